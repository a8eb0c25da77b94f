"""What the programs of paged attention do in a step: tiles of queries and ranges of keys, worked out on the host.

A tile is some consecutive queries of one sequence with all heads that share a KV head: `rows / (heads per KV head)`
queries. Few queries over many keys would leave most of a GPU idle, so a tile's keys are split (Flash-Decoding, Dao et
al. 2023): each split's result is partial and a second kernel merges them. How a decode's keys are split depends on its
own length only, never on the batch.
"""

import numpy as np
from numpy.typing import NDArray

WORK_FIELDS = 8
"""Numbers of a work item, which are:

0. sequence: its place in `AttentionBatch.rows`
1. first query: a row of the queries
2. number of queries
3. position of the first query in its sequence
4. first key
5. end key, not included
6. partial: the row of the first query's partial result, those of the others follow; -1: the result is whole
7. number of splits of this tile where this is the first, 1 where the result is whole, 0 for splits behind the first

Those whose splits are to be merged, that is with more than one in the last field, stand before all others.
"""

SPLIT_KEYS = 512
"""Keys of a split are a multiple of this.

512 keys of 128 dimensions in 16 bits are 256 KiB for each KV head, against 2 KiB of partial results for each of four
heads: under 2 % more traffic once these are read again. And it cuts 8,192 keys of 8 KV heads into 128 programs, which
is what the 132 multiprocessors of an H100 or H200 need to reach their bandwidth.
"""
MAX_SPLITS = 32
"""Splits of one decode, so longer contexts have longer splits; and of all tiles of longer queries in a step together.

With 8 KV heads these are 256 programs, two for each multiprocessor. It bounds the memory of partial results.
"""
DETERMINISTIC_SPLIT_KEYS = 1024
"""Keys of every split in the deterministic mode, where splits have to begin at the same keys for every query."""

_ROWS = (16, 64, 128)
_ROWS_OF_LARGE_HEADS = (16, 32)
"""Heads of more than 128 dimensions: the results of more rows do not fit into a program's registers everywhere."""
_DETERMINISTIC_ROWS = 64
"""At most. Prefill reads keys for 64 rows at once, while decodes, most of whose rows are empty, are bound by memory."""


def tile_rows(
    *, num_heads: int, num_kv_heads: int, head_dim: int, max_query_len: int, is_deterministic: bool = False
) -> int:
    """How many rows, queries times heads that share a KV head, a tile has. A power of two.

    The deterministic mode has one size: a matrix product of another size may add up in another order.
    """
    group = num_heads // num_kv_heads
    choices = _ROWS if head_dim <= 128 else _ROWS_OF_LARGE_HEADS
    if is_deterministic:
        choices = (min(_DETERMINISTIC_ROWS, choices[-1]),)
    rows = next((n for n in choices if n >= max_query_len * group), choices[-1])
    return max(rows, 1 << (group - 1).bit_length())


def split_keys(is_deterministic: bool) -> int:
    """What the length of a split is a multiple of."""
    return DETERMINISTIC_SPLIT_KEYS if is_deterministic else SPLIT_KEYS


