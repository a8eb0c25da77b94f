# pyright: basic
"""The decoder's operations as a program of the native CPU kernels, and weights as their tiles.

A program is recorded once and computes any step. Quantized tensors of GGUF files stay as they are, in another order.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.library import Library, ThreadPool
from trioengine_kernels.native.program import Buffer, Program, ProgramBuilder
from trioengine_kernels.native.tiles import GGML_TYPE_NAMES, TileKind, WeightTiles, pack_float_pieces, pack_ggml

from trioengine.checkpoint.gguf import GGMLType
from trioengine.config.engine import Quantization
from trioengine.models.decoder import AttentionShape
from trioengine.models.loader import Checkpoint, Floats, LoadedModel, ReportFraction, StoredMatrix, load_model

NativeMatrix: TypeAlias = Sequence[WeightTiles]
"""One matrix or several, one below the other: parts of one type are one."""
NativeModel: TypeAlias = LoadedModel[NativeMatrix, Floats]
"""A model that can be recorded."""

_TILE_KINDS: Mapping[Quantization, TileKind] = {
    Quantization.INT8: TileKind.INT8,
    Quantization.INT4: TileKind.INT4,
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
) -> NativeModel:
    """As `loader.load_model`, packed into tiles.

    Args:
        checkpoint: the model.
        library: the kernels.
        pool: threads that pack.
        quantization: what matrices of floats become; None keeps them.
        report: called with the share of the weights that is loaded.
    """
    return load_model(checkpoint, NativeWeights(library, pool, quantization), report)


class NativeWeights:
    """Makes tiles of weights, tensor by tensor, so that little memory is used beside them."""

    def __init__(self, library: Library, pool: ThreadPool, quantization: Quantization | None = None) -> None:
        self._library = library
        self._pool = pool
        self._float_kind = None if quantization is None else _TILE_KINDS[quantization]

    def matrix(self, parts: Sequence[StoredMatrix]) -> NativeMatrix:
        """The parts, one below the other."""
        by_kind = [list(equals) for _, equals in itertools.groupby(parts, key=lambda part: part.kind)]
        return [self._pack(equals) if _is_known(equals[0]) else self._pack_floats(equals) for equals in by_kind]

    def vector(self, values: Floats) -> Floats:
        """The same numbers."""
        return values

    def _pack(self, parts: Sequence[StoredMatrix]) -> WeightTiles:
        """Parts of one type that the kernels know."""
        part = _joined(parts)
        kind = self._kind_of_floats(part) if part.kind.block_size == 1 else None
        return pack_ggml(
            self._library, part.kind.name, part.rows, len(part.rows), part.num_columns, kind=kind, pool=self._pool
        )

    def _kind_of_floats(self, part: StoredMatrix) -> TileKind | None:
        """None keeps the numbers as they are."""
        if self._float_kind is not None:
            return self._float_kind
        return TileKind.F16 if part.kind is GGMLType.BF16 and _fit_halves(part.rows) else None

    def _pack_floats(self, parts: Sequence[StoredMatrix]) -> WeightTiles:
        """Parts of a type that the kernels do not know: 8-bit tiles of quantized ones, in pieces to save memory."""
        part = _joined(parts)
        kind = TileKind.INT8 if part.kind.block_size > 1 else self._float_kind or TileKind.F32
        step = max(_STRIP_ROWS, _PIECE_VALUES // part.num_columns // _STRIP_ROWS * _STRIP_ROWS)
        pieces = (part.floats(first, first + step) for first in range(0, len(part.rows), step))
        return pack_float_pieces(self._library, pieces, len(part.rows), part.num_columns, kind, pool=self._pool)


def _is_known(part: StoredMatrix) -> bool:
    return part.kind.name in GGML_TYPE_NAMES


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

    def rope_write_kv(self, qkv: Buffer, inverse_frequencies: Floats, shape: AttentionShape) -> Buffer:
        """As `ProgramBuilder.rope_write_kv`; the queries are where they were."""
        self.builder.rope_write_kv(
            qkv,
            shape.kv_layer,
            num_heads=shape.num_heads,
            inverse_frequencies=inverse_frequencies,
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
            kv_group=shape.kv_group,
        )

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
