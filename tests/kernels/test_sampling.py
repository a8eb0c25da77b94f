"""The sampler: its distribution, what each limit keeps, and that nothing but seed and position decides a draw."""

import math

import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.sampling import SamplingBatch, logprobs, penalize, processed_logits, sample  # noqa: E402
from trioengine_kernels.sampling import reference as sampling_reference  # noqa: E402


def make_batch(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, position=0):
    """One row per entry of the longest argument; single values stand for all rows."""

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).clone()

    return SamplingBatch(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seed=column(seed, torch.int64),
        position=column(position, torch.int64),
    )


def draw_many(logits, num_draws, **params):
    batch = make_batch(num_draws, position=torch.arange(num_draws), **params)
    return sample(logits.expand(num_draws, -1), batch)


def kept_by_brute_force(logits, temperature, top_k, top_p, min_p):
    """Token ids that the limits leave, in plain Python with float64."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    kept = [i for i, w in enumerate(weights) if w >= min_p]
    if top_k > 0:
        floor = sorted((logits[i] for i in kept), reverse=True)[:top_k][-1]
        kept = [i for i in kept if logits[i] >= floor]
    if top_p < 1:
        total, mass, floor = sum(weights[i] for i in kept), 0.0, None
        for i in sorted(kept, key=lambda i: -logits[i]):
            mass += weights[i]
            if mass >= top_p * total:
                floor = logits[i]
                break
        kept = [i for i in kept if floor is None or logits[i] >= floor]
    return set(kept)


def test_temperature_zero_takes_the_largest_whatever_the_other_rows_do() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 100)
    tokens = sample(logits, make_batch(6, temperature=[0.0, 1, 0, 0.5, 0, 2]))
    assert tokens.dtype is torch.int64
    assert tokens[[0, 2, 4]].tolist() == logits.argmax(-1)[[0, 2, 4]].tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Chi-square over 12 tokens; 31.3 is passed by chance once in a thousand, and the draws are always the same."""
    logits = torch.linspace(-2, 1.5, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    num_draws = 4000
    counts = draw_many(logits, num_draws, temperature=temperature).bincount(minlength=12).double()
    expected = torch.softmax(logits.double() / temperature, -1) * num_draws
    assert ((counts - expected).square() / expected).sum().item() < 31.3


def test_draws_of_neighbouring_seeds_and_positions_are_independent() -> None:
    """Pairs of draws from a fair choice of four: all sixteen pairs are equally common (chi-square, 15 degrees)."""
    logits = torch.zeros(4)
    first = draw_many(logits, 3000, seed=1)
    for other in (draw_many(logits, 3000, seed=2), first.roll(1), draw_many(logits, 3000, seed=1 + 2**32)):
        counts = (first * 4 + other).bincount(minlength=16).double()
        assert ((counts - 3000 / 16).square() / (3000 / 16)).sum().item() < 37.7


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1, 0),
        (3, 1, 0),
        (100, 1, 0),
        (0, 0.5, 0),
        (0, 0.95, 0),
        (0, 1, 0.1),
        (5, 0.7, 0),
        (5, 0.7, 0.3),
        (0, 1e-4, 0),
    ],
)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("num_candidates", [4, 1024])
def test_limits_keep_what_brute_force_keeps(monkeypatch, num_candidates, temperature, top_k, top_p, min_p) -> None:
    """Exactly those tokens are drawn, whether or not the first look at the largest logits settles it."""
    monkeypatch.setattr(sampling_reference, "_NUM_CANDIDATES", num_candidates)
    # Three equal logits, so that a cut falls between equals.
    logits = torch.tensor([1.0, 0.2, 2.0, 1.0, -0.5, 1.0, 0.7, 2.2, -1.0, 0.1])
    tokens = draw_many(logits, 600, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(tokens.tolist()) == kept_by_brute_force(logits.tolist(), temperature, top_k, top_p, min_p)


def test_limits_on_a_large_vocabulary_draw_the_same_from_few_candidates_and_from_all(monkeypatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(30, 5000) * 2
    batch = make_batch(30, top_k=[0, 40, 1500] * 10, top_p=[0.9, 0.5, 0.99, 0.999, 1.0] * 6, position=torch.arange(30))
    quick = sample(logits, batch)
    monkeypatch.setattr(sampling_reference, "_NUM_CANDIDATES", 5000)
    assert quick.tolist() == sample(logits, batch).tolist()


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 1003)
    params = {
        "temperature": torch.tensor([0.5, 1, 2, 0, 1, 1, 1, 0.1]),
        "top_k": torch.tensor([0, 5, 0, 0, 0, 50, 0, 0]),
        "top_p": torch.tensor([1, 1, 0.9, 1, 0.5, 0.8, 1, 1]),
        "min_p": torch.tensor([0, 0, 0, 0, 0, 0.1, 0.2, 0]),
        "seed": torch.tensor([1, 2, 3, 4, 5, 6, -7, 2**62]),
        "position": torch.arange(8) * 11,
    }
    together = sample(logits, make_batch(8, **params)).tolist()
    backwards = sample(logits.flip(0), make_batch(8, **{k: v.flip(0) for k, v in params.items()})).tolist()
    alone = [sample(logits[i : i + 1], make_batch(1, **{k: v[i] for k, v in params.items()})).item() for i in range(8)]
    assert together == alone == backwards[::-1]


def test_the_random_numbers_are_fixed_for_ever() -> None:
    """Users keep seeds: a change of the hash is a change of their outputs."""
    bits = sampling_reference._hash32(torch.tensor(-5), torch.tensor(1000), torch.tensor([0, 1, 49151]))
    assert bits.tolist() == [_plain_hash32(-5, 1000, i) for i in (0, 1, 49151)]


def _plain_hash32(seed: int, position: int, token_id: int) -> int:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    low, high = seed % 2**32, (seed % 2**64) >> 32
    key0 = mix(low ^ mix((position + 0x9E3779B9) % 2**32))
    key1 = mix(high ^ mix((key0 + 0x9E3779B9) % 2**32))
    return mix((mix(token_id ^ key0) + key1) % 2**32)


def test_noise_is_finite_for_every_hash(monkeypatch) -> None:
    extremes = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    monkeypatch.setattr(sampling_reference, "_hash32", lambda *_: extremes)
    noise = sampling_reference._gumbel_noise(torch.tensor(0), torch.tensor(0), extremes)
    assert noise.isfinite().all()
    assert noise.diff().lt(0).sum() >= 3  # small hashes are large noise


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-4, 1e-2])
@pytest.mark.parametrize("top_p", [1.0, 1e-4])
def test_tiny_temperatures_and_top_p_take_the_largest(temperature: float, top_p: float) -> None:
    """Case 35 (vllm 1623): nothing overflows: with a clear winner, a tiny temperature is greedy."""
    logits = torch.tensor([[-3e4, 60.0, 59.0, -torch.inf, 3.0]])
    assert sample(logits, make_batch(1, temperature=temperature, top_p=top_p)).tolist() == [1]


