"""`rms_norm`: the reference. `rms_norm.triton` is for a GPU."""

from trioengine_kernels.rms_norm.reference import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
