"""`paged_attention`: which implementation runs. There is one so far, the reference."""

from trioengine_kernels.paged_attention.reference import AttentionPlan, paged_attention, plan_attention

__all__ = ["AttentionPlan", "paged_attention", "plan_attention"]
