# pyright: basic
"""The activation of a gated MLP (SwiGLU) on a GPU."""

import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.gated import launch, variants_of
from trioengine_kernels.variants import Variant


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As the reference's, with one rounding: what is between the operations stays in float32."""
    return launch(_silu_and_mul_kernel, gate_up)


def variants() -> list[Variant]:
    """All kinds of numbers."""
    return variants_of(_silu_and_mul_kernel)


@triton.jit
def _silu_and_mul_kernel(gate_up, out, gate_up_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    gates = gate_up + row * gate_up_stride + columns
    gate = tl.load(gates, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=is_column, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=is_column)
