# pyright: basic
"""Low-rank adapters of a product (Hu et al., 2021, "LoRA"), from tables on a device: what Triton's computes."""

import torch
from torch import Tensor


def lora(y: Tensor, x: Tensor, slots: Tensor, first_row: int, a: Tensor, b: Tensor) -> Tensor:
    """`y`, and to some outputs of each token with an adapter `b @ (a @ x)` of that adapter added, in place.

    Sums are float32. A matrix that is several merged ones has a table, and a call, for each of them.

    Args:
        y: [num_tokens, rows], of x's type. Changed.
        x: [num_tokens, columns].
        slots: [num_tokens], int32: each token's adapter, in any order; 0 is none.
        first_row: the first of the outputs.
        a: [num_slots, rank, columns], of x's type. Slot 0 is never read. Adapters of a lower rank end in zeros.
        b: [num_slots, outputs, rank], the same.

    Returns:
        `y` itself.
    """
    part = y[:, first_row : first_row + b.shape[1]]
    for slot in range(1, len(a)):
        added = x.float() @ a[slot].float().T @ b[slot].float().T
        # Not added as zeros: an adapter that holds infinity must not reach the tokens of others.
        part.copy_(torch.where((slots == slot).unsqueeze(1), (part.float() + added).to(y.dtype), part))
    return y
