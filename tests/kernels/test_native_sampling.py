"""The native sampler: the reference's tokens exactly, its rules and log probabilities, in any batch."""

import math

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool  # noqa: E402
from trioengine_kernels.native.sampler import (  # noqa: E402
    MIN_LOGPROB,
    ChangedLogits,
    LogitBias,
    Masks,
    NativeSampler,
    Penalties,
    RaggedIds,
    SampledStatus,
)
from trioengine_kernels.sampling import SamplingBatch, logprobs, penalize, processed_logits, sample  # noqa: E402
from trioengine_kernels.sampling.reference import _gumbel_noise  # noqa: E402

from trioengine.testing.sampling_rows import make_arrays, random_logits  # noqa: E402

TEMPERATURES = [0.0, 1e-45, 1e-4, 0.5, 1.0, 1.0, 2.0, 100.0]
TOP_PS = [1.0, 1.0, 1.0, 1e-4, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 2.0**-24]
MIN_PS = [0.0, 0.0, 0.0, 0.0, 1e-4, 0.1, 1.0]
NUM_ROWS = {1: 4, 2: 30, 63: 60, 64: 60, 65: 60, 1003: 150, 4099: 50, 49152: 10}


@pytest.fixture(scope="module")
def sampler(library):
    pool = ThreadPool(library, 2)
    yield NativeSampler(library, pool)
    pool.close()


@pytest.fixture
def isas(library):
    """The kernels to try; afterwards the fastest are chosen again."""
    yield library.supported_isas()
    library.set_isa(library.supported_isas()[-1])


def random_arrays(rng, num_rows, vocab_size):
    return make_arrays(
        num_rows,
        temperature=rng.choice(TEMPERATURES, num_rows),
        top_k=rng.choice([0, 0, 0, -1, 1, 2, 50, 700, max(vocab_size - 1, 1), vocab_size, 2**31 - 1], num_rows),
        top_p=rng.choice(TOP_PS, num_rows),
        min_p=rng.choice(MIN_PS, num_rows),
        seed=rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        position=rng.integers(0, 2**33, num_rows),
    )


def reference_batch(arrays):
    return SamplingBatch(
        temperature=torch.from_numpy(arrays.temperature),
        top_k=torch.from_numpy(arrays.top_k.astype(np.int64)),
        top_p=torch.from_numpy(arrays.top_p),
        min_p=torch.from_numpy(arrays.min_p),
        seed=torch.from_numpy(arrays.seed.view(np.int64)),
        position=torch.from_numpy(arrays.position),
    )


def reference_tokens(logits, arrays):
    return sample(torch.from_numpy(logits), reference_batch(arrays)).numpy()


def ragged(rows):
    ids = np.array([token_id for row in rows for token_id in row], np.int32)
    return RaggedIds(np.cumsum([0, *map(len, rows)], dtype=np.int64), ids)


@pytest.mark.parametrize(
    "kind",
    [
        "wide",
        "one large",
        "like language",
        "flat",
        "many equals",
        "nearly equal",
        "many forbidden",
        "huge",
        "denormal",
        "sorted",
    ],
)
def test_the_tokens_are_the_references(library, sampler, isas, kind) -> None:
    """4,240 rows over all kinds, with every kernel of this processor."""
    rng = np.random.default_rng(len(kind))
    for vocab_size, num_rows in NUM_ROWS.items():
        logits = random_logits(rng, kind, num_rows, vocab_size)
        arrays = random_arrays(rng, num_rows, vocab_size)
        before = logits.copy()
        expected = reference_tokens(logits, arrays)
        for isa in isas:
            library.set_isa(isa)
            found = sampler.sample(logits, arrays)
            wrong = np.flatnonzero(found.token_ids != expected)
            assert wrong.size == 0, (vocab_size, isa, [getattr(arrays, name)[wrong] for name in ("top_k", "top_p")])
            assert not found.status.any()
        assert np.array_equal(logits, before)


