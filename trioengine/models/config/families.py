"""What each family of models has that its files do not say: one entry for each."""

import enum
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from trioengine.models.config.model import Activation, Architecture, NormPlacement, QueryKeyNorm


class WindowRule(enum.Enum):
    """Which layers of a folder's model have a window."""

    NONE = "none"
    ALL = "all"
    """Where `sliding_window` is set."""
    ALL_IF_USED = "all if used"
    """Where `use_sliding_window` is true; so for those that follow."""
    LAST_IF_USED = "last if used"
    """The ones from `max_window_layers` on, or those that `layer_types` names."""
    UNROTATED_IF_USED = "unrotated if used"
    """The ones without rope, or those that `layer_types` names."""
    PERIODIC = "periodic"
    """All but every so many, or those that `layer_types` names."""


@attrs.frozen(kw_only=True)
class Family:
    """How the models of a family differ from Llama, and where that is in their files."""

    class_name: str
    """In `architectures` of `config.json`."""
    seeing_class_name: str | None = None
    """There, of models that see, too, and have this one in `text_config`: only text goes into them."""
    gguf_name: str
    """`general.architecture` of GGUF files."""
    norm_placement: NormPlacement = NormPlacement.BEFORE
    query_key_norm: QueryKeyNorm = QueryKeyNorm.NONE
    activation: Activation = Activation.SILU
    activation_key: str = "hidden_act"
    activation_names: Mapping[str, Activation] = MappingProxyType({})
    """What this family calls an activation, besides what it is called everywhere."""
    has_output_bias: bool = True
    """A bias of queries, keys and values comes with one of the output projection."""
    has_scaled_embeddings: bool = False
    """By the square root of `hidden_size`."""
    has_local_rope: bool = False
    """Layers with a window have a rope of their own."""
    has_partial_rope: bool = False
    """`partial_rotary_factor` counts."""
    has_experts: bool = False
    windows: WindowRule = WindowRule.NONE
    window_period: int | None = None
    """Every so many layers, one has no window."""
    unrotated_period: int | None = None
    """Every so many layers, one has no rope."""
    own_keys: frozenset[str] = frozenset()
    """Of `RESULT_CHANGING_KEYS`: those that this family knows."""
    defaults: Mapping[str, object] = MappingProxyType({})
    """Values of keys of `config.json` that are not there."""
    num_layers_scaled_by_hidden_size: int | None = None
    """In GGUF files, where the scale of attention is not told: the model of so many layers divides queries by the
    square root of `hidden_size / num_heads`, the others by that of the size of a head."""


RESULT_CHANGING_KEYS: Mapping[str, object] = {
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1.0,
    "use_bidirectional_attention": False,
}
"""Keys of `config.json` that only some families know, and the value that changes nothing, besides null."""

_GEMMA_KEYS = frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"})
_GEMMA_DEFAULTS: Mapping[str, object] = {
    "bos_token_id": 2,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

FAMILIES: Mapping[Architecture, Family] = {
    Architecture.LLAMA: Family(class_name="LlamaForCausalLM", gguf_name="llama"),
    Architecture.MISTRAL: Family(
        class_name="MistralForCausalLM",
        gguf_name="llama",
        windows=WindowRule.ALL,
    ),
    Architecture.QWEN2: Family(
        class_name="Qwen2ForCausalLM",
        gguf_name="qwen2",
        has_output_bias=False,
        windows=WindowRule.LAST_IF_USED,
        defaults={"attention_bias": True},
    ),
    Architecture.QWEN3: Family(
        class_name="Qwen3ForCausalLM",
        gguf_name="qwen3",
        query_key_norm=QueryKeyNorm.HEAD,
        windows=WindowRule.LAST_IF_USED,
        defaults={"head_dim": 128},
    ),
    Architecture.SMOLLM3: Family(
        class_name="SmolLM3ForCausalLM",
        gguf_name="smollm3",
        windows=WindowRule.UNROTATED_IF_USED,
        unrotated_period=4,
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    Architecture.GEMMA: Family(
        class_name="GemmaForCausalLM",
        gguf_name="gemma",
        activation=Activation.GELU_TANH,
        activation_names={"gelu": Activation.GELU_TANH},
        has_scaled_embeddings=True,
        defaults={"bos_token_id": 2, "head_dim": 256, "tie_word_embeddings": True},
    ),
    Architecture.GEMMA2: Family(
        class_name="Gemma2ForCausalLM",
        gguf_name="gemma2",
        norm_placement=NormPlacement.BOTH,
        activation=Activation.GELU_TANH,
        activation_key="hidden_activation",
        has_scaled_embeddings=True,
        windows=WindowRule.PERIODIC,
        window_period=2,
        own_keys=_GEMMA_KEYS,
        defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        num_layers_scaled_by_hidden_size=46,
    ),
    Architecture.GEMMA3: Family(
        class_name="Gemma3ForCausalLM",
        seeing_class_name="Gemma3ForConditionalGeneration",
        gguf_name="gemma3",
        norm_placement=NormPlacement.BOTH,
        query_key_norm=QueryKeyNorm.HEAD,
        activation=Activation.GELU_TANH,
        activation_key="hidden_activation",
        has_scaled_embeddings=True,
        has_local_rope=True,
        windows=WindowRule.PERIODIC,
        window_period=6,
        own_keys=_GEMMA_KEYS,
        defaults={
            **_GEMMA_DEFAULTS,
            "rope_theta": 1e6,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
        num_layers_scaled_by_hidden_size=62,
    ),
    Architecture.PHI3: Family(
        class_name="Phi3ForCausalLM",
        gguf_name="phi3",
        has_partial_rope=True,
        windows=WindowRule.ALL,
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    Architecture.OLMO2: Family(
        class_name="Olmo2ForCausalLM",
        gguf_name="olmo2",
        norm_placement=NormPlacement.AFTER,
        query_key_norm=QueryKeyNorm.FULL,
        defaults={"rms_norm_eps": 1e-5},
    ),
    Architecture.GRANITE: Family(
        class_name="GraniteForCausalLM",
        gguf_name="granite",
        own_keys=frozenset({"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"}),
        defaults={"attention_multiplier": 1.0},
    ),
    Architecture.MIXTRAL: Family(
        class_name="MixtralForCausalLM",
        gguf_name="llama",
        has_experts=True,
        windows=WindowRule.ALL,
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "norm_topk_prob": True},
    ),
    Architecture.QWEN3_MOE: Family(
        class_name="Qwen3MoeForCausalLM",
        gguf_name="qwen3moe",
        query_key_norm=QueryKeyNorm.HEAD,
        has_experts=True,
        windows=WindowRule.ALL_IF_USED,
        defaults={"norm_topk_prob": False},
    ),
}
