"""`rope`: which implementation runs. There is one so far, the reference."""

from trioengine_kernels.rope.reference import rope

__all__ = ["rope"]
