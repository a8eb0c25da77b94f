# pyright: basic
"""Root mean square layer normalization (Zhang and Sennrich, 2019), alone and after a residual addition."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x²) + epsilon) * weight`, over the last dimension, computed in float32.

    Args:
        x: [..., size].
        weight: [size].
        epsilon: added to the mean square.

    Returns:
        Like `x`.
    """
    return F.rms_norm(x.float(), weight.shape, weight.float(), epsilon).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Add, then normalize: `rms_norm(x + residual)` and the sum itself, which is the next residual.

    Args:
        x: [..., size].
        residual: like `x`.
        weight: [size].
        epsilon: added to the mean square.

    Returns:
        The normalized sum and the sum, both like `x`.
    """
    total = x + residual
    return rms_norm(total, weight, epsilon), total
