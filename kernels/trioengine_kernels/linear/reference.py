# pyright: basic
"""Products with a matrix of floats."""

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weightᵀ + bias`, summed in float32 and rounded once.

    Args:
        x: [num_tokens, num_columns], float32, float16 or bfloat16.
        weight: [num_rows, num_columns], like `x`.
        bias: [num_rows], float32.

    Returns:
        [num_tokens, num_rows], like `x`.
    """
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
