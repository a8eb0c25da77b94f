"""A model's facts from a GGUF file: its metadata, and the names and shapes of its tensors."""

from collections.abc import Mapping

from trioengine.checkpoint.dequantize import dequantize
from trioengine.checkpoint.gguf import GGUFFile
from trioengine.models.config.checks import MAX_NUM_EXPERTS, MAX_NUM_LAYERS, checked
from trioengine.models.config.facts import Facts
from trioengine.models.config.families import FAMILIES, Family, WindowRule
from trioengine.models.config.model import Architecture, Experts, ModelConfig
from trioengine.models.config.rope import (
    LinearRopeScaling,
    LongRopeScaling,
    Rope,
    RopeFactors,
    RopeScaling,
    YarnRopeScaling,
    yarn_attention_factor,
)

_LLAMAS = (Architecture.MISTRAL, Architecture.MIXTRAL)
"""They call themselves llama."""
ARCHITECTURES: Mapping[str, Architecture] = {
    family.gguf_name: architecture for architecture, family in FAMILIES.items() if architecture not in _LLAMAS
}
"""By `general.architecture`."""
ROPE_FACTORS = "rope_freqs.weight"
"""What each frequency is divided by: Llama 3's scaling, which the metadata do not tell."""
LONG_ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
_SOFTMAX = 1
"""`expert_gating_func`."""


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Read the facts from a GGUF file's metadata and the names and shapes of its tensors.

    Raises:
        CheckpointError: a fact is missing or impossible, or the architecture is not one that this engine runs.
    """
    facts = Facts(file.metadata, str(file.path))
    name = facts.text("general.architecture")
    if name not in ARCHITECTURES:
        raise facts.unsupported_architecture(name, (*ARCHITECTURES, "bert"))  # That one is an encoder.
    # The keys of an architecture all begin with its name.
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    has_experts = bool(own.get("expert_count"))
    architecture = ARCHITECTURES[name]
    if has_experts and architecture is Architecture.LLAMA:
        architecture = Architecture.MIXTRAL
    return checked(_config(file, Facts(own, str(file.path), prefix), architecture), facts)


def _config(file: GGUFFile, facts: Facts, architecture: Architecture) -> ModelConfig:
    family, tensors = FAMILIES[architecture], file.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise facts.error("the tensor 'token_embd.weight' is missing or is no matrix")
    hidden_size = facts.size("embedding_length")
    num_heads = facts.size("attention.head_count")
    num_layers = facts.size("block_count", most=MAX_NUM_LAYERS)
    head_dim = facts.size("attention.key_length", max(1, hidden_size // num_heads))
    if facts.size("attention.value_length", head_dim) != head_dim:
        raise facts.error(f"attention.value_length differs from the size of an attention head, {head_dim}")
    if not family.has_experts:
        facts.refuse_unless("expert_count", 0)
    if family.windows is WindowRule.NONE and architecture is not Architecture.LLAMA:  # Mistral calls itself llama.
        facts.refuse_unless("attention.sliding_window", 0)
    windows = _windows(facts, family, num_layers)
    multiplier = hidden_size**0.5 if family.has_scaled_embeddings else facts.number("embedding_scale", 1.0)
    tokenizer = Facts(file.metadata, str(file.path))
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=facts.size("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=facts.size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=facts.size("context_length"),
        rms_norm_epsilon=facts.number("attention.layer_norm_rms_epsilon"),
        norm_placement=family.norm_placement,
        query_key_norm=family.query_key_norm,
        activation=family.activation,
        experts=_experts(facts) if family.has_experts else None,
        layer_ropes=_ropes(file, facts, family, head_dim, windows),
        layer_windows=windows,
        attention_scale=_attention_scale(facts, family, hidden_size // num_heads, head_dim, num_layers),
        attention_soft_cap=facts.optional_number("attn_logit_softcapping"),
        logit_soft_cap=facts.optional_number("final_logit_softcapping"),
        embedding_multiplier=multiplier,
        residual_multiplier=facts.number("residual_scale", 1.0),
        logit_multiplier=1 / facts.number("logit_scale", 1.0),
        has_qkv_bias="blk.0.attn_q.bias" in tensors,
        has_output_bias="blk.0.attn_output.bias" in tensors,
        has_tied_embeddings="output.weight" not in tensors,
        bos_token_id=tokenizer.optional_token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tokenizer.token_ids("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"),
    )


def _experts(facts: Facts) -> Experts:
    facts.refuse_unless("expert_shared_count", 0)
    facts.refuse_unless("expert_weights_scale", 0, 1)
    facts.refuse_unless("expert_gating_func", _SOFTMAX)
    return Experts(
        num_experts=facts.size("expert_count", most=MAX_NUM_EXPERTS),
        num_experts_per_token=facts.size("expert_used_count", most=MAX_NUM_EXPERTS),
        intermediate_size=facts.size("expert_feed_forward_length", facts.size("feed_forward_length")),
        # llama.cpp does so for every family that is known here, whatever their folders say.
        has_normalized_weights=facts.flag("expert_weights_norm", True),
    )


def _attention_scale(facts: Facts, family: Family, shared_size: int, head_dim: int, num_layers: int) -> float:
    is_shared = num_layers == family.num_layers_scaled_by_hidden_size
    return facts.number("attention.scale", max(1, shared_size if is_shared else head_dim) ** -0.5)


def _windows(facts: Facts, family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = facts.size("attention.sliding_window", 0, least=0) or None
    key = "attention.sliding_window_pattern"
    if facts.is_list(key):
        is_windowed = facts.flags(key, num_layers)
    elif facts.has(key) or family.window_period is not None:
        period = facts.size(key, family.window_period)
        is_windowed = [(layer + 1) % period != 0 for layer in range(num_layers)]
    else:
        is_windowed = [True] * num_layers
    return tuple(window if windowed else None for windowed in is_windowed)


def _ropes(
    file: GGUFFile, facts: Facts, family: Family, head_dim: int, windows: tuple[int | None, ...]
) -> tuple[Rope | None, ...]:
    rotary_dim: int | None = facts.size("rope.dimension_count", head_dim)
    if rotary_dim == head_dim:
        rotary_dim = None
    rope = Rope(facts.number("rope.freq_base", 10000.0), _scaling(file, facts), rotary_dim)
    local = Rope(facts.number("rope.freq_base_swa", 10000.0), None, rotary_dim) if family.has_local_rope else rope
    ropes: list[Rope | None] = [rope if window is None else local for window in windows]
    if family.unrotated_period is not None:
        ropes[family.unrotated_period - 1 :: family.unrotated_period] = [None] * (len(ropes) // family.unrotated_period)
    return tuple(ropes)


def _scaling(file: GGUFFile, facts: Facts) -> RopeScaling | None:
    kind = facts.text("rope.scaling.type", "none")
    facts.refuse_unless("rope.scaling.yarn_log_multiplier", 0)
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise facts.error(f"both {ROPE_FACTORS} and rope scaling of the type {kind[:50]!r} are not supported")
        return RopeFactors(_numbers(file, ROPE_FACTORS, facts))
    if all(name in file.tensors for name in LONG_ROPE_FACTORS) and kind in ("none", "longrope"):
        short, long = (_numbers(file, name, facts) for name in LONG_ROPE_FACTORS)
        return LongRopeScaling(
            short_factors=short,
            long_factors=long,
            original_max_position_embeddings=facts.size("rope.scaling.original_context_length"),
            attention_factor=facts.number("rope.scaling.attn_factor", 1.0),
        )
    match kind:
        case "none" if facts.has("rope.scaling.type"):
            return None
        case "none":
            # The first files with linear scaling did not say that it is linear; 0 is none, too.
            key = "rope.scaling.factor" if facts.has("rope.scaling.factor") else "rope.scale_linear"
            factor = 1.0 if facts.is_one_of(key, 0) else facts.number(key, 1.0)
            return None if factor == 1 else LinearRopeScaling(factor)
        case "linear":
            return LinearRopeScaling(facts.number("rope.scaling.factor"))
        case "yarn":
            factor = facts.number("rope.scaling.factor")
            attention_factor = facts.number("rope.scaling.attn_factor", 1.0) * yarn_attention_factor(factor)
            return YarnRopeScaling(
                factor=factor,
                original_max_position_embeddings=facts.size("rope.scaling.original_context_length"),
                attention_factor=attention_factor,
                beta_fast=facts.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=facts.number("rope.scaling.yarn_beta_slow", 1.0),
            )
        case other:
            raise facts.error(f"rope scaling of the type {other[:100]!r} is not supported")


def _numbers(file: GGUFFile, name: str, facts: Facts) -> tuple[float, ...]:
    values = dequantize(file.tensors[name])
    if values.ndim != 1 or not ((values > 0) & (values < 1e37)).all():
        raise facts.error(f"the tensor {name!r} must be numbers above 0")
    return tuple(values.tolist())
