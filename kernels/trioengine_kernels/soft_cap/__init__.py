"""`soft_cap`: which implementation runs. There is one so far, the reference."""

from trioengine_kernels.soft_cap.reference import soft_cap

__all__ = ["soft_cap"]
