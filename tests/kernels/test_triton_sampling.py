"""Sampling with Triton's kernels: the reference's tokens exactly, its rules and its log probabilities, in any batch."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from trioengine_kernels.native.library import ThreadPool  # noqa: E402
from trioengine_kernels.native.sampler import NativeSampler, SampledStatus  # noqa: E402
from trioengine_kernels.sampling import MIN_LOGPROB, SamplingBatch, device_reference  # noqa: E402
from trioengine_kernels.sampling import reference as sampling_reference  # noqa: E402
from trioengine_kernels.sampling import triton as sampling  # noqa: E402
from trioengine_kernels.sampling.device import (  # noqa: E402
    DeviceBias,
    DeviceIds,
    DeviceMasks,
    DevicePenalties,
    DeviceRules,
    change_rows,
    count_tokens,
    empty_state,
    set_output,
    set_prompt,
)

from trioengine.testing.sampling_rows import make_arrays, random_logits  # noqa: E402

# The interpreter computes lanes that a mask leaves out, and unsigned integers that wrap.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]

KINDS = [
    "wide",
    "one large",
    "like language",
    "flat",
    "many equals",
    "nearly equal",
    "many forbidden",
    "huge",
    "denormal",
    "far below",
]
TEMPERATURES = [0.0, 1e-45, 1e-6, 1e-4, 0.1, 0.5, 1.0, 1.0, 2.0, 100.0]
TOP_PS = [1.0, 1.0, 1e-30, 1e-4, 0.1, 0.5, 0.9, 0.95, 0.999999, 1 - 2.0**-24]
MIN_PS = [0.0, 0.0, 0.0, 1e-4, 0.1, 1.0]


def random_arrays(rng, num_rows, vocab_size):
    return make_arrays(
        num_rows,
        temperature=rng.choice(TEMPERATURES, num_rows),
        top_k=rng.choice([0, 0, -1, 1, 2, 50, 700, max(vocab_size - 1, 1), vocab_size, 2**31 - 1], num_rows),
        top_p=rng.choice(TOP_PS, num_rows),
        min_p=rng.choice(MIN_PS, num_rows),
        seed=rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        position=rng.integers(0, 2**33, num_rows),
    )


def batch_of(arrays, rows=slice(None)):
    return SamplingBatch(
        temperature=torch.from_numpy(arrays.temperature[rows].copy()),
        top_k=torch.from_numpy(arrays.top_k[rows].copy()),
        top_p=torch.from_numpy(arrays.top_p[rows].copy()),
        min_p=torch.from_numpy(arrays.min_p[rows].copy()),
        seed=torch.from_numpy(arrays.seed[rows].copy().view(np.int64)),
        position=torch.from_numpy(arrays.position[rows].copy()),
    )


def check_tokens(logits, arrays):
    """Draw, and compare token by token with the reference."""
    tensor = torch.from_numpy(logits)
    before = logits.copy()
    tokens, status = sampling.sample(tensor, batch_of(arrays))
    expected_tokens, expected_status = device_reference.sample(tensor, batch_of(arrays))
    wrong = np.flatnonzero((tokens != expected_tokens).numpy())
    names = ("temperature", "top_k", "top_p", "min_p")
    assert wrong.size == 0, (wrong, {name: getattr(arrays, name)[wrong] for name in names})
    assert status.tolist() == expected_status.tolist()
    assert (tokens.dtype, status.dtype) == (torch.int32, torch.uint8)
    assert np.array_equal(logits, before, equal_nan=True)
    return tokens


def check_limits(logits, arrays):
    """Compare what is left of each row with the reference: it shows a wrong threshold that no draw may show."""
    tensor = torch.from_numpy(logits)
    found = sampling.processed_logits(tensor, batch_of(arrays))
    expected = sampling_reference.processed_logits(tensor, batch_of(arrays))
    wrong = np.flatnonzero((found != expected).any(dim=1).numpy())
    names = ("temperature", "top_k", "top_p", "min_p")
    assert wrong.size == 0, (wrong, {name: getattr(arrays, name)[wrong] for name in names})


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    kind=st.sampled_from(KINDS),
    vocab_size=st.one_of(st.sampled_from([1, 2, 100, 1023, 1024, 1025]), st.integers(100, 3000)),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_tokens_are_the_references(kind: str, vocab_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = 6
    check_tokens(random_logits(rng, kind, num_rows, vocab_size), random_arrays(rng, num_rows, vocab_size))


@pytest.mark.parametrize("kind", KINDS)
def test_every_limit_on_every_kind_of_row(kind: str, monkeypatch) -> None:
    """Rows in three parts, with limits that leave few logits, many, and nearly all."""
    monkeypatch.setattr(sampling, "_MIN_PART", 1024)
    rng = np.random.default_rng(5)
    arrays = make_arrays(
        7,
        temperature=[1.0, 0.7, 1.0, 1.0, 1.3, 0.9, 1.0],
        top_k=[40, 0, 0, 300, 2, 2000, 2000],
        top_p=[1.0, 0.9, 0.999999, 0.8, 0.99, 0.5, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.1, 0.01, 0.05],
    )
    check_limits(random_logits(rng, kind, 7, 2500), arrays)


@pytest.mark.parametrize(("vocab_size", "list_size"), [(1500, 2), (64, 64), (65, 64)])
@pytest.mark.parametrize("kind", ["like language", "nearly equal", "many equals"])
def test_rows_with_as_many_candidates_as_the_list_holds_and_more(kind, vocab_size, list_size, monkeypatch) -> None:
    """Where there are more, the row itself is looked through."""
    monkeypatch.setattr(sampling, "_LIST_SIZE", list_size)
    rng = np.random.default_rng(6)
    arrays = make_arrays(4, temperature=0.9, top_k=[0, 50, 60, 50], top_p=[0.95, 1.0, 0.9, 0.3])
    check_limits(random_logits(rng, kind, 4, vocab_size), arrays)


def test_the_kth_logit_in_the_last_bins() -> None:
    """At 2,048 bins below the largest and further, where only the last bin is."""
    logits = np.float32([0, -20, -63.9, -63.94, -63.96, -63.98, -64, -64.1, -80, -np.inf, -np.inf])[None].repeat(10, 0)
    check_limits(
        logits, make_arrays(10, temperature=[1.0, 40.0] * 5, top_k=np.arange(1, 11), top_p=[1.0] * 7 + [0.9] * 3)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vocabulary_of_fifty_thousand(temperature: float) -> None:
    """Thirteen parts for each row."""
    rng = np.random.default_rng(7)
    arrays = make_arrays(2, temperature=temperature, top_k=[0, 50], top_p=[0.95, 0.9], position=[3, 4])
    check_tokens(random_logits(rng, "like language", 2, 50_001), arrays)


def test_rows_that_are_not_finite() -> None:
    """NaN first, then plus infinity, then the first token; flagged alone, at any temperature and with any limit."""
    rng = np.random.default_rng(8)
    logits = random_logits(rng, "wide", 10, 1200)
    logits[1, [30, 1100]] = np.nan
    logits[2, 1199] = np.nan
    logits[2, 4] = np.inf
    logits[3, [1050, 1060]] = np.inf
    logits[4] = -np.inf
    logits[5, 1:] = -np.inf
    logits[6, :-1] = -np.inf
    logits[8] = np.nan
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 3)):
        arrays = make_arrays(10, temperature=temperature, top_k=top_k, top_p=0.9 if top_k else 1.0)
        tokens = check_tokens(logits, arrays)
        assert tokens[[1, 2, 3, 4, 5, 6, 8]].tolist() == [30, 1199, 1050, 0, 0, 1199, 0]
    status = sampling.sample(torch.from_numpy(logits), batch_of(make_arrays(10)))[1]
    nan, none = SampledStatus.IS_NAN, SampledStatus.NOTHING_ALLOWED
    assert status.tolist() == [0, nan, nan, 0, none, 0, 0, 0, nan, 0]


def test_of_exact_ties_the_first_token_wins() -> None:
    """A second logit is chosen such that with its noise it is exactly as large as the first with its own."""
    num_rows, seed = 30, torch.tensor(7)
    noise = np.stack(
        [sampling_reference._gumbel_noise(seed, torch.tensor(i), torch.arange(2)).numpy() for i in range(num_rows)]
    )
    better, rows = noise.argmax(-1), np.arange(num_rows)
    difference = noise[rows, 1 - better] - noise[rows, better]
    logits = np.zeros((num_rows, 2), np.float32)
    logits[rows, better] = difference
    is_tie = difference + noise[rows, better] == noise[rows, 1 - better]
    assert is_tie.sum() > 10
    tokens = check_tokens(logits, make_arrays(num_rows))
    assert not tokens.numpy()[is_tie].any()


def test_ties_across_parts_and_of_the_kth_logit(monkeypatch) -> None:
    """The largest logit twice, in two parts, and equals of the third: all of them stay."""
    monkeypatch.setattr(sampling, "_MIN_PART", 1024)
    logits = np.full((20, 2100), -4.0, np.float32)
    logits[:, [700, 2000]] = 2.0
    logits[:, [3, 1500, 2099]] = 1.5
    greedy = check_tokens(logits[:1], make_arrays(1, temperature=0))
    assert greedy.tolist() == [700]
    tokens = check_tokens(logits, make_arrays(20, top_k=3))
    assert set(tokens.tolist()) == {3, 700, 1500, 2000, 2099}


def test_limits_that_fall_between_neighbouring_floats() -> None:
    """The last logit that `min_p` keeps, and logits that decide `top_p` of a pair, and their neighbours."""
    rng = np.random.default_rng(1)
    for name, edge in (("min_p", np.log), ("top_p", lambda p: np.log((1 - p) / p))):
        limit = rng.uniform(0.501, 0.999, 8).astype(np.float32)
        logits = np.zeros((8, 2), np.float32)
        logits[:, 1] = edge(limit.astype(np.float64))
        for side in (-np.inf, 0.0, np.inf):
            moved = logits.copy()
            if side:
                moved[:, 1] = np.nextafter(moved[:, 1], np.float32(side))
            check_limits(moved, make_arrays(8, **{name: limit}))


def test_min_p_that_cuts_a_bin() -> None:
    """Of logits that share a bin some are left out, and weigh nothing when the others' share is counted."""
    rng = np.random.default_rng(17)
    logits = (rng.standard_normal((12, 200)) * 0.004).astype(np.float32)
    check_limits(logits, make_arrays(12, min_p=0.99, top_p=[0.3, 0.5, 0.7] * 4, top_k=[0, 60, 180, 199] * 3))


