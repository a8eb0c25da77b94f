"""`linear`: products with matrices of floats. `triton.linear` gives a row the same numbers in any batch."""

from trioengine_kernels.linear.reference import linear

__all__ = ["linear"]
