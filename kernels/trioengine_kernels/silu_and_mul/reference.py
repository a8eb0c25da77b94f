# pyright: basic
"""The activation of a gated MLP (SwiGLU; Shazeer, 2020)."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, where the two lie side by side.

    Args:
        gate_up: [num_tokens, 2 * size]: the gates, then the values.

    Returns:
        [num_tokens, size].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