def test_temperature_that_makes_different_logits_equal() -> None:
    """The division rounds neighbours together, across the border of two bins: they stay or go as one."""
    steps = np.arange(-40, 40, dtype=np.float32) * np.float32(2.0**-23)
    logits = np.concatenate([np.float32([8.0]), np.float32(7.0) + steps, np.float32(6.96875) + steps])[None]
    for temperature in (3.0, 100.0, 1e30):
        for top_k in (20, 42, 82, 120):
            arrays = make_arrays(2, temperature=temperature, top_k=top_k, top_p=[1.0, 0.6])
            check_limits(np.repeat(logits, 2, 0), arrays)


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(9)
    logits = random_logits(rng, "like language", 6, 1800)
    arrays = random_arrays(rng, 6, 1800)
    together = sampling.sample(torch.from_numpy(logits), batch_of(arrays))[0].tolist()
    backwards = sampling.sample(torch.from_numpy(logits[::-1].copy()), batch_of(arrays, slice(None, None, -1)))[0]
    assert backwards.tolist()[::-1] == together
    for row in range(6):
        rows = slice(row, row + 1)
        assert sampling.sample(torch.from_numpy(logits[rows]), batch_of(arrays, rows))[0].tolist() == together[rows]


def test_rows_of_a_wider_matrix() -> None:
    """Logits of a padded vocabulary: what is behind a row's tokens is nobody's."""
    rng = np.random.default_rng(10)
    wide = torch.full((4, 1300), torch.inf)
    wide[:, :1100] = torch.from_numpy(random_logits(rng, "wide", 4, 1100))
    logits = wide[:, :1100]
    arrays = make_arrays(4, top_k=[0, 5, 0, 9], top_p=[1.0, 1.0, 0.8, 0.8])
    expected = device_reference.sample(logits.contiguous(), batch_of(arrays))[0]
    assert sampling.sample(logits, batch_of(arrays))[0].tolist() == expected.tolist()
    own = sampling.logprobs(logits, expected, 3)
    assert own.top_token_ids.tolist() == device_reference.logprobs(logits, expected, 3).top_token_ids.tolist()


