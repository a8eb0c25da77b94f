# pyright: basic
"""Makes the planes of quantized matrices out of GGUF's blocks and out of floats, in torch, on any device.

The numbers are those of the native kernels' tiles (`native/src/pack.c`), bit by bit. Exactly: Q4_0, Q4_1, Q5_0, Q5_1
and Q8_0 keep every code, scale and minimum. Q4_K and Q5_K keep their codes; their scales and minimums, products of two
numbers each, are rounded to halves. Q6_K, which has a scale for 16 columns, is rounded again to 8 bits with one for 32.
Block layouts are those of ggml's `ggml-common.h`. This module does not know files or matrices.
"""

from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor
from trioengine_kernels.quantized_linear import GROUP_SIZE, WeightKind

from trioengine.checkpoint.gguf import GGMLType

_MAX_FLOAT8 = 448.0
_NAN = float("nan")


@attrs.frozen(eq=False)
class Planes:
    """What `QuantizedWeight` has of some groups of columns, in the order of rows and columns, in any shape."""

    codes: Tensor
    """The last dimension of INT4, uint8, are the 16 bytes of a group."""
    scales: Tensor
    minimums: Tensor | None = None
    """None where the code 0 stands for 0."""

    def widened(self) -> "Planes":
        """INT4 or INT8 as INT8_AFFINE, which holds the same numbers."""
        is_int4 = self.codes.dtype is torch.uint8
        codes = unpacked_nibbles(self.codes).view(torch.int8) if is_int4 else self.codes
        return Planes(codes, self.scales, torch.zeros_like(self.scales) if self.minimums is None else self.minimums)


def kind_of_blocks(kind: GGMLType) -> WeightKind | None:
    """What blocks of this type become; None where their layout is not known here."""
    return _KINDS.get(kind)


def planes_of_blocks(kind: GGMLType, blocks: Tensor) -> Planes:
    """Of blocks, [num_blocks, block_bytes], uint8, whose type has a `kind_of_blocks`."""
    return _UNPACK[kind](blocks)


def quantized(values: Tensor, kind: WeightKind) -> Planes:
    """Numbers, [num_groups, columns of a group], float32, rounded to the nearest code.

    Groups with a number that is not finite become NaN. Of INT4, the smallest number has the code 0 and the largest the
    code 15; the others are symmetric.
    """
    match kind:
        case WeightKind.INT4:
            return _rounded_to_4_bits(values)
        case WeightKind.INT8:
            return _rounded_to_8_bits(values)
        case WeightKind.FP8:
            return _rounded_to_float8(values)
        case WeightKind.INT8_AFFINE:
            raise ValueError("Numbers become INT8, which leaves no use for a minimum.")


def packed_nibbles(codes: Tensor) -> Tensor:
    """[..., 32] codes of 4 bits to [..., 16] bytes."""
    return codes[..., :16] | codes[..., 16:] << 4


def unpacked_nibbles(packed: Tensor) -> Tensor:
    """[..., 16] bytes to [..., 32] codes of 4 bits."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _half(blocks: Tensor, place: int) -> Tensor:
    """The number at a byte of each block: [num_blocks], float16."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).squeeze(1)


def _q4_0(blocks: Tensor) -> Planes:
    scales = _half(blocks, 0)
    return Planes(blocks[:, 2:], scales, (-8 * scales.float()).half())


