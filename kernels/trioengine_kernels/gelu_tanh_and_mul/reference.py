# pyright: basic
"""The activation of a gated MLP (GEGLU; Shazeer, 2020), with GELU by its approximation with tanh."""

import torch.nn.functional as F
from torch import Tensor


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up`, where the two lie side by side.

    Args:
        gate_up: [num_tokens, 2 * size]: the gates, then the values.

    Returns:
        [num_tokens, size].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
