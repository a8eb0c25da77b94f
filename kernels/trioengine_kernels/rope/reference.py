# pyright: basic
"""Rotary position embedding (Su et al., 2021), where element i is paired with element i + rotary_dim / 2 ("neox")."""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of elements by its token's angle.

    Where `rotary_dim` is smaller than `head_dim`, the elements behind it stay as they are.

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos: [num_tokens, rotary_dim / 2], the cosines of position × frequency.
        sin: like `cos`.

    Returns:
        Like `x`, contiguous.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, rest) if rest.shape[-1] else rotated, dim=-1)
