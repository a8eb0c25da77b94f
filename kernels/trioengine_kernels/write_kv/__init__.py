"""`write_kv`: which implementation runs. There is one so far, the reference."""

from trioengine_kernels.write_kv.reference import write_kv

__all__ = ["write_kv"]
