"""The Triton kernels of LoRA, interpreted, against their reference."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trioengine_kernels.lora.device_reference import lora as reference  # noqa: E402
from trioengine_kernels.lora.triton import lora  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}
FIRST_ROW = 24
NUM_SLOTS = 4


def make_case(num_tokens, rank, num_columns, num_outputs, dtype):
    """y, x, slots that are in no order, a and b. Slot 0 is NaN; what it holds must not count."""
    generator = torch.Generator().manual_seed(rank + num_tokens)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    y, x = random(num_tokens, FIRST_ROW + num_outputs + 5), random(num_tokens, num_columns)
    slots = torch.randint(0, NUM_SLOTS, (num_tokens,), generator=generator, dtype=torch.int32)
    slots[-1] = 3
    a, b = random(NUM_SLOTS, rank, num_columns) / num_columns**0.5, random(NUM_SLOTS, num_outputs, rank) / rank**0.5
    a[0], b[0] = float("nan"), float("nan")
    return y.to(dtype), x.to(dtype), slots, a.to(dtype), b.to(dtype)


def error(value, expected):
    return float((value.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "rank", "num_columns", "num_outputs"),
    [
        (1, 8, 96, 40),
        (3, 16, 1100, 80),  # Columns in three splits.
        (17, 24, 200, 72),
        (33, 80, 72, 130),  # Two tiles of ranks.
        (16, 512, 64, 16),
    ],
)
def test_each_token_gets_what_its_adapter_adds(num_tokens, rank, num_columns, num_outputs, dtype) -> None:
    y, x, slots, a, b = make_case(num_tokens, rank, num_columns, num_outputs, dtype)
    expected = y.double()
    for token, slot in enumerate(slots.tolist()):
        if slot:
            added = b[slot].double() @ (a[slot].double() @ x[token].double())
            expected[token, FIRST_ROW : FIRST_ROW + num_outputs] += added
    for compute in (reference, lora):
        changed = y.clone()
        assert compute(changed, x, slots, FIRST_ROW, a, b) is changed
        assert error(changed, expected) < TOLERANCE[dtype]
        outside = torch.ones(y.shape[1], dtype=torch.bool)
        outside[FIRST_ROW : FIRST_ROW + num_outputs] = False
        assert torch.equal(changed[:, outside], y[:, outside])


def test_tokens_without_an_adapter_are_not_touched() -> None:
    """Nor is what they have read, so that padded rows may hold anything."""
    y, x, slots, a, b = make_case(20, 16, 64, 32, torch.float32)
    slots.zero_()
    x.fill_(float("nan"))
    assert torch.equal(lora(y.clone(), x, slots, FIRST_ROW, a, b), y)
    assert torch.equal(reference(y.clone(), x, slots, FIRST_ROW, a, b), y)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_an_adapter_full_of_infinity_is_its_users_problem_only() -> None:
    y, x, slots, a, b = make_case(20, 16, 64, 32, torch.float32)
    expected = lora(y.clone(), x, slots, FIRST_ROW, a, b)
    a[2], b[2] = float("inf"), float("inf")
    for compute in (reference, lora):
        changed = compute(y.clone(), x, slots, FIRST_ROW, a, b)
        assert error(changed[slots != 2], expected[slots != 2]) < 1e-6
        assert not changed[slots == 2].isfinite().all()


def test_a_token_gets_the_same_in_any_batch() -> None:
    y, x, slots, a, b = make_case(33, 24, 700, 40, torch.float16)
    together = lora(y.clone(), x, slots, FIRST_ROW, a, b)
    for token in (0, 15, 32):
        of_token = slice(token, token + 1)
        alone = lora(y[of_token].clone(), x[of_token], slots[of_token], FIRST_ROW, a, b)
        assert torch.equal(alone, together[of_token])


def test_rows_may_lie_apart() -> None:
    y, x, slots, a, b = make_case(5, 16, 64, 32, torch.float32)
    expected = lora(y.clone(), x, slots, FIRST_ROW, a, b)
    wide_y, wide_x = torch.zeros(5, 100), torch.zeros(5, 90)
    wide_y[:, : y.shape[1]], wide_x[:, :64] = y, x
    changed = lora(wide_y[:, : y.shape[1]], wide_x[:, :64], slots, FIRST_ROW, a, b)
    assert torch.equal(changed, expected)
    assert not wide_y[:, y.shape[1] :].any()


def test_no_tokens_are_no_work() -> None:
    y, x, slots, a, b = make_case(2, 16, 64, 32, torch.float32)
    assert lora(y[:0], x[:0], slots[:0], FIRST_ROW, a, b).shape == (0, y.shape[1])
