# pyright: basic
"""Weight matrices packed for the native products.

Quantized GGUF blocks are rearranged, not dequantized; floats are kept or quantized. The layouts are in src/te.h. This
module does not know files: it takes a tensor's bytes.
"""

import enum
from collections.abc import Iterable, Mapping
from ctypes import c_int32, c_int64, c_size_t, c_void_p

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine_kernels.native import library as native

MAX_SIZE = 1 << 24
"""Of rows and columns; with tiles of 16 rows of 4 bytes, products of sizes stay far below any overflow."""


class TileKind(enum.IntEnum):
    """How weights are stored. Values are those of `TeTileKind` in src/te.h."""

    INT4 = 0
    """0 to 15 times a scale plus a minimum, for each 32 columns of a row; both are integers times a unit of the row."""
    INT8 = 1
    """-128 to 127 times a scale, a half, for each 32 columns of a row."""
    INT8_AFFINE = 2
    """INT8 with a minimum."""
    F16 = 3
    F32 = 4

    @property
    def is_quantized(self) -> bool:
        """Whether activations are quantized for products with it."""
        return self <= TileKind.INT8_AFFINE


@attrs.frozen
class _GGMLType:
    number: int
    block_size: int
    block_bytes: int
    kind: TileKind


_GGML_TYPES: Mapping[str, _GGMLType] = {
    "F32": _GGMLType(0, 1, 4, TileKind.F32),
    "F16": _GGMLType(1, 1, 2, TileKind.F16),
    "Q4_0": _GGMLType(2, 32, 18, TileKind.INT4),
    "Q4_1": _GGMLType(3, 32, 20, TileKind.INT4),
    "Q5_0": _GGMLType(6, 32, 22, TileKind.INT8),
    "Q5_1": _GGMLType(7, 32, 24, TileKind.INT8_AFFINE),
    "Q8_0": _GGMLType(8, 32, 34, TileKind.INT8),
    "Q4_K": _GGMLType(12, 256, 144, TileKind.INT4),
    "Q5_K": _GGMLType(13, 256, 176, TileKind.INT8_AFFINE),
    "Q6_K": _GGMLType(14, 256, 210, TileKind.INT8),
    # Halves cannot hold all of its values.
    "BF16": _GGMLType(30, 1, 2, TileKind.F32),
}
GGML_TYPE_NAMES = frozenset(_GGML_TYPES)
"""The types that `pack_ggml` takes."""
_BLOCK_TYPES: Mapping[TileKind, _GGMLType] = {
    TileKind.INT4: _GGML_TYPES["Q4_1"],
    TileKind.INT8: _GGML_TYPES["Q8_0"],
    TileKind.INT8_AFFINE: _GGMLType(1000, 32, 36, TileKind.INT8_AFFINE),
}
_PLAIN_TYPE_NAMES = {"F32", "F16", "BF16"}


