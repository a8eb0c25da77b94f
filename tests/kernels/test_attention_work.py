"""The work list of paged attention: every query meets each key that it sees once, and it fits where it has to."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from trioengine_kernels.paged_attention.work import (
    MAX_SPLITS,
    WORK_FIELDS,
    max_partials,
    max_work,
    plan_work,
    split_keys,
    tile_rows,
)

NUM_KV_HEADS = 2


@st.composite
def steps(draw):
    """Sequences with queries, and places without."""
    seqs = draw(st.lists(st.tuples(st.integers(0, 9000), st.sampled_from([0, 1, 1, 1, 3, 17, 400])), max_size=12))
    query_lens = [num_queries for _, num_queries in seqs]
    return query_lens, [0 if n == 0 else before + n for before, n in seqs]


def plan(query_lens, seq_lens, **options):
    options = {"num_heads": 4 * NUM_KV_HEADS, "head_dim": 64, "window": None} | options
    start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return plan_work(start, np.array(seq_lens, np.int32), num_kv_heads=NUM_KV_HEADS, **options)


@given(steps(), st.sampled_from([1, 3, 4, 16, 24]), st.sampled_from([None, 1, 700]), st.booleans())
def test_every_query_meets_each_key_once(step, group, window, is_deterministic) -> None:
    query_lens, seq_lens = step
    options = {"num_heads": group * NUM_KV_HEADS, "head_dim": 128, "is_deterministic": is_deterministic}
    items = plan(query_lens, seq_lens, window=window, **options)
    assert items.dtype == np.int32
    assert items.shape[1] == WORK_FIELDS

    starts = np.concatenate([[0], np.cumsum(query_lens)])
    ranges: dict[int, list[tuple[int, int]]] = {}
    for sequence, query, num_queries, position, first_key, end_key, *_ in items.tolist():
        assert query - starts[sequence] + num_queries <= query_lens[sequence]
        assert position == seq_lens[sequence] - query_lens[sequence] + query - starts[sequence]
        assert first_key < end_key <= position + num_queries
        for row in range(query, query + num_queries):
            ranges.setdefault(row, []).append((first_key, end_key))
    assert sorted(ranges) == list(range(sum(query_lens)))
    for sequence, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for i in range(query_len):
            position = seq_len - query_len + i
            pieces = sorted(ranges[starts[sequence] + i])
            assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(pieces))
            assert pieces[0][0] <= max(0, position + 1 - (window or position + 1))
            assert pieces[-1][1] > position


@given(steps(), st.sampled_from([1, 4]), st.sampled_from([None, 700]), st.booleans())
def test_partial_results_have_places_of_their_own(step, group, window, is_deterministic) -> None:
    """Those of a tile follow each other, its first split tells how many there are, and such items come first."""
    options = {"num_heads": group * NUM_KV_HEADS, "head_dim": 128, "is_deterministic": is_deterministic}
    items = plan(*step, window=window, **options)
    is_leader = items[:, 7] > 1
    assert not is_leader[np.count_nonzero(is_leader) :].any()
    assert ((items[:, 7] == 1) == (items[:, 6] == -1)).all()
    places = [place for item in items.tolist() if item[6] >= 0 for place in range(item[6], item[6] + item[2])]
    assert len(set(places)) == len(places)
    by_place = {item[6]: item for item in items.tolist() if item[6] >= 0}
    num_splits = 0
    for leader in items[is_leader].tolist():
        splits = [by_place[leader[6] + i * leader[2]] for i in range(leader[7])]
        assert [split[:4] for split in splits] == [leader[:4]] * leader[7]
        assert [split[4] for split in splits[1:]] == [split[5] for split in splits[:-1]]
        assert [split[7] for split in splits[1:]] == [0] * (leader[7] - 1)
        num_splits += leader[7]
    assert num_splits == np.count_nonzero(items[:, 6] >= 0)


@given(steps(), st.sampled_from([1, 4, 16]), st.sampled_from([64, 256]), st.booleans())
def test_capacities_hold(step, group, head_dim, is_deterministic) -> None:
    query_lens, seq_lens = step
    shape = {
        "num_heads": group * NUM_KV_HEADS,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": head_dim,
        "max_query_len": max([1, *query_lens]),
        "is_deterministic": is_deterministic,
    }
    room = max_work(
        max_num_seqs=len(query_lens), max_num_tokens=sum(query_lens), max_seq_len=max([1, *seq_lens]), **shape
    )
    options = {key: shape[key] for key in ("num_heads", "head_dim", "is_deterministic")}
    items = plan(query_lens, seq_lens, **options)
    assert len(items) <= room
    rows = tile_rows(**shape)
    assert items[:, 2].max(initial=0) <= rows // group
    used = (items[:, 6] + items[:, 2])[items[:, 6] >= 0].max(initial=0)
    assert used <= max_partials(len(items), rows=rows, group=group, max_query_len=shape["max_query_len"])


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_the_splits_of_a_decode_do_not_depend_on_others(is_deterministic: bool) -> None:
    lens = [1, 511, 512, 513, 5000, 40_000]
    together = plan([1] * 6 + [33], [*lens, 99], is_deterministic=is_deterministic)
    for i, seq_len in enumerate(lens):
        alone = plan([1], [seq_len], is_deterministic=is_deterministic)
        own = together[together[:, 0] == i]
        assert sorted(own[:, 4:6].tolist()) == sorted(alone[:, 4:6].tolist())


def test_deterministic_splits_begin_at_the_same_keys_for_every_length() -> None:
    split = split_keys(True)
    for seq_len in (split, split + 1, 100 * split + 5):
        items = plan([1], [seq_len], is_deterministic=True)
        assert sorted(items[:, 4]) == list(range(0, seq_len, split))


def test_a_decode_of_a_long_context_has_a_bounded_number_of_splits() -> None:
    assert len(plan([1], [1_000_000])) == MAX_SPLITS


def test_a_short_chunk_on_a_long_context_is_split() -> None:
    """17 queries alone would be one or two programs for each head."""
    assert len(plan([17], [32 * 1024])) == MAX_SPLITS


def test_a_prompt_of_many_tiles_is_not_split() -> None:
    assert (plan([8192], [8192])[:, 7] == 1).all()


def test_a_step_without_queries_has_no_work() -> None:
    assert plan([], []).shape == (0, WORK_FIELDS)
    assert plan([0, 0], [0, 0]).shape == (0, WORK_FIELDS)


def test_the_longest_items_come_first() -> None:
    """So that the programs of a step end together."""
    items = plan([1, 1, 1], [100, 300, 200])
    assert (items[:, 5] - items[:, 4]).tolist() == [300, 200, 100]
