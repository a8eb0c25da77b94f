# pyright: basic
"""The decoder's operations on a device, by a set of kernels, in the device's own number type.

What they read is in tensors that stay where they are, and they start nothing that the host waits for: a graph can
record a step's operations once and compute others with them. Weights come from `device_weights`.
"""

from collections.abc import Sequence
from typing import TypeAlias

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from trioengine_kernels.experts.weights import ExpertWeights
from trioengine_kernels.kernel_set import KernelSet
from trioengine_kernels.paged_attention.batch import AttentionBatch
from trioengine_kernels.quantized_linear import QuantizedWeight

from trioengine.models.config import Activation, Experts
from trioengine.models.decoder import AttentionShape, Decoder, GatedMLP, LayerWeights, MixtureOfExperts, Rotation
from trioengine.models.loader import Checkpoint, LoadedModel, ReportFraction, WeightMaker, load_model
from trioengine.models.lora import LoRA, LoRAPlace, lora_targets

DeviceMatrix: TypeAlias = Tensor | QuantizedWeight
"""[rows, columns] of the model's number type, or quantized."""
DeviceModel: TypeAlias = LoadedModel[DeviceMatrix, Tensor]
"""A model that `DeviceOps` can compute. Vectors are float32, but biases of matrices that are not quantized."""


@attrs.frozen(eq=False)
class LayerKVCache:
    """Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim].

    They are of the model's number type, or float8_e4m3fn: then what they stand for is theirs times a scale.
    """

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


@attrs.frozen(eq=False)
class DeviceInput:
    """The packed tokens of one step. Tensors are int32, on the device."""

    token_ids: Tensor
    """[num_tokens]."""
    positions: Tensor
    """[num_tokens]: each token's place in its sequence."""
    slots: Sequence[Tensor]
    """For each KV group, [num_tokens]: `block_id * block_size + offset`, where the token's key and value are stored."""
    attention: Sequence[AttentionBatch]
    """For each KV group, with its block table and its window."""
    logit_rows: Tensor
    """[num_logit_rows]: the tokens whose successors are wanted."""
    hidden_rows: Tensor
    """[num_hidden_rows]: the tokens whose hidden states are wanted."""
    lora_slots: Tensor | None = None
    """[num_tokens]: each token's adapter, 0 is none. None is 0 for all."""


