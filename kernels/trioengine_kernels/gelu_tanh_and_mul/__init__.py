"""`gelu_tanh_and_mul`: the reference. `gelu_tanh_and_mul.triton` is for a GPU."""

from trioengine_kernels.gelu_tanh_and_mul.reference import gelu_tanh_and_mul

__all__ = ["gelu_tanh_and_mul"]
