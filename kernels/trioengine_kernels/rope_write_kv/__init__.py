"""`rope_write_kv`: queries, keys and values ready for attention. The reference; `rope_write_kv.triton` is for a GPU."""

from trioengine_kernels.rope_write_kv.reference import rope_write_kv

__all__ = ["rope_write_kv"]
