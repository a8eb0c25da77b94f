"""What a step starts with: Triton's embedding and its tokens and slots, interpreted, against the references."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trioengine_kernels.embedding import reference as embedding_reference  # noqa: E402
from trioengine_kernels.embedding.triton import embedding  # noqa: E402
from trioengine_kernels.prepare_step import reference as step_reference  # noqa: E402
from trioengine_kernels.prepare_step.triton import prepare_step  # noqa: E402
from trioengine_kernels.quantized_linear.weight import QuantizedWeight, WeightKind  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}
VOCAB_SIZE = 50


def assert_close(out, expected) -> None:
    assert out.dtype is expected.dtype
    assert out.shape == expected.shape
    error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < TOLERANCE[out.dtype]


def quantized_table(kind: WeightKind, num_columns: int, group_size: int = 32) -> QuantizedWeight:
    num_groups = -(-num_columns // group_size)
    scales = torch.rand(VOCAB_SIZE, num_groups) + 0.1
    minimums = None
    match kind:
        case WeightKind.INT4:
            codes = torch.randint(0, 256, (VOCAB_SIZE, num_columns // 2), dtype=torch.uint8)
        case WeightKind.INT8 | WeightKind.INT8_AFFINE:
            codes = torch.randint(-128, 128, (VOCAB_SIZE, num_columns), dtype=torch.int8)
        case WeightKind.FP8:
            codes = (torch.randn(VOCAB_SIZE, num_columns) * 50).to(torch.float8_e4m3fn)
    if kind in (WeightKind.INT4, WeightKind.INT8_AFFINE):
        minimums = torch.randn(VOCAB_SIZE, num_groups).half()
    if kind is not WeightKind.FP8:
        scales = scales.half()
    return QuantizedWeight(
        kind=kind,
        codes=codes,
        scales=scales,
        minimums=minimums,
        num_rows=VOCAB_SIZE,
        num_columns=num_columns,
        group_size=group_size,
    )


def random_ids(num_tokens: int):
    return torch.randint(0, VOCAB_SIZE, (num_tokens,), dtype=torch.int32)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "num_columns"), [(0, 64), (1, 1), (17, 80), (3, 1100)])
def test_rows_of_a_dense_table_are_those_of_its_tokens(num_tokens: int, num_columns: int, dtype) -> None:
    torch.manual_seed(0)
    table, ids = torch.randn(VOCAB_SIZE, num_columns).to(dtype), random_ids(num_tokens)
    assert torch.equal(embedding(ids, table, 1.0, dtype), table[ids.long()])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_are_multiplied_and_converted(dtype) -> None:
    torch.manual_seed(0)
    table, ids = torch.randn(VOCAB_SIZE, 96).half(), random_ids(5)
    out = embedding(ids, table, 7.5, dtype)
    assert_close(out, (table[ids.long()].double() * 7.5).to(dtype))
    assert torch.equal(out, embedding_reference.embedding(ids, table, 7.5, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("kind", "num_columns", "group_size"),
    [
        (WeightKind.INT4, 96, 32),
        (WeightKind.INT4, 1056, 32),
        (WeightKind.INT8, 80, 32),
        (WeightKind.INT8_AFFINE, 80, 32),
        (WeightKind.FP8, 80, 32),
        (WeightKind.FP8, 160, 64),
        (WeightKind.FP8, 80, 80),
    ],
)
def test_rows_of_a_quantized_table_equal_the_references(
    kind: WeightKind, num_columns: int, group_size: int, dtype
) -> None:
    """Groups may be cut by the end of a row, and rows by the end of a program's columns."""
    torch.manual_seed(0)
    table, ids = quantized_table(kind, num_columns, group_size), random_ids(5)
    assert_close(embedding(ids, table, 1.5, dtype), embedding_reference.embedding(ids, table, 1.5, dtype))


def test_a_token_reads_its_own_row_only() -> None:
    torch.manual_seed(0)
    table = torch.randn(VOCAB_SIZE, 80)
    table[::2] = torch.nan
    assert not embedding(torch.tensor([1, 7, 49], dtype=torch.int32), table, 2.0, torch.float32).isnan().any()
    assert embedding(torch.tensor([4], dtype=torch.int32), table, 2.0, torch.float32).isnan().all()


@pytest.mark.parametrize("num_tokens", [0, 1, 17, 200])
@pytest.mark.parametrize(("num_groups", "block_size"), [(1, 16), (3, 48)])
def test_tokens_and_slots_equal_the_references(num_tokens: int, num_groups: int, block_size: int) -> None:
    torch.manual_seed(0)
    num_rows, max_blocks = 6, 5
    table = torch.randperm(num_groups * num_rows * max_blocks).int().view(num_groups, num_rows, max_blocks)
    ids = torch.randint(-1, 3, (num_tokens,), dtype=torch.int32)
    rows = torch.randint(0, num_rows, (num_tokens,), dtype=torch.int32)
    positions = torch.randint(0, max_blocks * block_size, (num_tokens,), dtype=torch.int32)
    last_tokens = torch.randint(100, 200, (num_rows,), dtype=torch.int32)
    arguments = (ids, rows, positions, last_tokens, table, block_size)
    for out, expected in zip(prepare_step(*arguments), step_reference.prepare_step(*arguments), strict=True):
        assert out.dtype is expected.dtype is torch.int32
        assert torch.equal(out, expected)


def test_a_token_that_the_host_does_not_know_is_the_last_one_of_its_sequence() -> None:
    """Two sequences, the second in the middle of its second block of two groups."""
    ids, slots = prepare_step(
        torch.tensor([5, -1, -1], dtype=torch.int32),
        torch.tensor([0, 2, 0], dtype=torch.int32),
        torch.tensor([15, 20, 16], dtype=torch.int32),
        torch.tensor([70, 71, 72], dtype=torch.int32),
        torch.tensor([[[3, 4], [0, 0], [1, 2]], [[9, 8], [0, 0], [7, 6]]], dtype=torch.int32),
        16,
    )
    assert ids.tolist() == [5, 72, 70]
    assert slots.tolist() == [[3 * 16 + 15, 2 * 16 + 4, 4 * 16], [9 * 16 + 15, 6 * 16 + 4, 8 * 16]]
