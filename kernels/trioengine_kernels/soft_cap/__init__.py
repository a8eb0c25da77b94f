"""`soft_cap`: the reference. `soft_cap.triton` is for a GPU."""

from trioengine_kernels.soft_cap.reference import soft_cap

__all__ = ["soft_cap"]
