"""Drafts and masks, through the core: fewer steps, the same tokens, and nobody gives way for a guess."""

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from trioengine.config.engine import SpeculationConfig, SpeculationMethod
from trioengine.core.config import CoreConfig
from trioengine.core.engine_core import EngineCore
from trioengine.core.executor import StepPlan, StepResult, TokenMasks
from trioengine.core.structured_output import MaskEntry
from trioengine.errors import EngineGenerateError, RequestError
from trioengine.testing.core_driver import Answer, CoreDriver, make_core_config, make_core_request
from trioengine.testing.fake_executor import FakeExecutor, generate_alone
from trioengine.types.messages import Finished, GetStats, PauseGeneration, PauseMode, ResumeGeneration
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams
from trioengine.types.structured import StructuredOutputsParams

VOCAB_SIZE = 1000
PROMPT = (1, 2, 3)


def config(method: SpeculationMethod | None = SpeculationMethod.DRAFT_MODEL, **options: Any) -> CoreConfig:
    speculation = None
    if method is not None:
        model = "small" if method is SpeculationMethod.DRAFT_MODEL else None
        speculation = SpeculationConfig(method=method, num_speculative_tokens=3, model=model, prompt_lookup_min=1)
    return attrs.evolve(make_core_config(), speculation=speculation, **options)


def alone(prompt: Sequence[int], num_tokens: int) -> list[int]:
    return generate_alone(prompt, num_tokens, vocab_size=VOCAB_SIZE)


def right(token_ids: Sequence[int]) -> Sequence[int]:
    """A draft model that knows what comes next."""
    return alone(token_ids, 3)


def wrong(token_ids: Sequence[int]) -> Sequence[int]:
    """One that is right once, and then not."""
    return [*alone(token_ids, 1), 0, 0]


def num_steps(driver: CoreDriver) -> int:
    return len([plan for plan in driver.plans if plan.scheduled])


def test_right_drafts_save_steps() -> None:
    """Behind the first three, which show what a step costs without, there are up to four tokens in each."""
    driver = CoreDriver(config(), draft_model=right)
    answer = driver.add(make_core_request(0, PROMPT, max_tokens=13))
    driver.run()
    assert answer.tokens == alone(PROMPT, 13)
    assert num_steps(driver) == 6
    stats = driver.call(GetStats())
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 7, 7)
    assert stats.num_accepted_tokens_per_pos == (3, 2, 2)


def test_a_step_is_not_planned_before_its_drafts_are_there() -> None:
    """Steps are planned ahead until the draft model is asked for the first time."""
    driver = CoreDriver(config(async_scheduling=True), draft_model=right)
    answer = driver.add(make_core_request(0, PROMPT, max_tokens=13))
    driver.run()
    assert answer.tokens == alone(PROMPT, 13)
    assert num_steps(driver) == 7
    stats = driver.call(GetStats())
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (6, 6)


def test_wrong_drafts_change_no_token() -> None:
    driver = CoreDriver(config(enable_prefix_caching=True), draft_model=wrong)
    answers = [driver.add(make_core_request(slot, [1] * (slot + 3), max_tokens=12)) for slot in range(4)]
    driver.run()
    for slot, answer in enumerate(answers):
        assert answer.tokens == alone([1] * (slot + 3), 12)
    stats = driver.call(GetStats())
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_drafts_are_looked_up_in_the_sequence() -> None:
    """Where it repeats itself."""
    driver = CoreDriver(config(SpeculationMethod.NGRAM), scripts={PROMPT: [7, 8, 9] * 6})
    answer = driver.add(make_core_request(0, PROMPT, max_tokens=18))
    driver.run()
    assert answer.tokens == [7, 8, 9] * 6
    assert num_steps(driver) < 12


