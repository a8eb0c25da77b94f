"""Turns float32 arrays into the bytes of GGUF's types: floats, and those quantized types whose rule is one line.

Q8_0 and Q4_0 are rounded as ggml's reference functions (`quantize_row_q8_0_ref`, `quantize_row_q4_0_ref`) do. What the
K-quants' searches find cannot be had here.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.gguf import GGMLType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_BLOCK = 32


def can_quantize(kind: GGMLType) -> bool:
    """Whether `quantize` knows the type."""
    return kind in _QUANTIZE


def quantize(values: Floats, kind: GGMLType) -> Bytes:
    """The bytes of an array in row order. Rows of quantized types are whole blocks.

    Numbers too large for the type become infinite.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return _QUANTIZE[kind](np.ascontiguousarray(values, np.float32)).reshape(-1)


def _f32(values: Floats) -> Bytes:
    return values.astype("<f4").reshape(-1).view(np.uint8)


def _f16(values: Floats) -> Bytes:
    return values.astype("<f2").reshape(-1).view(np.uint8)


def _bf16(values: Floats) -> Bytes:
    """Rounded to the nearest, ties to even; what is not a number stays none."""
    bits = values.reshape(-1).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    rounded = np.where(np.isnan(values.reshape(-1)), bits >> 16 | 0x40, rounded)
    return rounded.astype("<u2").view(np.uint8)


def _q8_0(values: Floats) -> Bytes:
    blocks = values.reshape(-1, _BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    codes = _rounded(blocks * _inverse(scale)).astype(np.int8)
    return np.concatenate((scale.astype("<f2").view(np.uint8), codes.view(np.uint8)), axis=1)


def _q4_0(values: Floats) -> Bytes:
    blocks = values.reshape(-1, _BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-8)
    codes = np.clip(np.trunc(blocks * _inverse(scale) + np.float32(8.5)), 0, 15).astype(np.uint8)
    packed = codes[:, :16] | np.left_shift(codes[:, 16:], 4, dtype=np.uint8)
    return np.concatenate((scale.astype("<f2").view(np.uint8), packed), axis=1)


def _inverse(scale: Floats) -> Floats:
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale).astype(np.float32)


def _rounded(values: Floats) -> Floats:
    """Halves away from zero, as C's `roundf`."""
    floor = np.floor(np.abs(values))
    return np.sign(values) * (floor + np.floor(2 * (np.abs(values) - floor)))


_QUANTIZE: Mapping[GGMLType, Callable[[Floats], Bytes]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
}