def test_of_exact_ties_the_first_token_wins(library, sampler, isas) -> None:
    """A second logit is chosen such that with its noise it is exactly as large as the first with its own."""
    num_rows = 300
    noise = np.array(
        [_gumbel_noise(torch.tensor(7), torch.tensor(i), torch.arange(2)).numpy() for i in range(num_rows)]
    )
    better = noise.argmax(-1)
    rows = np.arange(num_rows)
    difference = noise[rows, 1 - better] - noise[rows, better]
    logits = np.zeros((num_rows, 2), np.float32)
    logits[rows, better] = difference
    is_tie = difference + noise[rows, better] == noise[rows, 1 - better]
    assert is_tie.sum() > 100
    assert 0.3 < better[is_tie].mean() < 0.7
    for isa in isas:
        library.set_isa(isa)
        assert not sampler.sample(logits, make_arrays(num_rows)).token_ids[is_tie].any()


def test_limits_that_fall_between_neighbouring_floats(sampler) -> None:
    """The last logit that `min_p` keeps, and logits that decide `top_p` of a pair, and their neighbours."""
    rng = np.random.default_rng(1)
    for name, edge in (("min_p", np.log), ("top_p", lambda p: np.log((1 - p) / p))):
        limit = rng.uniform(0.501, 0.999, 600).astype(np.float32)
        logits = np.zeros((600, 2), np.float32)
        logits[:, 1] = edge(limit.astype(np.float64))
        for side in (-np.inf, 0.0, np.inf):
            moved = logits.copy()
            if side:
                moved[:, 1] = np.nextafter(moved[:, 1], np.float32(side))
            arrays = make_arrays(600, **{name: limit})
            tokens = sampler.sample(moved, arrays).token_ids
            assert tokens.tolist() == reference_tokens(moved, arrays).tolist()
            if name == "min_p":
                assert tokens.any() == (side >= 0)


