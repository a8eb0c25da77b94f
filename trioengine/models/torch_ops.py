# pyright: basic
"""The decoder's operations in torch, computed as they are called, and weights as float32 tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from trioengine_kernels.experts import choose_experts, mix_experts
from trioengine_kernels.gelu_tanh_and_mul import gelu_tanh_and_mul
from trioengine_kernels.lora import lora
from trioengine_kernels.paged_attention import AttentionPlan, paged_attention
from trioengine_kernels.rms_norm import add_rms_norm, rms_norm
from trioengine_kernels.rope import rope
from trioengine_kernels.silu_and_mul import silu_and_mul
from trioengine_kernels.soft_cap import soft_cap
from trioengine_kernels.write_kv import write_kv

from trioengine.models.config import Activation, Experts
from trioengine.models.decoder import AttentionShape, GatedMLP, Rotation
from trioengine.models.loader import Checkpoint, LoadedModel, ReportFraction, load_model
from trioengine.models.lora import LoRA, lora_targets
from trioengine.models.source import Floats, MatrixPart


class TorchWeights:
    """Makes float32 tensors of weights, whatever they are in the file."""

    def matrix(self, parts: Sequence[MatrixPart], *, min_bits: int = 4) -> Tensor:
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
    lora_slots: Tensor | None = None
    """[num_tokens]: each token's adapter, 0 is none. None is 0 for all."""
    hidden_rows: Tensor = attrs.field(factory=lambda: torch.empty(0, dtype=torch.int64))
    """[num_hidden_rows]: the tokens whose hidden states are wanted."""


class TorchOps:
    """The operations of one step. Nothing is overwritten but the cache."""

    def __init__(
        self,
        batch: DecoderInput,
        kv_cache: Sequence[Sequence[LayerKVCache]],
        loras: "TorchLoRAs | None" = None,
    ) -> None:
        """`kv_cache`: for each KV group, its layers' in their order. `loras`: what `DecoderInput.lora_slots` means."""
        self._batch = batch
        self._kv_cache = kv_cache
        self._loras = None if batch.lora_slots is None else loras
        self._lora_slots = batch.lora_slots
        self.hidden_states: Tensor | None = None
        """[num_hidden_rows, hidden_size], when the decoder is done."""
        self._angles: dict[Rotation[Tensor], tuple[Tensor, Tensor]] = {}

    def embedding(self, table: Tensor, multiplier: float) -> Tensor:
        """The rows of the step's tokens times the multiplier."""
        return F.embedding(self._batch.token_ids, table) * multiplier

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """As `trioengine_kernels.rms_norm`."""
        return rms_norm(x, weight, epsilon)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The sum."""
        return residual + x

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """As `trioengine_kernels.rms_norm`."""
        return add_rms_norm(x, residual, weight, epsilon)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weightᵀ + bias`, and as `trioengine_kernels.lora`."""
        y = F.linear(x, weight, bias)
        if self._loras is None or self._lora_slots is None:
            return y
        return lora(y, x, self._lora_slots, self._loras.adapters_of(weight))

    def rope_write_kv(
        self,
        qkv: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        rotation: Rotation[Tensor] | None,
        shape: AttentionShape,
    ) -> Tensor:
        """The rotated queries, [num_tokens, num_heads, head_dim]."""
        query_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        query, key, value = qkv.split([query_width, kv_width, kv_width], dim=1)
        query = self._normed_and_rotated(query, query_norm, rotation, shape)
        key = self._normed_and_rotated(key, key_norm, rotation, shape)
        cache, slots = self._kv_cache[shape.kv_group][shape.kv_layer], self._batch.slots[shape.kv_group]
        write_kv(key, value.unflatten(1, (-1, shape.head_dim)), cache.keys, cache.values, slots)
        return query

    def _normed_and_rotated(
        self, x: Tensor, norm: Tensor | None, rotation: Rotation[Tensor] | None, shape: AttentionShape
    ) -> Tensor:
        """[num_tokens, heads, head_dim]."""
        if norm is not None:
            # Of one head's size or of all.
            x = rms_norm(x.unflatten(1, (-1, len(norm))), norm, shape.norm_epsilon).flatten(1)
        heads = x.unflatten(1, (-1, shape.head_dim))
        return heads if rotation is None else rope(heads, *self._angles_of(rotation))

    def _angles_of(self, rotation: Rotation[Tensor]) -> tuple[Tensor, Tensor]:
        """Cosines and sines, with the rotation's factor."""
        if rotation not in self._angles:
            angles = self._batch.positions.unsqueeze(1) * rotation.inverse_frequencies
            factor = rotation.attention_factor
            self._angles[rotation] = angles.cos() * factor, angles.sin() * factor
        return self._angles[rotation]

    def attention(self, query: Tensor, shape: AttentionShape) -> Tensor:
        """As `trioengine_kernels.paged_attention`, the heads side by side."""
        cache, plan = self._kv_cache[shape.kv_group][shape.kv_layer], self._batch.attention[shape.kv_group]
        attended = paged_attention(query, cache.keys, cache.values, plan, scale=shape.scale, soft_cap=shape.soft_cap)
        return attended.flatten(1)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """As `trioengine_kernels.silu_and_mul`, or the other activation's."""
        return _GATES[activation](gate_up)

    def experts(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: Sequence[GatedMLP[Tensor]],
        choice: Experts,
        activation: Activation,
    ) -> Tensor:
        """As `trioengine_kernels.experts`."""
        chosen, weights = choose_experts(
            router_logits, choice.num_experts_per_token, is_normalized=choice.has_normalized_weights
        )

        def compute(number: int, rows: Tensor) -> Tensor:
            expert = experts[number]
            return F.linear(self.gated(F.linear(rows, expert.gate_up), activation), expert.down)

        return mix_experts(x, chosen, weights, compute)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """As `trioengine_kernels.soft_cap`."""
        return soft_cap(x, cap)

    def select_rows(self, x: Tensor) -> Tensor:
        """The rows of `DecoderInput.logit_rows`, then those of `hidden_rows`. From here on there are no others."""
        rows = torch.cat((self._batch.logit_rows, self._batch.hidden_rows))
        if self._batch.lora_slots is not None:
            self._lora_slots = self._batch.lora_slots.index_select(0, rows)
        return x.index_select(0, rows)

    def keep_hidden(self, x: Tensor) -> Tensor:
        """Keeps the rows of `hidden_rows`; returns the others."""
        num_logit_rows = len(self._batch.logit_rows)
        self.hidden_states = x[num_logit_rows:]
        if self._lora_slots is not None:
            self._lora_slots = self._lora_slots[:num_logit_rows]
        return x[:num_logit_rows]


