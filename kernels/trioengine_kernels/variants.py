# pyright: basic
"""Triton kernels with everything that decides their machine code, so that they can be compiled without a GPU.

Each `<op>/triton.py` lists what the engine launches (`variants()`), from the same tables that its launches read.
`trioengine_kernels.compile` compiles all of them for every architecture that the engine is made for, and looks for
spills and at shared memory.
"""

from collections.abc import Mapping

import attrs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile
from triton.runtime.jit import JITFunction

SHARED_MEMORY_BYTES: Mapping[int, int] = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
"""By compute capability, times 10: what one program may have. The keys are the architectures that are compiled for; 8.6
and 12.0 have no more than 8.9."""
_IS_DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


@attrs.frozen(eq=False)
class Variant:
    """One configuration of a kernel.

    A launch compiles for what it knows of its arguments, and so does a variant: all pointers are taken to be aligned
    to 16 bytes, as torch allocates, and an "i32:16" to be divisible by 16. Without that for strides no load is wide
    and none is pipelined, so the machine code, its registers and its shared memory would be others than a launch's.
    """

    name: str
    """Of kernel and configuration, for test ids and benchmarks: "paged_attention[bf16, head_dim=128]"."""
    kernel: JITFunction
    signature: Mapping[str, str]
    """By argument, Triton's type: "*bf16", "*u8", "i32", "fp32", or "i32:16". Constants need none, or "constexpr"."""
    constants: Mapping[str, object]
    """By argument, its value; None for a pointer that is not given."""
    num_warps: int = 4
    num_stages: int = 3
    min_capability: int = 80
    """Architectures below it do not have what this needs."""
    is_fused: bool = True
    """Whether products and sums may be one operation, rounded once; a launch says `enable_fp_fusion`."""

    def compile(self, capability: int) -> CompiledKernel:
        """Machine code for an architecture, a key of `SHARED_MEMORY_BYTES`. Needs no GPU, nor the interpreter."""
        signature, attributes = {}, {}
        for place, argument in enumerate(self.kernel.arg_names):
            if argument in self.constants:
                signature[argument] = "constexpr"
                continue
            signature[argument], _, divisor = self.signature[argument].partition(":")
            if divisor or signature[argument].startswith("*"):
                attributes[(place,)] = _IS_DIVISIBLE_BY_16
        source = ASTSource(self.kernel, signature=signature, constexprs=dict(self.constants), attrs=attributes)
        options = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.is_fused,
        }
        return compile(source, target=GPUTarget("cuda", capability, 32), options=options)
