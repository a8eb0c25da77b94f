"""What every `Executor` promises, as checks that run against any of them.

A test module makes a `Subject` and runs each of `CHECKS` on it:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check: Check) -> None:
        check(Subject(make=MyExecutor, block_size=4, vocab_size=1000))

The checks compare an executor with itself: a sequence's tokens must not depend on what else is in the step, on how its
prompt is split, or on which blocks it has. None of them knows a right token.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import attrs

from trioengine.core.executor import NO_TOKEN, Executor, NewSequence, ScheduledSequence, StepPlan, StepResult
from trioengine.types.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=None)
RANDOM = SamplingParams(temperature=1.0, max_tokens=None)


@attrs.frozen
class Subject:
    """An executor to check. It has at least 24 blocks and takes sequences of at least 48 tokens."""

    make: Callable[[], Executor]
    """A fresh executor; the check closes it."""
    block_size: int
    vocab_size: int

    def prompt(self, num_tokens: int, start: int = 0) -> list[int]:
        """Token ids that differ with `start`."""
        return [(start * 31 + position * 7 + 1) % self.vocab_size for position in range(num_tokens)]


Check: TypeAlias = Callable[[Subject], None]


def check_a_step_without_sequences_has_no_tokens(subject: Subject) -> None:
    """A plan that schedules nothing, or only removes, is a step like others."""
    with _session(subject) as session:
        assert session.step() == []
        sequence_id = session.add(subject.prompt(3))
        session.step(sequence_id)
        assert session.step(remove=[sequence_id]) == []


def check_results_carry_their_step(subject: Subject) -> None:
    """A result has its plan's step number, and one token for each entry."""
    with _session(subject) as session:
        sequence_ids = [session.add(subject.prompt(3, start)) for start in range(3)]
        for step in range(3):
            result = session.run(session.plan(dict.fromkeys(sequence_ids)))
            assert result.step == step
            assert len(result.tokens) == 3
            assert all(type(token) is int and 0 <= token < subject.vocab_size for token in result.tokens)
            assert not result.failures
            session.take_in(sequence_ids, result)


def check_an_incomplete_prompt_samples_nothing(subject: Subject) -> None:
    """Only the step that reaches the end of the known tokens samples one."""
    with _session(subject) as session:
        sequence_id = session.add(subject.prompt(7))
        assert session.step(sequence_id, num_tokens=3) == [NO_TOKEN]
        assert session.step(sequence_id, num_tokens=3) == [NO_TOKEN]
        assert session.step(sequence_id, num_tokens=1) != [NO_TOKEN]


