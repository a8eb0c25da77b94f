"""Products with packed weights against numpy and the gguf package's dequantization."""

import numpy as np
import pytest
from trioengine_kernels.native.library import Isa, ThreadPool
from trioengine_kernels.native.program import KVCache, ProgramBuilder, StepArrays
from trioengine_kernels.native.tiles import TileKind, WeightTiles, pack_float, pack_ggml

gguf = pytest.importorskip("gguf")

BLOCK_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
PLAIN_TYPES = ["F32", "F16", "BF16"]
SCALE_PLACES = {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q8_0": [0], "Q5_0": [0], "Q4_0": [0]}
"""Where the halves of a block are that scale it; Q4_1 and Q5_1 are like Q4_K."""


def random_raw(type_name, rows, columns, seed=0):
    """Random bytes of a type with sane scales, and the weights that they stand for."""
    rng = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name in PLAIN_TYPES:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        raw = gguf.quants.quantize(values, kind).view(np.uint8)
    else:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (rows * columns // block_size, block_bytes), dtype=np.uint8)
        for place in SCALE_PLACES.get(type_name, [0, 2]):
            scales = rng.uniform(0.001, 0.02, len(blocks)).astype(np.float16)
            blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
        raw = blocks.reshape(rows, -1)
    return raw, gguf.quants.dequantize(raw, kind).reshape(rows, columns)


def run_linear(library, pool, x, tiles, bias=None):
    """`tiles` applied to the rows of `x`, with all memory poisoned before."""
    builder = ProgramBuilder(
        library, max_tokens=len(x), max_logit_rows=len(x), num_kv_heads=1, head_dim=16, vocab_size=len(x)
    )
    rows = builder.select_rows(builder.embedding(pack_float(library, x, TileKind.F32)))
    program = builder.build(builder.linear(rows, tiles, bias))
    program.memory[:] = 0xFF
    tokens = np.arange(len(x), dtype=np.int32)
    step = StepArrays(
        token_ids=tokens,
        positions=tokens,
        slots=tokens[None],
        query_start=np.array([0, len(x)], np.int32),
        seq_lens=np.array([len(x)], np.int32),
        block_table=np.arange(-(-len(x) // 16), dtype=np.int32)[None, None],
        logit_rows=tokens,
    )
    cache = KVCache(num_blocks=-(-len(x) // 16), block_size=16, num_layers=1, num_kv_heads=1, head_dim=16)
    return program.run(step, [cache], pool).copy()


def quantized(x):
    """What the activations become: [rows, groups, 32] whole numbers and [rows, groups] scales."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    largest = np.abs(padded).max(axis=2)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(padded * inverse[..., None]), largest / np.float32(127)


def product_of_quantized(x, weights):
    """In float64: what remains is rounding."""
    q, scales = quantized(x)
    values = (q.astype(np.float64) * scales[..., None]).reshape(len(x), -1)[:, : x.shape[1]]
    return values @ weights.astype(np.float64).T


def product_error(actual, expected, x, weights):
    """Relative to what the products of such vectors are when nothing cancels."""
    scale = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weights, axis=1)
    return np.linalg.norm(actual - expected) / np.linalg.norm(scale)


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_products_with_quantized_blocks_are_exact_for_quantized_activations(library, pool, isa, type_name):
    """Integers are exact; what is left is the rounding of scales to halves (Q5_K), of 4 bits' to a row's unit, or
    of values to 8 bits (Q6_K)."""
    tolerance = {"Q5_K": 5e-4, "Q6_K": 5e-3}.get(type_name, 5e-5 if type_name.startswith("Q4") else 1e-6)
    rng = np.random.default_rng(1)
    for rows, columns, tokens in [(1, 256, 1), (7, 256, 2), (16, 512, 3), (33, 768, 5), (40, 1024, 13)]:
        raw, weights = random_raw(type_name, rows, columns, seed=rows)
        x = rng.standard_normal((tokens, columns), dtype=np.float32)
        tiles = pack_ggml(library, type_name, raw, rows, columns, pool=pool)
        actual = run_linear(library, pool, x, tiles)
        error = product_error(actual, product_of_quantized(x, weights), x, weights)
        assert error < tolerance, (rows, columns, tokens)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_the_error_of_8_bit_activations_is_small(library, pool, type_name):
    raw, weights = random_raw(type_name, 48, 96)
    x = np.random.default_rng(2).standard_normal((9, 96), dtype=np.float32)
    actual = run_linear(library, pool, x, pack_ggml(library, type_name, raw, 48, 96))
    assert relative_error(actual, x @ weights.T) < 1e-2


@pytest.mark.parametrize("type_name", PLAIN_TYPES)
def test_products_with_floats_keep_their_values(library, pool, isa, type_name):
    rng = np.random.default_rng(3)
    for rows, columns, tokens in [(1, 1, 1), (15, 33, 2), (17, 100, 4), (70, 64, 7), (130, 31, 20)]:
        raw, weights = random_raw(type_name, rows, columns, seed=rows)
        x = rng.standard_normal((tokens, columns), dtype=np.float32)
        actual = run_linear(library, pool, x, pack_ggml(library, type_name, raw, rows, columns))
        assert relative_error(actual, x.astype(np.float64) @ weights.T.astype(np.float64)) < 1e-6


@pytest.mark.parametrize(("kind", "tolerance"), [(TileKind.INT8, 0.01), (TileKind.INT4, 0.13), (TileKind.F16, 1e-3)])
def test_floats_can_be_quantized_at_load(library, pool, kind, tolerance):
    rng = np.random.default_rng(4)
    weights = rng.standard_normal((37, 70), dtype=np.float32)
    x = rng.standard_normal((6, 70), dtype=np.float32)
    actual = run_linear(library, pool, x, pack_float(library, weights, kind, pool=pool))
    assert relative_error(actual, x @ weights.T) < tolerance


def test_the_largest_numbers_do_not_overflow(library, pool, isa):
    """All weights and activations at their limits, of either sign: the sums of 16 bits must not saturate."""
    x = np.concatenate([np.ones((1, 64), np.float32), -np.ones((1, 64), np.float32)])
    for type_name, raw_byte in [("Q4_0", 0xFF), ("Q4_1", 0xFF), ("Q8_0", 0x80), ("Q8_0", 0x7F), ("Q5_1", 0xFF)]:
        raw, _ = random_raw(type_name, 8, 64)
        blocks = raw.reshape(16, -1)
        header = {"Q4_0": 2, "Q8_0": 2}.get(type_name, 4)
        blocks[:, header:] = raw_byte
        weights = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name]).reshape(8, 64)
        actual = run_linear(library, pool, x, pack_ggml(library, type_name, raw, 8, 64))
        tolerance = 5e-5 if type_name.startswith("Q4") else 1e-6  # Of INT4's scales.
        assert relative_error(actual, product_of_quantized(x, weights)) < tolerance


@pytest.mark.parametrize("nibble", [0, 15])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_numbers_of_int4_fit_into_32_bits(library, pool, isa, nibble, sign):
    """Scales and minimums are the row's largest, and add up: both 8 times 127 times 32 times their limit."""
    scale = np.float16(0.0123)
    minimum = np.float16(sign * (8 * scale) - 8 * scale)
    block = np.concatenate([np.array([scale, minimum]).view(np.uint8), np.full(16, nibble * 17, np.uint8)])
    raw = np.tile(block, (8, 2))
    weights = np.full((8, 64), nibble * float(scale) + float(minimum))
    x = np.concatenate([np.ones((9, 64), np.float32), -np.ones((1, 64), np.float32)])
    actual = run_linear(library, pool, x, pack_ggml(library, "Q4_1", raw, 8, 64))
    expected = product_of_quantized(x, weights)
    assert np.abs(actual - expected).max() < 5e-5 * 64 * 16 * float(scale)


def test_a_bias_is_added(library, pool, isa):
    rng = np.random.default_rng(5)
    bias = rng.standard_normal(19, dtype=np.float32)
    for kind in (TileKind.INT8, TileKind.F32):
        tiles = pack_float(library, rng.standard_normal((19, 40), dtype=np.float32), kind)
        x = rng.standard_normal((3, 40), dtype=np.float32)
        assert np.array_equal(run_linear(library, pool, x, tiles, bias), run_linear(library, pool, x, tiles) + bias)


def test_stacked_matrices_stand_side_by_side(library, pool):
    rng = np.random.default_rng(6)
    weights = [rng.standard_normal((rows, 64), dtype=np.float32) for rows in (9, 16, 5)]
    kinds = [TileKind.INT4, TileKind.F32, TileKind.INT8]
    tiles = [pack_float(library, w, kind) for w, kind in zip(weights, kinds, strict=True)]
    x = rng.standard_normal((4, 64), dtype=np.float32)
    bias = rng.standard_normal(30, dtype=np.float32)
    actual = run_linear(library, pool, x, tiles, bias)
    alone = [run_linear(library, pool, x, matrix) for matrix in tiles]
    assert np.array_equal(actual, np.concatenate(alone, axis=1) + bias)


@pytest.mark.parametrize("columns", [160, 810])
@pytest.mark.parametrize("kind", [TileKind.INT4, TileKind.INT8, TileKind.F16, TileKind.F32])
def test_a_row_gives_the_same_bits_in_any_batch(library, pool, isa, kind, columns):
    rng = np.random.default_rng(7)
    tiles = pack_float(library, rng.standard_normal((203, columns), dtype=np.float32), kind)
    x = rng.standard_normal((133, columns), dtype=np.float32)
    together = run_linear(library, pool, x, tiles)
    for first, end in [(0, 1), (5, 7), (10, 13), (20, 24), (30, 43), (50, 59), (1, 133)]:
        assert np.array_equal(run_linear(library, pool, x[first:end], tiles), together[first:end])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("rows", [33_000, 33_008])
def test_results_too_large_for_a_cache_are_the_same_bits(library, isa, rows, num_threads):
    """Such as logits, of which some kernels write whole lines past the caches; the last strips are not whole."""
    pool = ThreadPool(library, num_threads)
    rng = np.random.default_rng(10)
    tiles = pack_float(library, rng.standard_normal((rows, 32), dtype=np.float32), TileKind.INT8)
    x = rng.standard_normal((70, 32), dtype=np.float32)
    together = run_linear(library, pool, x, tiles)
    for first, end in [(0, 4), (63, 66), (69, 70)]:
        assert np.array_equal(run_linear(library, pool, x[first:end], tiles), together[first:end])


@pytest.mark.parametrize("kind", [TileKind.INT4, TileKind.INT8])
def test_kernels_with_fused_multiply_add_agree_to_the_bit(library, pool, kind):
    before = library.isa
    isas = [isa for isa in library.supported_isas() if isa in (Isa.AVX2, Isa.AVX_VNNI, Isa.VNNI)]
    if len(isas) < 2:
        pytest.skip("This processor runs only one of them.")
    rng = np.random.default_rng(8)
    tiles = pack_float(library, rng.standard_normal((50, 416), dtype=np.float32), kind)
    x = rng.standard_normal((75, 416), dtype=np.float32)
    results = []
    for isa in isas:
        library.set_isa(isa)
        results.append(run_linear(library, pool, x, tiles))
    library.set_isa(before)
    assert all(np.array_equal(result, results[0]) for result in results[1:])


def test_a_row_that_is_not_a_number_stays_so_and_stays_alone(library, pool, isa):
    rng = np.random.default_rng(9)
    tiles = pack_float(library, rng.standard_normal((8, 64), dtype=np.float32), TileKind.INT8)
    x = rng.standard_normal((4, 64), dtype=np.float32)
    clean = run_linear(library, pool, x, tiles)
    x[1, 40], x[3, 0] = np.nan, np.inf
    actual = run_linear(library, pool, x, tiles)
    assert np.isnan(actual[[1, 3]]).all()
    assert np.array_equal(actual[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 1e-20, 1e20])
def test_activations_of_any_size_keep_their_scale(library, pool, isa, magnitude):
    tiles = pack_float(library, np.ones((8, 32), np.float32), TileKind.F32)
    quantized_tiles = pack_float(library, np.ones((8, 32), np.float32), TileKind.INT8)
    x = np.full((1, 32), magnitude, np.float32)
    expected = run_linear(library, pool, x, tiles)
    assert np.allclose(run_linear(library, pool, x, quantized_tiles), expected, rtol=1e-2, atol=1e-26)


@pytest.mark.parametrize("type_name", [*BLOCK_TYPES, *PLAIN_TYPES])
def test_embedding_rows_are_the_tensors_rows(library, pool, type_name):
    raw, weights = random_raw(type_name, 21, 256)
    tiles = pack_ggml(library, type_name, raw, 21, 256)
    builder = ProgramBuilder(library, max_tokens=5, max_logit_rows=5, num_kv_heads=1, head_dim=16, vocab_size=21)
    program = builder.build(builder.select_rows(builder.embedding(tiles)))
    ids = np.array([20, 0, 7, 8, 20], np.int32)
    places = np.arange(5, dtype=np.int32)
    step = StepArrays(ids, places, places[None], np.array([0, 5], np.int32), np.array([5], np.int32),
                      np.zeros((1, 1, 1), np.int32), places)  # fmt: skip
    cache = KVCache(num_blocks=1, block_size=16, num_layers=1, num_kv_heads=1, head_dim=16)
    tolerance = {"Q5_K": 2e-3, "Q6_K": 8e-3}.get(type_name, 2e-5 if type_name.startswith("Q4") else 1e-6)
    assert relative_error(program.run(step, [cache], pool), weights[ids]) < tolerance


def test_wrong_sizes_are_refused(library):
    raw, _ = random_raw("Q4_0", 8, 64)
    with pytest.raises(ValueError, match="no multiple of 32"):
        pack_ggml(library, "Q4_0", raw, 8, 60)
    with pytest.raises(ValueError, match="bytes"):
        pack_ggml(library, "Q4_0", raw[:-1], 8, 64)
    with pytest.raises(ValueError, match="cannot be packed"):
        pack_ggml(library, "IQ2_XXS", raw, 8, 64)
    with pytest.raises(ValueError, match="INT4 only"):
        pack_ggml(library, "Q4_0", raw, 8, 64, kind=TileKind.INT8)
    with pytest.raises(ValueError, match="cannot be packed"):
        pack_ggml(library, "F32", raw, 0, 64)


def test_tiles_are_aligned(library):
    tiles = [pack_float(library, np.ones((n, n), np.float32), TileKind.INT8) for n in (1, 9, 33)]
    assert all(isinstance(t, WeightTiles) and t.data.ctypes.data % 64 == 0 for t in tiles)
