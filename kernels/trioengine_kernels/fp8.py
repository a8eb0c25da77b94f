# pyright: basic
"""Numbers of the kind float8_e4m3fn in Triton, by their bits.

Architectures below 89 have no instructions for them, and Triton's interpreter rounds them wrongly; this is exact on
all. Kernels see the codes as bytes: launches pass `tensor.view(torch.uint8)`.
"""

import triton
import triton.language as tl


@triton.jit
def encode_fp8(x):
    """float32 to codes, uint8: the nearest number, ties to even, and 448 for all that is larger. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    magnitude_bits = magnitude.to(tl.int32, bitcast=True)
    # 20 of float32's 23 bits of the fraction go. Its exponent counts from -127, this one's from -7: 120 of it, in the
    # place where the exponent is after the shift, go too.
    rounded = magnitude_bits + 0x7FFFF + ((magnitude_bits >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    # Below 2⁻⁶ a code counts steps of 2⁻⁹, which is what the last bit of a float32 next to 2¹⁴ is worth.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (sign | tl.where(x != x, 0x7F, code)).to(tl.uint8)


@triton.jit
def decode_fp8(codes):
    """Codes, uint8, to float32."""
    # The bits are those of a float16 with a shorter fraction, whose exponent counts from -15 in place of -7.
    bits = codes.to(tl.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
