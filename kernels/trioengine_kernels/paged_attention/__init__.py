"""`paged_attention` of a processor, which is planned with torch. What a device runs, `libraries.choose_attention` says,
and `device_reference` what it has to compute."""

from trioengine_kernels.paged_attention.reference import AttentionPlan, paged_attention, plan_attention

__all__ = ["AttentionPlan", "paged_attention", "plan_attention"]
