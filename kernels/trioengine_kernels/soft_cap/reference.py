# pyright: basic
"""Logits that cannot leave a range (Bello et al., 2016)."""

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`, computed in float32.

    Args:
        x: of any shape.
        cap: above 0; results are between this and its negative.

    Returns:
        Like `x`.
    """
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)