def _q4_1(blocks: Tensor) -> Planes:
    return Planes(blocks[:, 4:], _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Planes:
    return Planes((_fives(blocks, 2) - 16).view(torch.int8), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Planes:
    return Planes(_fives(blocks, 4).view(torch.int8), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Planes:
    return Planes(blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _fives(blocks: Tensor, place: int) -> Tensor:
    """Four bits from nibbles, the fifth of column i from bit i of a 32-bit word before them: [num_blocks, 32]."""
    fifth = (blocks[:, place : place + 4, None] >> _counted(8, blocks)) & 1
    return unpacked_nibbles(blocks[:, place + 4 :]) | fifth.flatten(1) << 4


def _q4_k(blocks: Tensor) -> Planes:
    codes = packed_nibbles(_k_nibbles(blocks[:, 16:]))
    return Planes(codes.flatten(0, 1), *_k_scales_and_minimums(blocks))


def _q5_k(blocks: Tensor) -> Planes:
    # Bit g of byte i of the 32 bytes at 16 is the fifth bit of column i of group g.
    fifth = (blocks[:, None, 16:48] >> _counted(8, blocks)[:, None]) & 1
    codes = (_k_nibbles(blocks[:, 48:]) | fifth << 4).view(torch.int8)
    return Planes(codes.flatten(0, 1), *_k_scales_and_minimums(blocks))


def _k_nibbles(packed: Tensor) -> Tensor:
    """[num_blocks, 128] to [num_blocks, 8, 32]: of 32 bytes, all low halves are a group, and all high ones the next."""
    groups = packed.unflatten(1, (4, 32))
    return torch.stack((groups & 15, groups >> 4), dim=2).flatten(1, 2)


def _k_scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the eight groups of Q4_K and Q5_K blocks, [num_blocks * 8] both.

    Six bits each, packed into 12 bytes: the first four of both in the low bits of bytes 0 to 7, the last four in the
    halves of bytes 8 to 11 with their two upper bits on top of bytes 0 to 7.
    """
    scales, minimums, rest = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((scales & 63, rest & 15 | scales >> 2 & 48), dim=1)
    minimums = torch.cat((minimums & 63, rest >> 4 | minimums >> 2 & 48), dim=1)
    scales = _half(blocks, 0).float()[:, None] * scales
    minimums = -_half(blocks, 2).float()[:, None] * minimums
    return scales.half().flatten(), minimums.half().flatten()


def _q6_k(blocks: Tensor) -> Planes:
    # Two halves of 128 columns; in each, 64 bytes of nibbles and 32 bytes of upper bit pairs for four groups of 32.
    nibbles = blocks[:, :128].unflatten(1, (2, 2, 32))
    low = torch.stack((nibbles & 15, nibbles >> 4), dim=2).flatten(2, 3)
    pairs = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> 2 * _counted(4, blocks)[:, None]) & 3
    codes = (low | pairs << 4).flatten(1).short() - 32
    scales = blocks[:, 192:208].view(torch.int8).short().repeat_interleave(16, dim=1)
    values = _half(blocks, 208).float()[:, None] * (codes * scales)
    return _rounded_to_8_bits(values.view(-1, GROUP_SIZE))


def _counted(count: int, like: Tensor) -> Tensor:
    """0 to count - 1, uint8."""
    return torch.arange(count, dtype=torch.uint8, device=like.device)


def _rounded_to_8_bits(values: Tensor) -> Planes:
    scales = _quotient(_largest(values), 127.0).half()
    exact = scales.float()
    # A scale that is 0, infinite or NaN: codes have nothing to say.
    inverse = torch.where(exact.isfinite() & (exact > 0), 1 / exact, 0.0)
    codes = (values.nan_to_num() * inverse[:, None]).clamp_(-127, 127).round_()
    return Planes(codes.to(torch.int8), scales)


def _rounded_to_4_bits(values: Tensor) -> Planes:
    lows, highs = values.aminmax(dim=1)
    is_finite = _largest(values).isfinite()
    scales = _quotient(torch.where(is_finite, highs - lows, _NAN), 15.0).half()
    minimums = lows.half()
    exact = scales.float()[:, None]
    codes = ((values - minimums.float()[:, None]) / exact).clamp_(0, 15).round_()
    codes = torch.where(exact > 0, codes.nan_to_num(), 0.0).to(torch.uint8)
    return Planes(packed_nibbles(codes), scales, minimums)


def _rounded_to_float8(values: Tensor) -> Planes:
    scales = _quotient(_largest(values), _MAX_FLOAT8)
    inverse = torch.where(scales.isfinite() & (scales > 0), 1 / scales, 0.0)
    codes = (values.nan_to_num() * inverse[:, None]).clamp_(-_MAX_FLOAT8, _MAX_FLOAT8)
    return Planes(codes.to(torch.float8_e4m3fn), scales)


def _largest(values: Tensor) -> Tensor:
    """The largest magnitude of each group, float32; NaN where one is not finite."""
    largest = values.abs().amax(dim=1)
    return torch.where(largest.isfinite(), largest, _NAN)


def _quotient(values: Tensor, divisor: float) -> Tensor:
    """By a tensor: torch multiplies by the inverse of a number on some devices, which rounds otherwise."""
    return values / torch.full_like(values, divisor)


_KINDS: Mapping[GGMLType, WeightKind] = {
    GGMLType.Q4_0: WeightKind.INT4,
    GGMLType.Q4_1: WeightKind.INT4,
    GGMLType.Q4_K: WeightKind.INT4,
    GGMLType.Q5_0: WeightKind.INT8,
    GGMLType.Q8_0: WeightKind.INT8,
    GGMLType.Q6_K: WeightKind.INT8,
    GGMLType.Q5_1: WeightKind.INT8_AFFINE,
    GGMLType.Q5_K: WeightKind.INT8_AFFINE,
}
_UNPACK: Mapping[GGMLType, Callable[[Tensor], Planes]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q6_K: _q6_k,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q5_K: _q5_k,
}
