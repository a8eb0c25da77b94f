"""RMS norm, rope, gated activations, the soft cap and the KV write against their formulas in float64."""

import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.gelu_tanh_and_mul import gelu_tanh_and_mul  # noqa: E402
from trioengine_kernels.rms_norm import add_rms_norm, rms_norm  # noqa: E402
from trioengine_kernels.rope import rope  # noqa: E402
from trioengine_kernels.silu_and_mul import silu_and_mul  # noqa: E402
from trioengine_kernels.soft_cap import soft_cap  # noqa: E402
from trioengine_kernels.write_kv import write_kv  # noqa: E402

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def relative_error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 576), (17, 80), (3, 1)])
def test_rms_norm_equals_the_formula(shape, dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype) * 7, torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype is dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]


def test_add_rms_norm_normalizes_the_sum_and_returns_it() -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 32), (128, 128)])
def test_rope_is_a_rotation_of_pairs(head_dim: int, rotary_dim: int) -> None:
    """Element i and i + rotary_dim/2 are one complex number, multiplied by e^(i angle); the rest is untouched."""
    torch.manual_seed(0)
    half = rotary_dim // 2
    x, angles = torch.randn(17, 3, head_dim), torch.rand(17, half) * 100
    out = rope(x, angles.cos(), angles.sin())
    pairs = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
    turned = pairs * torch.polar(torch.ones(17, 1, half).double(), angles.unsqueeze(1).double())
    expected = torch.cat((turned.real, turned.imag, x[..., rotary_dim:].double()), -1)
    assert relative_error(out, expected) < 1e-5
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("size", [1, 15, 1536])
def test_silu_and_mul_gates_the_second_half_by_the_first(size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 2 * size) * 5
    gate, up = x.double()[:, :size], x.double()[:, size:]
    assert relative_error(silu_and_mul(x), gate / (1 + (-gate).exp()) * up) < 1e-5


@pytest.mark.parametrize("size", [1, 15, 1536])
def test_gelu_tanh_and_mul_gates_the_second_half_by_the_first(size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 2 * size) * 5
    gate, up = x.double()[:, :size], x.double()[:, size:]
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    assert relative_error(gelu_tanh_and_mul(x), 0.5 * gate * (1 + inner.tanh()) * up) < 1e-5


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_soft_cap_keeps_small_numbers_and_bounds_large_ones(dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(7, 33) * 40).to(dtype)
    out = soft_cap(x, 30.0)
    assert out.dtype is dtype
    assert relative_error(out, 30 * torch.tanh(x.double() / 30)) < TOLERANCE[dtype]
    assert torch.equal(soft_cap(torch.tensor([torch.inf, -torch.inf, 0.0]), 30.0), torch.tensor([30.0, -30.0, 0.0]))


def test_write_kv_fills_exactly_its_slots() -> None:
    """Also from slices of a wider tensor, as the model gives it."""
    torch.manual_seed(0)
    qkv = torch.randn(17, 4, 3, 64)
    key, value = qkv[:, 1], qkv[:, 2]
    key_cache, value_cache = torch.full((4, 16, 3, 64), torch.nan), torch.full((4, 16, 3, 64), torch.nan)
    slots = torch.randperm(64)[:17]
    write_kv(key, value, key_cache, value_cache, slots)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(key_cache[slot // 16, slot % 16], key[i])
        assert torch.equal(value_cache[slot // 16, slot % 16], value[i])
    is_written = ~key_cache.isnan().any(-1).any(-1).flatten()
    assert sorted(is_written.nonzero().flatten().tolist()) == sorted(slots.tolist())
    assert torch.equal(value_cache.isnan(), key_cache.isnan())
