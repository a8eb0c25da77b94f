"""The rules of sequences as arrays: both samplers draw the same tokens from them, in one batch and row by row."""

from array import array

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import Library, ThreadPool  # noqa: E402
from trioengine_kernels.native.sampler import NativeSampler, SampledTokens, SamplingArrays  # noqa: E402

from trioengine.config.engine import LogprobsMode  # noqa: E402
from trioengine.core.executor import NewSequence  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.tokenizer.bad_words import BadWords, TokenIndex  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker.sampler import sample_rows  # noqa: E402
from trioengine.worker.sampling_table import LogitRows, SamplingTable  # noqa: E402
from trioengine.worker.sequences import SequenceState, sequence_state  # noqa: E402

VOCAB_SIZE = 997
PROMPT = [5, 6, 7, 5]
OUTPUT = [8, 9, 8, 8]
DRAFTS = [3, 5, 1]
WORDS = TokenIndex([f"<{token_id}>".encode() for token_id in range(VOCAB_SIZE)])
RULES = {
    "greedy": SamplingParams(temperature=0),
    "top_p of zero": SamplingParams(top_p=0.0),
    "random": SamplingParams(temperature=1.3, logprobs=3),
    "cuts": SamplingParams(top_k=40, top_p=0.9, min_p=0.001, logprobs=0),
    "top_k off": SamplingParams(top_k=-1),
    "bias": SamplingParams(temperature=0.7, logit_bias={3: 4.0, 900: -2.0}, logprobs=-1),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    "one penalty": SamplingParams(temperature=0, frequency_penalty=-1.0, logprobs=5),
    "too short to end": SamplingParams(temperature=0.5, min_tokens=6),
    "few allowed": SamplingParams(allowed_token_ids=(1, 5, 8, 40, 41, 42), logit_bias={41: 3.0}, logprobs=8),
    "bad words": SamplingParams(temperature=0.8, bad_words=("<500>", "<8><3>", "9><8><8><1>", "<3><5><8>")),
}
ALL_TOKENS = ~np.zeros(32, np.int32)


@pytest.fixture(scope="module")
def library() -> Library:
    return native_library()


def make_states(table: SamplingTable, seed: int = 0) -> list[SequenceState]:
    """One for each of RULES, with drafts behind its tokens."""
    states: list[SequenceState] = []
    for i, rules in enumerate(RULES.values()):
        new = NewSequence(
            i,
            PROMPT + OUTPUT,
            len(PROMPT),
            rules,
            seed=2**64 - 1 - seed * 100 - i,
            end_token_ids=(1, 8, 500),
        )
        bad_words = BadWords(rules.bad_words, WORDS) if rules.bad_words else None
        states.append(sequence_state(new, VOCAB_SIZE, bad_words))
        states[-1].token_ids.extend(DRAFTS)
        table.add(states[-1])
    return states


def make_rows(states: list[SequenceState], seed: int) -> LogitRows:
    """Each sequence's four places, every fifth row bound by a mask; some rows about tokens of the prompt."""
    rows = LogitRows()
    for state in states:
        for number in range(1 + len(DRAFTS)):
            count = len(rows.states) + seed
            rows.add(state, 0, len(PROMPT + OUTPUT) + number, mask_row=count % 3 if count % 5 == 0 else -1)
        if seed % 2:
            rows.add(state, 0, 2, known=PROMPT[2])
    return rows


def part_of(rows: LogitRows, row: int) -> LogitRows:
    part = LogitRows()
    part.add(rows.states[row], 0, rows.places[row], known=rows.known[row], mask_row=rows.mask_rows[row])
    return part


def assert_same(found: SampledTokens, expected: SampledTokens, rows: slice) -> None:
    """Tokens, ranks and order exactly."""
    assert found.token_ids.tolist() == expected.token_ids[rows].tolist()
    assert found.status.tolist() == expected.status[rows].tolist()
    if found.logprobs is None or expected.logprobs is None:
        assert expected.logprobs is None or not expected.logprobs.rank[rows].any()
        return
    width = found.logprobs.top.shape[1]
    assert found.logprobs.rank.tolist() == expected.logprobs.rank[rows].tolist()
    assert found.logprobs.top_token_ids.tolist() == expected.logprobs.top_token_ids[rows, :width].tolist()
    assert found.logprobs.chosen == pytest.approx(expected.logprobs.chosen[rows], rel=1e-5, abs=1e-5)
    assert found.logprobs.top == pytest.approx(expected.logprobs.top[rows, :width], rel=1e-5, abs=1e-5)
    assert np.isfinite(found.logprobs.top).all()


