"""A decoder-only transformer whose differences between models are in its configuration and weights.

It is written once, in terms of `Ops`: torch computes them as they are called, the native kernels record them as a
program that later steps run. This module does not know what a tensor is, nor sequences, requests or sampling: the step
behind the `Ops` says which token stands at which position and slot, and from which rows logits are wanted.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import attrs

from trioengine.models.config import Activation, Experts, ModelConfig, NormPlacement

TensorT = TypeVar("TensorT")
"""Numbers of a step, one row for each of its tokens."""
MatrixT = TypeVar("MatrixT")
"""A weight that is multiplied by, or looked up in: as a backend keeps it."""
VectorT = TypeVar("VectorT")
"""A weight with one number per column, float32."""


@attrs.frozen(eq=False)
class GatedMLP(Generic[MatrixT]):
    """`down @ (activation(gate @ x) * (up @ x))`."""

    gate_up: MatrixT
    """[2 * intermediate_size, hidden_size]: gates, values."""
    down: MatrixT
    """[hidden_size, intermediate_size]."""


@attrs.frozen(eq=False)
class MixtureOfExperts(Generic[MatrixT]):
    """MLPs of which each token goes through a few."""

    router: MatrixT
    """[num_experts, hidden_size]."""
    experts: Sequence[GatedMLP[MatrixT]]


@attrs.frozen(eq=False)
class LayerWeights(Generic[MatrixT, VectorT]):
    """One layer. Matrices are [outputs, inputs]; projections that read the same input are one matrix."""

    attention_norm: VectorT | None
    """Before the attention, [hidden_size]."""
    qkv: MatrixT
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]: queries, keys, values."""
    qkv_bias: VectorT | None
    query_norm: VectorT | None
    """[head_dim], or of all heads, [num_heads * head_dim]."""
    key_norm: VectorT | None
    """[head_dim], or of all heads, [num_kv_heads * head_dim]."""
    output: MatrixT
    """[hidden_size, num_heads * head_dim]."""
    output_bias: VectorT | None
    attention_post_norm: VectorT | None
    """Of the attention's result, [hidden_size]."""
    mlp_norm: VectorT | None
    """Before the MLP, [hidden_size]."""
    mlp: GatedMLP[MatrixT] | MixtureOfExperts[MatrixT]
    mlp_post_norm: VectorT | None
    """Of the MLP's result, [hidden_size]."""


@attrs.frozen(eq=False)
class Rotation(Generic[VectorT]):
    """The rotary position embeddings of a layer, or of several."""

    inverse_frequencies: VectorT
    """[rotary_dim / 2]: angle per position. The first rotary_dim elements of a head are rotated."""
    attention_factor: float
    """Multiplies what is rotated."""


@attrs.frozen(eq=False)
class DecoderWeights(Generic[MatrixT, VectorT]):
    """All weights of a model."""

    embedding: MatrixT
    """[vocab_size, hidden_size]."""
    layers: Sequence[LayerWeights[MatrixT, VectorT]]
    final_norm: VectorT
    """[hidden_size]. `ModelConfig.logit_multiplier` is in it."""
    head: MatrixT
    """[vocab_size, hidden_size]; the embedding itself where they are tied."""
    rotations: Sequence[Rotation[VectorT] | None]
    """One for each layer; those that are equal are one object. None rotates nothing."""


@attrs.frozen
class AttentionShape:
    """What the attention of a layer is told, besides numbers."""

    num_heads: int
    num_kv_heads: int
    """Head h reads KV head `h // (num_heads / num_kv_heads)`."""
    head_dim: int
    scale: float
    """Multiplies query · key."""
    soft_cap: float | None
    """Scores become `soft_cap * tanh(score / soft_cap)` before the softmax."""
    norm_epsilon: float
    """Of queries and keys, where they are normalized."""
    window: int | None
    """Each token sees itself and the `window - 1` before it; None is all of them."""
    kv_group: int
    """Of `ModelConfig.kv_groups`: its blocks hold the layer's keys and values."""
    kv_layer: int
    """The layer's place in its group."""