def test_a_forbidden_token_is_never_drawn() -> None:
    logits = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf])
    assert set(draw_many(logits, 200, temperature=100.0).tolist()) == {0, 2}
    assert set(draw_many(logits, 200, temperature=100.0, top_k=3).tolist()) == {0, 2}


def test_penalties_equal_their_formulas() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5, -1.0])
    prompt, output = torch.tensor([0, 1, 1]), torch.tensor([2, 2, 4])
    penalize(logits, prompt, output, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    assert logits.tolist() == [1.0, -4.0, 0.5 - 0.25 - 1.0, 0.5, -2.0 - 0.25 - 0.5]


def test_penalties_of_an_empty_output_change_nothing() -> None:
    logits, nothing = torch.randn(5), torch.tensor([], dtype=torch.int64)
    before = logits.clone()
    penalize(logits, nothing, nothing, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 4, "top_p": 0.7}])
def test_processed_logits_keep_what_draws_can_be(limits) -> None:
    """Over temperature, and minus infinity exactly where no draw falls."""
    logits = torch.tensor([0.0, 2.0, 1.5, -0.5, 1.0, 1.0])
    processed = processed_logits(logits.unsqueeze(0), make_batch(1, temperature=0.8, **limits))[0]
    kept = processed.isfinite()
    assert set(kept.nonzero().flatten().tolist()) == set(draw_many(logits, 2000, temperature=0.8, **limits).tolist())
    assert torch.equal(processed[kept], ((logits - 2.0) / 0.8)[kept])


def test_processed_logits_of_a_greedy_row_are_its_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, -torch.inf]])
    assert torch.equal(processed_logits(logits, make_batch(1, temperature=0.0, top_k=1)), logits)


def test_logprobs_are_the_true_top_and_the_chosen_one_beside_it() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -torch.inf], [0.0, 0.0, 0.0, 0.0]])
    found = logprobs(logits, torch.tensor([3, 2]), num_top=2)
    exact = torch.log_softmax(logits.double(), -1)
    assert found.top_token_ids[0].tolist() == [1, 2]
    assert found.top[0].tolist() == pytest.approx(exact[0, [1, 2]].tolist(), rel=1e-6)
    assert found.chosen.tolist() == pytest.approx([-9999.0, math.log(0.25)])
    assert found.rank.tolist() == [4, 1]


def test_logprobs_are_finite_numbers() -> None:
    """Case 38 (sglang 5984): also for tokens that a grammar forbids."""
    logits = torch.full((1, 30), -torch.inf)
    logits[0, 3] = 1.0
    found = logprobs(logits, torch.tensor([3]), num_top=20)
    assert found.top.isfinite().all()
    assert found.top.min().item() == -9999.0
    assert found.chosen.item() == 0.0


def test_the_total_of_top_p_counts_all_equals_of_the_kth(monkeypatch) -> None:
    """Also those that are not among the first candidates."""
    monkeypatch.setattr(sampling_reference, "_NUM_CANDIDATES", 4)
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -3.0])
    # e^2 is 0.31 of e^2 + 6e, but 0.47 of e^2 + 3e.
    tokens = draw_many(logits, 300, top_k=3, top_p=0.4)
    assert set(tokens.tolist()) == set(range(7))
