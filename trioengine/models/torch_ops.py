# pyright: basic
"""The decoder's operations in torch, computed as they are called, and weights as float32 tensors."""

from collections.abc import Sequence
from typing import TypeAlias

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from trioengine_kernels.paged_attention import AttentionPlan, paged_attention
from trioengine_kernels.rms_norm import add_rms_norm, rms_norm
from trioengine_kernels.rope import rope
from trioengine_kernels.silu_and_mul import silu_and_mul
from trioengine_kernels.write_kv import write_kv

from trioengine.models.decoder import AttentionShape
from trioengine.models.loader import Checkpoint, Floats, LoadedModel, MatrixPart, ReportFraction, load_model


class TorchWeights:
    """Makes float32 tensors of weights, whatever they are in the file."""

    def matrix(self, parts: Sequence[MatrixPart]) -> Tensor:
        """The parts, one below the other: [rows, columns]."""
        if len(parts) == 1:
            return torch.from_numpy(parts[0].floats())
        stacked = np.empty((sum(part.num_rows for part in parts), parts[0].num_columns), dtype=np.float32)
        first = 0
        for part in parts:
            stacked[first : first + part.num_rows] = part.floats()
            first += part.num_rows
        return torch.from_numpy(stacked)

    def vector(self, values: Floats) -> Tensor:
        """The same numbers, in the same memory."""
        return torch.from_numpy(values)


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
    slots: Sequence[Tensor]
    """For each KV group, [num_tokens]: `block_id * block_size + offset`, where the token's key and value are stored."""
    attention: Sequence[AttentionPlan]
    """For each KV group, with its blocks and its window."""
    logit_rows: Tensor
    """[num_logit_rows]: the tokens whose successors are wanted."""


class TorchOps:
    """The operations of one step. Nothing is overwritten but the cache."""

    def __init__(self, batch: DecoderInput, kv_cache: Sequence[Sequence[LayerKVCache]]) -> None:
        """`kv_cache`: for each KV group, its layers' in their order."""
        self._batch = batch
        self._kv_cache = kv_cache
        self._angles: tuple[Tensor, Tensor] | None = None

    def embedding(self, table: Tensor) -> Tensor:
        """The rows of the step's tokens."""
        return F.embedding(self._batch.token_ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """As `trioengine_kernels.rms_norm`."""
        return rms_norm(x, weight, epsilon)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """As `trioengine_kernels.rms_norm`."""
        return add_rms_norm(x, residual, weight, epsilon)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weightᵀ + bias`."""
        return F.linear(x, weight, bias)

    def rope_write_kv(self, qkv: Tensor, inverse_frequencies: Tensor, shape: AttentionShape) -> Tensor:
        """The rotated queries, [num_tokens, num_heads, head_dim]."""
        if self._angles is None:
            angles = self._batch.positions.unsqueeze(1) * inverse_frequencies
            self._angles = angles.cos(), angles.sin()
        heads = qkv.unflatten(1, (-1, shape.head_dim))
        num_rotated = shape.num_heads + shape.num_kv_heads
        rotated = rope(heads[:, :num_rotated], *self._angles)
        cache, slots = self._kv_cache[shape.kv_group][shape.kv_layer], self._batch.slots[shape.kv_group]
        write_kv(rotated[:, shape.num_heads :], heads[:, num_rotated:], cache.keys, cache.values, slots)
        return rotated[:, : shape.num_heads]

    def attention(self, query: Tensor, shape: AttentionShape) -> Tensor:
        """As `trioengine_kernels.paged_attention`, the heads side by side."""
        cache, plan = self._kv_cache[shape.kv_group][shape.kv_layer], self._batch.attention[shape.kv_group]
        return paged_attention(query, cache.keys, cache.values, plan, scale=shape.scale).flatten(1)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """As `trioengine_kernels.silu_and_mul`."""
        return silu_and_mul(gate_up)

    def select_logit_rows(self, x: Tensor) -> Tensor:
        """The rows of `DecoderInput.logit_rows`."""
        return x.index_select(0, self._batch.logit_rows)


TorchModel: TypeAlias = LoadedModel[Tensor, Tensor]
"""A model that `TorchOps` can compute."""


def load_torch_model(checkpoint: Checkpoint, report: ReportFraction | None = None) -> TorchModel:
    """As `loader.load_model`, float32 tensors."""
    return load_model(checkpoint, TorchWeights(), report)
