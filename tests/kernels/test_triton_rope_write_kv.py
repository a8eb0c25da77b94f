"""Triton's norm, rotation and KV write in one, interpreted, against the reference; and that one against its parts."""

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trioengine_kernels.rms_norm import rms_norm  # noqa: E402
from trioengine_kernels.rope import rope  # noqa: E402
from trioengine_kernels.rope_write_kv import reference  # noqa: E402
from trioengine_kernels.rope_write_kv.triton import rope_write_kv  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # numpy's, about NaN.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}
NUM_BLOCKS, BLOCK_SIZE = 3, 16


@attrs.frozen
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int | None
    norm: str


SHAPES = [
    Shape(9, 3, 64, 64, "none"),
    Shape(3, 1, 80, 80, "head"),
    Shape(6, 2, 96, 96, "full"),
    Shape(4, 4, 128, 128, "full"),
    Shape(12, 4, 128, 128, "head"),
    Shape(3, 1, 80, 32, "none"),
    Shape(3, 1, 96, 24, "full"),
    Shape(5, 5, 20, 12, "head"),
    Shape(3, 1, 64, None, "head"),
    Shape(2, 1, 15, None, "none"),
]


def inputs_of(shape: Shape, num_tokens: int, dtype, cache_dtype):
    """Positional and named arguments. Unwritten slots hold NaN."""
    torch.manual_seed(0)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    qkv = (torch.randn(num_tokens, (heads + 2 * kv_heads) * shape.head_dim) * 3).to(dtype)
    query_norm = key_norm = cos = sin = None
    if shape.norm != "none":
        is_full = shape.norm == "full"
        query_norm = torch.randn(shape.head_dim * (heads if is_full else 1))
        key_norm = torch.randn(shape.head_dim * (kv_heads if is_full else 1))
    if shape.rotary_dim is not None:
        angles = torch.rand(num_tokens, shape.rotary_dim // 2) * 100
        cos, sin = angles.cos() * 1.1, angles.sin() * 1.1
    caches = [
        torch.full((NUM_BLOCKS, BLOCK_SIZE, kv_heads, shape.head_dim), torch.nan).to(cache_dtype) for _ in range(2)
    ]
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens].int()
    named = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": shape.head_dim, "norm_epsilon": 1e-5}
    return [qkv, query_norm, key_norm, cos, sin, *caches, slots], named


def outputs(function, positional, named):
    """The queries and both caches, written into copies."""
    *first, keys, values, slots = positional
    keys, values = keys.clone(), values.clone()
    return function(*first, keys, values, slots, **named), keys, values


def assert_close(out, expected) -> None:
    assert out.dtype is expected.dtype
    assert out.shape == expected.shape
    out, expected, tolerance = out.double(), expected.double(), TOLERANCE[out.dtype]
    assert torch.equal(out.isnan(), expected.isnan())
    assert ((out - expected).nan_to_num().norm() / expected.nan_to_num().norm()).item() < tolerance


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_outputs_equal_the_references_and_other_slots_stay(shape: Shape, dtype) -> None:
    positional, named = inputs_of(shape, 5, dtype, dtype)
    for out, expected in zip(
        outputs(rope_write_kv, positional, named),
        outputs(reference.rope_write_kv, positional, named),
        strict=True,
    ):
        assert_close(out, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_float8_cache_holds_the_same_codes_as_the_references(shape: Shape) -> None:
    """Some numbers are too large for it."""
    positional, named = inputs_of(shape, 5, torch.float32, torch.float8_e4m3fn)
    named |= {"key_scale": 0.005, "value_scale": 0.02}
    query, *caches = outputs(rope_write_kv, positional, named)
    expected_query, *expected = outputs(reference.rope_write_kv, positional, named)
    assert_close(query, expected_query)
    for out, codes in zip(caches, expected, strict=True):
        assert torch.equal(out.view(torch.uint8), codes.view(torch.uint8))
    assert (caches[0].float().abs() == 448).any()


def test_the_reference_is_made_of_its_parts() -> None:
    """Norm over each head, rotation, and the write of what they and the values are."""
    shape = Shape(4, 2, 16, 8, "head")
    positional, named = inputs_of(shape, 3, torch.float32, torch.float32)
    qkv, query_norm, key_norm, cos, sin, _, _, slots = positional
    query, keys, values = outputs(reference.rope_write_kv, positional, named)
    heads = qkv.view(3, 8, 16)
    torch.testing.assert_close(query, rope(rms_norm(heads[:, :4], query_norm, 1e-5), cos, sin))
    written = keys.flatten(0, 1)[slots.long()], values.flatten(0, 1)[slots.long()]
    torch.testing.assert_close(written[0], rope(rms_norm(heads[:, 4:6], key_norm, 1e-5), cos, sin))
    assert torch.equal(written[1], heads[:, 6:])
    assert keys.isnan().sum() == values.isnan().sum() == (NUM_BLOCKS * BLOCK_SIZE - 3) * 2 * 16


@pytest.mark.parametrize("norm", ["head", "full"])
def test_tokens_do_not_touch_each_other(norm: str) -> None:
    """NaN stays in its token, a token is the same alone, and of no tokens nothing is written."""
    shape = Shape(6, 2, 64, 64, norm)
    positional, named = inputs_of(shape, 3, torch.float32, torch.float32)
    expected = outputs(rope_write_kv, positional, named)
    slots = positional[-1].long()
    positional[0][1] = torch.nan
    query, *caches = outputs(rope_write_kv, positional, named)
    assert query[1].isnan().all()
    assert torch.equal(query[::2], expected[0][::2])
    for cache, expected_cache in zip(caches, expected[1:], strict=True):
        assert torch.equal(cache.flatten(0, 1)[slots[::2]], expected_cache.flatten(0, 1)[slots[::2]])
        assert cache.flatten(0, 1)[slots[1]].isnan().all()

    qkv, query_norm, key_norm, cos, sin, keys, values, slots = positional
    alone = [qkv[2:], query_norm, key_norm, cos[2:], sin[2:], keys, values, slots[2:]]
    assert torch.equal(outputs(rope_write_kv, alone, named)[0], expected[0][2:])
    nothing = [qkv[:0], query_norm, key_norm, cos[:0], sin[:0], keys, values, slots[:0]]
    query, *caches = outputs(rope_write_kv, nothing, named)
    assert query.shape == (0, 6, 64)
    assert all(cache.isnan().all() for cache in caches)


def test_rows_of_a_wider_tensor_are_read_where_they_lie() -> None:
    shape = Shape(3, 1, 64, 64, "head")
    positional, named = inputs_of(shape, 4, torch.float32, torch.float32)
    expected = outputs(rope_write_kv, positional, named)
    wide = torch.full((4, 1000), torch.nan)
    wide[:, 100 : 100 + positional[0].shape[1]] = positional[0]
    positional[0] = wide[:, 100 : 100 + positional[0].shape[1]]
    assert torch.equal(outputs(rope_write_kv, positional, named)[0], expected[0])
