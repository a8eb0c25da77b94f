"""`silu_and_mul`: the reference. `silu_and_mul.triton` is for a GPU."""

from trioengine_kernels.silu_and_mul.reference import silu_and_mul

__all__ = ["silu_and_mul"]
