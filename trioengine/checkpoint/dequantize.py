"""Turns GGUF tensors into float32 arrays.

The common types are vectorised here; the layouts are those of ggml's `ggml-common.h`. The rarer ones go through the
`gguf` package where it is installed. Quantized blocks are worked on in slices that stay in the processor's cache:
the bundled model of 135 million weights takes about half a second on one core.

This module does not know models, and quantizes nothing.
"""

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.gguf import GGMLType, GGUFTensor
from trioengine.errors import CheckpointError

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
UnpackBlocks: TypeAlias = Callable[[Bytes, Floats], None]
"""Fills floats [num_blocks, block_size] from blocks [num_blocks, block_bytes]."""

SLICE_VALUES = 1 << 16
"""Numbers worked on at a time: 256 KiB of float32."""


def dequantize(tensor: GGUFTensor) -> Floats:
    """Return the tensor's numbers as a new writable float32 array of the tensor's shape.

    Integer and float64 tensors are converted; what float32 cannot hold is rounded or becomes infinite.

    Raises:
        CheckpointError: the type needs the `gguf` package, and that is not installed or does not know it either.
    """
    kind = tensor.ggml_type
    if (dtype := _PLAIN.get(kind)) is not None:
        with np.errstate(over="ignore"):
            return tensor.data.view(dtype).astype(np.float32).reshape(tensor.shape)
    if kind is GGMLType.BF16:
        return (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    unpack = _UNPACK.get(kind)
    if unpack is None:
        return _dequantize_with_gguf_package(tensor)
    blocks = tensor.data.reshape(-1, kind.block_bytes)
    values = np.empty((len(blocks), kind.block_size), np.float32)
    step = SLICE_VALUES // kind.block_size
    # A damaged file may hold infinite or NaN scales; they give infinite or NaN weights, silently.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            unpack(blocks[start : start + step], values[start : start + step])
    return values.reshape(tensor.shape)


def _halves(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block: [num_blocks, 1], float32."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _unpack_nibbles(packed: Bytes, low: Floats, high: Floats) -> None:
    np.bitwise_and(packed, 15, out=low, casting="unsafe")
    np.right_shift(packed, 4, out=high, casting="unsafe")


def _unpack_q4_0(blocks: Bytes, values: Floats) -> None:
    _unpack_nibbles(blocks[:, 2:], values[:, :16], values[:, 16:])
    values -= 8
    values *= _halves(blocks, 0)


def _unpack_q4_1(blocks: Bytes, values: Floats) -> None:
    _unpack_nibbles(blocks[:, 4:], values[:, :16], values[:, 16:])
    values *= _halves(blocks, 0)
    values += _halves(blocks, 2)


def _unpack_fives(blocks: Bytes, start: int, values: Floats) -> None:
    """Four low bits from nibbles, the fifth of value i from bit i of a 32-bit word before them."""
    fifth = np.unpackbits(np.ascontiguousarray(blocks[:, start : start + 4]), axis=1, bitorder="little") << 4
    packed = blocks[:, start + 4 :]
    np.bitwise_or(packed & 15, fifth[:, :16], out=values[:, :16], casting="unsafe")
    np.bitwise_or(packed >> 4, fifth[:, 16:], out=values[:, 16:], casting="unsafe")


def _unpack_q5_0(blocks: Bytes, values: Floats) -> None:
    _unpack_fives(blocks, 2, values)
    values -= 16
    values *= _halves(blocks, 0)


def _unpack_q5_1(blocks: Bytes, values: Floats) -> None:
    _unpack_fives(blocks, 4, values)
    values *= _halves(blocks, 0)
    values += _halves(blocks, 2)


def _unpack_q8_0(blocks: Bytes, values: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 0), out=values)


def _scales_and_mins(blocks: Bytes) -> tuple[Floats, Floats]:
    """The eight scales and eight minimums of Q4_K and Q5_K blocks: each [num_blocks, 8, 1].

    Six bits each, packed into 12 bytes: the first four of both in the low bits of bytes 0 to 7, the last four in the
    nibbles of bytes 8 to 11 with their two upper bits on top of bytes 0 to 7.
    """
    packed = blocks[:, 4:16]
    scale_bits, min_bits, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([scale_bits & 63, (rest & 15) | ((scale_bits >> 2) & 48)], axis=1)
    mins = np.concatenate([min_bits & 63, (rest >> 4) | ((min_bits >> 2) & 48)], axis=1)
    scaled = _halves(blocks, 0) * scales.astype(np.float32)
    minimums = _halves(blocks, 2) * mins.astype(np.float32)
    return scaled[:, :, None], minimums[:, :, None]


def _unpack_q4_k(blocks: Bytes, values: Floats) -> None:
    scales, mins = _scales_and_mins(blocks)
    groups = values.reshape(-1, 8, 32)
    _unpack_nibbles(blocks[:, 16:].reshape(-1, 4, 32), groups[:, 0::2], groups[:, 1::2])
    groups *= scales
    groups -= mins


def _unpack_q5_k(blocks: Bytes, values: Floats) -> None:
    scales, mins = _scales_and_mins(blocks)
    groups = values.reshape(-1, 8, 32)
    # Bit g of byte i of the 32 bytes at 16 is the fifth bit of value i in group g.
    fifth = ((blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]) & 1) << 4
    packed = blocks[:, 48:].reshape(-1, 4, 32)
    np.bitwise_or(packed & 15, fifth[:, 0::2], out=groups[:, 0::2], casting="unsafe")
    np.bitwise_or(packed >> 4, fifth[:, 1::2], out=groups[:, 1::2], casting="unsafe")
    groups *= scales
    groups -= mins


