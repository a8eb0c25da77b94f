"""Turns float32 arrays into the bytes of GGUF's types: floats, and those quantized types whose rule is one line.

Numbers are rounded as ggml's reference functions (`quantize_row_q8_0_ref` and so on) do. What the K-quants' searches
find cannot be had here.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.dequantize import SLICE_VALUES
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
    values = np.ascontiguousarray(values, np.float32).reshape(-1)
    data = np.empty(values.size // kind.block_size * kind.block_bytes, np.uint8)
    num_bytes = SLICE_VALUES // kind.block_size * kind.block_bytes
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        # In slices that stay in the processor's cache, which is up to 15 times as fast.
        for number, first in enumerate(range(0, values.size, SLICE_VALUES)):
            part = _QUANTIZE[kind](values[first : first + SLICE_VALUES])
            data[number * num_bytes : (number + 1) * num_bytes] = part.reshape(-1)
    return data


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
    scale, codes = _symmetric_codes(values, 4)
    return np.concatenate((scale, _nibbles(codes)), axis=1)


def _q5_0(values: Floats) -> Bytes:
    scale, codes = _symmetric_codes(values, 5)
    return np.concatenate((scale, _fifth_bits(codes), _nibbles(codes)), axis=1)


def _q4_1(values: Floats) -> Bytes:
    scale_and_minimum, codes = _codes_above_minimum(values, 4)
    return np.concatenate((scale_and_minimum, _nibbles(codes)), axis=1)


def _q5_1(values: Floats) -> Bytes:
    scale_and_minimum, codes = _codes_above_minimum(values, 5)
    return np.concatenate((scale_and_minimum, _fifth_bits(codes), _nibbles(codes)), axis=1)


def _symmetric_codes(values: Floats, num_bits: int) -> tuple[Bytes, Bytes]:
    """Scales as bytes, and codes, of which the middle one is 0: the number farthest from 0 has the code 0."""
    blocks, middle = values.reshape(-1, _BLOCK), 1 << num_bits - 1
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-middle)
    codes = np.trunc(blocks * _inverse(scale) + np.float32(middle + 0.5))
    return scale.astype("<f2").view(np.uint8), np.clip(codes, 0, 2 * middle - 1).astype(np.uint8)


def _codes_above_minimum(values: Floats, num_bits: int) -> tuple[Bytes, Bytes]:
    """Scales and minimums as bytes, and codes."""
    blocks, largest_code = values.reshape(-1, _BLOCK), (1 << num_bits) - 1
    minimum = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - minimum) / np.float32(largest_code)
    codes = np.trunc((blocks - minimum) * _inverse(scale) + np.float32(0.5))
    fields = np.concatenate((scale, minimum), axis=1).astype("<f2").view(np.uint8)
    return fields, np.clip(codes, 0, largest_code).astype(np.uint8)


def _nibbles(codes: Bytes) -> Bytes:
    """Four bits of each: the first half of a block beside the second."""
    packed = np.empty((len(codes), 16), np.uint8)
    np.left_shift(codes[:, 16:], 4, out=packed)
    packed |= codes[:, :16] & 15
    return packed


def _fifth_bits(codes: Bytes) -> Bytes:
    """A 32-bit word for each block."""
    return np.packbits(codes >> 4, axis=1, bitorder="little")


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
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
}
