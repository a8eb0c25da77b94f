"""Norms, gates and additions of the native backend against numpy in float64."""

import math

import numpy as np
import pytest
from trioengine_kernels.native.program import KVCache, ProgramBuilder, StepArrays
from trioengine_kernels.native.structures import Activation
from trioengine_kernels.native.tiles import TileKind, pack_float

EPSILON = 1e-5


def run(library, pool, x, record):
    """What `record(builder, x)` gives for the rows of `x`, with all memory poisoned before."""
    builder = ProgramBuilder(
        library, max_tokens=len(x), max_logit_rows=len(x), num_kv_heads=1, head_dim=16, vocab_size=len(x)
    )
    out = record(builder, builder.embedding(pack_float(library, x, TileKind.F32)))
    program = builder.build(builder.select_rows(out))
    program.memory[:] = 0xFF
    tokens = np.arange(len(x), dtype=np.int32)
    num_blocks = -(-len(x) // 16)
    step = StepArrays(tokens, tokens, tokens[None], np.array([0, len(x)], np.int32), np.array([len(x)], np.int32),
                      np.arange(num_blocks, dtype=np.int32)[None, None], tokens)  # fmt: skip
    cache = KVCache(num_blocks=num_blocks, block_size=16, num_layers=1, num_kv_heads=1, head_dim=16)
    return program.run(step, [cache], pool).copy()


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def norm(x, weight):
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPSILON) * weight


def identity(library, size):
    return pack_float(library, np.eye(size, dtype=np.float32), TileKind.INT8)


def whole(library, width):
    """Sums what is side by side."""
    halves = np.concatenate([np.eye(width, dtype=np.float32)] * 2, axis=1)
    return pack_float(library, halves, TileKind.F32)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (5, 32), (40, 100), (2, 576)])
def test_rms_norm(library, pool, isa, rows, width):
    x, weight = random(rows, width) * 3, random(width, seed=1)
    actual = run(library, pool, x, lambda builder, buffer: builder.rms_norm(buffer, weight, EPSILON))
    assert np.allclose(actual, norm(x, weight), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("rows", "width"), [(1, 7), (40, 100), (2, 576)])
def test_a_norm_after_an_addition_changes_the_residual(library, pool, isa, rows, width):
    x, weight = random(rows, width), random(width, seed=1)

    def record(builder, residual):
        first = builder.rms_norm(residual, weight, EPSILON)
        return builder.add_rms_norm(first, residual, weight, EPSILON)

    def record_residual(builder, residual):
        record(builder, residual)
        return residual

    total = x + norm(x, weight)
    assert np.allclose(run(library, pool, x, record_residual), total, rtol=2e-6, atol=1e-6)
    assert np.allclose(run(library, pool, x, record), norm(total, weight), rtol=1e-5, atol=1e-6)


def test_an_addition_changes_the_residual(library, pool, isa):
    x = random(9, 100)

    def record(builder, residual):
        builder.add(builder.rms_norm(residual, np.ones(100, np.float32), EPSILON), residual)
        return residual

    assert np.allclose(run(library, pool, x, record), x + norm(x, 1), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (2, 1536), (7, 40), (50, 64)])
def test_gated_activations(library, pool, isa, rows, width, activation):
    x = random(rows, 2 * width) * 4
    actual = run(library, pool, x, lambda builder, buffer: builder.gated(buffer, activation))
    gate, up = x[:, :width].astype(np.float64), x[:, width:].astype(np.float64)
    match activation:
        case Activation.SILU:
            activated = gate / (1 + np.exp(-gate))
        case Activation.GELU_TANH:
            activated = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        case Activation.GELU:
            activated = 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
        case Activation.RELU:
            activated = np.maximum(gate, 0)
    expected = activated * up
    assert (np.abs(actual - expected) <= 3e-6 * np.abs(expected) + 1e-6 * np.maximum(1, np.abs(up))).all()


