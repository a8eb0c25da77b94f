"""`prepare_step`: the inputs of a step on the device. The reference; `prepare_step.triton` is for a GPU."""

from trioengine_kernels.prepare_step.reference import prepare_step

__all__ = ["prepare_step"]
