"""Triton's RMS norm, gated activations, soft cap and float8 numbers, interpreted, against the references."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from trioengine_kernels.fp8 import decode_fp8, encode_fp8  # noqa: E402
from trioengine_kernels.gelu_tanh_and_mul import reference as gelu_reference  # noqa: E402
from trioengine_kernels.gelu_tanh_and_mul.triton import gelu_tanh_and_mul  # noqa: E402
from trioengine_kernels.rms_norm import reference as norm_reference  # noqa: E402
from trioengine_kernels.rms_norm.triton import add_rms_norm, rms_norm  # noqa: E402
from trioengine_kernels.silu_and_mul import reference as silu_reference  # noqa: E402
from trioengine_kernels.silu_and_mul.triton import silu_and_mul  # noqa: E402
from trioengine_kernels.soft_cap import reference as cap_reference  # noqa: E402
from trioengine_kernels.soft_cap.triton import soft_cap  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # numpy's, which computes what is then not selected, and exp(1000), which is infinity, as it should be.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}
GATES = [(silu_and_mul, silu_reference.silu_and_mul), (gelu_tanh_and_mul, gelu_reference.gelu_tanh_and_mul)]


def assert_close(out, expected) -> None:
    assert out.dtype is expected.dtype
    assert out.shape == expected.shape
    error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < TOLERANCE[out.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 1), (2, 3, 80), (1, 576), (17, 1000), (2, 16384)])
def test_rms_norm_equals_the_reference(shape, dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype) * 7, torch.randn(shape[-1])
    assert_close(rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 576), (17, 80), (2, 3, 129)])
def test_add_rms_norm_equals_the_reference_and_leaves_the_sum_in_the_residual(shape, dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype) * 9, torch.randn(shape[-1])
    expected, expected_sum = norm_reference.add_rms_norm(x, residual, weight, 1e-6)
    out, total = add_rms_norm(x, residual, weight, 1e-6)
    assert_close(out, expected)
    assert total is residual
    assert torch.equal(total, expected_sum)


def test_rows_of_a_wider_tensor_are_normed_where_they_lie() -> None:
    torch.manual_seed(0)
    wide, weight = torch.randn(5, 300), torch.randn(100)
    x, residual = wide[:, 100:200], torch.randn(5, 100)
    assert_close(rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))
    expected = norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(add_rms_norm(x, residual, weight, 1e-5)[0], expected[0])


def test_epsilon_counts() -> None:
    x, weight = torch.full((1, 16), 1e-3), torch.ones(16)
    assert_close(rms_norm(x, weight, 1e-3), norm_reference.rms_norm(x, weight, 1e-3))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: rms_norm(x, torch.ones(80), 1e-5),
        lambda x: add_rms_norm(x, torch.ones_like(x), torch.ones(80), 1e-5)[0],
        silu_and_mul,
        gelu_tanh_and_mul,
        lambda x: soft_cap(x, 30.0),
    ],
    ids=["rms_norm", "add_rms_norm", "silu_and_mul", "gelu_tanh_and_mul", "soft_cap"],
)
def test_rows_do_not_touch_each_other(compute) -> None:
    """NaN stays in its row, a row is the same alone, and of no rows there is nothing."""
    torch.manual_seed(0)
    x = torch.randn(3, 80)
    expected = compute(x.clone())
    x[1] = torch.nan
    out = compute(x.clone())
    assert out[1].isnan().all()
    assert torch.equal(out[::2], expected[::2])
    assert torch.equal(compute(x[2:].clone()), expected[2:])
    assert compute(x[:0]).shape == (0, expected.shape[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 15, 1536])
@pytest.mark.parametrize(("gate", "reference"), GATES)
def test_a_gate_equals_the_reference(gate, reference, size: int, dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 2 * size).to(dtype) * 5
    assert_close(gate(x), reference(x.float()).to(dtype))


@pytest.mark.parametrize(("gate", "reference"), GATES)
def test_a_gate_is_right_for_numbers_of_any_size(gate, reference) -> None:
    gates = torch.tensor([1e-30, 1e-3, 0.5, 1.0, 2.0, 3.0, 20.0, 1e4, 1e30])
    gates = torch.cat((gates, -gates, torch.tensor([0.0, torch.inf])))
    x = torch.cat((gates, torch.full_like(gates, 0.5))).unsqueeze(0)
    torch.testing.assert_close(gate(x).double(), reference(x.double()), rtol=1e-5, atol=1e-9)


def test_a_gate_reads_rows_of_a_wider_tensor() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 300)[:, 10:110]
    assert_close(silu_and_mul(x), silu_reference.silu_and_mul(x))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 1030)])
def test_soft_cap_equals_the_reference(shape, dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 40).to(dtype)
    assert_close(soft_cap(x, 30.0), cap_reference.soft_cap(x, 30.0))


def test_soft_cap_keeps_small_numbers_and_bounds_large_ones() -> None:
    """Each number by itself: the relative error is small also where a tanh made of exponentials would cancel."""
    x = torch.cat((torch.logspace(-8, 3, 500), -torch.logspace(-8, 3, 500), torch.tensor([0.0, torch.inf, -torch.inf])))
    out = soft_cap(x.unsqueeze(0), 30.0).squeeze(0)
    torch.testing.assert_close(out.double(), torch.tanh(x.double() / 30) * 30, rtol=1e-6, atol=0)


@triton.jit
def _round_trip_kernel(x, codes, decoded, num_elements, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    is_element = places < num_elements
    code = encode_fp8(tl.load(x + places, mask=is_element, other=0.0))
    tl.store(codes + places, code, mask=is_element)
    tl.store(decoded + places, decode_fp8(code), mask=is_element)


def test_float8_numbers_are_torchs() -> None:
    """All codes, what lies halfway between two, next to it, and far outside."""
    torch.manual_seed(0)
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (numbers[1:] + numbers[:-1]) / 2
    neighbours = [torch.nextafter(halves, torch.tensor(to)) for to in (0.0, torch.inf)]
    positive = torch.cat((numbers, halves, *neighbours, torch.rand(500) * 500, torch.logspace(-12, 2, 500)))
    special = torch.tensor([449.0, 464.0, 465.0, 1e38, torch.inf, torch.nan, 1e-45])
    x = torch.cat((positive, special, -positive, -special))
    codes, decoded = torch.empty(len(x), dtype=torch.uint8), torch.empty(len(x))
    _round_trip_kernel[(1,)](x, codes, decoded, len(x), BLOCK=4096)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    is_number = ~x.isnan()
    assert torch.equal(codes[is_number], expected.view(torch.uint8)[is_number])
    assert torch.equal(decoded[is_number], expected.float()[is_number])
    assert decoded[~is_number].isnan().all()
