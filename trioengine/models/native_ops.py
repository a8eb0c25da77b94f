# pyright: basic
"""The decoder's operations as a program of the native CPU kernels, and weights as their tiles.

A program is recorded once and computes any step. Quantized tensors of GGUF files stay as they are, in another order.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs
import numpy as np
from trioengine_kernels.native.library import Library, ThreadPool
from trioengine_kernels.native.program import Buffer, Program, ProgramBuilder
from trioengine_kernels.native.tiles import GGML_TYPE_NAMES, TileKind, WeightTiles, pack_float, pack_ggml

from trioengine.checkpoint.locate import ModelLocation
from trioengine.config.engine import Quantization
from trioengine.models.decoder import AttentionShape
from trioengine.models.loader import Floats, LoadedModel, ReportFraction, StoredMatrix, load_model

NativeMatrix: TypeAlias = Sequence[WeightTiles]
"""One matrix or several, one below the other: parts of one type are one."""
NativeModel: TypeAlias = LoadedModel[NativeMatrix, Floats]
"""A model that can be recorded."""

_TILE_KINDS: Mapping[Quantization, TileKind] = {
    Quantization.INT8: TileKind.INT8,
    Quantization.INT4: TileKind.INT4,
}
_PACKED_VALUES = 1 << 24
"""Numbers that are made floats at a time, on the way from a type that cannot be packed as it is: 64 MiB."""
_STRIP_ROWS = 16
"""Matrices of a multiple of these rows can be cut anywhere between them: 16 rows are a whole number of tiles."""


def load_native_model(
    location: ModelLocation,
    library: Library,
    pool: ThreadPool,
    quantization: Quantization | None = None,
    report: ReportFraction | None = None,
) -> NativeModel:
    """As `loader.load_model`, packed into tiles.

    Args:
        location: where the model is.
        library: the kernels.
        pool: threads that pack.
        quantization: what matrices of floats become; None keeps them.
        report: called with the share of the weights that is loaded.
    """
    return load_model(location, NativeWeights(library, pool, quantization), report)


class NativeWeights:
    """Makes tiles of weights, tensor by tensor, so that little memory is used beside them."""

    def __init__(self, library: Library, pool: ThreadPool, quantization: Quantization | None = None) -> None:
        self._library = library
        self._pool = pool
        self._float_kind = None if quantization is None else _TILE_KINDS[quantization]

    def matrix(self, parts: Sequence[StoredMatrix]) -> NativeMatrix:
        """The parts, one below the other."""
        return [
            tiles
            for _, equals in itertools.groupby(parts, key=lambda part: part.kind)
            for tiles in self._pack(list(equals))
        ]

    def vector(self, values: Floats) -> Floats:
        """The same numbers."""
        return values

    def _pack(self, parts: Sequence[StoredMatrix]) -> list[WeightTiles]:
        """Parts of one type."""
        kind, num_columns = parts[0].kind, parts[0].num_columns
        if kind.name not in GGML_TYPE_NAMES:
            return [tiles for part in parts for tiles in self._pack_floats(part)]
        rows = np.concatenate([part.rows for part in parts]) if len(parts) > 1 else parts[0].rows
        float_kind = self._float_kind if kind.block_size == 1 else None
        return [
            pack_ggml(
                self._library, kind.name, rows.reshape(-1), len(rows), num_columns, kind=float_kind, pool=self._pool
            )
        ]

    def _pack_floats(self, part: StoredMatrix) -> list[WeightTiles]:
        """Of a type that the kernels do not know: 8-bit tiles, in pieces so that no large copy exists."""
        step = max(_STRIP_ROWS, _PACKED_VALUES // part.num_columns // _STRIP_ROWS * _STRIP_ROWS)
        kind = TileKind.INT8 if part.kind.block_size > 1 else TileKind.F32
        return [
            pack_float(self._library, part.floats(first, first + step), kind, pool=self._pool)
            for first in range(0, len(part.rows), step)
        ]


@attrs.frozen(eq=False)
class NativeOps:
    """Records operations. Residuals and queries are changed in place."""

    builder: ProgramBuilder

    def embedding(self, table: NativeMatrix) -> Buffer:
        """The rows of the step's tokens."""
        (tiles,) = table
        return self.builder.embedding(tiles)

    def rms_norm(self, x: Buffer, weight: Floats, epsilon: float) -> Buffer:
        """As `ProgramBuilder.rms_norm`."""
        return self.builder.rms_norm(x, weight, epsilon)

    def add_rms_norm(self, x: Buffer, residual: Buffer, weight: Floats, epsilon: float) -> tuple[Buffer, Buffer]:
        """As `ProgramBuilder.add_rms_norm`, and the residual, which is changed."""
        return self.builder.add_rms_norm(x, residual, weight, epsilon), residual

    def linear(self, x: Buffer, weight: NativeMatrix, bias: Floats | None = None) -> Buffer:
        """As `ProgramBuilder.linear`."""
        return self.builder.linear(x, weight, bias)

    def rope_write_kv(self, qkv: Buffer, layer: int, inverse_frequencies: Floats, shape: AttentionShape) -> Buffer:
        """As `ProgramBuilder.rope_write_kv`; the queries are where they were."""
        self.builder.rope_write_kv(qkv, layer, num_heads=shape.num_heads, inverse_frequencies=inverse_frequencies)
        return qkv

    def attention(self, query: Buffer, layer: int, shape: AttentionShape) -> Buffer:
        """As `ProgramBuilder.attention`."""
        return self.builder.attention(query, layer, num_heads=shape.num_heads, scale=shape.scale, window=shape.window)

    def silu_and_mul(self, gate_up: Buffer) -> Buffer:
        """As `ProgramBuilder.silu_mul`."""
        return self.builder.silu_mul(gate_up)

    def select_logit_rows(self, x: Buffer) -> Buffer:
        """As `ProgramBuilder.select_rows`."""
        return self.builder.select_rows(x)


def record(model: NativeModel, library: Library, *, max_tokens: int, max_logit_rows: int) -> Program:
    """The program that computes a model's steps.

    Args:
        model: whose weights it keeps.
        library: the kernels.
        max_tokens: of one step.
        max_logit_rows: of one step.

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
    return builder.build(model.decoder.forward(NativeOps(builder)))
