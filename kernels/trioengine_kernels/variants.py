# pyright: basic
"""Triton kernels with everything that decides their machine code, so that they can be compiled without a GPU.

Each `<op>/triton.py` lists what the engine launches (`variants()`), from the same tables that its launches read. A test
compiles all of them for every architecture that the engine is made for, and looks for spills and at shared memory.
"""

from collections.abc import Mapping

import attrs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile
from triton.runtime.jit import JITFunction

SHARED_MEMORY_BYTES: Mapping[int, int] = {80: 166_912, 90: 232_448, 100: 232_448}
"""By compute capability, times 10: what one program may have. The keys are the architectures that are compiled for."""


@attrs.frozen(eq=False)
class Variant:
    """One configuration of a kernel."""

    name: str
    """Of kernel and configuration, for test ids and benchmarks: "paged_attention[bf16, head_dim=128]"."""
    kernel: JITFunction
    signature: Mapping[str, str]
    """By argument, in order, Triton's type: "*bf16", "*fp8e4nv", "i32", "fp32"; of constants "constexpr"."""
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    min_capability: int = 80
    """Architectures below it do not have what this needs."""

    def compile(self, capability: int) -> CompiledKernel:
        """Machine code for an architecture, a key of `SHARED_MEMORY_BYTES`. Needs no GPU, nor the interpreter."""
        source = ASTSource(self.kernel, signature=dict(self.signature), constexprs=dict(self.constants))
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return compile(source, target=GPUTarget("cuda", capability, 32), options=options)