@pytest.mark.parametrize("limits", [{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_draws_follow_the_softmax_of_what_the_limits_keep(sampler, limits) -> None:
    """Chi-square over at most 12 tokens; 31.3 is passed by chance once in a thousand, and the draws are always the
    same."""
    logits = np.random.default_rng(3).permutation(np.linspace(-2, 1.5, 12)).astype(np.float32)
    num_draws = 20000
    tokens = sampler.sample(np.broadcast_to(logits, (num_draws, 12)), make_arrays(num_draws, **limits)).token_ids
    counts = np.bincount(tokens, minlength=12)
    weights = np.exp(logits.astype(np.float64)) * (counts > 0)
    expected = weights / weights.sum() * num_draws
    kept = counts > 0
    assert kept.sum() == {"top_k": 7, "top_p": 7, "min_p": 10}.get(next(iter(limits), ""), 12)
    assert (np.square(counts - expected)[kept] / expected[kept]).sum() < 31.3


def test_batch_and_threads_change_nothing(library, sampler) -> None:
    """Bitwise, log probabilities too: alone, backwards, on one thread and on five."""
    rng = np.random.default_rng(0)
    logits = random_logits(rng, "like language", 40, 3001)
    arrays = random_arrays(rng, 40, 3001)

    def run(with_sampler, rows):
        columns = {name: getattr(arrays, name)[rows].copy() for name in ("temperature", "top_k", "top_p", "min_p")}
        part = make_arrays(
            len(rows),
            seed=arrays.seed[rows],
            position=arrays.position[rows],
            num_logprobs=np.full(len(rows), 3, np.int32),
            penalties=some_penalties([[int(row), int(row) + 1, int(row)] for row in rows]),
            **columns,
        )
        found = with_sampler.sample(logits[rows], part)
        return [
            (found.token_ids[i], found.logprobs.chosen[i].tobytes(), found.logprobs.top[i].tobytes())
            for i in range(len(rows))
        ]

    expected = run(sampler, np.arange(40))
    assert run(sampler, np.arange(40)[::-1])[::-1] == expected
    assert [run(sampler, np.array([row]))[0] for row in range(40)] == expected
    for num_threads in (1, 5):
        pool = ThreadPool(library, num_threads)
        other = NativeSampler(library, pool)
        assert all(run(other, np.arange(40)) == expected for _ in range(5))
        pool.close()


def some_penalties(seen, num_prompt_tokens=1, repetition=1.3, presence=0.25, frequency=0.7):
    num_rows = len(seen)
    return Penalties(
        seen=ragged(seen),
        num_prompt_tokens=np.broadcast_to(np.asarray(num_prompt_tokens, np.int64), (num_rows,)).copy(),
        repetition=np.full(num_rows, repetition, np.float32),
        presence=np.full(num_rows, presence, np.float32),
        frequency=np.full(num_rows, frequency, np.float32),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "strength", [(1.3, 0.0, 0.0), (1.0, 0.3, 0.0), (1.0, 0.0, -0.7), (0.77, -0.1, 0.33), (1.0, 0.0, 0.0)]
)
def test_rules_apply_in_the_references_order(sampler, temperature, strength) -> None:
    """Changed logits, masks, bias, penalties, forbidden, allowed, to the last bit; rows keep to their own rules, and
    forced ones to none."""
    rng = np.random.default_rng(5)
    num_rows, vocab_size = 24, 301
    logits = random_logits(rng, "wide", num_rows, vocab_size)
    repetition, presence, frequency = strength
    expected = logits.copy()
    changed_logits = random_logits(rng, "wide", 4, vocab_size)
    changed_rows = np.where(np.arange(num_rows) % 6 == 0, np.arange(num_rows) // 6, -1).astype(np.int32)
    mask_bits = rng.integers(-(2**31), 2**31, (3, 11), dtype=np.int32)  # A word more than is needed.
    mask_bits[1, :4], mask_bits[2, 2:6] = -1, 0
    mask_rows = np.where(np.arange(num_rows) % 4 == 1, np.arange(num_rows) % 3, -1).astype(np.int32)
    forced = np.where(np.arange(num_rows) % 11 == 10, np.arange(num_rows) + 200, -1).astype(np.int32)
    seen, num_prompt, biased, bias_values, forbidden, allowed = [], [], [], [], [], []
    for row in range(num_rows):
        best = np.argsort(-logits[row])
        biased.append(rng.permutation(vocab_size)[:6].tolist() if row % 2 else [])
        values = (rng.standard_normal(len(biased[-1])) * 5).astype(np.float32)
        bias_values += values.tolist()
        seen.append((best[rng.integers(0, 20, 30)].tolist()) if row % 3 else [])
        num_prompt.append(int(rng.integers(0, 31)) if row % 3 else 0)
        forbidden.append(best[rng.integers(0, 30, 4)].tolist() if row % 5 == 1 else [])
        allowed.append(rng.permutation(vocab_size)[:40].tolist() if row % 7 == 2 else [])
        if changed_rows[row] >= 0:
            expected[row] = changed_logits[changed_rows[row]]
        if mask_rows[row] >= 0:
            words = mask_bits[mask_rows[row]]
            hidden = [token for token in range(vocab_size) if not int(words[token // 32]) >> token % 32 & 1]
            expected[row, hidden] = -np.inf
        expected[row, biased[-1]] += values
        tensor = torch.from_numpy(expected[row])
        prompt, output = torch.tensor(seen[-1][: num_prompt[-1]]), torch.tensor(seen[-1][num_prompt[-1] :])
        penalize(
            tensor,
            prompt.long(),
            output.long(),
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        expected[row, forbidden[-1]] = -np.inf
        if allowed[-1]:
            expected[row, np.setdiff1d(np.arange(vocab_size), allowed[-1])] = -np.inf
    rules = {
        "logit_bias": LogitBias(ragged(biased), np.array(bias_values, np.float32)),
        "penalties": some_penalties(seen, num_prompt, repetition, presence, frequency),
        "forbidden": ragged(forbidden),
        "allowed": ragged(allowed),
        "changed": ChangedLogits(changed_rows, changed_logits),
        "masks": Masks(mask_rows, mask_bits),
        "forced": forced,
    }
    arrays = make_arrays(num_rows, temperature=temperature, **rules)
    expected_tokens = np.where(forced >= 0, forced, reference_tokens(expected, arrays)).tolist()
    before = logits.copy()
    # Twice: the memory for counting is clean again after the first time.
    for _ in range(2):
        found = sampler.sample(logits, arrays)
        assert found.token_ids.tolist() == expected_tokens
        assert not found.status.any()
    assert np.array_equal(logits, before)


def test_penalized_logits_equal_the_references_to_the_last_bit(sampler) -> None:
    """Log probabilities are of the logits before the rules, so a probe tells: an unpenalized token that is exactly as
    likely as the penalized one wins when it comes first and loses when it comes last."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        old = np.float32(rng.standard_normal() * 9)
        count, repetition = int(rng.integers(1, 40)), float(rng.uniform(0.5, 2))
        presence, frequency = (float(value) for value in rng.uniform(-2, 2, 2))
        tensor = torch.tensor([0.0, float(old), 0.0])
        output = torch.full((count,), 1)
        penalize(
            tensor,
            torch.tensor([], dtype=torch.int64),
            output,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        new = tensor[1].item()
        logits = np.array([[new, old, -np.inf], [-np.inf, old, new], [-np.inf, old, new]], np.float32)
        logits[2, 2] = np.nextafter(logits[2, 2], np.float32(np.inf))
        penalties = some_penalties([[1] * count] * 3, 0, repetition, presence, frequency)
        found = sampler.sample(logits, make_arrays(3, temperature=0, penalties=penalties))
        assert found.token_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["wide", "like language", "many equals", "flat", "many forbidden", "huge"])
def test_logprobs_and_ranks(library, sampler, isas, kind) -> None:
    """Of the logits before rules and limits; ranks and the order of the most likely are exact."""
    rng = np.random.default_rng(11)
    num_rows, vocab_size = 12, 2500
    logits = random_logits(rng, kind, num_rows, vocab_size)
    num_logprobs = np.array([-1, 0, 1, 5, 20, vocab_size, -1, 7, 0, 1, 100, 3], np.int32)
    rules = {"forbidden": ragged([[int(logits[row].argmax())] for row in range(num_rows)])}
    arrays = make_arrays(num_rows, num_logprobs=num_logprobs, top_k=90, **rules)
    exact = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy().clip(min=MIN_LOGPROB)
    for isa in isas:
        library.set_isa(isa)
        found = sampler.sample(logits, arrays)
        reference = logprobs(torch.from_numpy(logits), torch.from_numpy(found.token_ids).long(), vocab_size)
        for row, num in enumerate(num_logprobs):
            top, ids = found.logprobs.top[row], found.logprobs.top_token_ids[row]
            assert (ids[max(num, 0) :] == -1).all()
            assert (top[max(num, 0) :] == MIN_LOGPROB).all()
            if num < 0:
                assert (found.logprobs.chosen[row], found.logprobs.rank[row]) == (MIN_LOGPROB, 0)
                continue
            assert ids[:num].tolist() == reference.top_token_ids[row, :num].tolist()
            assert top[:num] == pytest.approx(exact[row, ids[:num]], rel=1e-6, abs=1e-5)
            assert found.logprobs.chosen[row] == pytest.approx(exact[row, found.token_ids[row]], rel=1e-6, abs=1e-5)
            assert found.logprobs.rank[row] == reference.rank[row]
            assert found.token_ids[row] != logits[row].argmax()


@pytest.mark.parametrize("kind", ["wide", "like language", "many equals", "flat", "many forbidden", "huge", "denormal"])
def test_logprobs_of_what_is_drawn_from(library, sampler, isas, kind) -> None:
    """After rules, temperature and limits; of forced rows they are of the logits as they are."""
    rng = np.random.default_rng(12)
    num_rows, vocab_size = 40, 1500
    logits = random_logits(rng, kind, num_rows, vocab_size)
    arrays = random_arrays(rng, num_rows, vocab_size)
    forbidden = [[int(logits[row].argmax())] for row in range(num_rows)]
    ruled = logits.copy()
    for row in range(num_rows):
        ruled[row, forbidden[row]] = -np.inf
    forced = np.where(np.arange(num_rows) % 5 == 0, np.arange(num_rows), -1).astype(np.int32)
    num_logprobs = np.array([-1, 0, 1, 20, vocab_size] * 8, np.int32)
    arrays = attrs.evolve(
        arrays,
        forbidden=ragged(forbidden),
        forced=forced,
        num_logprobs=num_logprobs,
        logprobs_are_processed=True,
    )
    processed = processed_logits(torch.from_numpy(ruled), reference_batch(arrays)).numpy()
    processed = np.where(forced[:, None] >= 0, logits, processed)
    exact = torch.log_softmax(torch.from_numpy(processed).double(), -1).numpy().clip(min=MIN_LOGPROB)
    for isa in isas:
        library.set_isa(isa)
        found = sampler.sample(logits, arrays)
        reference = logprobs(torch.from_numpy(processed), torch.from_numpy(found.token_ids).long(), vocab_size)
        for row, num in enumerate(num_logprobs):
            if num < 0:
                continue
            top, ids = found.logprobs.top[row, :num], found.logprobs.top_token_ids[row, :num]
            assert ids.tolist() == reference.top_token_ids[row, :num].tolist()
            assert top == pytest.approx(exact[row, ids], rel=1e-6, abs=1e-5)
            assert found.logprobs.chosen[row] == pytest.approx(exact[row, found.token_ids[row]], rel=1e-6, abs=1e-5)
            assert found.logprobs.rank[row] == reference.rank[row]
            assert forced[row] >= 0 or found.logprobs.chosen[row] > MIN_LOGPROB


def test_a_row_with_nan_is_flagged_alone(sampler) -> None:
    """At any temperature, wherever the NaN is, also where a rule would hide it; its log probabilities are numbers."""
    rng = np.random.default_rng(2)
    logits = random_logits(rng, "wide", 8, 200)
    clean = sampler.sample(logits, make_arrays(8, temperature=[0, 1] * 4, top_p=0.9)).token_ids
    for place in (0, 63, 64, 130, 199):
        wrong = logits.copy()
        wrong[[2, 3], place] = np.nan
        wrong[3, 199] = np.nan
        arrays = make_arrays(
            8,
            temperature=[0, 1] * 4,
            top_p=0.9,
            num_logprobs=np.full(8, 2, np.int32),
            forbidden=ragged([[], [], [place, 199], [], [], [], [], []]),
        )
        found = sampler.sample(wrong, arrays)
        assert found.status.tolist() == [0, 0, SampledStatus.IS_NAN, SampledStatus.IS_NAN, 0, 0, 0, 0]
        assert found.token_ids[[2, 3]].tolist() == [place, place]
        assert np.delete(found.token_ids, [2, 3]).tolist() == np.delete(clean, [2, 3]).tolist()
        assert np.isfinite(found.logprobs.top).all()
        assert np.isfinite(found.logprobs.chosen).all()


def test_rows_that_forbid_everything_and_rows_with_infinity(sampler) -> None:
    logits = np.zeros((4, 70), np.float32)
    logits[0] = -np.inf
    logits[2, [40, 60]] = np.inf
    rules = {"forbidden": ragged([[], [0, 1], [], []]), "allowed": ragged([[], [0, 1], [], [69]])}
    masked = sampler.sample(
        logits[1:2], make_arrays(1, masks=Masks(np.zeros(1, np.int32), np.array([[0, 0, ~63]], np.int32)))
    )
    assert masked.status.tolist() == [SampledStatus.NOTHING_ALLOWED]  # Bits past the vocabulary mean nothing.
    found = sampler.sample(logits, make_arrays(4, num_logprobs=np.full(4, 2, np.int32), top_k=3, top_p=0.5, **rules))
    nothing = SampledStatus.NOTHING_ALLOWED
    assert found.status.tolist() == [nothing, nothing, SampledStatus.SAMPLED, SampledStatus.SAMPLED]
    assert found.token_ids[2:].tolist() == [40, 69]
    assert np.isfinite(found.logprobs.top).all()


def test_every_result_is_written_and_nothing_outside_a_row_is_read(library, monkeypatch) -> None:
    """Results and scratch memory start as garbage, rows are padded with NaN."""
    rng = np.random.default_rng(9)
    real_empty = np.empty

    def poisoned(shape, dtype=float):
        array = real_empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)
        return array

    for vocab_size in (5, 100, 2049):
        padded = np.full((6, vocab_size + 7), np.nan, np.float32)
        padded[:, :vocab_size] = random_logits(rng, "many equals", 6, vocab_size)
        arrays = make_arrays(
            6,
            temperature=[0, 1, 1, 1, 1, 1],
            top_k=[0, 0, 3, 0, 3, 0],
            top_p=[1, 1, 1, 0.5, 0.5, 1],
            num_logprobs=np.array([-1, 0, 1, 2, 3, 0], np.int32),
            penalties=some_penalties([[0, 1, 1]] * 6),
            allowed=ragged([[], [], [], [0, 1, 2], [], []]),
        )
        pool = ThreadPool(library, 1)
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", poisoned)
            first = NativeSampler(library, pool).sample(padded[:, :vocab_size], arrays)
        second = NativeSampler(library, pool).sample(padded[:, :vocab_size].copy(), arrays)
        pool.close()
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert (first.token_ids >= 0).all()
        assert (first.token_ids < vocab_size).all()
        assert not first.status.any()
        for name in ("chosen", "rank", "top", "top_token_ids"):
            assert np.array_equal(getattr(first.logprobs, name), getattr(second.logprobs, name))
        assert np.isfinite(first.logprobs.top).all()


def test_noise_cannot_exceed_what_tokens_are_passed_over_by() -> None:
    """The largest noise, of the hash 0, is below the bound in variants/sampling.c."""
    assert -math.log(-math.log1p(-(2.0**-33))) < 22.9


def test_an_empty_batch(sampler) -> None:
    found = sampler.sample(np.empty((0, 10), np.float32), make_arrays(0, num_logprobs=np.empty(0, np.int32)))
    assert found.token_ids.shape == (0,)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"forbidden": ragged([[3], [10]])}, "forbidden"),
        ({"allowed": ragged([[-1], []])}, "allowed"),
        ({"forbidden": ragged([[3]])}, "forbidden.starts"),
        ({"forbidden": RaggedIds(np.array([0, 2, 1], np.int64), np.array([1], np.int32))}, "forbidden.starts"),
        ({"logit_bias": LogitBias(ragged([[3], [4]]), np.zeros(1, np.float32))}, "logit_bias.values"),
        ({"penalties": some_penalties([[1], [2]], num_prompt_tokens=2)}, "num_prompt_tokens"),
        ({"num_logprobs": np.array([11, 0], np.int32)}, "num_logprobs"),
        ({"num_logprobs": np.array([1, 0], np.int64)}, "num_logprobs"),
        ({"masks": Masks(np.zeros(2, np.int32), np.zeros((1, 0), np.int32))}, "masks.bits"),
        ({"masks": Masks(np.array([0, 1], np.int32), np.zeros((1, 1), np.int32))}, "masks.rows"),
        ({"masks": Masks(np.zeros(2, np.int32), np.zeros((2, 2), np.int32)[:, ::2])}, "masks.bits"),
        ({"changed": ChangedLogits(np.zeros(2, np.int32), np.zeros((1, 9), np.float32))}, "changed.logits"),
        ({"changed": ChangedLogits(np.array([0, 1], np.int32), np.zeros((1, 10), np.float32))}, "changed.rows"),
        ({"forced": np.array([-1, 10], np.int32)}, "forced"),
    ],
)
def test_what_does_not_fit_is_refused(sampler, change, named) -> None:
    with pytest.raises(ValueError, match=named):
        sampler.sample(np.zeros((2, 10), np.float32), make_arrays(2, **change))


@pytest.mark.parametrize(
    "logits",
    [np.zeros((2, 10)), np.zeros((10, 2), np.float32).T, np.zeros(10, np.float32), np.zeros((2, 0), np.float32)],
)
def test_wrong_logits_are_refused(sampler, logits) -> None:
    with pytest.raises(ValueError, match=r"logits|vocabulary"):
        sampler.sample(logits, make_arrays(2))
