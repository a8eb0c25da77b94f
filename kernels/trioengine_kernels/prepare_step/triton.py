# pyright: basic
# pyright: reportCallIssue=false
"""What a step's tokens are and where their keys and values go, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.variants import Variant

_BLOCK = 128
"""Tokens of a program."""
_NUM_WARPS = 4


def prepare_step(
    token_ids: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    block_table: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    num_tokens = token_ids.shape[0]
    num_groups, num_rows, max_blocks = block_table.shape
    ids = torch.empty(num_tokens, dtype=torch.int32, device=token_ids.device)
    slots = torch.empty((num_groups, num_tokens), dtype=torch.int32, device=token_ids.device)
    if num_tokens:
        grid = (triton.cdiv(num_tokens, _BLOCK), num_groups)
        _prepare_step_kernel[grid](
            token_ids,
            token_rows,
            positions,
            last_tokens,
            block_table,
            ids,
            slots,
            num_tokens,
            num_rows,
            max_blocks,
            BLOCK_SIZE=block_size,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return ids, slots


def variants() -> list[Variant]:
    """The block size decides nothing but divisions."""
    tensors = ("token_ids", "token_rows", "positions", "last_tokens", "block_table", "ids", "slots")
    return [
        Variant(
            name=f"prepare_step[block_size={block_size}]",
            kernel=_prepare_step_kernel,
            signature=dict.fromkeys(tensors, "*i32") | {"num_tokens": "i32", "num_rows": "i32", "max_blocks": "i32"},
            constants={"BLOCK_SIZE": block_size, "BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
        )
        for block_size in (16, 48)
    ]


# Numbers of tokens are not compiled for: every new step would have to wait.
@triton.jit(do_not_specialize=["num_tokens", "num_rows", "max_blocks"])
def _prepare_step_kernel(
    token_ids,
    token_rows,
    positions,
    last_tokens,
    block_table,
    ids,
    slots,
    num_tokens,
    num_rows,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < num_tokens
    rows = tl.load(token_rows + tokens, mask=is_token, other=0)
    position = tl.load(positions + tokens, mask=is_token, other=0)
    blocks = block_table + (group * num_rows + rows) * max_blocks
    block = tl.load(blocks + position // BLOCK_SIZE, mask=is_token, other=0)
    tl.store(slots + group * num_tokens + tokens, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=is_token)
    if group == 0:
        token = tl.load(token_ids + tokens, mask=is_token, other=0)
        last = tl.load(last_tokens + rows, mask=is_token & (token == -1), other=0)
        tl.store(ids + tokens, tl.where(token == -1, last, token), mask=is_token)
