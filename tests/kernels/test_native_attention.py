"""Native attention, rope and the cache against the formulas in float64."""

import attrs
import numpy as np
import pytest
from trioengine_kernels.native.library import ThreadPool
from trioengine_kernels.native.program import KVCache, ProgramBuilder, StepArrays
from trioengine_kernels.native.tiles import TileKind, pack_float

NAN = 0x7E00
LENS = [1, 15, 16, 17, 200]


@attrs.frozen(kw_only=True)
class Heads:
    """Shape and options of an attention operation."""

    num_kv_heads: int = 2
    group: int = 3
    dim: int = 64
    window: int | None = None
    soft_cap: float | None = None
    is_quantized: bool = False
    """Its result is wanted as the input of a quantized product, which here is the identity."""

    @property
    def num_heads(self):
        return self.num_kv_heads * self.group

    @property
    def width(self):
        return (self.num_heads + 2 * self.num_kv_heads) * self.dim


class Sequences:
    """Sequences with random queries, keys and values, halves, in shuffled blocks of a poisoned cache."""

    def __init__(self, library, heads, seq_lens, block_size=16, seed=0):
        self.library, self.heads, self.seq_lens, self.block_size = library, heads, seq_lens, block_size
        rng = np.random.default_rng(seed)
        self.qkv = [rng.standard_normal((n, heads.width)).astype(np.float16).astype(np.float32) for n in seq_lens]
        counts = [-(-n // block_size) for n in seq_lens]
        order = rng.permutation(sum(counts) + 3).astype(np.int32)
        self.cache = KVCache(
            num_blocks=len(order),
            block_size=block_size,
            num_layers=2,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.dim,
        )
        self.cache.data[:] = NAN
        # What lies behind a sequence's blocks is not read, so it may be no block at all.
        self.block_table = np.full((len(seq_lens), max(counts) + 1), -1, np.int32)
        for i, count in enumerate(counts):
            self.block_table[i, :count] = order[sum(counts[:i]) :][:count]

    def run(self, pool, ranges):
        """Compute tokens `first` to `end` of each sequence in one step; a list of their results."""
        heads = self.heads
        x = np.concatenate([self.qkv[i][first:end] for i, (first, end) in ranges.items()])
        builder = ProgramBuilder(
            self.library,
            max_tokens=len(x),
            max_logit_rows=len(x),
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.dim,
            vocab_size=len(x),
        )
        qkv = builder.embedding(pack_float(self.library, x, TileKind.F32))
        builder.rope_write_kv(qkv, 1, num_heads=heads.num_heads, inverse_frequencies=None)
        out = builder.attention(
            qkv,
            1,
            num_heads=heads.num_heads,
            scale=heads.dim**-0.5,
            window=heads.window,
            soft_cap=heads.soft_cap,
        )
        if heads.is_quantized:
            out = builder.linear(out, pack_float(self.library, np.eye(out.width, dtype=np.float32), TileKind.INT8))
        program = builder.build(builder.select_rows(out))
        program.memory[:] = 0xFF
        counts = np.array([end - first for first, end in ranges.values()])
        positions = np.concatenate([np.arange(first, end) for first, end in ranges.values()])
        tables = self.block_table[list(ranges)]
        blocks = tables[np.arange(len(ranges)).repeat(counts), positions // self.block_size]
        step = StepArrays(
            token_ids=np.arange(len(x), dtype=np.int32),
            positions=positions.astype(np.int32),
            slots=(blocks * self.block_size + positions % self.block_size).astype(np.int32)[None],
            query_start=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
            seq_lens=np.array([end for _, end in ranges.values()], np.int32),
            block_table=np.ascontiguousarray(tables)[None],
            logit_rows=np.arange(len(x), dtype=np.int32),
        )
        return np.split(program.run(step, [self.cache], pool).copy(), counts.cumsum()[:-1])

    def expected(self, i):
        heads = self.heads
        x = self.qkv[i].astype(np.float64).reshape(len(self.qkv[i]), -1, heads.dim)
        query = x[:, : heads.num_heads]
        keys = x[:, heads.num_heads : -heads.num_kv_heads].repeat(heads.group, axis=1)
        values = x[:, -heads.num_kv_heads :].repeat(heads.group, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, keys) * heads.dim**-0.5
        if heads.soft_cap:
            scores = heads.soft_cap * np.tanh(scores / heads.soft_cap)
        places = np.arange(len(x))
        is_seen = places[None] <= places[:, None]
        if heads.window:
            is_seen &= places[None] > places[:, None] - heads.window
        weights = np.where(is_seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, values).reshape(len(x), -1)


def check_whole(library, pool, heads, seq_lens=LENS, block_size=16, tolerance=3e-6):
    """Whole prompts, then again their last token only."""
    sequences = Sequences(library, heads, seq_lens, block_size)
    results = sequences.run(pool, {i: (0, n) for i, n in enumerate(seq_lens)})
    for i, result in enumerate(results):
        expected = sequences.expected(i)
        assert np.linalg.norm(result - expected) / np.linalg.norm(expected) < tolerance
    again = sequences.run(pool, {i: (n - 1, n) for i, n in enumerate(seq_lens)})
    assert all(np.array_equal(result[-1:], last) for result, last in zip(results, again, strict=True))


@pytest.mark.parametrize(("group", "dim"), [(1, 128), (2, 64), (3, 64), (4, 80), (5, 64), (6, 48), (8, 96), (3, 128)])
def test_each_query_attends_to_what_came_before_it(library, pool, isa, group, dim):
    check_whole(library, pool, Heads(group=group, dim=dim))


@pytest.mark.parametrize("dim", [8, 24, 40])
def test_small_heads(library, pool, isa, dim):
    check_whole(library, pool, Heads(dim=dim))


@pytest.mark.parametrize("block_size", [32, 48])
def test_larger_blocks(library, pool, block_size):
    check_whole(library, pool, Heads(), block_size=block_size)


@pytest.mark.parametrize("window", [1, 16, 17, 100, 1000])
def test_a_window_hides_what_is_older(library, pool, isa, window):
    check_whole(library, pool, Heads(window=window), [1, 17, 200, 600])


@pytest.mark.parametrize("window", [1, 16, 17, 300])
def test_blocks_behind_the_window_are_not_there(library, pool, isa, window):
    """Neither their content nor their ids."""
    lens = [600, 77, 300]
    whole = Sequences(library, Heads(window=window), lens)
    expected = whole.run(pool, {i: (0, n) for i, n in enumerate(lens)})
    for counts in ([1, 1, 1], [30, 1, 50]):
        sequences = Sequences(library, Heads(window=window), lens)
        sequences.run(pool, {i: (0, n) for i, n in enumerate(lens)})
        starts = [n - count for n, count in zip(lens, counts, strict=True)]
        for i, start in enumerate(starts):
            for column in range(max(0, start - window + 1) // 16):
                sequences.cache.block(sequences.block_table[i, column])[:] = NAN
                sequences.block_table[i, column] = -1
        results = sequences.run(pool, {i: (start, lens[i]) for i, start in enumerate(starts)})
        for i, start in enumerate(starts):
            assert np.array_equal(results[i], expected[i][start:])
        # One that is seen must be there.
        sequences.block_table[0, max(0, starts[0] - window + 1) // 16] = -1
        with pytest.raises(ValueError, match="out of range"):
            sequences.run(pool, {0: (starts[0], lens[0])})


def test_a_soft_cap_bounds_scores(library, pool, isa):
    check_whole(library, pool, Heads(soft_cap=2.0))


def test_long_sequences_are_worked_on_in_splits(library, pool, isa):
    check_whole(library, pool, Heads(num_kv_heads=1, dim=64), [255, 256, 257, 1030])


def test_the_result_can_be_written_quantized(library, pool, isa):
    check_whole(library, pool, Heads(is_quantized=True), tolerance=1e-2)
    check_whole(library, pool, Heads(is_quantized=True, dim=80), tolerance=1e-2)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_neither_batch_nor_chunks_nor_threads_change_a_bit(library, isa, num_threads, window):
    """Chunks of all sizes, beside others, on other numbers of threads, and token by token: the same bits."""
    lens = [40, 300, 550]
    heads = Heads(num_kv_heads=1, group=2, dim=32, window=window)
    whole = Sequences(library, heads, lens)
    expected = whole.run(ThreadPool(library, 1), {i: (0, n) for i, n in enumerate(lens)})
    pool = ThreadPool(library, num_threads)
    sequences = Sequences(library, heads, lens)
    rng = np.random.default_rng(1)
    done = [0] * len(lens)
    while done != lens:
        ranges = {}
        for i in rng.permutation(len(lens)).tolist():
            if done[i] < lens[i] and rng.random() < 0.7:
                end = min(lens[i], done[i] + int(rng.choice([1, 1, 2, 5, 23, 90])))
                ranges[i], done[i] = (done[i], end), end
        if ranges:
            for (i, (first, end)), result in zip(ranges.items(), sequences.run(pool, ranges), strict=True):
                assert np.array_equal(result, expected[i][first:end])


def test_values_too_large_for_halves_are_bounded(library, pool, isa):
    """A value becomes the largest half instead of infinity, which times a weight of zero would not be a number."""
    sequences = Sequences(library, Heads(), [20])
    sequences.qkv[0][19, -1] = 1e9
    result = sequences.run(pool, {0: (0, 20)})[0]
    assert np.isfinite(result).all()
    assert np.allclose(result[:19], sequences.expected(0)[:19], atol=1e-5)


def test_a_query_that_is_not_a_number_stays_alone(library, pool, isa):
    sequences = Sequences(library, Heads(), [20, 30])
    clean = sequences.run(pool, {0: (0, 20), 1: (0, 30)})
    sequences.qkv[0][7, :64] = np.nan
    results = sequences.run(pool, {0: (0, 20), 1: (0, 30)})
    assert np.isnan(results[0][7, :64]).all()
    assert np.array_equal(np.delete(results[0], 7, axis=0), np.delete(clean[0], 7, axis=0))
    assert np.array_equal(results[1], clean[1])


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 20])
def test_what_is_not_a_number_counts_only_where_it_is_seen(library, pool, isa, part, num_rows):
    """Neither a query before it, in the same step or another, nor other heads. Drafts may be such tokens, and others
    begin behind a prefix that ends before them."""
    heads = Heads(num_kv_heads=2, group=2, dim=24, window=12)
    sequences, clean = (Sequences(library, heads, [20]) for _ in range(2))
    expected = clean.run(pool, {0: (0, 20)})[0]
    sequences.qkv[0][7, -1 if part == "value" else -2 * heads.dim - 1] = np.nan  # Of the last head.
    steps = [(first, min(first + num_rows, 20)) for first in range(0, 20, num_rows)]
    result = np.concatenate([sequences.run(pool, {0: step})[0] for step in steps])
    is_seen = np.zeros(result.shape, bool)
    is_seen[7:19, 2 * heads.dim :] = True
    assert np.isnan(result[is_seen]).all()
    assert np.array_equal(result[~is_seen], expected[~is_seen])


@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 80), (64, 32), (24, 12)])
def test_rope_rotates_pairs_and_writes_to_the_tokens_slots(library, pool, isa, dim, rotary_dim):
    heads = Heads(dim=dim)
    sequences = Sequences(library, heads, [50])
    frequencies = (10000.0 ** -(np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)
    x = sequences.qkv[0]
    builder = ProgramBuilder(library, max_tokens=50, max_logit_rows=50, num_kv_heads=2, head_dim=dim, vocab_size=50)
    qkv = builder.embedding(pack_float(library, x, TileKind.F32))
    builder.rope_write_kv(qkv, 0, num_heads=6, inverse_frequencies=frequencies)
    program = builder.build(builder.select_rows(qkv))
    positions = np.arange(50, dtype=np.int32)
    slots = sequences.block_table[0, positions // 16] * 16 + positions % 16
    step = StepArrays(positions, positions, slots.astype(np.int32)[None], np.array([0, 50], np.int32),
                      np.array([50], np.int32), sequences.block_table[None, :, :4].copy(), positions)  # fmt: skip
    actual = program.run(step, [sequences.cache], pool).reshape(50, 10, dim)

    angles = (positions[:, None].astype(np.float32) * frequencies).astype(np.float64)[:, None]
    expected = x.reshape(50, 10, dim).astype(np.float64)
    half = rotary_dim // 2
    first, second = expected[:, :8, :half].copy(), expected[:, :8, half:rotary_dim].copy()
    expected[:, :8, :half] = first * np.cos(angles) - second * np.sin(angles)
    expected[:, :8, half:rotary_dim] = second * np.cos(angles) + first * np.sin(angles)
    assert np.allclose(actual, expected, atol=1e-6)
    stored_keys = sequences.cache.keys(0)[slots // 16, :, :, slots % 16]
    stored_values = sequences.cache.values(0)[slots // 16, :, slots % 16]
    assert np.allclose(stored_keys, expected[:, 6:8], rtol=1e-3, atol=1e-4)
    assert np.array_equal(stored_values, x.reshape(50, 10, dim)[:, 8:].astype(np.float16))
    is_written = np.zeros(len(sequences.cache.keys(0)) * 16, bool)
    is_written[slots] = True
    untouched = sequences.cache.keys(0).transpose(0, 3, 1, 2).reshape(len(is_written), -1)[~is_written]
    assert np.isnan(untouched).all()
