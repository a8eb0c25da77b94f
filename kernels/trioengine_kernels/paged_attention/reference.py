# pyright: basic
"""Causal attention over a paged KV cache, for prefill chunks and decodes of many sequences in one call.

A step has one plan and one call per layer: what depends on the block tables and lengths only is worked out once, in
`plan_attention`. Each query row is computed by the same arithmetic whatever else the batch holds, up to the rounding
of the matrix products behind `scaled_dot_product_attention`.
"""

from collections.abc import Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

MAX_GROUP_TOKENS = 32768
"""Keys that decodes gather at once: bounds the memory of a step whatever the number of sequences."""
_MAX_PADDING = 2
"""Decodes are grouped with others up to this many times longer, so at most half of the work is padding."""


@attrs.frozen(eq=False)
class _Decodes:
    """Sequences with one query token each, padded to the longest."""

    rows: Tensor
    """[num_seqs], int64: their rows of the queries."""
    block_ids: Tensor
    """[num_seqs * blocks_per_seq], int64: from the first that is seen."""
    num_keys: int
    """Of the sequence with the most, counted from the start of its first block."""
    mask: Tensor | None
    """[num_seqs, 1, 1, num_keys], bool, True is seen. None where every key is."""
    padding: Tensor | None
    """int64 places, among all gathered keys, that are not seen."""


@attrs.frozen(eq=False)
class _Chunk:
    """One sequence with several query tokens."""

    first_row: int
    end_row: int
    block_ids: Tensor
    """[num_blocks], int64: from the first that is seen."""
    first_key: int
    """Counted from the start of the first block."""
    num_keys: int
    mask: Tensor
    """[num_queries, num_keys], bool, True is seen."""
    is_plain_causal: bool
    """Queries and keys are the same tokens and no window cuts them."""


@attrs.frozen(eq=False)
class AttentionPlan:
    """How the rows of a step's queries map to sequences and their cache blocks. Made by `plan_attention`."""

    decodes: Sequence[_Decodes]
    chunks: Sequence[_Chunk]
    block_size: int