def check_a_split_prompt_gives_the_same_tokens(subject: Subject) -> None:
    """However a prompt is split over steps, across blocks or inside them, the answer is the same."""
    prompt = subject.prompt(2 * subject.block_size + 3)
    whole = _generate(subject, prompt)
    for num_tokens in (1, 2, subject.block_size, subject.block_size + 1):
        with _session(subject) as session:
            sequence_id = session.add(prompt)
            for _ in range((len(prompt) - 1) // num_tokens):
                assert session.step(sequence_id, num_tokens=num_tokens) == [NO_TOKEN]
            assert session.generate(sequence_id, len(whole)) == whole


def check_a_batch_gives_the_same_tokens(subject: Subject) -> None:
    """Sequences of unequal length, started in different steps, get the tokens that each gets alone."""
    prompts = [subject.prompt(length, start=length) for length in (1, subject.block_size, subject.block_size + 3, 2)]
    alone = [_generate(subject, prompt, num_tokens=8) for prompt in prompts]
    with _session(subject) as session:
        generated: dict[int, list[int]] = {}
        for prompt in prompts:  # Each step has prompts and decodes.
            generated[session.add(prompt)] = []
            session.step_all(generated)
        while any(len(tokens) < 8 for tokens in generated.values()):
            session.step_all(generated)
        assert [tokens[:8] for tokens in generated.values()] == alone


def check_the_order_of_a_batch_does_not_matter(subject: Subject) -> None:
    """Tokens follow `scheduled`'s order, which may change from step to step."""
    prompts = [subject.prompt(3, start) for start in range(3)]
    alone = [_generate(subject, prompt, num_tokens=4) for prompt in prompts]
    with _session(subject) as session:
        sequence_ids = [session.add(prompt) for prompt in prompts]
        generated: dict[int, list[int]] = {sequence_id: [] for sequence_id in sequence_ids}
        for turn in range(4):
            turned = sequence_ids[turn % 3 :] + sequence_ids[: turn % 3]
            session.step_all({sequence_id: generated[sequence_id] for sequence_id in turned})
        assert list(generated.values()) == alone


def check_blocks_may_be_in_any_order(subject: Subject) -> None:
    """A block table is a list, not a range."""
    prompt = subject.prompt(3 * subject.block_size)
    with _session(subject) as session:
        session.free_block_ids = session.free_block_ids[1::2][::-1] + session.free_block_ids[::2]
        assert session.generate(session.add(prompt), 6) == _generate(subject, prompt)


def check_a_preempted_sequence_goes_on(subject: Subject) -> None:
    """Removed, and new again with the tokens generated before, a sequence continues as if nothing had happened."""
    prompt = subject.prompt(subject.block_size + 1)
    for sampling in (GREEDY, RANDOM):
        whole = _generate(subject, prompt, num_tokens=8, sampling=sampling)
        with _session(subject) as session:
            sequence_id = session.add(prompt, sampling=sampling)
            assert session.generate(sequence_id, 3) == whole[:3]
            session.readd(sequence_id)
            assert session.generate(sequence_id, 5) == whole[3:]


def check_blocks_pass_on_within_a_step(subject: Subject) -> None:
    """A step's new sequence may get the blocks of one that the same step removes."""
    first, second = subject.prompt(subject.block_size + 2), subject.prompt(subject.block_size + 1, start=5)
    with _session(subject) as session:
        session.free_block_ids = session.free_block_ids[:3]
        first_id = session.add(first)
        session.generate(first_id, subject.block_size)
        second_id = session.add(second)
        tokens = session.step(second_id, remove=[first_id])
        assert tokens + session.generate(second_id, 5) == _generate(subject, second)


def check_a_sequence_may_rest(subject: Subject) -> None:
    """A sequence that a step leaves out loses nothing."""
    first, second = subject.prompt(4), subject.prompt(5, start=3)
    with _session(subject) as session:
        first_id, second_id = session.add(first), session.add(second)
        tokens = session.generate(first_id, 3)
        assert session.generate(second_id, 6) == _generate(subject, second)
        assert tokens + session.generate(first_id, 3) == _generate(subject, first)


def check_a_seed_gives_the_same_tokens(subject: Subject) -> None:
    """Random numbers depend on seed and position only: not on the batch, nor on the sequence's id."""
    prompt = subject.prompt(4)
    largest = 2**64 - 1
    alone = {seed: _generate(subject, prompt, num_tokens=6, sampling=RANDOM, seed=seed) for seed in (0, 1, largest)}
    with _session(subject) as session:
        session.step(session.add(subject.prompt(2, start=9), sampling=RANDOM, seed=7))
        by_id = {session.add(prompt, sampling=RANDOM, seed=seed): seed for seed in (largest, 0, 1)}
        generated: dict[int, list[int]] = {sequence_id: [] for sequence_id in by_id}
        for _ in range(6):
            session.step_all(generated)
        assert {by_id[sequence_id]: tokens for sequence_id, tokens in generated.items()} == alone


def check_end_tokens_wait_for_min_tokens(subject: Subject) -> None:
    """End tokens are not sampled before `min_tokens` tokens are generated; then they may be, after a preemption too."""
    prompt = subject.prompt(5)
    free = _generate(subject, prompt, num_tokens=4)
    held_back = attrs.evolve(GREEDY, min_tokens=3)
    with _session(subject) as session:
        sequence_id = session.add(prompt, sampling=held_back, end_token_ids=free)
        tokens = session.generate(sequence_id, 2)
        session.readd(sequence_id)
        tokens += session.generate(sequence_id, 1)
        assert not set(tokens) & set(free)
        whole = [*prompt, *tokens]
        assert session.generate(sequence_id, 3) == _generate(subject, whole, num_tokens=3)
    with _session(subject) as session:
        sequence_id = session.add(prompt, sampling=attrs.evolve(GREEDY, min_tokens=0), end_token_ids=free)
        assert session.generate(sequence_id, 4) == free


def check_close_twice(subject: Subject) -> None:
    """`close` may come again, and while sequences are known."""
    executor = subject.make()
    new = NewSequence(0, subject.prompt(2), 2, GREEDY, seed=0)
    executor.submit(StepPlan(0, [ScheduledSequence(0, 0, 2, [0])], [new]))
    assert len(executor.result().tokens) == 1
    executor.close()
    executor.close()


CHECKS: Sequence[Check] = (
    check_a_step_without_sequences_has_no_tokens,
    check_results_carry_their_step,
    check_an_incomplete_prompt_samples_nothing,
    check_a_split_prompt_gives_the_same_tokens,
    check_a_batch_gives_the_same_tokens,
    check_the_order_of_a_batch_does_not_matter,
    check_blocks_may_be_in_any_order,
    check_a_preempted_sequence_goes_on,
    check_blocks_pass_on_within_a_step,
    check_a_sequence_may_rest,
    check_a_seed_gives_the_same_tokens,
    check_end_tokens_wait_for_min_tokens,
    check_close_twice,
)


@attrs.define(eq=False)
class _Live:
    """The session's copy of a sequence."""

    new: NewSequence
    token_ids: list[int]
    is_known: bool = False
    num_computed_tokens: int = 0
    block_table: list[int] = attrs.field(factory=list[int])


class _Session:
    """Writes plans, in the place of a scheduler: blocks from a list, sequences by hand."""

    def __init__(self, executor: Executor, block_size: int) -> None:
        self.free_block_ids = list(range(executor.kv_cache_groups[0].num_blocks))
        self._executor = executor
        self._block_size = block_size
        self._live: dict[int, _Live] = {}
        self._num_sequences = 0
        self._step = 0
        self._removed: list[int] = []

    def add(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        end_token_ids: Sequence[int] = (),
    ) -> int:
        """The id of a sequence that is new in the first plan that schedules it."""
        sequence_id = self._num_sequences
        self._num_sequences += 1
        new = NewSequence(sequence_id, list(prompt), len(prompt), sampling, seed, tuple(end_token_ids))
        self._live[sequence_id] = _Live(new, list(prompt))
        return sequence_id

    def readd(self, sequence_id: int) -> None:
        """Preempt a sequence."""
        live = self._live[sequence_id]
        self._forget(sequence_id)
        new = attrs.evolve(live.new, token_ids=list(live.token_ids))
        self._live[sequence_id] = _Live(new, live.token_ids)

    def plan(self, num_tokens: Mapping[int, int | None], remove: Sequence[int] = ()) -> StepPlan:
        """A step of these sequences: so many tokens of each, or, with None, all that are known."""
        for sequence_id in remove:
            self._forget(sequence_id)
        new = [self._live[sequence_id].new for sequence_id in num_tokens if not self._live[sequence_id].is_known]
        scheduled = [self._work(self._live[sequence_id], number) for sequence_id, number in num_tokens.items()]
        plan = StepPlan(self._step, scheduled, new, self._removed)
        self._step += 1
        self._removed = []
        return plan

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan."""
        self._executor.submit(plan)
        return self._executor.result()

    def take_in(self, sequence_ids: Sequence[int], result: StepResult) -> None:
        """Append a step's tokens to the session's copies."""
        for sequence_id, token in zip(sequence_ids, result.tokens, strict=True):
            if token != NO_TOKEN:
                self._live[sequence_id].token_ids.append(token)

    def step(self, *sequence_ids: int, num_tokens: int | None = None, remove: Sequence[int] = ()) -> list[int]:
        """One step of these sequences: what it sampled for each."""
        result = self.run(self.plan(dict.fromkeys(sequence_ids, num_tokens), remove))
        self.take_in(sequence_ids, result)
        return list(result.tokens)

    def step_all(self, generated: Mapping[int, list[int]]) -> None:
        """One step of these sequences; their tokens are appended to the lists."""
        for sequence_id, token in zip(generated, self.step(*generated), strict=True):
            generated[sequence_id].append(token)

    def generate(self, sequence_id: int, num_tokens: int) -> list[int]:
        """A sequence's next tokens."""
        return [self.step(sequence_id)[0] for _ in range(num_tokens)]

    def _forget(self, sequence_id: int) -> None:
        live = self._live.pop(sequence_id)
        if live.is_known:
            self._removed.append(sequence_id)
        self.free_block_ids[:0] = live.block_table

    def _work(self, live: _Live, num_tokens: int | None) -> ScheduledSequence:
        start = live.num_computed_tokens
        end = len(live.token_ids) if num_tokens is None else start + num_tokens
        num_missing = -(-end // self._block_size) - len(live.block_table)
        new_block_ids = [self.free_block_ids.pop(0) for _ in range(num_missing)]
        live.block_table.extend(new_block_ids)
        live.num_computed_tokens = end
        live.is_known = True
        return ScheduledSequence(live.new.sequence_id, start, end - start, new_block_ids)


@contextmanager
def _session(subject: Subject) -> Generator[_Session]:
    executor = subject.make()
    try:
        yield _Session(executor, subject.block_size)
    finally:
        executor.close()


def _generate(
    subject: Subject, prompt: Sequence[int], *, num_tokens: int = 6, sampling: SamplingParams = GREEDY, seed: int = 0
) -> list[int]:
    """What a prompt gives alone."""
    with _session(subject) as session:
        return session.generate(session.add(prompt, sampling=sampling, seed=seed), num_tokens)