def test_a_step_of_four_tokens_of_which_the_third_is_the_end() -> None:
    """Case 24 (vllm 47616): tokens and log probabilities are three."""
    tokens = alone(PROMPT, 6)
    driver = CoreDriver(config(), draft_model=right)
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(tokens[5],), logprobs=1)
    answer = driver.add(make_core_request(0, PROMPT, sampling=sampling))
    driver.run()
    assert num_steps(driver) == 4
    assert driver.plans[3].num_tokens == 4
    assert answer.tokens == tokens
    assert [entry.token_ids[0] for entry in answer.logprobs] == tokens
    assert answer.finished == Finished(0, FinishReason.STOP, stop_token_id=tokens[5])


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_drafts_do_not_pass_the_limit_of_an_answer(max_tokens: int) -> None:
    """Nor are tokens computed that could not belong to it."""
    driver = CoreDriver(config(), draft_model=right)
    answer = driver.add(make_core_request(0, PROMPT, max_tokens=max_tokens))
    driver.run()
    assert answer.tokens == alone(PROMPT, max_tokens)
    for plan in driver.plans:
        for work in plan.scheduled:
            assert work.num_computed_tokens + work.num_tokens < len(PROMPT) + max_tokens


def test_drafts_take_what_is_left_of_a_step() -> None:
    """Behind everyone's own tokens, new prompts' too; and of its rows of logits."""
    driver = CoreDriver(config(max_num_batched_tokens=10, max_num_logit_rows=12), draft_model=right)
    driver.add(make_core_request(0, PROMPT, max_tokens=20))
    for _ in range(3):
        driver.step()
    driver.add(make_core_request(1, [5] * 8))
    driver.step()
    assert [(work.num_tokens, len(work.draft_token_ids)) for work in driver.plans[-1].scheduled] == [(2, 1), (8, 0)]
    driver = CoreDriver(config(max_num_seqs=2, max_num_logit_rows=4), draft_model=right)
    driver.add(make_core_request(0, PROMPT, max_tokens=20))
    driver.add(make_core_request(1, PROMPT, max_tokens=20))
    for _ in range(4):
        driver.step()
    assert [len(work.draft_token_ids) for work in driver.plans[-1].scheduled] == [2, 0]


def test_nobody_is_preempted_for_drafts() -> None:
    """They take free blocks, or what is left in the last one."""
    driver = CoreDriver(config(), num_blocks=4, draft_model=right)
    answers = [driver.add(make_core_request(slot, [slot] * 6, max_tokens=3)) for slot in range(2)]
    driver.run()
    assert driver.call(GetStats()).num_preemptions == 0
    for slot, answer in enumerate(answers):
        assert answer.tokens == alone([slot] * 6, 3)


def test_while_there_are_drafts_one_step_is_in_flight() -> None:
    driver = CoreDriver(config(async_scheduling=True), draft_model=right)
    answer = driver.add(make_core_request(0, PROMPT, max_tokens=13))
    while driver.core.has_work:
        num_plans = len(driver.plans)
        driver.step()
        new_plans = driver.plans[num_plans:]
        if any(work.draft_token_ids for plan in new_plans for work in plan.scheduled):
            assert driver.core.scheduler.num_in_flight == 0
    driver.take()
    assert answer.tokens == alone(PROMPT, 13)
    assert driver.call(GetStats()).num_accepted_tokens > 3


# Grammars


class FakeGrammar:
    """The answer is exactly these tokens; those in `forced` must come where they stand, the others are one of many."""

    def __init__(self, tokens: Sequence[int], forced: Collection[int], *, is_ready: bool) -> None:
        self.tokens = list(tokens)
        self.forced = forced
        self.is_ready = is_ready
        self.is_complete = self.is_free = False
        self.error: Exception | None = None
        self.num_accepted = 0
        self.refused: int | None = None
        """A token that does not fit after all."""

    def forced_tokens(self, max_tokens: int) -> list[int]:
        tokens: list[int] = []
        for token in self.tokens[self.num_accepted :]:
            if token not in self.forced or len(tokens) == max_tokens:
                break
            tokens.append(token)
        return tokens

    def num_allowed(self, drafts: Sequence[int]) -> int:
        expected = self.tokens[self.num_accepted : self.num_accepted + len(drafts)]
        for index, (draft, token) in enumerate(zip(drafts, expected, strict=False)):
            if draft != token:
                return index
        return len(expected)

    def accept(self, token_ids: Sequence[int]) -> int:
        expected = self.tokens[self.num_accepted : self.num_accepted + len(token_ids)]
        assert list(token_ids[: len(expected)]) == expected
        if self.refused in expected:
            self.error = EngineGenerateError("does not fit")
            return expected.index(self.refused)
        self.num_accepted += len(expected)
        self.is_complete = self.num_accepted == len(self.tokens)
        return len(expected)  # What follows the last one is the end, which has no token.


