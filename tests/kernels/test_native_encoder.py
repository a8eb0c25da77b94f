"""Layer norms, activations, attention to all of a text, and kept hidden states, against numpy in float64."""

import math

import numpy as np
import pytest
from trioengine_kernels.native.library import ThreadPool
from trioengine_kernels.native.program import ProgramBuilder, StepArrays
from trioengine_kernels.native.structures import Activation
from trioengine_kernels.native.tiles import TileKind, pack_float

EPSILON = 1e-12


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def step_of(lengths, *, positions=None, logit_rows=(), hidden_rows=()):
    """Texts of these lengths; token i of the step has the id i."""
    count = sum(lengths)
    tokens = np.arange(count, dtype=np.int32)
    return StepArrays(
        token_ids=tokens,
        positions=tokens if positions is None else positions,
        slots=np.empty((0, count), np.int32),
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        seq_lens=np.array(lengths, np.int32),
        block_table=np.empty((0, len(lengths), 0), np.int32),
        logit_rows=np.array(logit_rows, np.int32),
        hidden_rows=np.array(hidden_rows, np.int32),
    )


def builder_of(library, x, *, head_dim=16):
    builder = ProgramBuilder(
        library, max_tokens=len(x), max_logit_rows=len(x), num_kv_heads=1, head_dim=head_dim, vocab_size=len(x)
    )
    return builder, builder.embedding(pack_float(library, x, TileKind.F32))


def run(library, pool, x, record, lengths=None, head_dim=16):
    """What `record(builder, x)` gives for the rows of `x`, with all memory poisoned before."""
    builder, buffer = builder_of(library, x, head_dim=head_dim)
    program = builder.build(builder.select_rows(record(builder, buffer)))
    program.memory[:] = 0xFF
    return program.run(step_of(lengths or [len(x)], logit_rows=range(len(x))), (), pool).copy()


def attend(library, builder, qkv, num_heads, scale):
    """Attention of queries, keys and values that lie side by side."""
    width = qkv.width // 3
    eye = np.eye(3 * width, dtype=np.float32)
    query_key, value = (
        builder.linear(qkv, pack_float(library, eye[part], TileKind.F32))
        for part in (slice(0, 2 * width), slice(2 * width, None))
    )
    return builder.full_attention(query_key, value, num_heads=num_heads, scale=scale)


def layer_norm(x, weight, bias):
    x = x.astype(np.float64)
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + EPSILON) * weight + bias


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (40, 32), (5, 100), (2, 384)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_layer_norm(library, pool, isa, rows, width, has_residual):
    """Of a row, or of a sum; far from zero, where a careless variance would be lost."""
    x, weight, bias = random(rows, width) + 100, random(width, seed=1), random(width, seed=2)

    def record(builder, buffer):
        residual = builder.embedding(pack_float(library, x[::-1], TileKind.F32)) if has_residual else None
        return builder.layer_norm(buffer, residual, weight, bias, EPSILON)

    expected = layer_norm(x + x[::-1].astype(np.float64) if has_residual else x, weight, bias)
    if width == 1:
        expected = np.broadcast_to(bias, expected.shape)
    assert np.allclose(run(library, pool, x, record), expected, rtol=1e-4, atol=2e-4)


def activated(x, activation):
    x = x.astype(np.float64)
    match activation:
        case Activation.SILU:
            return x / (1 + np.exp(-x))
        case Activation.GELU_TANH:
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        case Activation.GELU:
            return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        case Activation.RELU:
            return np.maximum(x, 0)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (33, 64), (2, 45)])
def test_activations(library, pool, isa, activation, rows, width):
    x = random(rows, width) * 4
    eye = pack_float(library, np.eye(width, dtype=np.float32), TileKind.F32)
    actual = run(library, pool, x, lambda builder, buffer: builder.activated_linear(buffer, eye, None, activation))
    assert np.allclose(actual, activated(x, activation), rtol=3e-6, atol=2e-6)


