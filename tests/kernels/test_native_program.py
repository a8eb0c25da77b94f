"""Whole programs of the native backend: a small decoder against numpy, and the same bits however it is scheduled."""

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trioengine_kernels.native.buffers import BufferPlan
from trioengine_kernels.native.library import ThreadPool
from trioengine_kernels.native.program import KVCache, ProgramBuilder, StepArrays
from trioengine_kernels.native.tiles import TileKind, pack_float

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, LAYERS = 96, 6, 2, 32, 160, 101, 2
EPSILON, BLOCK_SIZE, MAX_TOKENS = 1e-5, 16, 96
FREQUENCIES = (10000.0 ** -(np.arange(0, DIM, 2) / DIM)).astype(np.float32)


class Model:
    """Random weights of a decoder, and its programs."""

    def __init__(self, library, kind, seed=0):
        self.library = library
        rng = np.random.default_rng(seed)

        def matrix(rows, columns):
            weights = rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)
            return weights, pack_float(library, weights, kind)

        self.embedding = matrix(VOCAB, HIDDEN)
        self.layers = [
            (
                matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                rng.standard_normal((HEADS + 2 * KV_HEADS) * DIM, dtype=np.float32),
                matrix(HIDDEN, HEADS * DIM),
                matrix(2 * INNER, HIDDEN),
                matrix(HIDDEN, INNER),
                *(rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32) for _ in range(2)),
            )
            for _ in range(LAYERS)
        ]
        self.final_norm = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)

    def program(self):
        builder = ProgramBuilder(
            self.library,
            max_tokens=MAX_TOKENS,
            max_logit_rows=MAX_TOKENS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            vocab_size=VOCAB,
        )
        residual = builder.embedding(self.embedding[1])
        norms = [layer[5] for layer in self.layers[1:]] + [self.final_norm]
        x = builder.rms_norm(residual, self.layers[0][5], EPSILON)
        for i, (qkv, bias, output, gate_up, down, _, mlp_norm) in enumerate(self.layers):
            projected = builder.linear(x, qkv[1], bias)
            builder.rope_write_kv(projected, i, num_heads=HEADS, inverse_frequencies=FREQUENCIES)
            attended = builder.attention(projected, i, num_heads=HEADS, scale=DIM**-0.5)
            x = builder.add_rms_norm(builder.linear(attended, output[1]), residual, mlp_norm, EPSILON)
            gated = builder.silu_mul(builder.linear(x, gate_up[1]))
            x = builder.add_rms_norm(builder.linear(gated, down[1]), residual, norms[i], EPSILON)
        program = builder.build(builder.linear(builder.select_rows(x), self.embedding[1]))
        program.memory[:] = 0xFF
        return program

    def expected(self, token_ids):
        """The logits of all tokens, in float64."""

        def norm(x, weight):
            return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPSILON) * weight

        residual = self.embedding[0][token_ids].astype(np.float64)
        angles = np.arange(len(token_ids))[:, None, None] * FREQUENCIES.astype(np.float64)
        for qkv, bias, output, gate_up, down, attention_norm, mlp_norm in self.layers:
            heads = (norm(residual, attention_norm) @ qkv[0].T + bias).reshape(len(token_ids), -1, DIM)
            first, second = heads[..., : DIM // 2], heads[..., DIM // 2 :]
            cos, sin = np.cos(angles), np.sin(angles)
            rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
            keys = rotated[:, HEADS : HEADS + KV_HEADS].repeat(HEADS // KV_HEADS, axis=1)
            values = heads[:, HEADS + KV_HEADS :].repeat(HEADS // KV_HEADS, axis=1)
            scores = np.einsum("qhd,khd->hqk", rotated[:, :HEADS], keys) * DIM**-0.5
            scores = np.where(np.tri(len(token_ids), dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            attended = np.einsum("hqk,khd->qhd", weights, values).reshape(len(token_ids), -1)
            residual = residual + attended @ output[0].T
            gate, up = np.split(norm(residual, mlp_norm) @ gate_up[0].T, 2, axis=1)
            residual = residual + (gate / (1 + np.exp(-gate)) * up) @ down[0].T
        return norm(residual, self.final_norm) @ self.embedding[0].T


@attrs.frozen
class Work:
    """Tokens `first` to `end` of a sequence."""

    sequence: int
    first: int
    end: int


class Run:
    """Sequences that a program computes step by step, in shuffled blocks of a poisoned cache."""

    def __init__(self, program, sequences, pool, seed=0):
        self.program, self.sequences, self.pool = program, sequences, pool
        blocks_per_sequence = -(-max(map(len, sequences)) // BLOCK_SIZE)
        num_blocks = blocks_per_sequence * len(sequences) + 1
        order = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
        self.block_table = order[:-1].reshape(len(sequences), -1)
        self.cache = KVCache(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM
        )
        self.cache.data[:] = 0x7E00

    def step(self, works):
        """The logits of every token, one array for each work."""
        counts = np.array([work.end - work.first for work in works])
        positions = np.concatenate([np.arange(work.first, work.end) for work in works]).astype(np.int32)
        tables = np.ascontiguousarray(self.block_table[[work.sequence for work in works]])
        blocks = tables[np.arange(len(works)).repeat(counts), positions // BLOCK_SIZE]
        ids = np.concatenate([self.sequences[work.sequence][work.first : work.end] for work in works])
        step = StepArrays(
            token_ids=ids.astype(np.int32),
            positions=positions,
            slots=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE).astype(np.int32)[None],
            query_start=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
            seq_lens=np.array([work.end for work in works], np.int32),
            block_table=tables[None],
            logit_rows=np.arange(len(ids), dtype=np.int32),
        )
        return np.split(self.program.run(step, [self.cache], self.pool).copy(), counts.cumsum()[:-1])


def random_ids(*lens):
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, n) for n in lens]


@pytest.fixture(scope="module")
def model(library):
    return Model(library, TileKind.INT8)


@pytest.fixture(scope="module")
def alone(library, model):
    """Two sequences, each computed alone, whole, by one thread: what all other schedules must reproduce."""
    sequences = random_ids(50, 37)
    program = model.program()
    results = [
        Run(program, sequences, ThreadPool(library, 1)).step([Work(i, 0, len(ids))])[0]
        for i, ids in enumerate(sequences)
    ]
    return sequences, results


def test_a_decoder_of_floats_is_the_formula(library, pool, isa):
    model = Model(library, TileKind.F32)
    (ids,) = random_ids(50)
    actual = Run(model.program(), [ids], pool).step([Work(0, 0, 50)])[0]
    expected = model.expected(ids)
    # Keys and values are halves.
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) < 1e-3


@pytest.mark.parametrize(("kind", "tolerance"), [(TileKind.INT8, 0.03), (TileKind.INT4, 0.3)])
def test_a_quantized_decoder_is_close_to_the_formula(library, pool, isa, kind, tolerance):
    model = Model(library, kind)
    (ids,) = random_ids(50)
    actual = Run(model.program(), [ids], pool).step([Work(0, 0, 50)])[0]
    expected = model.expected(ids)
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) < tolerance


@settings(max_examples=25, deadline=None)
@given(data=st.data(), num_threads=st.integers(1, 3), seed=st.integers(0, 5))
def test_the_same_tokens_give_the_same_bits_in_any_schedule(library, model, alone, data, num_threads, seed):
    sequences, expected = alone
    pool = ThreadPool(library, num_threads)
    run = Run(model.program(), sequences, pool, seed)
    done = [0] * len(sequences)
    while any(n < len(ids) for n, ids in zip(done, sequences, strict=True)):
        works = []
        for i in data.draw(st.sampled_from([(0, 1), (1, 0)])):
            count = min(data.draw(st.sampled_from([50, 16, 7, 1, 0])), len(sequences[i]) - done[i])
            if count:
                works.append(Work(i, done[i], done[i] + count))
                done[i] += count
        if works:
            for work, result in zip(works, run.step(works), strict=True):
                assert np.array_equal(result, expected[work.sequence][work.first : work.end])
    pool.close()


def test_a_program_can_run_again_and_nothing_is_left_of_the_step_before(model, alone, pool):
    sequences, expected = alone
    run = Run(model.program(), sequences, pool)
    for _ in range(3):
        for i in (0, 1):
            assert np.array_equal(run.step([Work(i, 0, len(sequences[i]))])[0], expected[i])


def test_logits_are_computed_for_the_wanted_rows_only(library, model, alone, pool):
    sequences, expected = alone
    run = Run(model.program(), sequences, pool)
    places = np.arange(30, dtype=np.int32)
    slots = run.block_table[0, places // 16] * 16 + places % 16
    for rows in ([29], [], [3, 3, 0]):
        step = StepArrays(
            sequences[0][:30].astype(np.int32), places, slots.astype(np.int32)[None], np.array([0, 30], np.int32),
            np.array([30], np.int32), run.block_table[None, :1].copy(), np.array(rows, np.int32),
        )  # fmt: skip
        assert np.array_equal(run.program.run(step, [run.cache], pool), expected[0][rows])


def valid_step():
    return StepArrays(
        token_ids=np.array([1, 2, 3], np.int32),
        positions=np.array([0, 1, 0], np.int32),
        slots=np.array([[0, 1, 16]], np.int32),
        query_start=np.array([0, 2, 3], np.int32),
        seq_lens=np.array([2, 1], np.int32),
        block_table=np.array([[[0], [1]]], np.int32),
        logit_rows=np.array([1, 2], np.int32),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", [1, 2, VOCAB]),
        ("token_ids", [-1, 2, 3]),
        ("token_ids", [1, 2]),
        ("positions", [0, 1, -1]),
        ("slots", [[0, 1, 32]]),
        ("slots", [[0, 1, -1]]),
        ("slots", [0, 1, 16]),
        ("query_start", [0, 2, 4]),
        ("query_start", [0, 3, 3]),
        ("query_start", [1, 2, 3]),
        ("query_start", [0, 3]),
        ("seq_lens", [1, 1]),
        ("seq_lens", [2, 17]),
        ("seq_lens", [2]),
        ("block_table", [[[0], [2]]]),
        ("block_table", [[[0], [-1]]]),
        ("block_table", [[[0]]]),
        ("block_table", [[0], [1]]),
        ("logit_rows", [3]),
        ("logit_rows", [-1]),
        ("logit_rows", [0] * (MAX_TOKENS + 1)),
    ],
)
def test_a_step_that_would_leave_memory_is_refused(library, model, pool, field, value):
    cache = KVCache(num_blocks=2, block_size=16, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM)
    program = model.program()
    assert np.isfinite(program.run(valid_step(), [cache], pool)).all()
    with pytest.raises(ValueError):
        program.run(attrs.evolve(valid_step(), **{field: np.array(value, np.int32)}), [cache], pool)


def test_a_foreign_cache_is_refused(model, pool):
    program = model.program()
    for changed in ({"num_layers": LAYERS - 1}, {"num_kv_heads": 1}, {"head_dim": 64}):
        sizes = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": DIM, **changed}
        with pytest.raises(ValueError, match="cache"):
            program.run(valid_step(), [KVCache(num_blocks=2, block_size=16, **sizes)], pool)


def run_groups(library, pool, number, block_tables, caches, kv_groups=(0, 1)):
    """Two layers of the same numbers in KV groups of their own, the second with a window: what layer `number` gives."""
    num_tokens, heads = 60, KV_HEADS * 2
    x = np.random.default_rng(8).standard_normal((num_tokens, (heads + 2 * KV_HEADS) * DIM), dtype=np.float32)
    rows = pack_float(library, x, TileKind.F32)
    builder = ProgramBuilder(
        library,
        max_tokens=num_tokens,
        max_logit_rows=num_tokens,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        vocab_size=num_tokens,
    )
    outs = []
    for kv_group, window in zip(kv_groups, (None, 20), strict=True):
        qkv = builder.embedding(rows)
        builder.rope_write_kv(qkv, 0, num_heads=heads, inverse_frequencies=None, kv_group=kv_group)
        outs.append(builder.attention(qkv, 0, num_heads=heads, scale=DIM**-0.5, window=window, kv_group=kv_group))
    program = builder.build(builder.select_rows(outs[number]))
    places = np.arange(num_tokens, dtype=np.int32)
    step = StepArrays(
        token_ids=places,
        positions=places,
        slots=np.ascontiguousarray(block_tables[:, places // 16] * 16 + places % 16, np.int32),
        query_start=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([num_tokens], np.int32),
        block_table=np.ascontiguousarray(block_tables[:, None], np.int32),
        logit_rows=places,
    )
    return program.run(step, caches, pool).copy()


def group_caches(*nums_blocks):
    caches = [
        KVCache(num_blocks=num, block_size=16, num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM) for num in nums_blocks
    ]
    for cache in caches:
        cache.data[:] = 0x7E00
    return caches


def test_each_kv_group_has_its_own_cache_and_blocks(library, pool):
    tables = np.array([[3, 0, 1, 2], [9, 2, 5, 7]])
    same = np.array([[0, 1, 2, 3], [0, 1, 2, 3]])
    for number in (0, 1):
        results = []
        for block_tables, nums_blocks in ((tables, (4, 10)), (same, (4, 4))):
            caches = group_caches(*nums_blocks)
            results.append(run_groups(library, pool, number, block_tables, caches))
            for cache, table in zip(caches, block_tables, strict=True):
                is_whole = np.isfinite(cache.keys(0)).all(axis=(1, 2, 3))
                assert {*np.flatnonzero(is_whole)} == {*table[:3]}
        assert np.isfinite(results[0]).all()
        assert np.array_equal(*results)


def test_kv_groups_are_checked(library, pool):
    tables = np.array([[0, 1, 2, 3], [0, 1, 2, 3]])
    with pytest.raises(ValueError, match="fewer caches"):
        run_groups(library, pool, 0, tables[:1], group_caches(4))
    with pytest.raises(ValueError, match="out of range"):
        run_groups(library, pool, 0, tables, group_caches(4, 3))
    with pytest.raises(ValueError, match="in their order"):
        run_groups(library, pool, 0, tables, group_caches(4, 4), kv_groups=(0, 3))


def test_buffers_share_memory(library, model):
    """A model of many layers needs no more memory for a step's activations than one of few."""
    once = model.program().memory.nbytes
    model_of_more = Model(library, TileKind.INT8)
    model_of_more.layers = model_of_more.layers * 4
    assert model_of_more.program().memory.nbytes == once


def test_a_buffer_that_no_machine_has_room_for_is_a_lack_of_memory():
    with pytest.raises(MemoryError, match="too large"):
        BufferPlan().add(1 << 50)
