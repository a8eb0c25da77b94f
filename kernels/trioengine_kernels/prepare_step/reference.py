# pyright: basic
"""What a step's tokens are and where their keys and values go, worked out on the device.

A token that the step before this one samples is not known to the host when it plans: it says -1, and whose it is.
"""

import torch
from torch import Tensor


def prepare_step(
    token_ids: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    block_table: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Fill in the tokens that are on the device only, and find every token's place in the KV cache.

    Args:
        token_ids: [num_tokens], int32: -1 is the last token that its row's sequence sampled.
        token_rows: [num_tokens], int32: the row of the next two that each token's sequence has.
        positions: [num_tokens], int32: each token's place in its sequence.
        last_tokens: [num_rows], int32.
        block_table: [num_groups, num_rows, max_blocks], int32, contiguous: for each KV group, the blocks of each
            sequence in order.
        block_size: tokens of a block.

    Returns:
        Token ids, [num_tokens], int32; and slots, [num_groups, num_tokens], int32: `block_id * block_size + offset`.
    """
    rows, places = token_rows.long(), positions.long()
    ids = torch.where(token_ids == -1, last_tokens[rows], token_ids)
    blocks = block_table[:, rows, places // block_size]
    return ids, blocks * block_size + positions % block_size