def _unpack_q6_k(blocks: Bytes, values: Floats) -> None:
    # Two halves of 128 values; in each, 64 bytes of nibbles and 32 bytes of upper bit pairs for four groups of 32.
    packed = blocks[:, :128].reshape(-1, 2, 2, 32)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    groups = values.reshape(-1, 2, 4, 32)
    pairs = (upper >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & 3
    np.bitwise_or(packed & 15, pairs[:, :, :2] << 4, out=groups[:, :, :2], casting="unsafe")
    np.bitwise_or(packed >> 4, pairs[:, :, 2:] << 4, out=groups[:, :, 2:], casting="unsafe")
    values -= 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)
    sixteens = values.reshape(-1, 16, 16)
    sixteens *= scales[:, :, None]


_PLAIN: Mapping[GGMLType, str] = {
    GGMLType.F32: "<f4",
    GGMLType.F16: "<f2",
    GGMLType.F64: "<f8",
    GGMLType.I8: "i1",
    GGMLType.I16: "<i2",
    GGMLType.I32: "<i4",
    GGMLType.I64: "<i8",
}
_UNPACK: Mapping[GGMLType, UnpackBlocks] = {
    GGMLType.Q4_0: _unpack_q4_0,
    GGMLType.Q4_1: _unpack_q4_1,
    GGMLType.Q5_0: _unpack_q5_0,
    GGMLType.Q5_1: _unpack_q5_1,
    GGMLType.Q8_0: _unpack_q8_0,
    GGMLType.Q4_K: _unpack_q4_k,
    GGMLType.Q5_K: _unpack_q5_k,
    GGMLType.Q6_K: _unpack_q6_k,
}


@functools.cache
def _gguf_package() -> Any:
    try:
        return import_module("gguf")
    except ImportError:
        return None


def _dequantize_with_gguf_package(tensor: GGUFTensor) -> Floats:
    name = tensor.ggml_type.name
    package = _gguf_package()
    if package is None:
        raise CheckpointError(
            f"Tensor {tensor.name!r} is quantized as {name}, which needs the gguf package: pip install gguf."
        )
    row_bytes = tensor.shape[-1] // tensor.ggml_type.block_size * tensor.ggml_type.block_bytes
    try:
        quantization = package.GGMLQuantizationType(int(tensor.ggml_type))
        values = package.dequantize(tensor.data.reshape(-1, row_bytes), quantization)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(f"Tensor {tensor.name!r} is quantized as {name}, which cannot be read.") from error
    return cast(Floats, np.array(values, np.float32).reshape(tensor.shape))
