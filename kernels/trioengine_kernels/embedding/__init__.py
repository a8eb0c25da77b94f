"""`embedding`: rows of a table. The reference; `embedding.triton` is for a GPU."""

from trioengine_kernels.embedding.reference import embedding

__all__ = ["embedding"]
