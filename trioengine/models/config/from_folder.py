"""A model's facts from a folder as transformers saves it."""

from pathlib import Path

import attrs

from trioengine.models.config.checks import MAX_NUM_EXPERTS, MAX_NUM_LAYERS, checked
from trioengine.models.config.facts import Facts, read_json
from trioengine.models.config.families import FAMILIES, RESULT_CHANGING_KEYS, Family, WindowRule
from trioengine.models.config.labels import read_head
from trioengine.models.config.model import Activation, Architecture, Experts, ModelConfig
from trioengine.models.config.rope import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnRopeScaling,
    long_rope_attention_factor,
    yarn_attention_factor,
)
from trioengine.types.pooling import PoolingType

_CLASSES = {family.class_name: architecture for architecture, family in FAMILIES.items()}
_SEEING = {
    family.seeing_class_name: architecture for architecture, family in FAMILIES.items() if family.seeing_class_name
}
_SEEING_CLASSIFYING = {
    f"{name.removesuffix('ForConditionalGeneration')}ForSequenceClassification": architecture
    for name, architecture in _SEEING.items()
}
CLASSIFYING = _SEEING_CLASSIFYING | {
    # Where a class sees, the one that does not is another.
    f"{name.removesuffix('ForCausalLM')}{'Text' * (architecture in _SEEING.values())}ForSequenceClassification": (
        architecture
    )
    for name, architecture in _CLASSES.items()
}
"""Models that say which label a text has."""
ARCHITECTURES = _CLASSES | _SEEING | CLASSIFYING
"""By `architectures` of `config.json`."""
ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
"""By transformers' names."""


def config_from_folder(folder: Path) -> ModelConfig:
    """Read the facts from `config.json`, and more end tokens from `generation_config.json` where there is one.

    Raises:
        CheckpointError: a file is missing or malformed, a fact is missing or impossible, or the model is not one that
            this engine runs.
    """
    facts = Facts(read_json(folder / "config.json"), str(folder / "config.json"))
    name = facts.texts("architectures")[0]
    if name not in ARCHITECTURES:
        raise facts.unsupported_architecture(name, ARCHITECTURES)
    architecture = ARCHITECTURES[name]
    family = FAMILIES[architecture]
    end_tokens = facts.token_ids("eos_token_id")
    head = read_head(facts, pooling_type=PoolingType.LAST) if name in CLASSIFYING else None
    if name in _SEEING or name in _SEEING_CLASSIFYING:
        facts = facts.inner("text_config") or facts.nothing()
        end_tokens += facts.token_ids("eos_token_id")
    facts = facts.with_defaults(family.defaults)
    for key, neutral in RESULT_CHANGING_KEYS.items():
        if key not in family.own_keys:
            facts.refuse_unless(key, neutral)
    generation_path = folder / "generation_config.json"
    if generation_path.is_file():
        end_tokens += Facts(read_json(generation_path), str(generation_path)).token_ids("eos_token_id")
    config = _config(facts, architecture, tuple(dict.fromkeys(end_tokens)))
    if head is not None:
        # Nobody asks for the next token, so the embedding may stand where the output head is.
        config = attrs.evolve(config, head=head, has_tied_embeddings=True)
    return checked(config, facts)


