# pyright: basic
"""Paged attention by torch's own kernels: a yardstick for ours, and what there is without Triton.

Where torch runs FlashAttention 3 or 4 (`torch.nn.attention.activate_flash_attention_impl`), its variable-length
attention reads the blocks where they are and the host reads nothing. Otherwise keys are gathered for torch's
`scaled_dot_product_attention`, for which the host has to know the lengths: it waits for the device, in every layer.
"""

import torch
from torch import Tensor
from torch.nn import attention

from trioengine_kernels.paged_attention.batch import AttentionBatch
from trioengine_kernels.paged_attention.reference import paged_attention as gathered_attention
from trioengine_kernels.paged_attention.reference import plan_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # Before torch 2.10.
    varlen_attn = None


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """As `paged_attention.device_reference.paged_attention`."""
    has_plain_scores = soft_cap is None and sinks is None
    is_plain = has_plain_scores and key_cache.dtype == query.dtype and query.device.type == "cuda"
    if is_plain and reads_blocks(query.dtype, torch.cuda.get_device_capability(query.device)):
        return _paged_varlen(query, key_cache, value_cache, batch, scale)
    return _gathered(
        query,
        key_cache,
        value_cache,
        batch,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def reads_blocks(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether torch's variable-length attention reads a paged cache on such a GPU: as FlashAttention 2 it does not."""
    if varlen_attn is None or dtype not in (torch.float16, torch.bfloat16):
        return False
    # FlashAttention 3 is for Hopper, and 4 reads blocks on Blackwell only.
    return {"FA3": 9, "FA4": 10}.get(attention.current_flash_attention_impl() or "") == capability[0]


def _paged_varlen(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    block_table = batch.block_table.index_select(0, batch.rows)
    assert varlen_attn is not None, "reads_blocks says whether it is there"
    output = varlen_attn(
        query,
        key_cache,
        value_cache,
        batch.query_start,
        None,
        batch.max_query_len,
        block_table.shape[1] * batch.block_size,
        scale=scale,
        window_size=(-1 if batch.window is None else batch.window - 1, 0),
        enable_gqa=query.shape[1] != key_cache.shape[2],
        seqused_k=batch.seq_lens,
        block_table=block_table,
    )
    assert isinstance(output, Tensor), "no auxiliary results were asked for"
    return output


def _gathered(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    key_scale: float,
    value_scale: float,
) -> Tensor:
    has_queries = batch.query_start.diff() > 0
    if not has_queries.any():
        return torch.empty_like(query)
    # Places without queries fall out: what is left of `query_start` still has one sequence behind the other.
    query_start = torch.cat([batch.query_start[:1], batch.query_start[1:][has_queries]])
    seq_lens = batch.seq_lens[has_queries]
    block_table = batch.block_table[batch.rows[has_queries]]
    if key_cache.dtype != query.dtype:
        # Numbers of 8 bits are numbers of 16 bits too; only the sequences' own blocks are converted.
        block_table = block_table[:, : -(-int(seq_lens.max()) // batch.block_size)].clamp(min=0)
        key_cache, value_cache = (_blocks(cache, block_table, query.dtype) for cache in (key_cache, value_cache))
        block_table = torch.arange(block_table.numel(), device=query.device).view(block_table.shape)
    output = gathered_attention(
        query,
        key_cache,
        value_cache,
        plan_attention(block_table, query_start, seq_lens, block_size=batch.block_size, window=batch.window),
        scale=scale * key_scale,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.to(query.dtype),
    )
    return output if value_scale == 1 else output * value_scale


def _blocks(cache: Tensor, block_table: Tensor, dtype: torch.dtype) -> Tensor:
    # As bytes, which torch indexes everywhere.
    return cache.view(torch.uint8)[block_table.flatten().long()].view(cache.dtype).to(dtype)
