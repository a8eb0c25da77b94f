# pyright: basic
"""The mixture of experts of a layer from beginning to end, as one operation of a device: what Triton's computes."""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from trioengine_kernels.experts.reference import choose_experts, mix_experts
from trioengine_kernels.experts.weights import ExpertWeights, Matrix
from trioengine_kernels.gelu_tanh_and_mul.reference import gelu_tanh_and_mul
from trioengine_kernels.quantized_linear.reference import quantized_linear
from trioengine_kernels.silu_and_mul.reference import silu_and_mul

_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


def experts(
    x: Tensor,
    router_logits: Tensor,
    weights: ExpertWeights,
    *,
    num_per_token: int,
    is_normalized: bool,
    activation: str,
) -> Tensor:
    """Each token through the experts with its largest logits: their results, weighted by a softmax and added.

    Args:
        x: [num_tokens, hidden_size].
        router_logits: [num_tokens, num_experts].
        weights: the experts.
        num_per_token: how many of them each token gets.
        is_normalized: the weights of a token's experts are made to sum to 1.
        activation: "silu" or "gelu_tanh", of the gates.

    Returns:
        Like `x`.
    """
    chosen, shares = choose_experts(router_logits, num_per_token, is_normalized=is_normalized)

    def compute(number: int, rows: Tensor) -> Tensor:
        gated = _GATES[activation](_product(rows, weights.gate_up.matrices[number]))
        return _product(gated, weights.down.matrices[number])

    return mix_experts(x, chosen, shares, compute)


def _product(x: Tensor, matrix: Matrix) -> Tensor:
    return F.linear(x, matrix) if isinstance(matrix, Tensor) else quantized_linear(x, matrix)
