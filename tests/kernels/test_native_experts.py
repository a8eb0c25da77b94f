"""Mixtures of experts of the native backend: against numpy, and the same bits for a row whatever else is computed."""

import numpy as np
import pytest
from trioengine_kernels.native.library import ThreadPool
from trioengine_kernels.native.program import KVCache, ProgramBuilder, StepArrays
from trioengine_kernels.native.structures import Activation
from trioengine_kernels.native.tiles import TileKind, pack_float

HIDDEN, INNER = 64, 48


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


class Experts:
    """Random ones, their gates and values packed in `kinds`."""

    def __init__(self, library, num_experts, kinds=(TileKind.F32,), seed=0):
        self.library = library
        self.router = random(num_experts, HIDDEN, seed=seed)
        self.gate_up = random(num_experts, 2 * INNER, HIDDEN, seed=seed + 1) / HIDDEN**0.5
        self.down = random(num_experts, HIDDEN, INNER, seed=seed + 2) / INNER**0.5
        pieces = [np.split(matrix, len(kinds)) for matrix in self.gate_up]
        self.tiles = [
            (
                [
                    pack_float(library, np.ascontiguousarray(part), kind)
                    for part, kind in zip(parts, kinds, strict=True)
                ],
                [pack_float(library, down, kinds[-1])],
            )
            for parts, down in zip(pieces, self.down, strict=True)
        ]

    def run(self, pool, x, num_chosen=2, is_normalized=True, select=None):
        """What the rows of `x` become; `select`: only for these rows, chosen before."""
        rows = np.arange(len(x), dtype=np.int32) if select is None else np.array(select, np.int32)
        builder = ProgramBuilder(
            self.library,
            max_tokens=len(x),
            max_logit_rows=len(x),
            num_kv_heads=1,
            head_dim=16,
            vocab_size=len(x),
        )
        hidden = builder.embedding(pack_float(self.library, x, TileKind.F32))
        if select is not None:
            hidden = builder.select_rows(hidden)
        logits = builder.linear(hidden, pack_float(self.library, self.router, TileKind.F32))
        mixed = builder.experts(
            hidden,
            logits,
            self.tiles,
            num_chosen=num_chosen,
            is_normalized=is_normalized,
            activation=Activation.SILU,
        )
        program = builder.build(mixed if select is not None else builder.select_rows(mixed))
        program.memory[:] = 0xFF
        tokens = np.arange(len(x), dtype=np.int32)
        num_blocks = -(-len(x) // 16)
        step = StepArrays(tokens, tokens, tokens[None], np.array([0, len(x)], np.int32), np.array([len(x)], np.int32),
                          np.arange(num_blocks, dtype=np.int32)[None, None], rows)  # fmt: skip
        cache = KVCache(num_blocks=num_blocks, block_size=16, num_layers=1, num_kv_heads=1, head_dim=16)
        return program.run(step, [cache], pool).copy()

    def expected(self, x, num_chosen, is_normalized):
        x = x.astype(np.float64)
        logits = x @ self.router.T
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        mixed = np.zeros_like(x)
        for row, probabilities in enumerate(weights):
            best = np.argsort(-probabilities, kind="stable")[:num_chosen]
            total = probabilities[best].sum() if is_normalized else 1.0
            for expert in best:
                gate, up = np.split(self.gate_up[expert] @ x[row], 2)
                mixed[row] += probabilities[expert] / total * (self.down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        return mixed


def difference(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(("rows", "num_experts", "num_chosen"), [(1, 1, 1), (3, 8, 2), (40, 5, 5), (90, 33, 8)])
def test_experts_of_floats_are_the_formula(library, pool, isa, rows, num_experts, num_chosen, is_normalized):
    experts, x = Experts(library, num_experts), random(rows, HIDDEN, seed=7)
    actual = experts.run(pool, x, num_chosen, is_normalized)
    assert difference(actual, experts.expected(x, num_chosen, is_normalized)) < 1e-5


@pytest.mark.parametrize(
    ("kinds", "tolerance"),
    [
        ((TileKind.INT8,), 0.02),
        ((TileKind.INT4,), 0.3),
        ((TileKind.INT8, TileKind.F16), 0.02),
        ((TileKind.F16, TileKind.INT8), 0.02),
    ],
)
def test_experts_of_any_tiles_are_close_to_the_formula(library, pool, isa, kinds, tolerance):
    """Gates and values of different types, as in Q4_K_M files, too."""
    experts, x = Experts(library, 6, kinds), random(21, HIDDEN, seed=7)
    assert difference(experts.run(pool, x), experts.expected(x, 2, True)) < tolerance


@pytest.mark.parametrize("kind", [TileKind.F32, TileKind.INT8, TileKind.INT4])
def test_a_row_has_the_same_bits_in_any_batch(library, kind):
    """Whichever experts the other rows go through, and on however many threads."""
    experts, x = Experts(library, 7, (kind,)), random(70, HIDDEN, seed=7)
    whole = experts.run(ThreadPool(library, 3), x)
    single = ThreadPool(library, 1)
    for rows in ([0], [69, 3], list(range(5, 40))):
        assert np.array_equal(experts.run(single, x[rows]), whole[rows])


def test_experts_work_on_the_wanted_rows_only(library, pool):
    experts, x = Experts(library, 5), random(20, HIDDEN, seed=7)
    whole = experts.run(pool, x)
    for rows in ([4], [19, 0, 7], []):
        assert np.array_equal(experts.run(pool, x, select=rows), whole[rows])


def test_experts_that_do_not_fit_are_refused(library, pool):
    x = random(3, HIDDEN)
    experts = Experts(library, 4)
    with pytest.raises(ValueError, match="5 of 4"):
        experts.run(pool, x, num_chosen=5)
    experts.tiles = experts.tiles[:3]
    with pytest.raises(ValueError, match="cannot choose"):
        experts.run(pool, x)
    experts = Experts(library, 4)
    experts.tiles[2] = ([pack_float(library, random(2 * INNER, HIDDEN + 1), TileKind.F32)], experts.tiles[2][1])
    with pytest.raises(ValueError, match="same sizes"):
        experts.run(pool, x)
    experts = Experts(library, 4)
    for i, (gate_up, _) in enumerate(experts.tiles):
        experts.tiles[i] = (gate_up, [pack_float(library, random(HIDDEN, INNER + 1), TileKind.F32)])
    with pytest.raises(ValueError, match="do not fit"):
        experts.run(pool, x)
