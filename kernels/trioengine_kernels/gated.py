# pyright: basic
"""How the activations of gated MLPs are launched on a GPU: they differ in one line of their kernels."""

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from trioengine_kernels.variants import Variant

_BLOCK = 1024
"""Elements of a program: eight for each thread, two loads of 16 bytes."""
_NUM_WARPS = 4


def launch(kernel: JITFunction, gate_up: Tensor) -> Tensor:
    """Run a kernel of `gate_up`, `out`, the stride of the former, SIZE and BLOCK.

    Args:
        kernel: computes BLOCK columns of one row.
        gate_up: [num_tokens, 2 * size], each row contiguous.

    Returns:
        [num_tokens, size].
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, _BLOCK))
        kernel[grid](gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return out


def variants_of(kernel: JITFunction) -> list[Variant]:
    """All kinds of numbers."""
    return [
        Variant(
            name=f"{kernel.__name__.strip('_').removesuffix('_kernel')}[{dtype}, size={size}]",
            kernel=kernel,
            signature={"gate_up": f"*{dtype}", "out": f"*{dtype}", "gate_up_stride": "i32:16"},
            constants={"SIZE": size, "BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
        )
        for dtype, size in [("bf16", 14336), ("bf16", 1536), ("fp16", 14336), ("fp32", 1536)]
    ]
