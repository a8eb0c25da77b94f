"""The Triton kernels of mixtures of experts, interpreted, against their reference."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trioengine_kernels.experts import triton as kernels  # noqa: E402
from trioengine_kernels.experts.device_reference import experts as reference  # noqa: E402
from trioengine_kernels.experts.triton import experts  # noqa: E402
from trioengine_kernels.experts.weights import ExpertMatrices, ExpertWeights  # noqa: E402
from trioengine_kernels.quantized_linear import QuantizedWeight, WeightKind  # noqa: E402
from trioengine_kernels.quantized_linear.reference import dequantize  # noqa: E402

from trioengine.testing.quantized_weights import random_quantized_weight  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}
HIDDEN_SIZE, SIZE = 56, 24


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_weights(num_experts, dtype=torch.float32, hidden_size=HIDDEN_SIZE, size=SIZE):
    gate_up = [random(2 * size, hidden_size, seed=1 + n).to(dtype) / hidden_size**0.5 for n in range(num_experts)]
    down = [random(hidden_size, size, seed=101 + n).to(dtype) / size**0.5 for n in range(num_experts)]
    return ExpertWeights.of(gate_up, down)


def in_float32(weights):
    """The same numbers."""

    def matrices(part):
        return [dequantize(each) if isinstance(each, QuantizedWeight) else each.float() for each in part.matrices]

    return ExpertWeights.of(matrices(weights.gate_up), matrices(weights.down))


def check(x, logits, weights, *, num_per_token=2, is_normalized=True, activation="silu"):
    options = {"num_per_token": num_per_token, "is_normalized": is_normalized, "activation": activation}
    expected = reference(x.float(), logits, in_float32(weights), **options).double()
    mixed = experts(x, logits, weights, **options)
    assert mixed.dtype == x.dtype
    assert float((mixed.double() - expected).norm() / expected.norm()) < TOLERANCE[x.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("num_experts", "num_per_token", "num_tokens", "is_normalized", "activation"),
    [
        (4, 2, 1, True, "silu"),
        (8, 2, 3, False, "gelu_tanh"),
        (16, 8, 3, True, "silu"),
        (5, 2, 33, False, "silu"),
        (6, 6, 4, True, "gelu_tanh"),
        (1, 1, 17, False, "silu"),
    ],
)
def test_each_token_goes_through_its_experts(
    num_experts, num_per_token, num_tokens, is_normalized, activation, dtype
) -> None:
    check(
        random(num_tokens, HIDDEN_SIZE).to(dtype),
        random(num_tokens, num_experts, seed=7),
        make_weights(num_experts, dtype),
        num_per_token=num_per_token,
        is_normalized=is_normalized,
        activation=activation,
    )


@pytest.mark.parametrize("tile", kernels._TILES, ids=lambda tile: f"{tile.num_tokens} pairs")
def test_products_are_computed_in_tiles_of_several_sizes(tile, monkeypatch) -> None:
    """Of experts with more outputs than a tile has, and with more pairs and fewer than it has."""
    monkeypatch.setattr(kernels, "_TILES", (tile,))
    weights = make_weights(2, torch.float16, hidden_size=136, size=72)
    logits = random(19, 2, seed=7)
    logits[0] = torch.tensor([-9.0, 9.0])
    logits[1:, 0] += 9
    check(random(19, 136).half(), logits, weights, num_per_token=1)


def test_all_tokens_may_choose_the_same_experts(monkeypatch) -> None:
    """The others get none. And there are more pairs than are scanned at once."""
    monkeypatch.setattr(kernels, "_SCANNED_PAIRS", 16)
    logits = random(18, 8, seed=7) / 4
    logits[:, 3] += 9
    logits[:, 6] += 6
    check(random(18, HIDDEN_SIZE), logits, make_weights(8))


def test_of_equal_experts_the_first_are_chosen() -> None:
    logits = random(9, 8, seed=7).round()
    assert len(logits.unique()) < 8
    check(random(9, HIDDEN_SIZE), logits, make_weights(8), num_per_token=3)


def test_forbidden_experts_are_chosen_when_no_others_are_left() -> None:
    logits = torch.full((2, 8), float("-inf"))
    logits[:, 5] = 1.0
    check(random(2, HIDDEN_SIZE), logits, make_weights(8), num_per_token=3)


def test_logits_may_be_of_the_models_type_and_lie_apart() -> None:
    logits = random(9, 20, seed=7).half()[:, :8]
    check(random(9, HIDDEN_SIZE).half(), logits, make_weights(8, torch.float16))


def test_a_row_of_nan_stays_alone() -> None:
    x, logits, weights = random(5, HIDDEN_SIZE), random(5, 8, seed=7), make_weights(8)
    options = {"num_per_token": 2, "is_normalized": True, "activation": "silu"}
    expected = experts(x, logits, weights, **options)
    x[2], logits[2] = float("nan"), float("nan")
    mixed = experts(x, logits, weights, **options)
    others = [0, 1, 3, 4]
    assert torch.allclose(mixed[others], expected[others], rtol=1e-5, atol=1e-6)
    assert mixed[2].isnan().all()


def test_a_token_gets_the_same_in_any_batch() -> None:
    x, logits = random(30, HIDDEN_SIZE).half(), random(30, 2, seed=7)
    weights = make_weights(2, torch.float16)
    options = {"num_per_token": 2, "is_normalized": True, "activation": "silu"}
    together = experts(x, logits, weights, **options)
    for token in (0, 17, 29):
        of_token = slice(token, token + 1)
        assert torch.equal(experts(x[of_token], logits[of_token], weights, **options), together[of_token])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", WeightKind)
def test_weights_may_be_quantized(kind, dtype) -> None:
    """In groups of which the last tile of columns has fewer."""
    hidden_size, size = (96, 160)
    gate_up = [random_quantized_weight(kind, 2 * size, hidden_size, seed=1 + n) for n in range(4)]
    down = [random_quantized_weight(kind, hidden_size, size, seed=101 + n) for n in range(4)]
    x = random(5, hidden_size).to(dtype)
    check(x, random(5, 4, seed=7), ExpertWeights.of(gate_up, down))


def test_both_matrices_may_be_of_different_kinds() -> None:
    gate_up = [random_quantized_weight(WeightKind.INT4, 2 * 32, 64, seed=1 + n) for n in range(4)]
    down = [random_quantized_weight(WeightKind.INT8, 64, 32, seed=101 + n) for n in range(4)]
    check(random(3, 64), random(3, 4, seed=7), ExpertWeights.of(gate_up, down))


def test_weights_stay_where_they_are() -> None:
    weights = make_weights(3)
    assert weights.num_experts == 3
    for part in (weights.gate_up, weights.down):
        assert part.codes.tolist() == [matrix.data_ptr() for matrix in part.matrices]
        assert part.scales is None
        assert part.minimums is None
    planes = [random_quantized_weight(WeightKind.INT4, 64, 64, seed=n) for n in range(2)]
    quantized = ExpertMatrices.of(planes)
    assert quantized.codes.tolist() == [each.codes.data_ptr() for each in planes]
    assert quantized.scales is not None
    assert quantized.scales.tolist() == [each.scales.data_ptr() for each in planes]


def test_experts_that_are_not_alike_are_refused() -> None:
    one, other = random(64, 64), random(64, 32)
    for matrices in (
        [],
        [one, other],
        [one, one.half()],
        [one, random_quantized_weight(WeightKind.INT8, 64, 64, seed=0)],
    ):
        with pytest.raises(ValueError, match="one shape and one type"):
            ExpertMatrices.of(matrices)
    with pytest.raises(ValueError, match="contiguous"):
        ExpertMatrices.of([one.T])
    with pytest.raises(ValueError, match="16 bytes"):
        ExpertMatrices.of([random(64 * 64 + 1)[1:].view(64, 64)])
    for gate_up, down in (([one], [one]), ([one], [other, other])):
        with pytest.raises(ValueError, match="Each expert"):
            ExpertWeights.of(gate_up, down)


def test_no_tokens_are_no_work() -> None:
    options = {"num_per_token": 2, "is_normalized": True, "activation": "silu"}
    assert experts(random(0, HIDDEN_SIZE), random(0, 4), make_weights(4), **options).shape == (0, HIDDEN_SIZE)
