"""A decoder-only transformer whose differences between models are in its configuration and weights.

It is written once, in terms of `Ops`: torch computes them as they are called, the native kernels record them as a
program that later steps run. This module does not know what a tensor is, nor sequences, requests or sampling: the step
behind the `Ops` says which token stands at which position and slot, and from which rows logits are wanted.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import attrs

from trioengine.models.config import ModelConfig

TensorT = TypeVar("TensorT")
"""Numbers of a step, one row for each of its tokens."""
MatrixT = TypeVar("MatrixT")
"""A weight that is multiplied by, or looked up in: as a backend keeps it."""
VectorT = TypeVar("VectorT")
"""A weight with one number per column, float32."""
MatrixT_contra = TypeVar("MatrixT_contra", contravariant=True)
VectorT_contra = TypeVar("VectorT_contra", contravariant=True)


@attrs.frozen(eq=False)
class LayerWeights(Generic[MatrixT, VectorT]):
    """One layer. Matrices are [outputs, inputs]; projections that read the same input are one matrix."""

    attention_norm: VectorT
    """[hidden_size]."""
    qkv: MatrixT
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]: queries, keys, values."""
    qkv_bias: VectorT | None
    output: MatrixT
    """[hidden_size, num_heads * head_dim]."""
    output_bias: VectorT | None
    mlp_norm: VectorT
    """[hidden_size]."""
    gate_up: MatrixT
    """[2 * intermediate_size, hidden_size]: gates, values."""
    down: MatrixT
    """[hidden_size, intermediate_size]."""


@attrs.frozen(eq=False)
class DecoderWeights(Generic[MatrixT, VectorT]):
    """All weights of a model."""

    embedding: MatrixT
    """[vocab_size, hidden_size]."""
    layers: Sequence[LayerWeights[MatrixT, VectorT]]
    final_norm: VectorT
    """[hidden_size]."""
    head: MatrixT
    """[vocab_size, hidden_size]; the embedding itself where they are tied."""
    inverse_frequencies: VectorT
    """[head_dim / 2]: angle per position."""


@attrs.frozen
class AttentionShape:
    """What the attention of a layer is told, besides numbers."""

    num_heads: int
    num_kv_heads: int
    """Head h reads KV head `h // (num_heads / num_kv_heads)`."""
    head_dim: int
    scale: float
    """Multiplies query · key."""
    window: int | None
    """Each token sees itself and the `window - 1` before it; None is all of them."""
    kv_group: int
    """Of `ModelConfig.kv_groups`: its blocks hold the layer's keys and values."""
    kv_layer: int
    """The layer's place in its group."""


class Ops(Protocol[TensorT, MatrixT_contra, VectorT_contra]):
    """The operations on the packed tokens of one step.

    A tensor that is given to `add_rms_norm` as the residual, or to `rope_write_kv`, may be overwritten.
    """

    def embedding(self, table: MatrixT_contra) -> TensorT:
        """The rows of the step's tokens, [num_tokens, hidden_size]."""
        ...

    def rms_norm(self, x: TensorT, weight: VectorT_contra, epsilon: float) -> TensorT:
        """`x / sqrt(mean(x²) + epsilon) * weight`."""
        ...

    def add_rms_norm(
        self, x: TensorT, residual: TensorT, weight: VectorT_contra, epsilon: float
    ) -> tuple[TensorT, TensorT]:
        """The normalized sum, and the sum, which is the next residual."""
        ...

    def linear(self, x: TensorT, weight: MatrixT_contra, bias: VectorT_contra | None = None) -> TensorT:
        """`x @ weightᵀ + bias`."""
        ...

    def rope_write_kv(self, qkv: TensorT, inverse_frequencies: VectorT_contra, shape: AttentionShape) -> TensorT:
        """Rotate queries and keys by their positions, and store keys and values in the layer's cache.

        Returns:
            What `attention` reads the queries from.
        """
        ...

    def attention(self, query: TensorT, shape: AttentionShape) -> TensorT:
        """What each token gathers from its sequence up to itself, [num_tokens, num_heads * head_dim]."""
        ...

    def silu_and_mul(self, gate_up: TensorT) -> TensorT:
        """`silu(gate) * up`, where the two lie side by side."""
        ...

    def select_logit_rows(self, x: TensorT) -> TensorT:
        """The rows of the tokens whose successors are wanted."""
        ...


class Decoder(Generic[MatrixT, VectorT]):
    """Says how logits come from tokens."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights[MatrixT, VectorT]) -> None:
        self._config = config
        self._shapes = {
            layer: AttentionShape(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
                window=group.window,
                kv_group=kv_group,
                kv_layer=kv_layer,
            )
            for kv_group, group in enumerate(config.kv_groups)
            for kv_layer, layer in enumerate(group.layers)
        }
        self.weights = weights

    def forward(self, ops: Ops[TensorT, MatrixT, VectorT]) -> TensorT:
        """The tokens of a step through all layers, their keys and values stored: the logits that are wanted.

        Returns:
            [num_logit_rows, vocab_size], float32.
        """
        weights, epsilon = self.weights, self._config.rms_norm_epsilon
        residual = ops.embedding(weights.embedding)
        x = ops.rms_norm(residual, weights.layers[0].attention_norm, epsilon)
        next_norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm]
        for i, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
            query = ops.rope_write_kv(qkv, weights.inverse_frequencies, self._shapes[i])
            x = ops.attention(query, self._shapes[i])
            if layer is weights.layers[-1]:
                # All keys and values are stored: the other tokens have done what they are for.
                x, residual = ops.select_logit_rows(x), ops.select_logit_rows(residual)
            x = ops.linear(x, layer.output, layer.output_bias)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, epsilon)
            x = ops.linear(ops.silu_and_mul(ops.linear(x, layer.gate_up)), layer.down)
            x, residual = ops.add_rms_norm(x, residual, next_norm, epsilon)
        return ops.linear(x, weights.head)