@pytest.mark.parametrize("kind", [TileKind.INT4, TileKind.INT8])
@pytest.mark.parametrize(("width", "has_bias"), [(32, True), (96, False), (640, True), (40, False)])
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("num_readers", [1, 2])
def test_a_gate_behind_a_product_gives_the_same_bits_for_few_and_many_rows(
    library, pool, isa, kind, width, has_bias, is_quantized, num_readers
):
    """Of many rows, the product does the gate's work where nobody else reads its results."""
    tiles = pack_float(library, random(2 * width, 160), kind)
    bias = random(2 * width, seed=1) if has_bias else None
    x = random(130, 160, seed=2)

    def record(builder, buffer):
        gate_up = builder.linear(buffer, tiles, bias)
        gated = builder.silu_mul(gate_up)
        result = builder.linear(gated, identity(library, width)) if is_quantized else gated
        if num_readers == 2:
            ones = np.ones(2 * width, np.float32)
            builder.add(builder.linear(builder.rms_norm(gate_up, ones, EPSILON), whole(library, width)), result)
        return result

    expected = np.concatenate([run(library, pool, x[first : first + 7], record) for first in range(0, 130, 7)])
    for rows in (8, 33, 130):
        assert np.array_equal(run(library, pool, x[:rows], record), expected[:rows])


def test_extreme_gates_give_what_their_limits_are(library, pool, isa):
    x = np.array([[-1e4, 1e4, -100.0, 0.0, 1.0, 1.0, 1.0, 1.0]], np.float32)
    actual = run(library, pool, x, lambda builder, buffer: builder.silu_mul(buffer))
    assert np.allclose(actual, [[0, 1e4, 0, 0]], atol=1e-30)


@pytest.mark.parametrize("width", [20, 32, 100])
@pytest.mark.parametrize("rows", [1, 30])
def test_operations_write_their_results_quantized(library, pool, isa, rows, width):
    """A quantized product with the identity gives the result of the operation before it, to 8 bits."""
    x, weight = random(rows, 2 * width), random(width, seed=1)

    def record(builder, buffer):
        gated = builder.silu_mul(buffer)
        normed = builder.rms_norm(builder.linear(gated, identity(library, width)), weight, EPSILON)
        return builder.linear(normed, identity(library, width))

    gate, up = x[:, :width].astype(np.float64), x[:, width:]
    expected = norm(gate / (1 + np.exp(-gate)) * up, weight)
    error = np.linalg.norm(run(library, pool, x, record) - expected) / np.linalg.norm(expected)
    assert error < 2e-2


def test_a_result_can_be_read_quantized_and_as_floats(library, pool, isa):
    x, weight = random(5, 64), random(64, seed=1)

    def record(builder, buffer):
        normed = builder.rms_norm(buffer, weight, EPSILON)
        total = builder.linear(normed, identity(library, 64))
        builder.add(normed, total)
        return total

    error = np.abs(run(library, pool, x, record) - 2 * norm(x, weight)).max()
    assert error < 0.05


@pytest.mark.parametrize("width", [1, 8, 100])
def test_a_soft_cap_is_in_place(library, pool, isa, width):
    x = random(5, width) * 40
    x[0, 0], x[1, 0] = 1e30, -1e30

    def record(builder, buffer):
        builder.soft_cap(buffer, 30.0)
        return buffer

    assert np.allclose(run(library, pool, x, record), 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-6, atol=1e-5)
    with pytest.raises(ValueError, match="positive"):
        run(library, pool, x, lambda builder, buffer: builder.soft_cap(buffer, 0.0))