def plan_attention(
    block_table: Tensor, query_start: Tensor, seq_lens: Tensor, *, block_size: int, window: int | None = None
) -> AttentionPlan:
    """Work out, once for all layers, which keys each query sees.

    Args:
        block_table: [num_seqs, max_blocks], int32: the blocks of each sequence in order. Entries behind a sequence's
            last block, and those whose tokens no query sees through the window any more, are not read.
        query_start: [num_seqs + 1], int32: the queries of sequence i are rows `query_start[i]` to
            `query_start[i + 1] - 1`; they are its last tokens. No sequence is without a query.
        seq_lens: [num_seqs], int32: tokens of each sequence, those of this step included.
        block_size: tokens of a block.
        window: a query sees itself and the `window - 1` tokens before it; None is all of them.
    """
    starts, lens = query_start.tolist(), seq_lens.tolist()
    decodes = [i for i in range(len(lens)) if starts[i + 1] - starts[i] == 1]
    # Counted from the start of the first block that a decode sees.
    num_keys = lens if window is None else [n - max(0, n - window) // block_size * block_size for n in lens]
    decodes.sort(key=lambda i: num_keys[i], reverse=True)
    block_table = block_table.long()
    return AttentionPlan(
        decodes=[
            _plan_decodes(group, starts, lens, num_keys, block_table, block_size, window)
            for group in _groups(decodes, num_keys, block_size)
        ],
        chunks=[
            _plan_chunk(starts[i], starts[i + 1], lens[i], block_table[i], block_size, window)
            for i in range(len(lens))
            if starts[i + 1] - starts[i] > 1
        ],
        block_size=block_size,
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from each query to the keys of its sequence up to and including itself.

    Slots of the cache that belong to no key of the plan never influence the result, whatever they hold.

    Args:
        query: [num_tokens, num_heads, head_dim]. Head h reads KV head `h // (num_heads / num_kv_heads)`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim]; the keys of this step are already in it.
        value_cache: like `key_cache`.
        plan: of this step.
        scale: multiplies query · key.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` before the softmax.
        sinks: [num_heads]: a score of each head that takes part in the softmax of every query and has no value.

    Returns:
        Like `query`, contiguous.
    """
    num_kv_heads = key_cache.shape[2]
    grouped = query.unflatten(1, (num_kv_heads, -1))  # [num_tokens, num_kv_heads, group, head_dim]
    output = torch.empty(grouped.shape, dtype=query.dtype, device=query.device)
    # [num_kv_heads, group, 1].
    sinks = None if sinks is None else sinks.view(key_cache.shape[2], -1, 1)
    for decodes in plan.decodes:
        keys = _gather_padded(key_cache, decodes)
        values = _gather_padded(value_cache, decodes)
        rows = grouped.index_select(0, decodes.rows)
        result = _attend(rows, keys, values, decodes.mask, False, scale, soft_cap, sinks)
        output.index_copy_(0, decodes.rows, result)
    for chunk in plan.chunks:
        keys, values = _gather_chunk(key_cache, chunk), _gather_chunk(value_cache, chunk)
        # The heads of a group stand in the batch dimension, where they share keys and values without a copy.
        rows = grouped[chunk.first_row : chunk.end_row].permute(2, 1, 0, 3)
        shape = (rows.shape[0], *keys.shape)
        result = _attend(
            rows,
            keys.expand(shape),
            values.expand(shape),
            chunk.mask,
            chunk.is_plain_causal,
            scale,
            soft_cap,
            None if sinks is None else sinks.transpose(0, 1).unsqueeze(-1),
        )
        output[chunk.first_row : chunk.end_row] = result.permute(2, 1, 0, 3)
    return output.flatten(1, 2)


def _groups(decodes: Sequence[int], lens: Sequence[int], block_size: int) -> list[list[int]]:
    """Cut sequences, longest first, into groups of similar length whose keys fit into `MAX_GROUP_TOKENS`."""
    groups: list[list[int]] = []
    for i in decodes:
        if groups:
            longest = lens[groups[-1][0]] + block_size
            fits = (len(groups[-1]) + 1) * longest <= MAX_GROUP_TOKENS
            if fits and longest <= _MAX_PADDING * (lens[i] + block_size):
                groups[-1].append(i)
                continue
        groups.append([i])
    return groups


def _plan_decodes(
    group: Sequence[int],
    starts: Sequence[int],
    lens: Sequence[int],
    num_keys: Sequence[int],
    block_table: Tensor,
    block_size: int,
    window: int | None,
) -> _Decodes:
    device = block_table.device
    most_keys = num_keys[group[0]]
    num_blocks = -(-most_keys // block_size)
    group_lens = torch.tensor([lens[i] for i in group], device=device).unsqueeze(1)
    ends = torch.tensor([num_keys[i] for i in group], device=device).unsqueeze(1)
    # What is behind a sequence's last block is padding: any block does, and its last one exists.
    columns = (group_lens - ends) // block_size + torch.arange(num_blocks, device=device)
    columns = torch.minimum(columns, (group_lens - 1) // block_size)
    places = torch.arange(num_blocks * block_size, device=device)
    is_seen = places < ends
    if window is not None:
        is_seen &= places >= ends - window
    has_padding = window is not None or num_keys[group[-1]] < most_keys
    return _Decodes(
        rows=torch.tensor([starts[i] for i in group], device=device),
        block_ids=block_table[torch.tensor(group, device=device).unsqueeze(1), columns].flatten(),
        num_keys=most_keys,
        mask=is_seen[:, None, None, :most_keys] if has_padding else None,
        padding=(~is_seen).flatten().nonzero().flatten() if has_padding else None,
    )


def _plan_chunk(
    first_row: int, end_row: int, seq_len: int, block_ids: Tensor, block_size: int, window: int | None
) -> _Chunk:
    first_query = seq_len - (end_row - first_row)
    first_key = 0 if window is None else max(0, first_query - window + 1)
    places = torch.arange(first_key, seq_len, device=block_ids.device)
    own_places = places[first_query - first_key :].unsqueeze(1)
    is_seen = places <= own_places
    if window is not None:
        is_seen &= places > own_places - window
    return _Chunk(
        first_row=first_row,
        end_row=end_row,
        block_ids=block_ids[first_key // block_size : -(-seq_len // block_size)],
        first_key=first_key % block_size,
        num_keys=seq_len - first_key,
        mask=is_seen,
        is_plain_causal=first_query == 0 and (window is None or window >= seq_len),
    )


def _gather_chunk(cache: Tensor, chunk: _Chunk) -> Tensor:
    """The sequence's cache rows that are seen, [num_kv_heads, num_keys, head_dim]."""
    rows = cache.index_select(0, chunk.block_ids).flatten(0, 1)
    return rows[chunk.first_key : chunk.first_key + chunk.num_keys].transpose(0, 1)


def _gather_padded(cache: Tensor, decodes: _Decodes) -> Tensor:
    """The sequences' cache rows, [num_seqs, num_kv_heads, num_keys, head_dim], zeros where nothing is seen."""
    gathered = cache.index_select(0, decodes.block_ids)
    if decodes.padding is not None:
        # A mask alone would not do: a weight of zero times whatever an old owner left (infinity, NaN) is NaN.
        gathered.flatten(0, 1).index_fill_(0, decodes.padding, 0)
    return gathered.view(len(decodes.rows), -1, *cache.shape[2:])[:, : decodes.num_keys].transpose(1, 2)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    is_plain_causal: bool,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention for queries [batch, heads, num_queries, head_dim] over keys of the same batch and heads.

    `sinks`: a score for each query; of a shape that can be expanded to [batch, heads, num_queries, 1].
    """
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query, keys, values, None if is_plain_causal else mask, is_causal=is_plain_causal, scale=scale
        )
    scores = query @ keys.transpose(-1, -2) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1) @ values
    scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(scores, dim=-1)[..., :-1] @ values
