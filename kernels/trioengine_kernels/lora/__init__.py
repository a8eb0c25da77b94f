"""`lora`: which implementation runs. There is one so far, the reference."""

from trioengine_kernels.lora.reference import lora

__all__ = ["lora"]
