"""The switches by which one decoder is many models."""

import enum
from collections.abc import Sequence

import attrs

from trioengine.models.config.labels import HeadConfig
from trioengine.models.config.rope import Rope


class Architecture(enum.StrEnum):
    """Model families that differ in more than numbers."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    SMOLLM3 = "smollm3"
    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3"
    PHI3 = "phi3"
    OLMO2 = "olmo2"
    GRANITE = "granite"
    MIXTRAL = "mixtral"
    QWEN3_MOE = "qwen3_moe"


class NormPlacement(enum.Enum):
    """Where attention and MLP have their norms."""

    BEFORE = "before"
    """Of what they read."""
    AFTER = "after"
    """Of their results, before those are added to the residual."""
    BOTH = "both"


class QueryKeyNorm(enum.Enum):
    """What is normalized of queries and keys, before they are rotated."""

    NONE = "none"
    HEAD = "head"
    """Each head by itself, all with the same weights."""
    FULL = "full"
    """All heads as one vector."""


class Activation(enum.Enum):
    """What is done to the gate of an MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its approximation with tanh."""


@attrs.frozen(kw_only=True)
class Experts:
    """An MLP that is many small ones, of which a router chooses a few for each token."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """Of each expert."""
    has_normalized_weights: bool
    """The weights of the chosen ones are made to sum to 1."""


@attrs.frozen
class KVGroup:
    """Layers with one window."""

    window: int | None
    layers: tuple[int, ...]


def _no_windows(config: "ModelConfig") -> tuple[int | None, ...]:
    return (None,) * config.num_layers


def _same_ropes(config: "ModelConfig") -> tuple[Rope | None, ...]:
    return (Rope(),) * config.num_layers


def _attention_scale(config: "ModelConfig") -> float:
    return config.head_dim**-0.5


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The architecture of one decoder-only model."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """The longest context that the model was trained for."""
    rms_norm_epsilon: float
    norm_placement: NormPlacement = NormPlacement.BEFORE
    query_key_norm: QueryKeyNorm = QueryKeyNorm.NONE
    activation: Activation = Activation.SILU
    experts: Experts | None = None
    """In place of the MLP in all layers."""
    layer_ropes: tuple[Rope | None, ...] = attrs.field(default=attrs.Factory(_same_ropes, takes_self=True))
    """One for each layer; None is a layer that knows no positions."""
    layer_windows: tuple[int | None, ...] = attrs.field(default=attrs.Factory(_no_windows, takes_self=True))
    """One for each layer, where each token sees itself and the `window - 1` before it; None is all of them."""
    attention_scale: float = attrs.field(default=attrs.Factory(_attention_scale, takes_self=True))
    """Multiplies query · key."""
    attention_soft_cap: float | None = None
    """Scores become `soft_cap * tanh(score / soft_cap)` before the softmax."""
    logit_soft_cap: float | None = None
    """The same for logits."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Of what attention and MLP add to the residual."""
    logit_multiplier: float = 1.0
    """Before a soft cap."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    """Of the attention's output projection."""
    has_tied_embeddings: bool = False
    """The embedding is the output head, too."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer."""
    head: HeadConfig | None = None
    """Of a model that says which label a text has, by the last token's hidden state. It generates no text."""

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        """The layers by their windows: those of one group keep the keys and values of the same tokens."""
        layers: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.layer_windows):
            layers.setdefault(window, []).append(layer)
        return [KVGroup(window, tuple(members)) for window, members in layers.items()]

    @property
    def num_active_parameters(self) -> int:
        """Numbers in the matrices that a token goes through; norms and biases, which hardly count, are left out."""
        return self._num_parameters(0 if self.experts is None else self.experts.num_experts_per_token)

    @property
    def num_parameters(self) -> int:
        """Numbers in all matrices."""
        return self._num_parameters(0 if self.experts is None else self.experts.num_experts)

    def _num_parameters(self, num_experts: int) -> int:
        """Where so many experts count."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        mlp = 3 * self.intermediate_size
        if self.experts is not None:
            mlp = 3 * num_experts * self.experts.intermediate_size + self.experts.num_experts
        num_embeddings = 1 if self.has_tied_embeddings else 2
        return (self.num_layers * (attention + mlp) + num_embeddings * self.vocab_size) * self.hidden_size
