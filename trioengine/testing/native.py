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
    return codes * scales.astype(np.float32)[:, columns] + minimums.astype(np.float32)[:, columns]


def tile_fields(tiles: WeightTiles) -> tuple[NDArray[np.int32], NDArray[np.float16], NDArray[np.float16]]:
    """Codes [rows, columns], scales and minimums [rows, groups] of quantized tiles."""
    groups, rows = tiles.num_groups, tiles.rows
    strips = -(-rows // 8)
    parts = tiles.data.reshape(strips, groups, -1)
    has_minimums = tiles.kind is not TileKind.INT8
    scales = parts[:, :, :16].view("<f2").transpose(0, 2, 1).reshape(-1, groups)
    minimums = np.zeros_like(scales)
    if has_minimums:
        minimums = parts[:, :, 16:32].view("<f2").transpose(0, 2, 1).reshape(-1, groups)
    # [strips, groups, columns / 4, rows of a strip, 4 columns]
    body = parts[:, :, 32 if has_minimums else 16 :].reshape(strips, groups, -1, 8, 4)
    if tiles.kind is TileKind.INT4:
        body = np.concatenate((body & 15, body >> 4), axis=2)
    codes = body.transpose(0, 3, 1, 2, 4).reshape(strips * 8, groups * 32).astype(np.int32)
    codes -= 0 if tiles.kind is TileKind.INT4 else 128
    return codes[:rows, : tiles.columns], scales[:rows], minimums[:rows]
