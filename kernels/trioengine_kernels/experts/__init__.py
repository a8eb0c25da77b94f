"""`choose_experts` and `mix_experts`: which implementation runs. There is one so far, the reference."""

from trioengine_kernels.experts.reference import choose_experts, mix_experts

__all__ = ["choose_experts", "mix_experts"]
