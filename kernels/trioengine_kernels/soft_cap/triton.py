# pyright: basic
# pyright: reportCallIssue=false
"""Logits that cannot leave a range, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.variants import Variant

_BLOCK = 1024
_NUM_WARPS = 4


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """As the reference's."""
    rows = x.reshape(-1, x.shape[-1])
    num_rows, size = rows.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(size, _BLOCK))
        _soft_cap_kernel[grid](rows, out, cap, rows.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return out


def variants() -> list[Variant]:
    """All kinds of numbers, of the size of a vocabulary."""
    return [
        Variant(
            name=f"soft_cap[{dtype}]",
            kernel=_soft_cap_kernel,
            signature={"x": f"*{dtype}", "out": f"*{dtype}", "cap": "fp32", "x_stride": "i32:16"},
            constants={"SIZE": 256_000, "BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
        )
        for dtype in ("fp32", "bf16", "fp16")
    ]


@triton.jit
def _soft_cap_kernel(x, out, cap, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    value = tl.load(x + row * x_stride + columns, mask=is_column, other=0.0).to(tl.float32) / cap
    tl.store(out + row * SIZE + columns, (cap * tanh(value)).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def tanh(x):
    """The hyperbolic tangent of float32 numbers, without a library."""
    # Near 0, where 1 - exp(-2 |x|) would cancel: five terms of Lambert's continued fraction, 1e-9 off at most.
    square = x * x
    small = x * (945.0 + square * (105.0 + square)) / (945.0 + square * (420.0 + 15.0 * square))
    power = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.5, small, tl.where(x < 0.0, -large, large))