_GATES: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu_and_mul,
    Activation.GELU_TANH: gelu_tanh_and_mul,
}

TorchModel: TypeAlias = LoadedModel[Tensor, Tensor]
"""A model that `TorchOps` can compute."""


class TorchLoRAs:
    """Adapters of one model, by slots, all empty at first."""

    def __init__(self, model: TorchModel) -> None:
        self._targets = lora_targets(model.config, model.decoder.weights)
        self._adapters: dict[int, dict[int, Sequence[tuple[int, Tensor, Tensor]]]] = {
            id(target.weight): {} for target in self._targets
        }

    def load(self, slot: int, adapter: LoRA) -> None:
        """Put an adapter into a slot."""
        for target in self._targets:
            self._adapters[id(target.weight)][slot] = [
                (part.first_row, torch.from_numpy(part.a), torch.from_numpy(part.b))
                for place in target.places
                if (part := adapter.part(place)) is not None
            ]

    def adapters_of(self, weight: Tensor) -> Mapping[int, Sequence[tuple[int, Tensor, Tensor]]]:
        """By slot, what adapters add to the products of a matrix of the model."""
        return self._adapters.get(id(weight), {})


def load_torch_model(
    checkpoint: Checkpoint, report: ReportFraction | None = None, max_length: int | None = None
) -> TorchModel:
    """As `loader.load_model`, float32 tensors."""
    return load_model(checkpoint, TorchWeights(), report, max_length)


def tensors_in(weights: object) -> Iterator[Tensor]:
    """All tensors of a model's weights, in the order of their fields. One that is there twice comes twice."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, (list, tuple)):
        for each in weights:
            yield from tensors_in(each)
    elif attrs.has(type(weights)):
        for field in attrs.fields(type(weights)):
            yield from tensors_in(getattr(weights, field.name))
