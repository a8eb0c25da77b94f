# pyright: basic
"""The decoder's operations as a program of the native CPU kernels, and weights as their tiles.

A program is recorded once and computes any step. Weights that their files have quantized stay as they are, in another
order, where tiles can hold them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.library import Library, ThreadPool
from trioengine_kernels.native.lora import LoraTable
from trioengine_kernels.native.program import Buffer, Program, ProgramBuilder
from trioengine_kernels.native.structures import Activation as NativeActivation
from trioengine_kernels.native.tiles import (
    GGML_TYPE_NAMES,
    TileKind,
    WeightTiles,
    pack_block_pieces,
    pack_float_pieces,
    pack_ggml,
)

from trioengine.checkpoint.gguf import GGMLType
from trioengine.checkpoint.quantized import QuantizedMatrix, ScaledMatrix
from trioengine.config.engine import Quantization
from trioengine.models.config import Activation, Experts
from trioengine.models.decoder import AttentionShape, GatedMLP, Rotation
from trioengine.models.loader import (
    Checkpoint,
    LoadedModel,
    ReportFraction,
    load_model,
    what_floats_become,
)
from trioengine.models.lora import LoRA, LoRAPlace, lora_targets
from trioengine.models.pack_cache import cached_weights
from trioengine.models.packed_groups import PackedForm, group_fields, packed_form
from trioengine.models.source import Floats, MatrixPart, StoredMatrix

NativeMatrix: TypeAlias = Sequence[WeightTiles]
"""One matrix or several, one below the other: parts of one type are one."""
NativeModel: TypeAlias = LoadedModel[NativeMatrix, Floats]
"""A model that can be recorded."""

_TILE_KINDS: Mapping[Quantization, TileKind] = {
    Quantization.INT8: TileKind.INT8,
    Quantization.INT4: TileKind.INT4,
}
_ACTIVATIONS: Mapping[Activation, NativeActivation] = {
    Activation.SILU: NativeActivation.SILU,
    Activation.GELU_TANH: NativeActivation.GELU_TANH,
}
_PIECE_VALUES = 1 << 22
"""Numbers that are floats at a time, on the way from a type that cannot be packed as it is: 16 MiB."""
_STRIP_ROWS = 16
"""Rows of a piece are a multiple, as `pack_float_pieces` needs."""


def load_native_model(
    checkpoint: Checkpoint,
    library: Library,
    pool: ThreadPool,
    quantization: Quantization | None = None,
    report: ReportFraction | None = None,
    max_length: int | None = None,
    cache_folder: Path | None = None,
) -> NativeModel:
    """As `loader.load_model`, packed into tiles.

    Args:
        checkpoint: the model.
        library: the kernels.
        pool: threads that pack.
        quantization: what matrices of floats become; None keeps them.
        report: called with the share of the weights that is loaded.
        max_length: as `loader.load_model`.
        cache_folder: keeps what takes long to pack for the next time, as `pack_cache` says; None keeps nothing.
    """
    weights = NativeWeights(library, pool, quantization)
    if cache_folder is None:
        return load_model(checkpoint, weights, report, max_length)
    with cached_weights(weights, library, cache_folder, checkpoint.version, str(quantization)) as maker:
        return load_model(checkpoint, maker, report, max_length)


class NativeWeights:
    """Makes tiles of weights, tensor by tensor, so that little memory is used beside them."""

    def __init__(self, library: Library, pool: ThreadPool, quantization: Quantization | None = None) -> None:
        self._library = library
        self._pool = pool
        self._quantization = quantization

    def matrix(self, parts: Sequence[MatrixPart], *, min_bits: int = 4) -> NativeMatrix:
        """The parts, one below the other."""
        float_kind = self._float_kind(min_bits)
        tiles: list[WeightTiles] = []
        for layout, equals in itertools.groupby(parts, key=lambda part: _layout(part, float_kind)):
            tiles += self._pack(layout, list(equals))
        return tiles

    def is_costly(self, parts: Sequence[MatrixPart], *, min_bits: int = 4) -> bool:
        """As `pack_cache.TilesMaker.is_costly`. Reads no numbers."""
        becomes_whole_numbers = self._float_kind(min_bits) is not None
        return any(
            isinstance(part, QuantizedMatrix)
            or (
                part.kind.name not in GGML_TYPE_NAMES
                if isinstance(part, StoredMatrix) and part.kind.block_size > 1
                else becomes_whole_numbers
            )
            for part in parts
        )

    def vector(self, values: Floats) -> Floats:
        """The same numbers."""
        return values

    def _float_kind(self, min_bits: int) -> TileKind | None:
        quantization = what_floats_become(self._quantization, min_bits)
        return None if quantization is None else _TILE_KINDS[quantization]

    def _pack(self, layout: "_Layout", parts: Sequence[MatrixPart]) -> Sequence[WeightTiles]:
        """Parts of one layout."""
        stored = [part for part in parts if isinstance(part, StoredMatrix)]
        if layout.ggml_type is not None:
            part, name = _joined(stored), layout.ggml_type.name
            rows, columns = part.num_rows, part.num_columns
            return [pack_ggml(self._library, name, part.rows, rows, columns, kind=layout.kind, pool=self._pool)]
        assert layout.kind is not None
        tiles: list[WeightTiles] = []
        for run in [[_joined(stored)]] if stored else _aligned_runs(parts):
            rows, columns = sum(part.num_rows for part in run), run[0].num_columns
            if layout.has_blocks:
                blocks = (
                    _blocks(part, first, end, layout.kind)
                    for part, first, end in _pieces(run)
                    if isinstance(part, QuantizedMatrix)
                )
                packed = pack_block_pieces(self._library, blocks, rows, columns, layout.kind, pool=self._pool)
            else:
                floats = (part.floats(first, end) for part, first, end in _pieces(run))
                packed = pack_float_pieces(self._library, floats, rows, columns, layout.kind, pool=self._pool)
            tiles.append(packed)
        return tiles


@attrs.frozen
class _Layout:
    """How a matrix becomes tiles."""

    kind: TileKind | None
    """None: the one that the GGML type has."""
    ggml_type: GGMLType | None = None
    """Of the bytes, where the kernels know them; else pieces are worked out here."""
    has_blocks: bool = False
    """Pieces are the codes, scales and minimums that the tiles have; else floats."""


def _layout(part: MatrixPart, float_kind: TileKind | None) -> _Layout:
    """`float_kind`: what floats become; None keeps them."""
    match part:
        case StoredMatrix() if part.kind.name not in GGML_TYPE_NAMES:
            # 8-bit tiles of quantized types that the kernels do not know.
            return _Layout(TileKind.INT8 if part.kind.block_size > 1 else float_kind or TileKind.F32)
        case StoredMatrix() if part.kind.block_size > 1:
            return _Layout(None, part.kind)
        case StoredMatrix():
            halves = TileKind.F16 if part.kind is GGMLType.BF16 and _fit_halves(part.rows) else None
            return _Layout(halves if float_kind is None else float_kind, part.kind)
        case QuantizedMatrix():
            return _PACKED_LAYOUTS[packed_form(part)]
        case ScaledMatrix():
            largest = float(np.abs(part.scales).max() * np.nanmax(np.abs(part.table[np.isfinite(part.table)])))
            halves = TileKind.F16 if 2.0**-8 <= largest < 2.0**15 else TileKind.F32
            return _Layout(halves if float_kind is None else float_kind)


_PACKED_LAYOUTS: Mapping[PackedForm, _Layout] = {
    PackedForm.INT4: _Layout(TileKind.INT4, has_blocks=True),
    PackedForm.INT8: _Layout(TileKind.INT8, has_blocks=True),
    PackedForm.INT8_AFFINE: _Layout(TileKind.INT8_AFFINE, has_blocks=True),
    PackedForm.ROUNDED: _Layout(TileKind.INT8),
    PackedForm.FLOATS: _Layout(TileKind.F32),
}


def _blocks(part: QuantizedMatrix, first: int, end: int, kind: TileKind) -> NDArray[np.uint8]:
    """Rows as `pack_block_pieces` wants them."""
    fields = group_fields(part, first, end, PackedForm[kind.name])
    codes = fields.codes
    if kind is TileKind.INT4:
        packed = codes[:, :, 16:] << 4
        packed |= codes[:, :, :16]
    else:
        packed = codes ^ np.uint8(128)
    halves = [fields.scales] if fields.minimums is None else [fields.scales, fields.minimums]
    parts = [each[:, :, None].view(np.uint8) for each in halves]
    return np.concatenate((*parts, packed), axis=2, dtype=np.uint8).reshape(len(codes), -1)


def _aligned_runs(parts: Sequence[MatrixPart]) -> Sequence[Sequence[MatrixPart]]:
    """Parts that can be packed together: all but the last of a run are strips of whole rows."""
    runs: list[list[MatrixPart]] = []
    for part in parts:
        if runs and runs[-1][-1].num_rows % _STRIP_ROWS == 0:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _pieces(parts: Sequence[MatrixPart]) -> Iterator[tuple[MatrixPart, int, int]]:
    """Parts, and from which row to which one pieces of them go."""
    for part in parts:
        step = max(_STRIP_ROWS, _PIECE_VALUES // part.num_columns // _STRIP_ROWS * _STRIP_ROWS)
        for first in range(0, part.num_rows, step):
            yield part, first, min(first + step, part.num_rows)


def _fit_halves(rows: NDArray[np.uint8]) -> bool:
    """Whether the BF16 numbers of a matrix lose nothing that counts as halves, which take half of float32's memory.

    Halves have more digits, but a smaller range: the largest number must be below 2^15, and numbers below 2^-17 lose
    up to 2^-25, which is as little as float32's rounding of the products where the largest is at least 2^-8.
    """
    largest = int((rows.view(np.uint16) & 0x7FFF).max())
    return 127 - 8 <= largest >> 7 < 127 + 15


def _joined(parts: Sequence[StoredMatrix]) -> StoredMatrix:
    """Of one type, one below the other."""
    return parts[0] if len(parts) == 1 else attrs.evolve(parts[0], rows=np.concatenate([part.rows for part in parts]))


class NativeLoRAs:
    """Slots for adapters of one model, 1 to `max_loras`, all empty at first."""

    def __init__(self, model: NativeModel, max_loras: int) -> None:
        targets = lora_targets(model.config, model.decoder.weights)
        self._tables = [(target.places, _lora_table(target.places, max_loras)) for target in targets]
        self._by_weight = {id(target.weight): table for target, (_, table) in zip(targets, self._tables, strict=True)}

    def table_of(self, weight: NativeMatrix) -> LoraTable | None:
        """The adapters of a matrix of the model that has not been freed."""
        return self._by_weight.get(id(weight))

    def load(self, slot: int, lora: LoRA) -> None:
        """Put an adapter into a slot. No step runs."""
        for places, table in self._tables:
            parts = [lora.part(place) for place in places]
            table.set(slot, [None if part is None else (part.a, part.b) for part in parts])


def _lora_table(places: Sequence[LoRAPlace], max_loras: int) -> LoraTable:
    return LoraTable(max_loras, places[0].num_columns, [(place.first_row, place.num_rows) for place in places])


@attrs.frozen(eq=False)
class NativeOps:
    """Records operations. Residuals and queries are changed in place."""

    builder: ProgramBuilder
    loras: NativeLoRAs | None = None

    def embedding(self, table: NativeMatrix, multiplier: float) -> Buffer:
        """As `ProgramBuilder.embedding`."""
        (tiles,) = table
        return self.builder.embedding(tiles, multiplier)

    def rms_norm(self, x: Buffer, weight: Floats, epsilon: float) -> Buffer:
        """As `ProgramBuilder.rms_norm`."""
        return self.builder.rms_norm(x, weight, epsilon)

    def add(self, x: Buffer, residual: Buffer) -> Buffer:
        """As `ProgramBuilder.add`: the residual, which is changed."""
        self.builder.add(x, residual)
        return residual

    def add_rms_norm(self, x: Buffer, residual: Buffer, weight: Floats, epsilon: float) -> tuple[Buffer, Buffer]:
        """As `ProgramBuilder.add_rms_norm`, and the residual, which is changed."""
        return self.builder.add_rms_norm(x, residual, weight, epsilon), residual

    def linear(self, x: Buffer, weight: NativeMatrix, bias: Floats | None = None) -> Buffer:
        """As `ProgramBuilder.linear`, and what adapters add."""
        out = self.builder.linear(x, weight, bias)
        if self.loras is not None and (table := self.loras.table_of(weight)) is not None:
            self.builder.lora(x, out, table)
        return out

    def rope_write_kv(
        self,
        qkv: Buffer,
        query_norm: Floats | None,
        key_norm: Floats | None,
        rotation: Rotation[Floats] | None,
        shape: AttentionShape,
    ) -> Buffer:
        """As `ProgramBuilder.rope_write_kv`; the queries are where they were."""
        self.builder.rope_write_kv(
            qkv,
            shape.kv_layer,
            num_heads=shape.num_heads,
            inverse_frequencies=None if rotation is None else rotation.inverse_frequencies,
            attention_factor=1.0 if rotation is None else rotation.attention_factor,
            norms=None if query_norm is None or key_norm is None else (query_norm, key_norm),
            epsilon=shape.norm_epsilon,
            kv_group=shape.kv_group,
        )
        return qkv

    def attention(self, query: Buffer, shape: AttentionShape) -> Buffer:
        """As `ProgramBuilder.attention`."""
        return self.builder.attention(
            query,
            shape.kv_layer,
            num_heads=shape.num_heads,
            scale=shape.scale,
            window=shape.window,
            soft_cap=shape.soft_cap,
            kv_group=shape.kv_group,
        )

    def gated(self, gate_up: Buffer, activation: Activation) -> Buffer:
        """As `ProgramBuilder.gated`."""
        return self.builder.gated(gate_up, _ACTIVATIONS[activation])

    def experts(
        self,
        x: Buffer,
        router_logits: Buffer,
        experts: Sequence[GatedMLP[NativeMatrix]],
        choice: Experts,
        activation: Activation,
    ) -> Buffer:
        """As `ProgramBuilder.experts`."""
        return self.builder.experts(
            x,
            router_logits,
            [(expert.gate_up, expert.down) for expert in experts],
            num_chosen=choice.num_experts_per_token,
            is_normalized=choice.has_normalized_weights,
            activation=_ACTIVATIONS[activation],
        )

    def soft_cap(self, x: Buffer, cap: float) -> Buffer:
        """As `ProgramBuilder.soft_cap`, in place."""
        self.builder.soft_cap(x, cap)
        return x

    def select_rows(self, x: Buffer) -> Buffer:
        """As `ProgramBuilder.select_rows_with_hidden`."""
        return self.builder.select_rows_with_hidden(x)

    def keep_hidden(self, x: Buffer) -> Buffer:
        """As `ProgramBuilder.keep_hidden`."""
        return self.builder.keep_hidden(x)


def record(
    model: NativeModel,
    library: Library,
    *,
    max_tokens: int,
    max_logit_rows: int,
    loras: NativeLoRAs | None = None,
) -> Program:
    """The program that computes a model's steps.

    Args:
        model: whose weights it keeps.
        library: the kernels.
        max_tokens: of one step.
        max_logit_rows: of one step.
        loras: of this model.

    Raises:
        MemoryError: its buffers do not fit.
    """
    builder = ProgramBuilder(
        library,
        max_tokens=max_tokens,
        max_logit_rows=max_logit_rows,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        vocab_size=model.config.vocab_size,
    )
    return builder.build(model.decoder.forward(NativeOps(builder, loras)))