@pytest.mark.parametrize("mode", LogprobsMode)
def test_all_rules_together_and_alone(library: Library, mode: LogprobsMode) -> None:
    """Places, masks, rules and what is known of the prompt: the same in one batch and row by row, native and torch."""
    sampler = NativeSampler(library, ThreadPool(library, 2))
    for seed in range(3):
        table = SamplingTable(VOCAB_SIZE, mode)
        rows = make_rows(make_states(table, seed), seed)
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal((len(rows.states), VOCAB_SIZE)) * 3).astype(np.float32)
        # Tokens that rules are about must be likely, or a forgotten rule would not show.
        logits[:, [1, 3, 5, 8, 500]] += 6
        bits = rng.integers(-(2**31), 2**31, (3, 32), dtype=np.int32)
        bits[0] = ALL_TOKENS
        bits[:, 0] |= 2 + 32  # Tokens that the most confined rows may have.
        arrays = table.arrays(rows, bits)
        expected = sample_rows(torch.from_numpy(logits), arrays)
        assert not expected.status.any()
        assert_same(sampler.sample(logits, arrays), expected, slice(None))
        for row in range(len(rows.states)):
            alone = sampler.sample(logits[row : row + 1], table.arrays(part_of(rows, row), bits))
            assert_same(alone, expected, slice(row, row + 1))


def arrays_of(*names: str, place: int = 8) -> SamplingArrays:
    table = SamplingTable(VOCAB_SIZE)
    states = dict(zip(RULES, make_states(table), strict=True))
    rows = LogitRows()
    for name in names:
        rows.add(states[name], 0, place)
    return table.arrays(rows)


def test_what_nobody_uses_is_left_out() -> None:
    arrays = arrays_of("greedy", "top_p of zero", "top_k off")
    assert (arrays.logit_bias, arrays.penalties, arrays.forbidden, arrays.allowed) == (None, None, None, None)
    assert (arrays.changed, arrays.masks, arrays.forced, arrays.num_logprobs) == (None, None, None, None)


@pytest.mark.parametrize(
    ("place", "forbidden"),
    [
        (8, {500, 3, 1}),  # 5 6 7 5 8 9 8 8: the ends of "<8><3>" and "9><8><8><1>"
        (9, {500}),  # 3 is next, as a draft
        (10, {500, 8}),  # then 5: the end of "<3><5><8>"
        (11, {500}),
    ],
)
def test_bad_words_end_with_a_token_that_is_forbidden_after_the_others(place: int, forbidden: set[int]) -> None:
    """Drafts count as what comes before."""
    arrays = arrays_of("bad words", place=place)
    assert arrays.forbidden is not None
    assert set(arrays.forbidden.token_ids.tolist()) == forbidden


def test_end_tokens_are_forbidden_up_to_min_tokens() -> None:
    """Drafts count as generated."""
    for place, is_forbidden in ((9, True), (10, False)):
        arrays = arrays_of("too short to end", place=place)
        assert (arrays.forbidden is not None) is is_forbidden


def test_penalties_see_what_comes_before_the_place() -> None:
    arrays = arrays_of("random", "penalties", place=10)
    assert arrays.penalties is not None
    assert arrays.penalties.seen.starts.tolist() == [0, 0, 10]
    assert arrays.penalties.seen.token_ids.tolist() == [*PROMPT, *OUTPUT, *DRAFTS[:2]]
    assert arrays.penalties.num_prompt_tokens.tolist() == [0, len(PROMPT)]


def test_rows_are_used_again() -> None:
    """A sequence that comes gets its own parameters in the row of one that has gone; more rows come when needed."""
    table = SamplingTable(VOCAB_SIZE)
    states = [state for _ in range(4) for state in make_states(table)]
    assert len({state.row for state in states}) == len(states)
    for state in states[:5]:
        table.remove(state)
    new = sequence_state(NewSequence(0, [1], 1, SamplingParams(temperature=0.25, top_k=3), seed=5), VOCAB_SIZE)
    table.add(new)
    rows = LogitRows()
    rows.add(new, 0, 1)
    rows.add(states[-1], 0, 8)
    arrays = table.arrays(rows)
    assert arrays.temperature.tolist() == [0.25, pytest.approx(0.8)]
    assert (arrays.top_k[0], arrays.seed[0], arrays.position[0]) == (3, 5, 1)
    assert array("i", [1]) == new.token_ids