def test_no_rows() -> None:
    logits, arrays = torch.empty(0, 50), make_arrays(0)
    tokens, status = sampling.sample(logits, batch_of(arrays))
    assert (tokens.shape, status.shape) == ((0,), (0,))
    assert sampling.processed_logits(logits, batch_of(arrays)).shape == (0, 50)
    assert sampling.logprobs(logits, tokens, 2).top.shape == (0, 2)


def test_tokens_of_the_native_sampler(library) -> None:
    """Three implementations, one token."""
    rng = np.random.default_rng(11)
    logits = random_logits(rng, "like language", 12, 900)
    arrays = random_arrays(rng, 12, 900)
    pool = ThreadPool(library, 1)
    native = NativeSampler(library, pool).sample(logits, arrays)
    pool.close()
    tokens, status = sampling.sample(torch.from_numpy(logits), batch_of(arrays))
    assert tokens.tolist() == native.token_ids.tolist()
    assert status.tolist() == native.status.tolist()


def test_processed_logits_of_rows_that_draw_nothing_are_as_they_were() -> None:
    rng = np.random.default_rng(12)
    logits = random_logits(rng, "wide", 5, 1300)
    logits[2], logits[3, 7] = -np.inf, np.inf
    check_limits(logits, make_arrays(5, temperature=[1, 0, 1, 1, 0.7], top_k=20, top_p=0.9))