def test_embeddings_are_multiplied(library, pool, isa):
    x = random(5, 40)
    builder = ProgramBuilder(library, max_tokens=5, max_logit_rows=5, num_kv_heads=1, head_dim=16, vocab_size=5)
    program = builder.build(builder.select_rows(builder.embedding(pack_float(library, x, TileKind.F32), 3.7)))
    tokens = np.arange(5, dtype=np.int32)
    step = StepArrays(tokens, tokens, tokens[None], np.array([0, 5], np.int32), np.array([5], np.int32),
                      np.zeros((1, 1, 1), np.int32), tokens)  # fmt: skip
    cache = KVCache(num_blocks=1, block_size=16, num_layers=1, num_kv_heads=1, head_dim=16)
    assert np.array_equal(program.run(step, [cache], pool), x * np.float32(3.7))


@pytest.mark.parametrize("is_full", [False, True], ids=["of each head", "of all heads"])
@pytest.mark.parametrize("factor", [None, 1.0, 1.3])
def test_queries_and_keys_are_normalized_before_they_are_rotated(library, pool, isa, is_full, factor):
    """Of 24 elements of a head, 16 are rotated, and multiplied by a factor."""
    rows, heads, kv_heads, dim = 19, 6, 2, 24
    x = random(rows, (heads + 2 * kv_heads) * dim) * 3
    sizes = (heads * dim, kv_heads * dim) if is_full else (dim, dim)
    norms = tuple(random(size, seed=3 + i) + 1 for i, size in enumerate(sizes))
    frequencies = None if factor is None else (100.0 ** -(np.arange(8) / 8)).astype(np.float32)
    builder = ProgramBuilder(
        library, max_tokens=rows, max_logit_rows=rows, num_kv_heads=kv_heads, head_dim=dim, vocab_size=rows
    )
    qkv = builder.embedding(pack_float(library, x, TileKind.F32))
    builder.rope_write_kv(
        qkv, 0, num_heads=heads, inverse_frequencies=frequencies, attention_factor=factor or 1.0, norms=norms,
        epsilon=EPSILON,
    )  # fmt: skip
    program = builder.build(builder.select_rows(qkv))
    program.memory[:] = 0xFF
    tokens = np.arange(rows, dtype=np.int32)
    step = StepArrays(tokens, tokens, tokens[None], np.array([0, rows], np.int32), np.array([rows], np.int32),
                      np.arange(2, dtype=np.int32)[None, None], tokens)  # fmt: skip
    cache = KVCache(num_blocks=2, block_size=16, num_layers=1, num_kv_heads=kv_heads, head_dim=dim)
    actual = program.run(step, [cache], pool).reshape(rows, -1, dim)
    split = (0, heads * dim, (heads + kv_heads) * dim)
    normed = [
        norm(x[:, first:end].reshape(-1, len(weight)), weight).reshape(rows, -1, dim)
        for first, end, weight in zip(split, split[1:], norms, strict=False)
    ]
    expected = np.concatenate((*normed, x[:, split[2] :].reshape(rows, -1, dim)), axis=1)
    if frequencies is not None:
        angles = tokens[:, None, None] * frequencies.astype(np.float64)
        rotated = expected[:, : heads + kv_heads]
        pairs = (rotated[..., :8] + 1j * rotated[..., 8:16]) * np.exp(1j * angles) * factor
        rotated[..., :8], rotated[..., 8:16] = pairs.real, pairs.imag
    assert np.allclose(actual, expected, rtol=1e-4, atol=1e-4)
    keys = cache.keys(0).transpose(0, 3, 1, 2).reshape(-1, kv_heads, dim)[:rows]
    assert np.allclose(keys, expected[:, heads : heads + kv_heads], rtol=1e-3, atol=1e-3)


def test_norms_of_another_size_are_refused(library):
    builder = ProgramBuilder(library, max_tokens=5, max_logit_rows=5, num_kv_heads=1, head_dim=16, vocab_size=5)
    qkv = builder.embedding(pack_float(library, random(5, 64), TileKind.F32))
    with pytest.raises(ValueError, match="A norm of 15"):
        builder.rope_write_kv(
            qkv, 0, num_heads=2, inverse_frequencies=None, norms=(np.ones(15, np.float32), np.ones(16, np.float32))
        )
