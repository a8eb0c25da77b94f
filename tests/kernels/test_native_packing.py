"""Packed weights hold the numbers that they were made of; the layout is read from its description in src/te.h."""

import numpy as np
import pytest
from trioengine_kernels.native.tiles import (
    TileKind,
    pack_block_pieces,
    pack_float,
    pack_float_pieces,
    pack_ggml,
)

from trioengine.testing.native import int4_units, tile_fields

BLOCK_BYTES = {TileKind.INT4: 20, TileKind.INT8: 34, TileKind.INT8_AFFINE: 36}


def blocks_of(kind: TileKind, codes: np.ndarray, scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    rows, groups = scales.shape
    parts = [scales[:, :, None].view(np.uint8)]
    if kind is not TileKind.INT8:
        parts.append(mins[:, :, None].view(np.uint8))
    grouped = codes.reshape(rows, groups, 32)
    if kind is TileKind.INT4:
        parts.append((grouped[:, :, :16] | grouped[:, :, 16:] << 4).astype(np.uint8))
    else:
        parts.append(grouped.astype(np.int8).view(np.uint8))
    return np.concatenate(parts, axis=2).reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_blocks_keep_every_code_scale_and_minimum(library, pool, kind):
    rng = np.random.default_rng(1)
    rows, columns = 43, 96
    low, high = (0, 16) if kind is TileKind.INT4 else (-128, 128)
    codes = rng.integers(low, high, (rows, columns))
    scales = rng.standard_normal((rows, columns // 32)).astype("<f2")
    mins = rng.standard_normal((rows, columns // 32)).astype("<f2") * (kind is not TileKind.INT8)
    blocks = blocks_of(kind, codes, scales, mins)
    assert blocks.shape == (rows, BLOCK_BYTES[kind] * columns // 32)
    pieces = (blocks[first : first + 16] for first in range(0, rows, 16))
    tiles = pack_block_pieces(library, pieces, rows, columns, kind, pool=pool)
    found_codes, found_scales, found_mins = tile_fields(tiles)
    assert np.array_equal(found_codes, codes)
    unit = int4_units(scales, mins) if kind is TileKind.INT4 else 0
    assert np.all(abs(found_scales - scales) <= 0.51 * unit)
    assert np.all(abs(found_mins - mins) <= 8.1 * unit)


@pytest.mark.parametrize("columns", [64, 70])
@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("kind", [TileKind.INT8, TileKind.INT4])
def test_floats_are_rounded_to_the_nearest_code(library, pool, kind, type_name, columns):
    values = np.random.default_rng(2).standard_normal((19, columns)).astype(np.float32)
    if type_name == "F16":
        raw = values.astype("<f2")
        values = raw.astype(np.float32)
    else:
        keep = 0xFFFF0000 if type_name == "BF16" else 0xFFFFFFFF
        values = (values.view(np.uint32) & np.uint32(keep)).view(np.float32)
        raw = (values.view(np.uint32) >> 16).astype("<u2") if type_name == "BF16" else values
    values[3] = 0
    raw[3] = 0
    tiles = pack_ggml(library, type_name, raw.reshape(-1).view(np.uint8), 19, columns, kind=kind, pool=pool)
    codes, scales, mins = tile_fields(tiles)
    scale = np.repeat(scales.astype(np.float32), 32, axis=1)[:, :columns]
    minimum = np.repeat(mins.astype(np.float32), 32, axis=1)[:, :columns]
    assert np.all(np.abs(codes * scale + minimum - values) <= scale * 0.502)
    assert np.all(codes[3] == 0)


def test_numbers_that_are_not_finite_spoil_their_own_group_or_row_alone(library):
    values = np.ones((3, 96), np.float32)
    values[0, 40], values[1, 70] = np.nan, np.inf
    _, scales, _ = tile_fields(pack_float(library, values, TileKind.INT8))
    assert np.array_equal(np.isnan(scales), [[False, True, False], [False, False, True], [False] * 3])
    _, scales, mins = tile_fields(pack_float(library, values, TileKind.INT4))
    assert np.isnan(scales[:2]).all()
    assert np.isfinite(scales[2]).all()
    assert np.allclose(mins[2], 1)


def test_int4_keeps_numbers_of_every_size(library):
    """Constants, rows with a group a thousand times larger than the others, the smallest and the largest floats."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((6, 96)).astype(np.float32)
    values[0] = 100.0
    values[1, :32] *= 1000
    values[2] = values[2] * 0.01 - 50
    values[3] = 1e-38
    values[4] *= 1e-28
    values[5] *= 1e37
    codes, scales, mins = tile_fields(pack_float(library, values, TileKind.INT4))
    with np.errstate(over="ignore"):
        found = codes * np.repeat(scales, 32, axis=1).astype(float) + np.repeat(mins, 32, axis=1)
    # Half a step, and what rounding adds: to the step, sixteen thousandths of a large row's unit for each.
    step = np.repeat((values.reshape(6, 3, 32).max(axis=2) - values.reshape(6, 3, 32).min(axis=2)) / 15, 32, axis=1)
    largest = np.abs(values).max(axis=1, keepdims=True).astype(float)
    assert np.all(np.abs(found - values) <= 0.5 * step + 2e-4 * largest + 1e-30)
    assert np.all(scales[3] == 0)


def test_pieces_that_do_not_fit_are_refused(library):
    floats, blocks = np.zeros((16, 64), np.float32), np.zeros((16, 40), np.uint8)
    with pytest.raises(ValueError, match="32 rows"):
        pack_float_pieces(library, [floats] * 3, 32, 64, TileKind.F32)
    with pytest.raises(ValueError, match="16 rows, not 32"):
        pack_float_pieces(library, [floats], 32, 64, TileKind.F32)
    with pytest.raises(ValueError, match="float32"):
        pack_float_pieces(library, [floats[:, :32]], 16, 64, TileKind.F32)
    with pytest.raises(ValueError, match="multiple of 16"):
        pack_block_pieces(library, [blocks[:8], blocks[:8]], 16, 64, TileKind.INT4)
    with pytest.raises(ValueError, match="bytes"):
        pack_block_pieces(library, [blocks], 16, 64, TileKind.INT8)
    with pytest.raises(ValueError, match="no blocks"):
        pack_block_pieces(library, [blocks], 16, 70, TileKind.INT4)
    with pytest.raises(ValueError, match="no blocks"):
        pack_block_pieces(library, [blocks], 16, 64, TileKind.F16)