def max_work(
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_query_len: int,
    is_deterministic: bool = False,
) -> int:
    """Rows of `plan_work` at most, for steps of up to so many sequences, queries, keys and queries of one sequence."""
    num_splits = -(-max_seq_len // split_keys(is_deterministic))
    num_decode_items = max_num_seqs * (num_splits if is_deterministic else min(num_splits, MAX_SPLITS))
    if max_query_len == 1:
        return num_decode_items
    rows = tile_rows(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_query_len=max_query_len,
        is_deterministic=is_deterministic,
    )
    num_tiles = max_num_tokens // (rows // (num_heads // num_kv_heads)) + max_num_seqs
    return num_decode_items + num_tiles + MAX_SPLITS


def max_partials(work_rows: int, *, rows: int, group: int, max_query_len: int) -> int:
    """Partial results, one for each query of each split, that so many rows of `plan_work` ask for at most.

    Args:
        work_rows: rows that there is room for.
        rows: of a tile.
        group: heads that share a KV head.
        max_query_len: queries of one sequence at most.
    """
    return work_rows if max_query_len == 1 else work_rows + MAX_SPLITS * (rows // group)


def plan_work(
    query_start: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    is_deterministic: bool = False,
    keys_per_split: int | None = None,
) -> NDArray[np.int32]:
    """Cut a step into work items for one KV group.

    Args:
        query_start: [num_seqs + 1], as in `AttentionBatch`.
        seq_lens: [num_seqs], as there.
        num_heads: of the queries.
        num_kv_heads: of the keys.
        head_dim: dimensions of a head.
        window: as in `AttentionBatch`.
        is_deterministic: as there.
        keys_per_split: in place of `split_keys`, for tests; the kernel has to be told too.

    Returns:
        [num_items, WORK_FIELDS], items that are merged first, then the longest first.
    """
    query_lens = query_start[1:] - query_start[:-1]
    max_query_len = int(query_lens.max(initial=0))
    if max_query_len == 0:
        return np.empty((0, WORK_FIELDS), np.int32)
    rows = tile_rows(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_query_len=max_query_len,
        is_deterministic=is_deterministic,
    )
    tiles = _tiles(query_start, query_lens, seq_lens, rows // (num_heads // num_kv_heads), max_query_len, window)
    sequence, _, num_queries, _, first_key, end_key, partial, num_splits = tiles.T
    split = keys_per_split or split_keys(is_deterministic)
    first_part = first_key // split
    num_parts = -(-end_key // split) - first_part
    if num_parts.max() == 1:
        return _longest_first(tiles)

    parts_per_split = _parts_per_split(num_parts, query_lens[sequence] == 1, is_deterministic)
    num_splits[:] = -(-num_parts // parts_per_split)
    num_partials = np.where(num_splits > 1, num_splits * num_queries, 0)
    partial[:] = np.where(num_splits > 1, np.cumsum(num_partials) - num_partials, -1)
    tile, index = _repeat(num_splits)
    items = tiles.take(tile, axis=0)
    _, _, num_queries, _, first_key, end_key, partial, num_splits = items.T
    split_len = (parts_per_split * split).take(tile)
    start = (first_part * split).take(tile) + index * split_len
    np.maximum(first_key, start, out=first_key)
    np.minimum(end_key, start + split_len, out=end_key)
    partial += index * num_queries * (partial >= 0)
    num_splits *= index == 0
    return _longest_first(items)


def _longest_first(items: NDArray[np.int32]) -> NDArray[np.int32]:
    """So that programs end together; and before these, also the longest first, what is merged."""
    order = items[:, 4] - items[:, 5]
    order -= (items[:, 7] > 1) * np.int32(2**30)
    return items.take(np.argsort(order, kind="stable"), axis=0)


def _tiles(
    query_start: NDArray[np.int32],
    query_lens: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    tile_tokens: int,
    max_query_len: int,
    window: int | None,
) -> NDArray[np.int32]:
    """[num_tiles, WORK_FIELDS]: items of a step where nothing is split."""
    if max_query_len == 1:
        sequence, offset = np.flatnonzero(query_lens), 0
    else:
        sequence, tile = _repeat(-(-query_lens // tile_tokens))
        offset = tile * tile_tokens
    tiles = np.empty((len(sequence), WORK_FIELDS), np.int32)
    tiles[:, 0] = sequence
    tiles[:, 1] = query_start.take(sequence) + offset
    tiles[:, 2] = np.minimum(query_lens.take(sequence) - offset, tile_tokens)
    tiles[:, 3] = (seq_lens - query_lens).take(sequence) + offset
    tiles[:, 4] = 0 if window is None else np.maximum(tiles[:, 3] - (window - 1), 0)
    tiles[:, 5] = tiles[:, 3] + tiles[:, 2]
    tiles[:, 6] = -1
    tiles[:, 7] = 1
    return tiles


def _parts_per_split(
    num_parts: NDArray[np.int32], is_decode: NDArray[np.bool_], is_deterministic: bool
) -> NDArray[np.int32]:
    """For each tile, how many of its `num_parts` parts of split length one program computes."""
    if is_deterministic:
        # Parts are added up one after the other, by one program or by the merge, and these sums are the same; others,
        # of splits of several parts, would not be.
        return np.where(is_decode, np.int32(1), num_parts)
    # Of as many tiles in all as a decode has splits; those of a step with more tiles are not split.
    num_longer = len(is_decode) - int(np.count_nonzero(is_decode))
    max_splits_of_longer = max(1, MAX_SPLITS // max(1, num_longer))
    return -(-num_parts // np.where(is_decode, np.int32(MAX_SPLITS), np.int32(max_splits_of_longer)))


def _repeat(counts: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """For `counts` of things each, to which each belongs and which one of its own it is: (0, 0, 2), (0, 1, 0)."""
    of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = np.cumsum(counts, dtype=np.int32) - counts
    return of, np.arange(len(of), dtype=np.int32) - first.take(of)