class Ops(Protocol[TensorT, MatrixT, VectorT]):
    """The operations on the packed tokens of one step.

    A tensor that is given to `add` or `add_rms_norm` as the residual, to `rope_write_kv` or to `soft_cap` may be
    overwritten.
    """

    def embedding(self, table: MatrixT, multiplier: float) -> TensorT:
        """The rows of the step's tokens times the multiplier, [num_tokens, hidden_size]."""
        ...

    def rms_norm(self, x: TensorT, weight: VectorT, epsilon: float) -> TensorT:
        """`x / sqrt(mean(x²) + epsilon) * weight`."""
        ...

    def add(self, x: TensorT, residual: TensorT) -> TensorT:
        """The sum, which is the next residual."""
        ...

    def add_rms_norm(self, x: TensorT, residual: TensorT, weight: VectorT, epsilon: float) -> tuple[TensorT, TensorT]:
        """The normalized sum, and the sum, which is the next residual."""
        ...

    def linear(self, x: TensorT, weight: MatrixT, bias: VectorT | None = None) -> TensorT:
        """`x @ weightᵀ + bias`."""
        ...

    def rope_write_kv(
        self,
        qkv: TensorT,
        query_norm: VectorT | None,
        key_norm: VectorT | None,
        rotation: Rotation[VectorT] | None,
        shape: AttentionShape,
    ) -> TensorT:
        """Normalize queries and keys, rotate them by their positions, and store keys and values in the layer's cache.

        Args:
            qkv: queries, keys, values.
            query_norm: as `LayerWeights.query_norm`; None leaves both as they are.
            key_norm: as `LayerWeights.key_norm`.
            rotation: None rotates nothing.
            shape: of the layer.

        Returns:
            What `attention` reads the queries from.
        """
        ...

    def attention(self, query: TensorT, shape: AttentionShape) -> TensorT:
        """What each token gathers from its sequence up to itself, [num_tokens, num_heads * head_dim]."""
        ...

    def gated(self, gate_up: TensorT, activation: Activation) -> TensorT:
        """`activation(gate) * up`, where the two lie side by side."""
        ...

    def experts(
        self,
        x: TensorT,
        router_logits: TensorT,
        experts: Sequence[GatedMLP[MatrixT]],
        choice: Experts,
        activation: Activation,
    ) -> TensorT:
        """Each token through the experts with its largest logits: their results, weighted by a softmax and added.

        Args:
            x: what they read.
            router_logits: one for each expert.
            experts: all of them.
            choice: how many a token gets, and how they are weighted.
            activation: of their gates.
        """
        ...

    def soft_cap(self, x: TensorT, cap: float) -> TensorT:
        """`cap * tanh(x / cap)`."""
        ...

    def select_rows(self, x: TensorT) -> TensorT:
        """The rows of the tokens whose successors or hidden states are wanted."""
        ...

    def keep_hidden(self, x: TensorT) -> TensorT:
        """Keep hidden states for whoever wants them; the rows of the tokens whose successors are wanted."""
        ...


class Decoder(Generic[MatrixT, VectorT]):
    """Says how logits come from tokens."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights[MatrixT, VectorT]) -> None:
        # The residual itself is read where no norm comes first.
        assert config.residual_multiplier == 1 or config.norm_placement is not NormPlacement.AFTER
        self._config = config
        self._shapes = {
            layer: AttentionShape(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.attention_scale,
                soft_cap=config.attention_soft_cap,
                norm_epsilon=config.rms_norm_epsilon,
                window=group.window,
                kv_group=kv_group,
                kv_layer=kv_layer,
            )
            for kv_group, group in enumerate(config.kv_groups)
            for kv_layer, layer in enumerate(group.layers)
        }
        # The residual is kept divided by its multiplier m, so that results are added to it as they are. A norm of it
        # is the norm of what it stands for: x/m / sqrt(mean((x/m)²) + ε/m²) = x / sqrt(mean(x²) + ε).
        self._residual_epsilon = config.rms_norm_epsilon / config.residual_multiplier**2
        self._embedding_multiplier = config.embedding_multiplier / config.residual_multiplier
        self.weights = weights

    def forward(self, ops: Ops[TensorT, MatrixT, VectorT]) -> TensorT:
        """The tokens of a step through all layers, their keys and values stored: the logits that are wanted.

        Returns:
            [num_logit_rows, vocab_size], float32.
        """
        weights, config = self.weights, self._config
        residual = ops.embedding(weights.embedding, self._embedding_multiplier)
        first_norm = weights.layers[0].attention_norm
        x = residual if first_norm is None else ops.rms_norm(residual, first_norm, self._residual_epsilon)
        next_norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm]
        for i, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
            rotation = weights.rotations[i]
            query = ops.rope_write_kv(qkv, layer.query_norm, layer.key_norm, rotation, self._shapes[i])
            x = ops.attention(query, self._shapes[i])
            if layer is weights.layers[-1]:
                # All keys and values are stored: the other tokens have done what they are for.
                x, residual = ops.select_rows(x), ops.select_rows(residual)
            x = ops.linear(x, layer.output, layer.output_bias)
            x, residual = self._add(ops, x, layer.attention_post_norm, residual, layer.mlp_norm)
            x = self._mlp(ops, x, layer.mlp)
            x, residual = self._add(ops, x, layer.mlp_post_norm, residual, next_norm)
        logits = ops.linear(ops.keep_hidden(x), weights.head)
        return logits if config.logit_soft_cap is None else ops.soft_cap(logits, config.logit_soft_cap)

    def _add(
        self,
        ops: Ops[TensorT, MatrixT, VectorT],
        x: TensorT,
        post_norm: VectorT | None,
        residual: TensorT,
        next_norm: VectorT | None,
    ) -> tuple[TensorT, TensorT]:
        """Add a result to the residual: what is read next, and the residual."""
        if post_norm is not None:
            x = ops.rms_norm(x, post_norm, self._config.rms_norm_epsilon)
        if next_norm is None:
            residual = ops.add(x, residual)
            return residual, residual
        return ops.add_rms_norm(x, residual, next_norm, self._residual_epsilon)

    def _mlp(
        self,
        ops: Ops[TensorT, MatrixT, VectorT],
        x: TensorT,
        mlp: GatedMLP[MatrixT] | MixtureOfExperts[MatrixT],
    ) -> TensorT:
        activation = self._config.activation
        match mlp:
            case GatedMLP():
                return ops.linear(ops.gated(ops.linear(x, mlp.gate_up), activation), mlp.down)
            case MixtureOfExperts():
                assert self._config.experts is not None
                return ops.experts(x, ops.linear(x, mlp.router), mlp.experts, self._config.experts, activation)
