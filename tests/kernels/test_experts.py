"""The choice and the mixture of experts against their formulas in float64."""

import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.experts import choose_experts, mix_experts  # noqa: E402


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(1, 1), (8, 2), (5, 5), (128, 8)])
def test_the_experts_with_the_largest_logits_are_chosen(num_experts, num_chosen, is_normalized) -> None:
    torch.manual_seed(0)
    logits = torch.randn(17, num_experts) * 3
    chosen, weights = choose_experts(logits, num_chosen, is_normalized=is_normalized)
    probabilities = torch.softmax(logits.double(), dim=-1)
    for row in range(17):
        best = sorted(range(num_experts), key=lambda expert: -probabilities[row, expert].item())[:num_chosen]
        assert chosen[row].tolist() == best
        expected = probabilities[row, best]
        expected = expected / expected.sum() if is_normalized else expected
        assert torch.allclose(weights[row].double(), expected, rtol=1e-5)


def test_of_equal_experts_the_first_are_chosen() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    chosen, weights = choose_experts(logits, 2, is_normalized=True)
    assert chosen.tolist() == [[1, 2]]
    assert torch.equal(weights, torch.tensor([[0.5, 0.5]]))


def test_each_token_is_the_weighted_sum_of_what_its_experts_make_of_it() -> None:
    """And experts that no token goes through are not computed."""
    torch.manual_seed(0)
    x, matrices = torch.randn(17, 6), torch.randn(5, 6, 6)
    chosen, weights = choose_experts(torch.randn(17, 4), 3, is_normalized=False)  # Nobody has the fifth.
    computed = []

    def compute(number, rows):
        computed.append(number)
        assert len(rows) > 0
        return rows @ matrices[number]

    mixed = mix_experts(x, chosen, weights, compute)
    assert sorted(computed) == [0, 1, 2, 3]
    for row in range(17):
        expected = sum(
            weight.double() * (x[row].double() @ matrices[expert].double())
            for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True)
        )
        assert torch.allclose(mixed[row].double(), expected, rtol=1e-4, atol=1e-6)