@attrs.frozen(eq=False)
class WeightTiles:
    """A packed matrix of `rows` outputs and `columns` inputs."""

    data: NDArray[np.uint8]
    """64-byte aligned."""
    kind: TileKind
    rows: int
    columns: int

    @property
    def num_groups(self) -> int:
        """Groups of 32 columns; the last one may be filled up."""
        return -(-self.columns // 32)


def pack_ggml(
    library: native.Library,
    ggml_type_name: str,
    raw: NDArray[np.uint8],
    rows: int,
    columns: int,
    *,
    kind: TileKind | None = None,
    pool: native.ThreadPool | None = None,
) -> WeightTiles:
    """Pack a GGUF tensor.

    Args:
        library: the native backend.
        ggml_type_name: one of `GGML_TYPE_NAMES`.
        raw: the tensor's bytes, any shape; rows follow each other.
        rows: outputs.
        columns: inputs.
        kind: for F32, F16 and BF16: what to make of them; None keeps their values. Quantized types have one kind.
        pool: threads to use.

    Raises:
        ValueError: the type is not known, or the bytes do not fit the sizes.
    """
    ggml_type = _GGML_TYPES.get(ggml_type_name)
    if ggml_type is None:
        raise ValueError(f"GGML type {ggml_type_name!r} cannot be packed.")
    if kind is not None and kind is not ggml_type.kind and ggml_type_name not in _PLAIN_TYPE_NAMES:
        raise ValueError(f"GGML type {ggml_type_name} is packed as {ggml_type.kind.name} only.")
    if not (0 < rows <= MAX_SIZE and 0 < columns <= MAX_SIZE):
        raise ValueError(f"A matrix of {rows} × {columns} cannot be packed.")
    if columns % ggml_type.block_size:
        raise ValueError(f"{columns} columns are no multiple of {ggml_type.block_size}, as {ggml_type_name} needs.")
    row_bytes = columns // ggml_type.block_size * ggml_type.block_bytes
    if raw.dtype != np.uint8 or raw.size != rows * row_bytes:
        raise ValueError(f"{rows} × {columns} of {ggml_type_name} are {rows * row_bytes} bytes, not {raw.nbytes}.")
    kind = ggml_type.kind if kind is None else kind
    return _pack(library, ggml_type, np.ascontiguousarray(raw), row_bytes, rows, columns, kind, pool)


def pack_float(
    library: native.Library,
    values: NDArray[np.float32],
    kind: TileKind,
    *,
    pool: native.ThreadPool | None = None,
) -> WeightTiles:
    """Pack floats, [rows, columns]: kept (F32), rounded to halves (F16) or quantized (INT8, INT4).

    Raises:
        ValueError: the array is no float32 matrix, or the kind is INT8_AFFINE, which INT8 and INT4 leave no use for.
    """
    if values.dtype != np.float32 or values.ndim != 2:
        raise ValueError("Only float32 matrices can be packed.")
    if kind is TileKind.INT8_AFFINE:
        raise ValueError("Floats are not packed as INT8_AFFINE.")
    raw = np.ascontiguousarray(values).view(np.uint8)
    return pack_ggml(library, "F32", raw, *values.shape, kind=kind, pool=pool)


def pack_float_pieces(
    library: native.Library,
    pieces: Iterable[NDArray[np.float32]],
    rows: int,
    columns: int,
    kind: TileKind,
    *,
    pool: native.ThreadPool | None = None,
) -> WeightTiles:
    """Pack floats as `pack_float` does, when they come in pieces, so that nobody needs to hold them all.

    Args:
        library: the native backend.
        pieces: [rows of the piece, columns], each but the last with a multiple of 16 rows.
        rows: of all pieces.
        columns: inputs.
        kind: all but INT8_AFFINE.
        pool: threads to use.

    Raises:
        ValueError: the pieces do not fit the sizes, or the kind is INT8_AFFINE.
    """
    if kind is TileKind.INT8_AFFINE:
        raise ValueError("Floats are not packed as INT8_AFFINE.")

    def as_bytes() -> Iterable[NDArray[np.uint8]]:
        for piece in pieces:
            if piece.dtype != np.float32 or piece.ndim != 2 or piece.shape[1] != columns:
                raise ValueError("A piece must be a float32 matrix of all columns.")
            yield np.ascontiguousarray(piece).view(np.uint8)

    return _pack_pieces(library, _GGML_TYPES["F32"], as_bytes(), rows, columns, kind, pool)


def pack_block_pieces(
    library: native.Library,
    pieces: Iterable[NDArray[np.uint8]],
    rows: int,
    columns: int,
    kind: TileKind,
    *,
    pool: native.ThreadPool | None = None,
) -> WeightTiles:
    """Pack numbers that are quantized already, each row a run of blocks of 32 columns.

    A block begins with its scale, a half. Then come for INT4 the minimum, a half, and 16 bytes with column i in the low
    and column 16 + i in the high bits of byte i; for INT8 32 signed bytes; for INT8_AFFINE the minimum, and those.

    Args:
        library: the native backend.
        pieces: [rows of the piece, bytes of a row], each but the last with a multiple of 16 rows.
        rows: of all pieces.
        columns: inputs, a multiple of 32.
        kind: a quantized one.
        pool: threads to use.

    Raises:
        ValueError: the pieces do not fit the sizes, or the kind is none of these.
    """
    if kind not in _BLOCK_TYPES or columns % 32:
        raise ValueError(f"There are no blocks for {columns} columns of {kind.name}.")
    return _pack_pieces(library, _BLOCK_TYPES[kind], pieces, rows, columns, kind, pool)


def _pack_pieces(
    library: native.Library,
    ggml_type: _GGMLType,
    pieces: Iterable[NDArray[np.uint8]],
    rows: int,
    columns: int,
    kind: TileKind,
    pool: native.ThreadPool | None,
) -> WeightTiles:
    if not (0 < rows <= MAX_SIZE and 0 < columns <= MAX_SIZE):
        raise ValueError(f"A matrix of {rows} × {columns} cannot be packed.")
    row_bytes = columns // ggml_type.block_size * ggml_type.block_bytes
    num_bytes = _packed_bytes(library, kind, rows, columns)
    data = library.allocate(num_bytes)[:num_bytes]
    first = 0
    for piece in pieces:
        if piece.dtype != np.uint8 or piece.ndim != 2 or piece.shape[1] != row_bytes or first % 16:
            raise ValueError(f"A piece must be rows of {row_bytes} bytes, and a multiple of 16 of them.")
        if first + len(piece) > rows:
            raise ValueError(f"The pieces have more than {rows} rows.")
        target = data[_packed_bytes(library, kind, first, columns) if first else 0 :]
        raw = np.ascontiguousarray(piece)
        _pack_into(library, target, ggml_type, raw, row_bytes, len(piece), columns, kind, pool)
        first += len(piece)
    if first != rows:
        raise ValueError(f"The pieces have {first} rows, not {rows}.")
    return WeightTiles(data, kind, rows, columns)


def _pack(
    library: native.Library,
    ggml_type: _GGMLType,
    raw: NDArray[np.uint8],
    row_bytes: int,
    rows: int,
    columns: int,
    kind: TileKind,
    pool: native.ThreadPool | None,
) -> WeightTiles:
    num_bytes = _packed_bytes(library, kind, rows, columns)
    data = library.allocate(num_bytes)[:num_bytes]
    _pack_into(library, data, ggml_type, raw, row_bytes, rows, columns, kind, pool)
    return WeightTiles(data, kind, rows, columns)


def _packed_bytes(library: native.Library, kind: TileKind, rows: int, columns: int) -> int:
    return library.function("te_packed_bytes", c_size_t, c_int32, c_int32, c_int32)(kind, rows, columns)


def _pack_into(
    library: native.Library,
    target: NDArray[np.uint8],
    ggml_type: _GGMLType,
    raw: NDArray[np.uint8],
    row_bytes: int,
    rows: int,
    columns: int,
    kind: TileKind,
    pool: native.ThreadPool | None,
) -> None:
    pack = library.function("te_pack", None, c_void_p, c_int32, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p)
    handle = None if pool is None else pool.handle
    pack(handle, ggml_type.number, raw.ctypes.data, row_bytes, rows, columns, kind, target.ctypes.data)
