# pyright: basic
"""What the attention of a device has to compute, in plain torch and float32, told the same way as the device is.

It reads everything from the batch's tensors at each call, as a recorded graph does, but not the work list.
"""

import torch
from torch import Tensor

from trioengine_kernels.paged_attention.batch import AttentionBatch


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
    """Attend from each query to the keys of its sequence up to and including itself.

    Args:
        query: [num_tokens, num_heads, head_dim]. Head h reads KV head `h // (num_heads / num_kv_heads)`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], of the queries' number type or float8_e4m3fn; the
            keys of this step are already in it.
        value_cache: like `key_cache`.
        batch: which queries and keys are whose.
        scale: multiplies query · key.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` before the softmax.
        sinks: [num_heads]: a score of each head that takes part in the softmax of every query and has no value.
        key_scale: what is cached stands for itself times this.
        value_scale: likewise.

    Returns:
        Like `query`, contiguous. Rows behind the last sequence's queries are zero here, and anything on a device.
    """
    group = query.shape[1] // key_cache.shape[2]
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    rows, lens, starts = batch.rows.tolist(), batch.seq_lens.tolist(), batch.query_start.tolist()
    for i, (row, seq_len) in enumerate(zip(rows, lens, strict=True)):
        start, end = starts[i], starts[i + 1]
        if start == end:
            continue
        places = torch.arange(seq_len, device=query.device)
        query_places = places[seq_len - (end - start) :].unsqueeze(1)
        is_seen = places <= query_places
        if batch.window is not None:
            is_seen &= places > query_places - batch.window
        first = int(is_seen[0].int().argmax())
        places, is_seen = places[first:], is_seen[:, first:]
        blocks, offsets = batch.block_table[row].long()[places // batch.block_size], places % batch.block_size
        keys = _cached(key_cache, blocks, offsets, key_scale).repeat_interleave(group, dim=1)
        values = _cached(value_cache, blocks, offsets, value_scale).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * scale
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        scores = scores.masked_fill(~is_seen, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(places)]
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return output


def _cached(cache: Tensor, blocks: Tensor, offsets: Tensor, scale: float) -> Tensor:
    """[num_keys, num_kv_heads, head_dim], float32."""
    if cache.element_size() > 1:
        return cache[blocks, offsets].float() * scale
    # As bytes, which torch indexes everywhere.
    return cache.view(torch.uint8)[blocks, offsets].view(cache.dtype).float() * scale
