"""BERT and its relatives: transformers in which each token sees all of its text, with norms behind each part.

Written once, in terms of `EncoderOps`, as the decoder is. This module does not know what a tensor is, nor texts,
requests or pooling.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import attrs

from trioengine.models.encoder_config import EncoderActivation, EncoderConfig

TensorT = TypeVar("TensorT")
"""Numbers of a step, one row for each of its tokens."""
MatrixT = TypeVar("MatrixT")
VectorT = TypeVar("VectorT")
MatrixT_contra = TypeVar("MatrixT_contra", contravariant=True)


@attrs.frozen(eq=False)
class LayerNorm(Generic[VectorT]):
    """Each [hidden_size]."""

    weight: VectorT
    bias: VectorT


@attrs.frozen(eq=False)
class Linear(Generic[MatrixT, VectorT]):
    """`x @ weightᵀ + bias`."""

    weight: MatrixT
    """[outputs, inputs]."""
    bias: VectorT


@attrs.frozen(eq=False)
class EncoderLayer(Generic[MatrixT, VectorT]):
    """One layer."""

    query_key: Linear[MatrixT, VectorT]
    """[2 * hidden_size, hidden_size]: queries, keys."""
    value: Linear[MatrixT, VectorT]
    output: Linear[MatrixT, VectorT]
    attention_norm: LayerNorm[VectorT]
    up: Linear[MatrixT, VectorT]
    """[intermediate_size, hidden_size]."""
    down: Linear[MatrixT, VectorT]
    mlp_norm: LayerNorm[VectorT]


@attrs.frozen(eq=False)
class EncoderWeights(Generic[MatrixT, VectorT]):
    """All weights but those of a classification head."""

    embedding: MatrixT
    """[vocab_size, hidden_size]."""
    positions: MatrixT
    """[types * num_positions, hidden_size]: each position's embedding plus that of a token type, type after type."""
    embedding_norm: LayerNorm[VectorT]
    layers: Sequence[EncoderLayer[MatrixT, VectorT]]


class EncoderOps(Protocol[TensorT, MatrixT_contra, VectorT]):
    """The operations on the packed tokens of one step."""

    def embedding(self, table: MatrixT_contra) -> TensorT:
        """The rows of the step's token ids, [num_tokens, hidden_size]."""
        ...

    def position_embedding(self, table: MatrixT_contra) -> TensorT:
        """The rows of the step's positions, [num_tokens, hidden_size]."""
        ...

    def add_layer_norm(self, x: TensorT, residual: TensorT, norm: LayerNorm[VectorT], epsilon: float) -> TensorT:
        """The norm of the sum."""
        ...

    def linear(self, x: TensorT, weight: MatrixT_contra, bias: VectorT | None = None) -> TensorT:
        """`x @ weightᵀ + bias`."""
        ...

    def full_attention(self, query_key: TensorT, value: TensorT, num_heads: int) -> TensorT:
        """What each token gathers from all of its text, [num_tokens, hidden_size]."""
        ...

    def activated_linear(
        self, x: TensorT, weight: MatrixT_contra, bias: VectorT, activation: EncoderActivation
    ) -> TensorT:
        """The activation of each number of `x @ weightᵀ + bias`."""
        ...

    def select_rows(self, x: TensorT) -> TensorT:
        """The rows of the tokens whose hidden states are wanted."""
        ...


class Encoder(Generic[MatrixT, VectorT]):
    """Says how hidden states come from tokens."""

    def __init__(self, config: EncoderConfig, weights: EncoderWeights[MatrixT, VectorT]) -> None:
        self._config = config
        self.weights = weights

    def forward(self, ops: EncoderOps[TensorT, MatrixT, VectorT]) -> TensorT:
        """The tokens of a step through all layers: the hidden states that are wanted, [num_rows, hidden_size]."""
        weights, config = self.weights, self._config
        epsilon = config.layer_norm_epsilon
        x = ops.add_layer_norm(
            ops.embedding(weights.embedding),
            ops.position_embedding(weights.positions),
            weights.embedding_norm,
            epsilon,
        )
        for layer in weights.layers:
            query_key = ops.linear(x, layer.query_key.weight, layer.query_key.bias)
            value = ops.linear(x, layer.value.weight, layer.value.bias)
            gathered = ops.full_attention(query_key, value, config.num_heads)
            if layer is weights.layers[-1]:
                # The other tokens have done what they are for.
                gathered, x = ops.select_rows(gathered), ops.select_rows(x)
            x = ops.add_layer_norm(
                ops.linear(gathered, layer.output.weight, layer.output.bias), x, layer.attention_norm, epsilon
            )
            inner = ops.activated_linear(x, layer.up.weight, layer.up.bias, config.activation)
            x = ops.add_layer_norm(ops.linear(inner, layer.down.weight, layer.down.bias), x, layer.mlp_norm, epsilon)
        return x
