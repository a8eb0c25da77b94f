"""`gelu_tanh_and_mul`: which implementation runs. There is one so far, the reference."""

from trioengine_kernels.gelu_tanh_and_mul.reference import gelu_tanh_and_mul

__all__ = ["gelu_tanh_and_mul"]
