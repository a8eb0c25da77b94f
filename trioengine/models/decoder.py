# pyright: basic
"""A decoder-only transformer whose differences between models are in its configuration and weights.

It computes packed tokens of many sequences at once against a paged KV cache. It does not know sequences, requests or
sampling: the caller says which token stands at which position and slot, and from which rows it wants logits.
"""

from collections.abc import Sequence

import attrs
import torch.nn.functional as F
from torch import Tensor
from trioengine_kernels.paged_attention import AttentionPlan, paged_attention
from trioengine_kernels.rms_norm import add_rms_norm, rms_norm
from trioengine_kernels.rope import rope
from trioengine_kernels.silu_and_mul import silu_and_mul
from trioengine_kernels.write_kv import write_kv

from trioengine.models.config import ModelConfig


@attrs.frozen(eq=False)
class LayerWeights:
    """One layer. Matrices are [outputs, inputs]; projections that read the same input are one matrix."""

    attention_norm: Tensor
    """[hidden_size]."""
    qkv: Tensor
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]: queries, keys, values."""
    qkv_bias: Tensor | None
    output: Tensor
    """[hidden_size, num_heads * head_dim]."""
    output_bias: Tensor | None
    mlp_norm: Tensor
    """[hidden_size]."""
    gate_up: Tensor
    """[2 * intermediate_size, hidden_size]: gates, values."""
    down: Tensor
    """[hidden_size, intermediate_size]."""


@attrs.frozen(eq=False)
class DecoderWeights:
    """All weights of a model, float32."""

    embedding: Tensor
    """[vocab_size, hidden_size]."""
    layers: Sequence[LayerWeights]
    final_norm: Tensor
    """[hidden_size]."""
    head: Tensor
    """[vocab_size, hidden_size]; the embedding itself where they are tied."""
    inverse_frequencies: Tensor
    """[head_dim / 2]: angle per position."""


@attrs.frozen(eq=False)
class LayerKVCache:
    """Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


@attrs.frozen(eq=False)
class DecoderInput:
    """The packed tokens of one step, int64."""

    token_ids: Tensor
    """[num_tokens]."""
    positions: Tensor
    """[num_tokens]: each token's place in its sequence."""
    slots: Tensor
    """[num_tokens]: `block_id * block_size + offset`, where the token's key and value are stored."""
    attention: AttentionPlan
    logit_rows: Tensor
    """[num_logit_rows]: the tokens whose successors are wanted."""


class Decoder:
    """Computes logits for packed tokens."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self._config = config
        self.weights = weights
        self._scale = config.head_dim**-0.5

    def forward(self, batch: DecoderInput, kv_cache: Sequence[LayerKVCache]) -> Tensor:
        """Compute the tokens of a step, store their keys and values, and return the logits that are wanted.

        Args:
            batch: the tokens.
            kv_cache: one per layer.

        Returns:
            [num_logit_rows, vocab_size], float32.
        """
        config, weights = self._config, self.weights
        epsilon = config.rms_norm_epsilon
        angles = batch.positions.unsqueeze(1) * weights.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        residual = F.embedding(batch.token_ids, weights.embedding)
        x = rms_norm(residual, weights.layers[0].attention_norm, epsilon)
        next_norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm]
        for layer, cache, next_norm in zip(weights.layers, kv_cache, next_norms, strict=True):
            x = self._attention(x, layer, cache, batch, cos, sin)
            x, residual = add_rms_norm(x, residual, layer.mlp_norm, epsilon)
            x = F.linear(silu_and_mul(F.linear(x, layer.gate_up)), layer.down)
            x, residual = add_rms_norm(x, residual, next_norm, epsilon)
        return F.linear(x.index_select(0, batch.logit_rows), weights.head)

    def _attention(
        self, x: Tensor, layer: LayerWeights, cache: LayerKVCache, batch: DecoderInput, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config = self._config
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).unflatten(1, (-1, config.head_dim))
        num_rotated = config.num_heads + config.num_kv_heads
        rotated = rope(qkv[:, :num_rotated], cos, sin)
        query, key, value = rotated[:, : config.num_heads], rotated[:, config.num_heads :], qkv[:, num_rotated:]
        write_kv(key, value, cache.keys, cache.values, batch.slots)
        attended = paged_attention(query, cache.keys, cache.values, batch.attention, scale=self._scale)
        return F.linear(attended.flatten(1), layer.output, layer.output_bias)