def _config(facts: Facts, architecture: Architecture, end_tokens: tuple[int, ...]) -> ModelConfig:
    family = FAMILIES[architecture]
    activations = {**ACTIVATIONS, **family.activation_names}
    default = next(name for name, activation in ACTIVATIONS.items() if activation is family.activation)
    activation = facts.text(family.activation_key, default)
    if activation not in activations:
        raise facts.error(
            f"{family.activation_key} is {activation[:50]!r}, which is not supported; {', '.join(activations)} are"
        )
    hidden_size = facts.size("hidden_size")
    num_heads = facts.size("num_attention_heads")
    num_layers = facts.size("num_hidden_layers", most=MAX_NUM_LAYERS)
    head_dim = facts.size("head_dim", max(1, hidden_size // num_heads))
    windows = _windows(facts, family, num_layers)
    has_bias = facts.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=facts.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=facts.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=facts.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=facts.size("max_position_embeddings"),
        rms_norm_epsilon=facts.number("rms_norm_eps", 1e-6),
        norm_placement=family.norm_placement,
        query_key_norm=family.query_key_norm,
        activation=activations[activation],
        experts=_experts(facts) if family.has_experts else None,
        layer_ropes=_ropes(facts, family, head_dim, windows),
        layer_windows=windows,
        attention_scale=_attention_scale(facts, head_dim),
        attention_soft_cap=facts.optional_number("attn_logit_softcapping"),
        logit_soft_cap=facts.optional_number("final_logit_softcapping"),
        embedding_multiplier=hidden_size**0.5
        if family.has_scaled_embeddings
        else facts.number("embedding_multiplier", 1.0),
        residual_multiplier=facts.number("residual_multiplier", 1.0),
        logit_multiplier=1 / facts.number("logits_scaling", 1.0),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias and family.has_output_bias,
        has_tied_embeddings=facts.flag("tie_word_embeddings", False),
        bos_token_id=facts.optional_token_id("bos_token_id"),
        eos_token_ids=end_tokens,
    )


def _experts(facts: Facts) -> Experts:
    key = "num_local_experts" if facts.has("num_local_experts") else "num_experts"
    num_experts = facts.size(key, most=MAX_NUM_EXPERTS)
    return Experts(
        num_experts=num_experts,
        num_experts_per_token=facts.size("num_experts_per_tok", most=MAX_NUM_EXPERTS),
        intermediate_size=facts.size("moe_intermediate_size", facts.size("intermediate_size")),
        has_normalized_weights=facts.flag("norm_topk_prob", False),
    )


def _attention_scale(facts: Facts, head_dim: int) -> float:
    scalar = facts.number("query_pre_attn_scalar", float(head_dim))
    return facts.number("attention_multiplier", scalar**-0.5)


def _windows(facts: Facts, family: Family, num_layers: int) -> tuple[int | None, ...]:
    match family.windows:
        case WindowRule.NONE:
            return (None,) * num_layers
        case WindowRule.ALL:
            return (facts.optional_size("sliding_window"),) * num_layers
        case WindowRule.PERIODIC:
            period = facts.size("sliding_window_pattern", family.window_period)
            is_full = [(layer + 1) % period == 0 for layer in range(num_layers)]
        case _ if not facts.flag("use_sliding_window", False):
            return (None,) * num_layers
        case WindowRule.ALL_IF_USED:
            is_full = [False] * num_layers
        case WindowRule.UNROTATED_IF_USED:
            is_full = _are_rotated(facts, family, num_layers)
        case WindowRule.LAST_IF_USED if facts.has("layer_types"):
            is_full = [True] * num_layers
        case WindowRule.LAST_IF_USED:
            num_full = facts.size("max_window_layers", least=0)
            is_full = [layer < num_full for layer in range(num_layers)]
    if family.windows is not WindowRule.ALL_IF_USED and facts.has("layer_types"):
        types = facts.texts("layer_types")
        if len(types) != num_layers or not {*types} <= {"full_attention", "sliding_attention"}:
            raise facts.error(f"layer_types must name 'full_attention' or 'sliding_attention' for {num_layers} layers")
        is_full = [kind == "full_attention" for kind in types]
    window = facts.size("sliding_window")
    return tuple(None if full else window for full in is_full)


def _are_rotated(facts: Facts, family: Family, num_layers: int) -> list[bool]:
    """The layers with rope."""
    if family.unrotated_period is None:
        return [True] * num_layers
    if facts.has("no_rope_layers"):  # Where 1 is a layer with rope.
        return [*facts.flags("no_rope_layers", num_layers)]
    period = facts.size("no_rope_layer_interval", family.unrotated_period)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _ropes(facts: Facts, family: Family, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
    """In `rope_parameters` where transformers 5 wrote the file, else in `rope_scaling` and at the top level."""
    parameters = facts.inner("rope_parameters") or facts.inner("rope_scaling")
    theta = facts.number("rope_theta", 10000.0)
    local = None
    if family.has_local_rope:
        local = Rope(facts.number("rope_local_base_freq", 10000.0))
        if parameters is not None and (parameters.has("full_attention") or parameters.has("sliding_attention")):
            local_parameters = parameters.inner("sliding_attention")
            parameters = parameters.inner("full_attention")
            if local_parameters is not None:
                local = _rope(facts, local_parameters, family, local.theta, head_dim)
    rope = _rope(facts, parameters, family, theta, head_dim)
    return tuple(
        None if not is_rotated else rope if window is None or local is None else local
        for window, is_rotated in zip(windows, _are_rotated(facts, family, len(windows)), strict=True)
    )


def _rope(facts: Facts, parameters: Facts | None, family: Family, theta: float, head_dim: int) -> Rope:
    if parameters is None:
        parameters = facts.nothing()
    theta = parameters.number("rope_theta", theta)
    share = parameters.number("partial_rotary_factor", facts.number("partial_rotary_factor", 1.0))
    if share != 1 and not family.has_partial_rope:
        raise facts.error(f"partial_rotary_factor is {share}, which is not supported for this architecture")
    rotary_dim = None if share == 1 else int(head_dim * min(share, 1.5))
    return Rope(theta, _scaling(facts, parameters, family, rotary_dim or head_dim), rotary_dim)


def _scaling(facts: Facts, parameters: Facts, family: Family, rotary_dim: int) -> RopeScaling | None:
    def original_length() -> int:
        # As transformers: what Phi-3 has at the top level comes first.
        default = facts.size("max_position_embeddings")
        default = parameters.size("original_max_position_embeddings", default, least=2)
        return facts.size("original_max_position_embeddings", default, least=2)

    def factor() -> float:
        return parameters.number("factor", facts.size("max_position_embeddings") / original_length())

    # Older files say "type".
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if family.has_partial_rope and kind in ("su", "yarn"):  # What Phi-3's first files called it.
        kind = "longrope"
    match kind:
        case "default":
            return None
        case "linear":
            return LinearRopeScaling(parameters.number("factor"))
        case "llama3":
            return Llama3RopeScaling(
                factor=parameters.number("factor"),
                low_freq_factor=parameters.number("low_freq_factor"),
                high_freq_factor=parameters.number("high_freq_factor"),
                original_max_position_embeddings=original_length(),
            )
        case "yarn":
            attention_factor = yarn_attention_factor(factor())
            if parameters.has("mscale") and parameters.has("mscale_all_dim"):
                attention_factor = yarn_attention_factor(factor(), parameters.number("mscale"))
                attention_factor /= yarn_attention_factor(factor(), parameters.number("mscale_all_dim"))
            return YarnRopeScaling(
                factor=factor(),
                original_max_position_embeddings=original_length(),
                attention_factor=parameters.number("attention_factor", attention_factor),
                beta_fast=parameters.number("beta_fast", 32.0),
                beta_slow=parameters.number("beta_slow", 1.0),
                is_truncated=parameters.flag("truncate", True),
            )
        case "longrope":
            attention_factor = long_rope_attention_factor(factor(), original_length())
            return LongRopeScaling(
                short_factors=parameters.numbers("short_factor", rotary_dim // 2),
                long_factors=parameters.numbers("long_factor", rotary_dim // 2),
                original_max_position_embeddings=original_length(),
                attention_factor=parameters.number("attention_factor", attention_factor),
            )
        case other:
            raise facts.error(f"rope scaling of the type {other[:100]!r} is not supported")