# ---- rules ----


def ids_of(rows, capacity=0):
    """Ids by row, rising, and behind them what belongs to no row."""
    ids = [token_id for row in rows for token_id in sorted(row)]
    padding = [5] * (capacity - len(ids))
    return DeviceIds(
        torch.tensor(np.cumsum([0, *map(len, rows)]), dtype=torch.int32), torch.tensor(ids + padding, dtype=torch.int32)
    )


def random_rules(rng, num_rows, vocab_size, has_masks=True):
    """Each row has another mix of rules; the first has none."""
    num_states, num_words = 3, (vocab_size + 31) // 32
    state = empty_state(num_states, vocab_size, "cpu")
    for row in range(num_states):
        set_prompt(state.prompt_bits, row, torch.from_numpy(rng.integers(0, vocab_size, 40)))
        set_output(state.output_counts, row, torch.from_numpy(rng.integers(0, vocab_size // 2, 60)))
    bits = rng.integers(-(2**31), 2**31, (2, num_words + 1), dtype=np.int32)  # A word more than is needed.
    numbers = np.arange(num_rows)
    biased = [rng.permutation(vocab_size)[: int(rng.integers(1, 150))] if row % 2 else [] for row in numbers]
    num_biased = sum(map(len, biased))
    values = torch.from_numpy((rng.standard_normal(num_biased + 7) * 5).astype(np.float32))

    def floats(low, high):
        return torch.from_numpy(rng.uniform(low, high, num_rows).astype(np.float32))

    return DeviceRules(
        bias=DeviceBias(ids_of(biased, num_biased + 7), values),
        penalties=DevicePenalties(
            state=state,
            rows=torch.from_numpy(np.where(numbers % 3 == 0, -1, numbers % num_states).astype(np.int32)),
            repetition=floats(0.5, 2),
            presence=floats(-2, 2),
            frequency=floats(-2, 2),
            drafts=ids_of([rng.integers(0, vocab_size, 4) if row % 4 == 1 else [] for row in numbers], num_rows * 4),
        ),
        masks=DeviceMasks(
            torch.from_numpy(np.where(numbers % 4 > 1, numbers % 2, -1).astype(np.int32)), torch.from_numpy(bits)
        )
        if has_masks
        else None,
    )


@pytest.mark.parametrize("has_masks", [True, False])
@pytest.mark.parametrize("vocab_size", [33, 1003, 5000])
def test_rules_are_the_references_to_the_last_bit(vocab_size: int, has_masks: bool) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(rng, "wide", 13, vocab_size)
    logits[5, 3], logits[6, ::5], logits[7, ::5], logits[10, ::3] = np.nan, np.inf, -np.inf, np.nan
    logits = torch.from_numpy(logits)
    rules = random_rules(rng, 13, vocab_size, has_masks)
    before = logits.clone()
    expected = device_reference.apply_rules(logits, rules)
    ruled = sampling.apply_rules(logits, rules)
    assert np.array_equal(ruled.numpy(), expected.numpy(), equal_nan=True)
    assert not torch.equal(ruled[1:], before[1:])
    assert np.array_equal(logits.numpy(), before.numpy(), equal_nan=True)
    # In place the same.
    assert sampling.apply_rules(logits, rules, out=logits) is logits
    assert np.array_equal(logits.numpy(), expected.numpy(), equal_nan=True)


def test_penalties_are_those_of_the_formulas() -> None:
    """Against `penalize`, which takes the tokens themselves; drafts count as output."""
    rng = np.random.default_rng(13)
    logits = torch.from_numpy(random_logits(rng, "wide", 20, 300))
    state = empty_state(20, 300, "cpu")
    repetition, presence, frequency = (
        torch.from_numpy(rng.uniform(*ends, 20).astype(np.float32)) for ends in ((0.5, 2), (-2, 2), (-2, 2))
    )
    expected, drafts = logits.clone(), []
    for row in range(20):
        prompt, output = (torch.from_numpy(rng.integers(0, 60, num)) for num in (25, 30))
        drafts.append(output[27:].tolist())
        set_prompt(state.prompt_bits, row, prompt)
        set_output(state.output_counts, row, output[:20])
        rows = torch.full((7,), row, dtype=torch.int32)
        count_tokens(state.output_counts, rows, output[20:27].int())
        sampling_reference.penalize(
            expected[row],
            prompt,
            output,
            repetition_penalty=repetition[row].item(),
            presence_penalty=presence[row].item(),
            frequency_penalty=frequency[row].item(),
        )
    nothing = DeviceBias(ids_of([[]] * 20), torch.empty(0))
    penalties = DevicePenalties(state, torch.arange(20).int(), repetition, presence, frequency, ids_of(drafts))
    for apply_rules in (device_reference.apply_rules, sampling.apply_rules):
        assert torch.equal(apply_rules(logits, DeviceRules(nothing, penalties)), expected)


def test_counts_of_nobody_reach_no_row() -> None:
    state = empty_state(2, 40, "cpu")
    count_tokens(
        state.output_counts, torch.tensor([-1, 1, 1, -1], dtype=torch.int32), torch.tensor([3, 5, 5, 39]).int()
    )
    assert state.output_counts[1].nonzero().tolist() == [[5]]
    assert state.output_counts[1, 5] == 2
    assert not state.output_counts[0].any()


def test_every_bit_of_a_prompt() -> None:
    state = empty_state(1, 70, "cpu")
    state.prompt_bits[0] = 77
    set_prompt(state.prompt_bits, 0, torch.tensor([0, 31, 31, 32, 69]))
    assert state.prompt_bits.tolist() == [[-(2**31) + 1, 1, 1 << 5], [0, 0, 0]]


def test_changed_rows_stay_wrong_where_they_were_no_numbers() -> None:
    logits = torch.zeros(4, 5)
    logits[2, 3] = torch.nan
    changed = change_rows(logits, torch.tensor([0, 2]), torch.ones(2, 5))
    assert changed[0].tolist() == [1] * 5
    assert changed[2].isnan().tolist() == [False, False, False, True, False]
    assert not logits[0].any()


# ---- log probabilities ----


@pytest.mark.parametrize("num_top", [0, 1, 20, 64, 65])
@pytest.mark.parametrize("kind", ["wide", "many equals", "flat", "many forbidden"])
def test_logprobs_ranks_and_the_most_likely(kind: str, num_top: int) -> None:
    """Ranks and ids are exact, equals by id; the last part of a row has fewer tokens than are wanted."""
    rng = np.random.default_rng(14)
    vocab_size = sampling._TOP_PART + 50
    logits = torch.from_numpy(random_logits(rng, kind, 3, vocab_size))
    tokens = torch.tensor([7, vocab_size - 1, int(logits[2].argmax())], dtype=torch.int32)
    found = sampling.logprobs(logits, tokens, num_top)
    expected = device_reference.logprobs(logits, tokens, num_top)
    exact = torch.log_softmax(logits.double(), -1).clamp(min=MIN_LOGPROB)
    assert found.rank.tolist() == expected.rank.tolist()
    assert found.top_token_ids.tolist() == expected.top_token_ids.tolist()
    assert found.chosen.tolist() == pytest.approx(exact[range(3), tokens.long()].tolist(), rel=1e-6, abs=1e-5)
    for row in range(3):
        assert found.top[row].tolist() == pytest.approx(
            exact[row, found.top_token_ids[row].long()].tolist(), rel=1e-6, abs=1e-5
        )
    kinds = {(each.chosen.dtype, each.rank.dtype, each.top_token_ids.dtype) for each in (found, expected)}
    assert kinds == {(torch.float32, torch.int32, torch.int32)}


def test_logprobs_are_numbers_where_there_are_none() -> None:
    """Rows that forbid everything or are no numbers; ids are in the vocabulary all the same."""
    logits = torch.zeros(4, 300)
    logits[0] = -torch.inf
    logits[1, 5] = torch.nan
    logits[2, 7] = torch.inf
    logits[3, 1:] = -torch.inf
    found = sampling.logprobs(logits, torch.tensor([0, 5, 7, 0], dtype=torch.int32), 4)
    assert found.chosen.tolist() == [MIN_LOGPROB, MIN_LOGPROB, MIN_LOGPROB, 0.0]
    assert found.top.isfinite().all()
    assert found.top_token_ids[[0, 3]].tolist() == [[0, 1, 2, 3]] * 2
    assert ((found.top_token_ids >= 0) & (found.top_token_ids < 300)).all()
    assert found.top[3].tolist() == [0.0] + [MIN_LOGPROB] * 3


def test_logprobs_of_a_row_whose_first_part_is_forbidden() -> None:
    """And of two zeros, of which the first has a sign: they are equal."""
    logits = torch.full((1, sampling._TOP_PART + 9), -torch.inf)
    logits[0, -4:] = torch.tensor([-2.0, -0.0, 0.0, -1.0])
    found = sampling.logprobs(logits, torch.tensor([sampling._TOP_PART + 7], dtype=torch.int32), 5)
    assert (found.top_token_ids - sampling._TOP_PART).tolist() == [[6, 7, 8, 5, -sampling._TOP_PART]]
    exact = torch.log_softmax(logits.double(), -1)[0]
    assert found.top[0, :4].tolist() == pytest.approx(exact[[-3, -2, -1, -4]].tolist(), abs=1e-6)
    assert (found.top[0, 4].item(), found.rank.item()) == (MIN_LOGPROB, 1)


def test_logprobs_do_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(15)
    logits = torch.from_numpy(random_logits(rng, "like language", 5, sampling._TOP_PART * 2 + 3))
    tokens = logits.argmax(-1).int()
    together = sampling.logprobs(logits, tokens, 5)
    alone = [sampling.logprobs(logits[row : row + 1], tokens[row : row + 1], 5) for row in range(5)]
    assert torch.equal(together.top, torch.cat([each.top for each in alone]))
    assert torch.equal(together.chosen, torch.cat([each.chosen for each in alone]))


@triton.jit
def _noise_of(seed, position, hashes, noise, bounds, TILE: tl.constexpr):
    tokens = tl.arange(0, TILE)
    first_key, second_key = sampling._noise_key(seed, position, 0)
    hashed = sampling._mix32(sampling._mix32(tokens.to(tl.uint32) ^ first_key) + second_key)
    tl.store(hashes + tokens, hashed.to(tl.int64))
    tl.store(noise + tokens, sampling._noise(hashed))
    tl.store(bounds + tokens, sampling._noise_bounds(hashed))


def test_noise_is_the_references_and_below_its_bound() -> None:
    """Else a token that wins could be passed over."""
    seed, position = torch.tensor([-5]), torch.tensor([2**40 + 1000])
    hashes, noise, bounds = (torch.zeros(2**17, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.float32))
    _noise_of[(1,)](seed, position, hashes, noise, bounds, TILE=len(hashes))
    assert torch.equal(hashes, sampling_reference._hash32(seed, position, torch.arange(len(hashes))))
    expected = sampling_reference._gumbel_noise(seed, position, torch.arange(len(hashes)))
    # Two libraries' double logarithms may round to two neighbouring floats, once in 2**28.
    assert (noise != expected).sum() <= 1
    assert (bounds - noise > 5e-4).all()


@pytest.mark.parametrize("extreme", [0, 1, 2**31, 2**32 - 2, 2**32 - 1])
def test_bounds_of_extreme_hashes(extreme: int) -> None:
    v = (extreme + 0.5) * 2.0**-32
    bound = 32 * math.log(2) + 1e-3 - math.log(np.float32(extreme) + np.float32(0.5))
    assert bound > -math.log(-math.log(1.0 - v)) > -4
    assert 1.0 - v == math.fsum((1.0, -v))  # Exact, so that log(1 - v) is log1p(-v).


def test_variants_cover_every_kernel() -> None:
    names = [variant.name for variant in sampling.variants()]
    assert len(names) == len(set(names)) <= 14
    for variant in sampling.variants():
        missing = set(variant.kernel.arg_names) - set(variant.signature) - set(variant.constants)
        assert not missing, variant.name
        assert not variant.is_fused