def test_gelu_far_from_zero(library, pool, isa):
    """Nothing of a large negative number is left, all of a large one; what is no number stays none."""
    x = np.array([[-1e30, -100, -5.3, 5.3, 100, 1e30, np.inf, np.nan]], np.float32)
    eye = pack_float(library, np.eye(1, dtype=np.float32), TileKind.F32)
    actual = run(library, pool, x.T, lambda b, buffer: b.activated_linear(buffer, eye, None, Activation.GELU))[:, 0]
    assert np.allclose(actual[:3], 0, atol=1e-6)
    assert np.allclose(actual[3:6], x[0, 3:6], rtol=1e-6)
    assert actual[6] == np.inf
    assert np.isnan(actual[7])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", [TileKind.INT4, TileKind.INT8, TileKind.F16, TileKind.F32])
@pytest.mark.parametrize(("rows", "width"), [(1, 45), (7, 400), (150, 136), (130, 32)])
def test_activated_products(library, isa, num_threads, kind, rows, width):
    """The activation of what the product is, in every bit: as floats, and as what a product after it reads."""
    pool = ThreadPool(library, num_threads)
    x, bias = random(rows, 64), random(width, seed=1)
    up = pack_float(library, random(width, 64, seed=2), kind)
    down = pack_float(library, random(8, width, seed=3), TileKind.INT8)
    floats = run(library, pool, x, lambda b, buffer: b.activated_linear(buffer, up, bias, Activation.RELU))
    assert (floats == np.maximum(run(library, pool, x, lambda b, buffer: b.linear(buffer, up, bias)), 0)).all()
    expected = run(library, pool, floats, lambda b, buffer: b.linear(buffer, down))
    actual = run(
        library, pool, x, lambda b, buffer: b.linear(b.activated_linear(buffer, up, bias, Activation.RELU), down)
    )
    assert (actual == expected).all()


