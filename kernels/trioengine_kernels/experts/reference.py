# pyright: basic
"""Mixtures of experts (Shazeer et al., 2017): which experts a token goes through, and their results put together."""

from collections.abc import Callable

import torch
from torch import Tensor


def choose_experts(router_logits: Tensor, num_experts_per_token: int, *, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """The experts with the largest logits; of equal ones those with lower numbers.

    Args:
        router_logits: [num_tokens, num_experts].
        num_experts_per_token: how many each token gets.
        is_normalized: the weights of a token's experts are made to sum to 1.

    Returns:
        Their numbers, int64, by falling weight, and their weights, float32: the softmax over all experts. Both
        [num_tokens, num_experts_per_token].
    """
    weights, chosen = torch.softmax(router_logits.float(), dim=-1).sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[:, :num_experts_per_token], chosen[:, :num_experts_per_token]
    return chosen, weights / weights.sum(dim=-1, keepdim=True) if is_normalized else weights


def mix_experts(x: Tensor, chosen: Tensor, weights: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Each token through its experts: the weighted sum of their results.

    Args:
        x: [num_tokens, size].
        chosen: as `choose_experts` returns it.
        weights: as `choose_experts` returns it.
        compute: what the expert of a number makes of rows [n, size], n at least 1: [n, size].

    Returns:
        Like `x`.
    """
    results = x.new_empty(*chosen.shape, x.shape[1])
    for number in chosen.unique().tolist():
        tokens, places = (chosen == number).nonzero(as_tuple=True)
        results[tokens, places] = compute(number, x[tokens])
    return (results * weights.unsqueeze(-1).to(x.dtype)).sum(dim=1)
