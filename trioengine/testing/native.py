# pyright: basic
"""The native CPU kernels for tests: built once into the user's cache. What packed weights hold."""

import numpy as np
import pytest
from numpy.typing import NDArray
from trioengine_kernels.native.library import Library, NativeUnavailableError, load_library
from trioengine_kernels.native.tiles import TileKind, WeightTiles

from trioengine.config import env


def native_library() -> Library:
    """The library that an engine would load. A test that asks for it is skipped where it cannot be built."""
    try:
        return load_library(env.cache_dir() / "native")
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def tile_values(tiles: WeightTiles) -> NDArray[np.float32]:
    """The numbers that quantized tiles stand for, [rows, columns], read as src/te.h describes them."""
    codes, scales, minimums = tile_fields(tiles)
    columns = np.arange(tiles.columns) // 32
    return codes * scales[:, columns] + minimums[:, columns]


def int4_units(scales: NDArray[np.floating], minimums: NDArray[np.floating]) -> NDArray[np.float64]:
    """For each row, [rows, 1], what INT4 tiles make these [rows, groups] multiples of: scales of one unit, minimums and
    eight scales, together, of eight."""
    scales, minimums = scales.astype(float), minimums.astype(float)
    return np.maximum(abs(scales), abs(minimums + 8 * scales) / 8).max(axis=1, keepdims=True) / 32767


def tile_fields(tiles: WeightTiles) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """Codes [rows, columns], scales and minimums [rows, groups] of quantized tiles."""
    groups, rows, kind = tiles.num_groups, tiles.rows, tiles.kind
    strips = -(-rows // 8)
    strip_bytes = tiles.data.reshape(strips, -1)
    num_unit_bytes = 32 if kind is TileKind.INT4 else 0
    parts = strip_bytes[:, num_unit_bytes:].reshape(strips, groups, -1)
    num_header_bytes = 16 if kind is TileKind.INT8 else 32
    header, body = parts[:, :, :num_header_bytes], parts[:, :, num_header_bytes:]
    if kind is TileKind.INT4:
        units = strip_bytes[:, :num_unit_bytes].view("<f4").reshape(-1, 1)
        pairs = header.view("<i2").astype(np.float32).reshape(strips, groups, 8, 2).transpose(3, 0, 2, 1)
        scales, middles = pairs.reshape(2, -1, groups)
        scales, minimums = units * scales, units * (8 * middles - 8 * scales)
    else:
        halves = header.view("<f2").astype(np.float32).reshape(strips, groups, -1, 8).transpose(2, 0, 3, 1)
        scales = halves[0].reshape(-1, groups)
        minimums = halves[1].reshape(-1, groups) if kind is TileKind.INT8_AFFINE else np.zeros_like(scales)
    # [strips, groups, columns / 4, rows of a strip, 4 columns]
    body = body.reshape(strips, groups, -1, 8, 4)
    if kind is TileKind.INT4:
        body = np.concatenate((body & 15, body >> 4), axis=2)
    codes = body.transpose(0, 3, 1, 2, 4).reshape(strips * 8, groups * 32).astype(np.int32)
    codes -= 0 if kind is TileKind.INT4 else 128
    return codes[:rows, : tiles.columns], scales[:rows], minimums[:rows]