class DeviceOps:
    """The operations of one step: `decoder.Ops`. A residual may be overwritten."""

    def __init__(
        self,
        batch: DeviceInput,
        kv_cache: Sequence[Sequence[LayerKVCache]],
        kernels: KernelSet,
        *,
        dtype: torch.dtype,
        loras: "DeviceLoRAs | None" = None,
        is_deterministic: bool = False,
    ) -> None:
        """Args:
        batch: the step.
        kv_cache: for each KV group, its layers' in their order.
        kernels: what computes.
        dtype: of all numbers between the embedding and the logits, which are float32.
        loras: what `DeviceInput.lora_slots` means.
        is_deterministic: what a token gives does not depend on what else is in the step.
        """
        self._batch = batch
        self._kv_cache = kv_cache
        self._kernels = kernels
        self._dtype = dtype
        self._is_deterministic = is_deterministic
        self._loras = loras
        self._lora_slots = None if loras is None else batch.lora_slots
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        self.hidden_states: Tensor | None = None
        """[num_hidden_rows, hidden_size], when the decoder is done."""

    def embedding(self, table: DeviceMatrix, multiplier: float) -> Tensor:
        """The rows of the step's tokens times the multiplier."""
        return self._kernels.embedding(self._batch.token_ids, table, multiplier, self._dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """As `trioengine_kernels.rms_norm`."""
        return self._kernels.rms_norm(x, weight, epsilon)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The sum."""
        return residual + x

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """As `trioengine_kernels.rms_norm`."""
        return self._kernels.add_rms_norm(x, residual, weight, epsilon)

    def linear(self, x: Tensor, weight: DeviceMatrix, bias: Tensor | None = None) -> Tensor:
        """`x @ weightᵀ + bias`, and as `trioengine_kernels.lora`."""
        if isinstance(weight, QuantizedWeight):
            y = self._kernels.quantized_linear(x, weight, bias)
        elif self._is_deterministic:
            y = self._kernels.linear(x, weight, bias)
        else:
            y = F.linear(x, weight, bias)
        if self._loras is not None and self._lora_slots is not None:
            for first_row, a, b in self._loras.adapters_of(weight):
                y = self._kernels.lora(y, x, self._lora_slots, first_row, a, b)
        # Behind the hidden states there is only the product that gives logits.
        return y if self.hidden_states is None else y.float()

    def rope_write_kv(
        self,
        qkv: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        rotation: Rotation[Tensor] | None,
        shape: AttentionShape,
    ) -> Tensor:
        """The rotated queries, [num_tokens, num_heads, head_dim]."""
        cache = self._kv_cache[shape.kv_group][shape.kv_layer]
        cos, sin = (None, None) if rotation is None else self._angles_of(rotation)
        return self._kernels.rope_write_kv(
            qkv,
            query_norm,
            key_norm,
            cos,
            sin,
            cache.keys,
            cache.values,
            self._batch.slots[shape.kv_group],
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            norm_epsilon=shape.norm_epsilon,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )

    def _angles_of(self, rotation: Rotation[Tensor]) -> tuple[Tensor, Tensor]:
        """Cosines and sines, with the rotation's factor, float32: [num_tokens, rotary_dim / 2]. Layers share them."""
        key = id(rotation)
        if key not in self._angles:
            angles = self._batch.positions.unsqueeze(1) * rotation.inverse_frequencies
            factor = rotation.attention_factor
            cos, sin = angles.cos(), angles.sin()
            self._angles[key] = (cos, sin) if factor == 1 else (cos * factor, sin * factor)
        return self._angles[key]

    def attention(self, query: Tensor, shape: AttentionShape) -> Tensor:
        """As `trioengine_kernels.paged_attention`, the heads side by side."""
        cache = self._kv_cache[shape.kv_group][shape.kv_layer]
        attended = self._kernels.paged_attention(
            query,
            cache.keys,
            cache.values,
            self._batch.attention[shape.kv_group],
            scale=shape.scale,
            soft_cap=shape.soft_cap,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )
        return attended.flatten(1)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """As `trioengine_kernels.silu_and_mul`, or the other activation's."""
        match activation:
            case Activation.SILU:
                return self._kernels.silu_and_mul(gate_up)
            case Activation.GELU_TANH:
                return self._kernels.gelu_tanh_and_mul(gate_up)

    def experts(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: Sequence[GatedMLP[DeviceMatrix]],
        choice: Experts,
        activation: Activation,
    ) -> Tensor:
        """As `trioengine_kernels.experts`."""
        assert isinstance(experts, DeviceExperts), "the model was not prepared"
        return self._kernels.experts(
            x,
            router_logits,
            experts.weights,
            num_per_token=choice.num_experts_per_token,
            is_normalized=choice.has_normalized_weights,
            activation=_ACTIVATION_NAMES[activation],
        )

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """As `trioengine_kernels.soft_cap`."""
        return self._kernels.soft_cap(x, cap)

    def select_rows(self, x: Tensor) -> Tensor:
        """The rows of `DeviceInput.logit_rows`, then those of `hidden_rows`. From here on there are no others."""
        batch = self._batch
        rows = torch.cat((batch.logit_rows, batch.hidden_rows)) if len(batch.hidden_rows) else batch.logit_rows
        if self._loras is not None and batch.lora_slots is not None:
            self._lora_slots = batch.lora_slots.index_select(0, rows)
        return x.index_select(0, rows)

    def keep_hidden(self, x: Tensor) -> Tensor:
        """Keeps the rows of `hidden_rows`; returns the others."""
        num_logit_rows = len(self._batch.logit_rows)
        self.hidden_states = x[num_logit_rows:]
        if self._lora_slots is not None:
            self._lora_slots = self._lora_slots[:num_logit_rows]
        return x[:num_logit_rows]


_ACTIVATION_NAMES = {Activation.SILU: "silu", Activation.GELU_TANH: "gelu_tanh"}


class DeviceExperts(tuple[GatedMLP[DeviceMatrix], ...]):
    """The experts of a layer, with what their kernel is told about them."""

    weights: ExpertWeights

    @classmethod
    def of(cls, experts: Sequence[GatedMLP[DeviceMatrix]]) -> "DeviceExperts":
        """These experts, whose tensors stay where they are."""
        made = cls(experts)
        made.weights = ExpertWeights.of([each.gate_up for each in experts], [each.down for each in experts])
        return made


def prepared(model: DeviceModel) -> DeviceModel:
    """The same model, with experts that a kernel can find, and biases of the number type that products add them in."""
    weights = model.decoder.weights
    layers = [_prepared_layer(layer) for layer in weights.layers]
    return attrs.evolve(model, decoder=Decoder(model.config, attrs.evolve(weights, layers=layers)))


def _prepared_layer(layer: LayerWeights[DeviceMatrix, Tensor]) -> LayerWeights[DeviceMatrix, Tensor]:
    mlp = layer.mlp
    return attrs.evolve(
        layer,
        qkv_bias=_like(layer.qkv_bias, layer.qkv),
        output_bias=_like(layer.output_bias, layer.output),
        mlp=attrs.evolve(mlp, experts=DeviceExperts.of(mlp.experts)) if isinstance(mlp, MixtureOfExperts) else mlp,
    )


def _like(bias: Tensor | None, weight: DeviceMatrix) -> Tensor | None:
    return bias if bias is None or isinstance(weight, QuantizedWeight) else bias.to(weight.dtype)


def load_device_model(
    checkpoint: Checkpoint,
    maker: WeightMaker[DeviceMatrix, Tensor],
    report: ReportFraction | None = None,
    max_length: int | None = None,
) -> DeviceModel:
    """As `loader.load_model`, ready for `DeviceOps`. `maker` is a `device_weights.DeviceWeightMaker`."""
    return prepared(load_model(checkpoint, maker, report, max_length))


class DeviceLoRAs:
    """Slots for adapters of one model, 1 to `max_loras`, all empty at first.

    An adapter is written into a slot's place, so that recorded graphs find it.
    """

    def __init__(
        self, model: DeviceModel, max_loras: int, max_rank: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Args:
        model: whose matrices they change.
        max_loras: slots.
        max_rank: of an adapter.
        dtype: of the numbers between embedding and logits.
        device: where the model is.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        self._tables: list[tuple[LoRAPlace, Tensor, Tensor]] = []
        self._by_weight: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        for target in lora_targets(model.config, model.decoder.weights):
            of_weight = self._by_weight.setdefault(id(target.weight), [])
            for place in target.places:
                a = torch.zeros(max_loras + 1, max_rank, place.num_columns, dtype=dtype, device=device)
                b = torch.zeros(max_loras + 1, place.num_rows, max_rank, dtype=dtype, device=device)
                self._tables.append((place, a, b))
                of_weight.append((place.first_row, a, b))

    def load(self, slot: int, adapter: LoRA) -> None:
        """Put an adapter into a slot. No step runs."""
        for place, a, b in self._tables:
            part = adapter.part(place)
            a[slot].zero_()
            b[slot].zero_()
            if part is not None:
                rank = len(part.a)
                a[slot, :rank].copy_(torch.from_numpy(part.a))
                b[slot, :, :rank].copy_(torch.from_numpy(part.b))

    def adapters_of(self, weight: DeviceMatrix) -> Sequence[tuple[int, Tensor, Tensor]]:
        """What adapters add to the products of a matrix of the model: first row, a [num_slots, rank, columns] and b
        [num_slots, rows, rank] of each part."""
        return self._by_weight.get(id(weight), ())