@attrs.define
class FakeStructuredOutputs:
    """Grammars from regular expressions that are a list of tokens; those that begin with "later" compile later."""

    forced: Collection[int] = ()
    compiling: list[FakeGrammar] = attrs.field(factory=list[FakeGrammar])
    abandoned: list[FakeGrammar] = attrs.field(factory=list[FakeGrammar])
    ended: list[FakeGrammar] = attrs.field(factory=list[FakeGrammar])
    fails_mask: bool = False

    def start(
        self,
        params: StructuredOutputsParams,
        prompt: "array[int]",
        end_token_ids: Sequence[int],
        reasoning_ended: object,
        thinking_token_budget: object,
    ) -> FakeGrammar:
        assert params.regex is not None
        first, *tokens = params.regex.split()
        if first == "bad":
            raise RequestError("bad", param="structured_outputs.regex")
        grammar = FakeGrammar(list(map(int, tokens)), self.forced, is_ready=first == "now")
        if not grammar.is_ready:
            self.compiling.append(grammar)
        return grammar

    def compile(self, error: Exception | None = None) -> None:
        grammar = self.compiling.pop(0)
        grammar.is_ready, grammar.error = error is None, error
        self.ended.append(grammar)

    def poll(self) -> Sequence[FakeGrammar]:
        ended, self.ended = self.ended, []
        return ended

    def abandon(self, grammar: FakeGrammar) -> None:
        self.abandoned.append(grammar)

    def masks(self, entries: Sequence[MaskEntry]) -> TokenMasks | None:
        first_rows: dict[int, int] = {}
        rows: list[int] = []
        for entry in entries:
            grammar: Any = entry.grammar
            first_rows[entry.index] = len(rows)
            allowed = [*grammar.tokens[grammar.num_accepted :], 0][: 1 + len(entry.drafts)]
            rows += allowed
            if self.fails_mask:
                grammar.error = EngineGenerateError("too complex")
        bits = np.zeros((len(rows), -(-VOCAB_SIZE // 32)), np.uint32)
        for row, token in enumerate(rows):
            bits[row, token // 32] = 1 << (token % 32)
        return TokenMasks(first_rows, bits.view(np.int32))


def structured(forced: Collection[int] = (), **options: Any) -> tuple[CoreDriver, FakeStructuredOutputs]:
    outputs = FakeStructuredOutputs(forced)
    return CoreDriver(config(None, **options), structured_outputs=outputs), outputs  # type: ignore[arg-type]


def add(driver: CoreDriver, slot: int, regex: str, max_tokens: int = 20) -> Answer:
    sampling = SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(regex=regex))
    return driver.add(make_core_request(slot, (slot + 1, 2), sampling=sampling))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_answer_has_the_form_and_ends_with_it(async_scheduling: bool) -> None:
    """Without a token for the end. Its neighbour, which is bound by nothing, is as alone."""
    driver, _ = structured(async_scheduling=async_scheduling)
    bound, free = add(driver, 0, "now 5 6 7 8"), driver.add(make_core_request(1, PROMPT, max_tokens=9))
    driver.run()
    assert bound.tokens == [5, 6, 7, 8]
    assert bound.finished == Finished(0, FinishReason.STOP, ends_with_text=True)
    assert free.tokens == alone(PROMPT, 9)


def test_tokens_without_a_choice_take_no_step_of_their_own() -> None:
    """Jump-ahead: right behind the prompt already."""
    driver, _ = structured(forced={5, 6, 8, 9})
    answer = add(driver, 0, "now 5 6 7 8 9 10 11")
    driver.run()
    assert answer.tokens == [5, 6, 7, 8, 9, 10, 11]
    assert num_steps(driver) == 3
    assert driver.call(GetStats()).num_drafts == 0


def test_a_bound_answer_may_end_before_its_form_does() -> None:
    driver, _ = structured(forced={5, 6, 7})
    answer = add(driver, 0, "now 5 6 7 8", max_tokens=2)
    driver.run()
    assert (answer.tokens, answer.finished) == ([5, 6], Finished(0, FinishReason.LENGTH))


def test_a_preempted_answer_keeps_its_form() -> None:
    driver, _ = structured(forced={6}, async_scheduling=True)
    answer = add(driver, 0, "now 5 6 7 8 9")
    driver.step()
    driver.core.scheduler.preempt_all()
    driver.run()
    assert answer.tokens == [5, 6, 7, 8, 9]


def test_guesses_are_cut_where_the_form_does_not_allow_them() -> None:
    outputs = FakeStructuredOutputs()
    driver = CoreDriver(
        config(),
        draft_model=lambda tokens: [tokens[-1] + 1, tokens[-1] + 2, 999],
        structured_outputs=outputs,  # type: ignore[arg-type]
    )
    answer = add(driver, 0, "now 5 6 7 8 9 10 11")
    driver.run()
    assert answer.tokens == [5, 6, 7, 8, 9, 10, 11]
    assert num_steps(driver) == 5
    assert driver.call(GetStats()).num_accepted_tokens == driver.call(GetStats()).num_draft_tokens == 3


def test_a_request_waits_for_its_grammar_outside_and_comes_back_to_its_place() -> None:
    """Others pass it, and the loop has nothing to do while all wait."""
    driver, outputs = structured(max_num_seqs=1)
    bound = add(driver, 0, "later 5 6")
    assert not driver.core.has_work
    others = [driver.add(make_core_request(slot, PROMPT, max_tokens=4)) for slot in (1, 2)]
    driver.step()
    outputs.compile()
    driver.run()
    assert [finished.slot for output in driver.outputs for finished in output.finished] == [1, 0, 2]
    assert bound.tokens == [5, 6]
    assert all(other.tokens == alone(PROMPT, 4) for other in others)


def test_a_grammar_that_does_not_compile_fails_its_request_alone() -> None:
    """Case 33 (vllm 17313): after a good one; at once or later."""
    driver, outputs = structured()
    good, bad, worse = add(driver, 0, "now 5 6"), add(driver, 1, "later 7"), add(driver, 2, "bad")
    outputs.compile(error=RequestError("does not compile", param="structured_outputs.regex"))
    driver.core.poll()
    driver.run()
    assert good.tokens == [5, 6]
    for answer in (bad, worse):
        assert answer.finished is not None
        assert answer.finished.error is not None
        assert answer.finished.error.fields["param"] == "structured_outputs.regex"
        assert not answer.tokens


def test_a_grammar_that_becomes_too_complex_fails_its_request_alone() -> None:
    """Of the step in which that happens it gets no token."""
    driver, outputs = structured()
    bound, free = add(driver, 0, "now 5 6"), driver.add(make_core_request(1, PROMPT))
    outputs.fails_mask = True
    driver.run()
    assert bound.finished is not None
    assert bound.finished.error is not None
    assert bound.finished.error.fields["message"] == "too complex"
    assert not bound.tokens
    assert free.tokens == alone(PROMPT, 4)


@pytest.mark.parametrize("forced", [set[int](), {5, 6, 7, 8}])
def test_a_token_that_does_not_fit_ends_its_request_behind_those_that_do(forced: set[int]) -> None:
    """They may be sampled in one step with it or in others before: the request gets the same."""
    driver, outputs = structured(forced)
    answer = add(driver, 0, "later 5 6 7 8")
    (grammar,) = outputs.compiling
    grammar.refused = 7
    outputs.compile()
    driver.core.poll()
    driver.run()
    assert answer.tokens == [5, 6]
    assert answer.finished is not None
    assert answer.finished.error is not None
    assert answer.finished.error.fields["message"] == "does not fit"
    assert num_steps(driver) == (1 if forced else 3)


def test_an_answer_that_ended_before_the_token_that_does_not_fit_is_whole() -> None:
    driver, outputs = structured({5, 6, 7, 8})
    answer = add(driver, 0, "later 5 6 7 8", max_tokens=2)
    (grammar,) = outputs.compiling
    grammar.refused = 7
    outputs.compile()
    driver.core.poll()
    driver.run()
    assert (answer.tokens, answer.finished) == ([5, 6], Finished(0, FinishReason.LENGTH))


def test_an_abort_while_the_grammar_compiles_abandons_it() -> None:
    driver, outputs = structured()
    answer = add(driver, 0, "later 5 6")
    driver.abort(0)
    driver.take_all()
    assert answer.finished == Finished(0, FinishReason.ABORT)
    assert outputs.abandoned == outputs.compiling
    outputs.compile()
    driver.core.poll()
    assert not driver.core.has_work


def test_a_deadline_passes_while_the_grammar_compiles() -> None:
    """The loop is told when to look, and the grammar is abandoned."""
    driver, outputs = structured()
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(regex="later 5 6"))
    answer = driver.add(attrs.evolve(make_core_request(0, PROMPT, sampling=sampling), queue_timeout_s=3.0))
    assert (driver.core.has_work, driver.core.idle_timeout_s()) == (False, 3.0)
    driver.now_s = 3.0
    driver.core.poll()
    driver.take_all()
    assert answer.finished is not None
    assert answer.finished.error is not None
    assert answer.finished.error.name == "DeadlineExceededError"
    assert outputs.abandoned == outputs.compiling
    driver.core.check_integrity()


def test_a_pause_waits_for_a_request_that_waits_for_its_grammar() -> None:
    """And one that comes later waits for both, in whichever order they end."""
    driver, outputs = structured()
    present = add(driver, 0, "later 5 6")
    assert driver.begin_call(PauseGeneration(PauseMode.WAIT)) is None
    later = add(driver, 1, "later 7 8")
    outputs.compile()
    outputs.compile()
    driver.core.poll()
    driver.run()
    assert len(driver.replies) == 1
    assert (present.tokens, later.tokens) == ([5, 6], [])
    driver.call(ResumeGeneration())
    driver.run()
    assert later.tokens == [7, 8]


def test_a_pause_waits_no_longer_for_a_grammar_that_does_not_compile() -> None:
    """The reply comes without a step."""
    driver, outputs = structured()
    add(driver, 0, "later 5 6")
    assert driver.begin_call(PauseGeneration(PauseMode.WAIT)) is None
    outputs.compile(error=EngineGenerateError("no"))
    driver.core.poll()
    assert not driver.core.has_work
    driver.take_all()
    assert len(driver.replies) == 1


class TimedExecutor(FakeExecutor):
    """Each step takes a second, and begins when the one before it has ended."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now_s = 0.0
        self.ends_s: deque[float] = deque()
        self.max_in_flight = 0

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.ends_s.append(1 + max([self.now_s, *self.ends_s]))
        self.max_in_flight = max(self.max_in_flight, len(self.ends_s))

    def result(self) -> StepResult:
        self.now_s = max(self.now_s, self.ends_s.popleft())
        return super().result()


def test_a_step_that_was_submitted_ahead_took_no_longer_than_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation decides by these times."""
    driver = CoreDriver(config(SpeculationMethod.NGRAM, async_scheduling=True))
    executor = TimedExecutor(vocab_size=VOCAB_SIZE)
    driver.core = EngineCore(driver.config, executor, clock=lambda: executor.now_s)
    speculator = driver.core.scheduler.drafting.speculator
    assert speculator is not None
    times_s: list[float] = []
    observe_step = speculator.observe_step

    def record(seconds: float, draft_seconds: float = 0.0) -> None:
        times_s.append(seconds)
        observe_step(seconds, draft_seconds)

    monkeypatch.setattr(speculator, "observe_step", record)
    driver.add(make_core_request(0, PROMPT, max_tokens=9))
    driver.run()
    assert executor.max_in_flight == 2
    assert set(times_s) == {1.0}