@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 3), (5, 31, 16), (37, 64, 50), (150, 1101, 40)])
def test_products_that_may_be_rounded(library, pool, isa, rows, columns, width):
    """Exact where bfloat16 holds the numbers; else each product loses up to two roundings to 8 bits. The rows beside
    one change no bit of it."""

    def run_product(x, weights, bias=None):
        tiles = pack_float(library, weights, TileKind.F32)
        return run(library, pool, x, lambda b, buffer: b.linear(buffer, tiles, bias, may_round=True))

    whole, whole_weights = np.round(random(rows, columns) * 4), np.round(random(width, columns, seed=1) * 4)
    bias = np.arange(width, dtype=np.float32)
    assert (run_product(whole, whole_weights, bias) == whole @ whole_weights.T + bias).all()

    x, weights = random(rows, columns), random(width, columns, seed=1)
    actual = run_product(x, weights)
    assert (np.abs(actual - x @ weights.T) <= 2**-7 * (np.abs(x) @ np.abs(weights).T) + 1e-5).all()
    assert (run_product(x[rows // 2 :], weights) == actual[rows // 2 :]).all()


@pytest.mark.parametrize("lengths", [[1], [16, 1, 15], [17, 40], [130, 3]])
@pytest.mark.parametrize(("num_heads", "dim"), [(1, 16), (3, 8), (2, 32), (2, 20)])
def test_full_attention(library, pool, isa, lengths, num_heads, dim):
    """Each token sees all of its own text and nothing of the others."""
    qkv = random(sum(lengths), 3 * num_heads * dim)

    def record(builder, buffer):
        return attend(library, builder, buffer, num_heads, dim**-0.5)

    actual = run(library, pool, qkv, record, lengths, head_dim=dim)
    first = 0
    for count in lengths:
        heads = qkv[first : first + count].astype(np.float64).reshape(count, 3, num_heads, dim)
        query, key, value = heads.swapaxes(0, 1)
        scores = np.einsum("qhd,khd->hqk", query, key) * dim**-0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        expected = np.einsum("hqk,khd->qhd", weights, value).reshape(count, -1)
        assert np.allclose(actual[first : first + count], expected, rtol=1e-5, atol=1e-5)
        first += count


def test_a_text_is_the_same_alone_and_in_company(library, pool, isa):
    """In every bit, whatever else is in the step."""
    lengths, dim = [5, 33, 16], 32
    qkv = random(sum(lengths), 3 * 2 * dim)

    def record(builder, buffer):
        attended = attend(library, builder, buffer, 2, 0.2)
        return builder.linear(attended, pack_float(library, random(24, 2 * dim, seed=3), TileKind.INT8))

    together = run(library, pool, qkv, record, lengths, head_dim=dim)
    assert (together[5:38] == run(library, pool, qkv[5:38], record, head_dim=dim)).all()


@pytest.mark.parametrize("operation", ["layer_norm", "activated_linear", "full_attention"])
def test_quantized_forms_are_those_of_the_floats(library, pool, isa, operation):
    """Products with quantized weights read what the operation before has quantized: the same as from its floats."""
    x = random(37, 96, seed=4)
    tiles = pack_float(library, random(32, 96 if operation != "full_attention" else 32, seed=5), TileKind.INT8)

    def record(builder, buffer, is_direct):
        match operation:
            case "layer_norm":
                out = builder.layer_norm(buffer, None, random(96, seed=6), random(96, seed=7), EPSILON)
            case "activated_linear":
                eye = pack_float(library, np.eye(96, dtype=np.float32), TileKind.F32)
                out = builder.activated_linear(buffer, eye, None, Activation.GELU)
            case _:
                out = attend(library, builder, buffer, 1, 0.3)
        if not is_direct:
            # Through another operation, which does not quantize.
            zeros = builder.linear(out, pack_float(library, np.zeros((out.width,) * 2, np.float32), TileKind.F32))
            builder.add(out, zeros)
            out = zeros
        return builder.linear(out, tiles)

    direct, through_floats = (
        run(library, pool, x, lambda b, buffer: record(b, buffer, is_direct), [30, 7], head_dim=32)  # noqa: B023
        for is_direct in (True, False)
    )
    assert (direct == through_floats).all()


def test_positions_choose_rows_and_are_checked(library, pool):
    """A position without a row would read foreign memory."""
    x, table = random(3, 8), random(5, 8, seed=1)
    builder, buffer = builder_of(library, x)
    rows = builder.position_embedding(pack_float(library, table, TileKind.F32))
    builder.add(buffer, rows)
    program = builder.build(builder.select_rows(rows))
    positions = np.array([4, 0, 4], np.int32)
    actual = program.run(step_of([2, 1], positions=positions, logit_rows=[0, 1, 2]), (), pool)
    assert (actual == x + table[positions]).all()
    with pytest.raises(ValueError, match="out of range"):
        program.run(step_of([2, 1], positions=positions + 1, logit_rows=[0]), (), pool)


def test_hidden_states_are_kept_beside_logits(library, pool):
    """Rows of logits come first, those of hidden states behind them, whichever the step wants."""
    x, weights = random(6, 16), random(32, 16, seed=1)
    builder, buffer = builder_of(library, x)
    hidden = builder.layer_norm(builder.select_rows_with_hidden(buffer), None, random(16, seed=2), x[0], EPSILON)
    logits = builder.linear(builder.keep_hidden(hidden), pack_float(library, weights, TileKind.INT8))
    program = builder.build(logits)
    program.memory[:] = 0xFF
    expected = layer_norm(x, random(16, seed=2), x[0])

    all_logits = program.run(step_of([6], logit_rows=range(6)), (), pool).copy()
    assert program.hidden_states().shape == (0, 16)
    for logit_rows, hidden_rows in (([5], [1, 0, 3]), ([], [2]), ([0, 1, 2], [3, 4, 5]), ([], [])):
        actual = program.run(step_of([4, 2], logit_rows=logit_rows, hidden_rows=hidden_rows), (), pool)
        assert (actual == all_logits[logit_rows]).all()
        assert np.allclose(program.hidden_states(), expected[hidden_rows], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="out of range"):
        program.run(step_of([6], hidden_rows=[6]), (), pool)
    with pytest.raises(ValueError, match="more hidden states"):
        program.run(step_of([6], logit_rows=[0], hidden_rows=range(6)), (), pool)
