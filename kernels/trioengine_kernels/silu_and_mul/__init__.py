"""`silu_and_mul`: which implementation runs. There is one so far, the reference."""

from trioengine_kernels.silu_and_mul.reference import silu_and_mul

__all__ = ["silu_and_mul"]
