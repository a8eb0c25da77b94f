# pyright: basic
# pyright: reportCallIssue=false, reportReturnType=false
"""RMS norm on a GPU: one program for each row, which is read once and kept in registers.

A row's numbers do not depend on how many rows there are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.variants import Variant


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As the reference's. Rows of up to 16,384 elements fit into registers."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, out.view(rows.shape), epsilon)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """As the reference's, except that the sum is `residual` itself, overwritten.

    Args:
        x: [..., size].
        residual: like `x`, contiguous.
        weight: [size].
        epsilon: added to the mean square.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, residual.view(rows.shape), weight, out.view(rows.shape), epsilon)
    return out, residual


def variants() -> list[Variant]:
    """The sizes of small and of large models, in all kinds of numbers."""
    cases = [("bf16", 576), ("bf16", 2048), ("bf16", 4096), ("bf16", 16384), ("fp16", 4096), ("fp32", 576)]
    return [
        Variant(
            name=f"{'add_' if has_residual else ''}rms_norm[{dtype}, size={size}]",
            kernel=_rms_norm_kernel,
            signature={
                "x": f"*{dtype}",
                "residual": f"*{dtype}",
                "weight": "*fp32",
                "out": f"*{dtype}",
                "x_stride": "i32:16",
                "epsilon": "fp32",
            },
            constants=_constants(size) if has_residual else _constants(size) | {"residual": None},
            num_warps=_num_warps(size),
        )
        for dtype, size in cases
        for has_residual in (False, True)
        if has_residual or size == 4096
    ]


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, epsilon: float) -> None:
    num_rows, size = x.shape
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            x, residual, weight, out, x.stride(0), epsilon, **_constants(size), num_warps=_num_warps(size)
        )


def _constants(size: int) -> dict[str, object]:
    return {"SIZE": size, "BLOCK": triton.next_power_of_2(size)}


def _num_warps(size: int) -> int:
    """Eight elements for each thread: one load of 16 bytes."""
    return max(1, min(32, triton.next_power_of_2(size) // 256))


@triton.jit
def _rms_norm_kernel(x, residual, weight, out, x_stride, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    if residual is not None:
        places = residual + row * SIZE + columns
        total = values + tl.load(places, mask=is_column, other=0.0).to(tl.float32)
        # The norm is of the sum as it is kept, so that it is the same wherever the two are computed.
        total = total.to(residual.dtype.element_ty)
        tl.store(places, total, mask=is_column)
        values = total.to(tl.float32)
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + epsilon)
    tl.store(out + row * SIZE + columns, (values * scale * weights).to(out.dtype.element_ty), mask=is_column)
