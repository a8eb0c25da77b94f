"""Whatever front ends do and whatever the limits, the core's books are right and answers are those given alone."""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from trioengine.config.engine import SchedulingPolicy, SpeculationConfig, SpeculationMethod
from trioengine.core.config import CoreConfig
from trioengine.core.executor import NewSequence, ScheduledSequence, StepPlan
from trioengine.core.request import Request
from trioengine.testing.core_driver import Answer, CoreDriver, make_core_request
from trioengine.testing.fake_executor import generate_alone, logprobs_alone
from trioengine.types.messages import (
    Call,
    EngineCoreRequest,
    Finished,
    PauseGeneration,
    PauseMode,
    ResetPrefixCache,
    ResumeGeneration,
    Sleep,
    WakeUp,
    unpack_int32,
)
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams
from trioengine.types.request import KVHints

VOCAB_SIZE = 9
FAILING_SEED = 100
"""A sequence with this seed fails at its first token, one with the next at its second, and so on."""
CLIENTS = st.integers(0, 2)
TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)


def _guess(token_ids: Sequence[int]) -> Sequence[int]:
    """Drafts that are right where the seed is 0."""
    return generate_alone(token_ids, 3, vocab_size=VOCAB_SIZE)


def _speculation_config(method: SpeculationMethod, num_speculative_tokens: int) -> SpeculationConfig:
    model = "small" if method is SpeculationMethod.DRAFT_MODEL else None
    return SpeculationConfig(
        method=method, num_speculative_tokens=num_speculative_tokens, model=model, prompt_lookup_min=1
    )


@attrs.define(eq=False)
class Sent:
    """A request that was sent, and what became of it."""

    request: EngineCoreRequest
    answer: Answer
    arrived_s: float
    sequence_id: int
    """That it has if it was not refused."""
    is_aborted: bool = False
    is_dropped: bool = False
    is_late: bool = False
    """Whether its deadline had passed when it had not begun."""


class CoreMachine(RuleBasedStateMachine):
    """Three clients, an engine that is always too small, and a check after every step."""

    @initialize(
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 9),
        max_model_len=st.integers(2, 20),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(2, 12),
        max_num_logit_rows=st.integers(1, 9) | st.just(100),
        policy=st.sampled_from(SchedulingPolicy),
        enable_prefix_caching=st.booleans(),
        num_offload_blocks=st.sampled_from([0, 0, 3]),
        max_num_partial_prefills=st.integers(1, 3),
        max_long_partial_prefills=st.integers(1, 2),
        long_prefill_token_threshold=st.sampled_from([0, 0, 1, 3]),
        async_scheduling=st.booleans(),
        speculation=st.sampled_from([None, None, *SpeculationMethod]),
        num_speculative_tokens=st.integers(1, 3),
    )
    def start(
        self,
        num_blocks: int,
        num_offload_blocks: int,
        policy: SchedulingPolicy,
        speculation: SpeculationMethod | None,
        num_speculative_tokens: int,
        enable_prefix_caching: bool,
        **limits: Any,
    ) -> None:
        """An engine with these limits."""
        self.config = CoreConfig(
            vocab_size=VOCAB_SIZE,
            scheduling_policy=policy,
            enable_prefix_caching=enable_prefix_caching,
            speculation=_speculation_config(speculation, num_speculative_tokens) if speculation else None,
            **limits,
        )
        self.loads_fail = False
        self.is_disturbed = False  # Whether anything may have failed, or was paused.
        self.num_later_replies = 0
        self.sequences: dict[int, NewSequence] = {}
        self.driver = CoreDriver(
            self.config,
            num_blocks=num_blocks,
            draft_model=_guess if speculation is SpeculationMethod.DRAFT_MODEL else None,
            num_offload_blocks=num_offload_blocks if enable_prefix_caching else 0,
            fails=lambda sequence, num_generated: sequence.seed - FAILING_SEED == num_generated,
            fails_load=lambda _: self.loads_fail,
        )
        self.sent: list[Sent] = []

    @rule(
        client=CLIENTS,
        prompt=st.lists(TOKEN_IDS, min_size=1, max_size=14),
        max_tokens=st.integers(0, 12),
        min_tokens=st.integers(0, 3),
        end_token_ids=st.sets(TOKEN_IDS, max_size=2),
        num_eos=st.integers(0, 1),
        seed=st.integers(0, 3),
        priority=st.integers(-1, 1),
        logprobs=st.none() | st.integers(0, 2),
        prompt_logprobs=st.none() | st.integers(0, 2),
        queue_timeout_s=st.none() | st.integers(1, 3),
        kv_hints=st.none() | st.builds(KVHints, st.booleans(), st.booleans()),
    )
    def add(
        self,
        client: int,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        end_token_ids: set[int],
        num_eos: int,
        seed: int,
        priority: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        queue_timeout_s: int | None,
        kv_hints: KVHints | None,
    ) -> None:
        """Send a request, perhaps one that cannot fit."""
        ends = sorted(end_token_ids)
        sampling = SamplingParams(
            max_tokens=max_tokens if prompt_logprobs is not None else max(1, max_tokens),
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=tuple(ends[num_eos:]),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        hints = {"queue_timeout_s": queue_timeout_s, "kv_hints": kv_hints}
        self._send(client, prompt, sampling, seed, tuple(ends[:num_eos]), priority, **hints)

    @rule(
        client=CLIENTS,
        num_prompt_tokens=st.integers(1, 14),
        last_token=TOKEN_IDS,
        seed=st.integers(0, 1),
        priority=st.integers(-1, 1),
        fails_at=st.none() | st.integers(0, 4),
        kv_hints=st.none() | st.builds(KVHints, st.booleans(), st.booleans()),
    )
    def add_with_common_prefix(
        self,
        client: int,
        num_prompt_tokens: int,
        last_token: int,
        seed: int,
        priority: int,
        fails_at: int | None,
        kv_hints: KVHints | None,
    ) -> None:
        """Send a request whose prompt begins like others, and which may fail."""
        prompt = [*(position % VOCAB_SIZE for position in range(num_prompt_tokens)), last_token]
        seed = seed if fails_at is None else FAILING_SEED + fails_at
        self._send(client, prompt, SamplingParams(max_tokens=8), seed, (), priority, kv_hints=kv_hints)

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds: int) -> None:
        """Time passes in which the loop does not turn. Then requests that have not begun in theirs are dropped."""
        self.driver.now_s += seconds
        for sent in self.sent:
            limit_s, answer = sent.request.queue_timeout_s, sent.answer
            is_open = not (answer.finished or sent.is_dropped or sent.is_aborted)
            if limit_s is not None and is_open and sent.arrived_s + limit_s <= self.driver.now_s:
                sent.is_late = not self._has_begun(sent)
        self.driver.core.poll()
        timeout_s = self.driver.core.idle_timeout_s()
        assert timeout_s is None or timeout_s > 0

    @rule()
    def make_loads_fail(self) -> None:
        """The offload store breaks, or is mended."""
        self.loads_fail = not self.loads_fail
        self.is_disturbed = True

    @rule(client=CLIENTS, num_requests=st.integers(2, 5), num_prompt_tokens=st.integers(1, 6), seed=st.integers(0, 3))
    def add_several(self, client: int, num_requests: int, num_prompt_tokens: int, seed: int) -> None:
        """Send enough requests with long answers that blocks run out while others wait."""
        for index in range(num_requests):
            prompt = [(index + position) % VOCAB_SIZE for position in range(num_prompt_tokens)]
            self._send(client, prompt, SamplingParams(max_tokens=8), seed, (), priority=index % 2)

    @rule(client=CLIENTS, prompt=st.sampled_from([[], [VOCAB_SIZE], [-1], [0] * 50]))
    def add_invalid(self, client: int, prompt: list[int]) -> None:
        """Send a request that must be refused."""
        before = self._load()
        self._send(client, prompt, SamplingParams(), 0, (), 0)
        assert self._load() == before

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a request in whatever state: never admitted, running, finished without our knowing, refused."""
        live = [sent for sent in self.sent if not sent.answer.finished and not sent.is_dropped]
        if live:
            sent = data.draw(st.sampled_from(live))
            sent.is_aborted = True
            self.driver.abort(sent.answer.slot, client=sent.answer.client)

    @rule(client=CLIENTS, slot=st.integers(1_000_000, 1_000_010))
    def abort_unknown(self, client: int, slot: int) -> None:
        """Abort what never was."""
        before = self._load()
        self.driver.abort(slot, client=client)
        assert self._load() == before

    @rule(client=CLIENTS)
    def drop_client(self, client: int) -> None:
        """A client vanishes; a new one may take its number."""
        self.driver.take_all()
        if client == 0:  # Nobody waits for its replies any more.
            self.num_later_replies = len(self.driver.replies)
        self.driver.drop_client(client)
        for sent in self.sent:
            if sent.answer.client == client and not sent.answer.finished:
                sent.is_dropped = True

    @rule(mode=st.sampled_from(PauseMode), clear_cache=st.booleans())
    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Compute no more, sooner or later."""
        self._begin(PauseGeneration(mode, clear_cache), mode)

    @rule(level=st.integers(1, 2), mode=st.sampled_from(PauseMode))
    def sleep(self, level: int, mode: PauseMode) -> None:
        """Sleep, sooner or later."""
        self._begin(Sleep(level, mode), mode)

    @rule()
    def resume(self) -> None:
        """End a pause, if there is one."""
        self.driver.call(ResumeGeneration())

    @rule(tags=st.sampled_from([(), ("weights",), ("kv_cache",)]))
    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Wake up what sleeps, if anything does."""
        self.driver.call(WakeUp(tags))

    @rule()
    def reset_prefix_cache(self) -> None:
        """Forget prefixes, if nobody runs."""
        assert self.driver.call(ResetPrefixCache()) == (self._load()[0] == 0)

    @rule(client=CLIENTS)
    def take(self, client: int) -> None:
        """A client's transport has room."""
        has_output = client in self.driver.core.clients_with_output()
        assert (self.driver.take(client) is not None) == has_output

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        """Some steps, outputs pending."""
        for _ in range(num_steps):
            if self.driver.core.has_work:
                self._step()

    def teardown(self) -> None:
        """Everything comes to its end: every answer right, every block free, nothing known any more."""
        if not hasattr(self, "driver"):
            return
        self.driver.call(WakeUp())
        self.driver.call(ResumeGeneration())
        num_steps = 0
        while self.driver.core.has_work:
            self._step()
            num_steps += 1
            # A step brings the first request nearer to its end, and only its own end makes another the first. A call
            # may only bring a result, and once for each request, what its data depends on may fail.
            assert num_steps <= 3 * (len(self.sent) + 1) * (2 * self.config.max_model_len + 2)
        self.driver.take_all()
        for sent in self.sent:
            self._check(sent)
        assert self._load() == (0, 0, self.driver.core.kv_cache.num_blocks)
        assert self.driver.executor.sequence_ids == set()
        assert list(self.driver.core.clients_with_output()) == []
        assert all(reply.error is None for reply in self.driver.replies)
        assert len(self.driver.replies) == self.num_later_replies

    def _begin(self, call: Call[None], mode: PauseMode) -> None:
        """Send an operation that may take its time."""
        self.is_disturbed = True
        if mode is PauseMode.ABORT:
            for sent in self.sent:
                sent.is_aborted |= not sent.answer.finished
        self.num_later_replies += self.driver.begin_call(call) is None

    def _send(
        self,
        client: int,
        prompt: list[int],
        sampling: SamplingParams,
        seed: int,
        eos_token_ids: tuple[int, ...],
        priority: int,
        **hints: Any,
    ) -> None:
        in_use = {
            sent.answer.slot
            for sent in self.sent
            if sent.answer.client == client and not sent.answer.finished and not sent.is_dropped
        }
        slot = min(set(range(len(in_use) + 1)) - in_use)  # As soon as a slot is free, it is used again.
        request = make_core_request(
            slot, prompt, sampling=sampling, seed=seed, eos_token_ids=eos_token_ids, priority=priority
        )
        request = attrs.evolve(request, **hints)
        self.is_disturbed |= seed >= FAILING_SEED
        sequence_id = self.driver.core._num_arrivals  # pyright: ignore[reportPrivateUsage]
        self.sent.append(Sent(request, self.driver.add(request, client), self.driver.now_s, sequence_id))

    def _has_begun(self, sent: Sent) -> bool:
        return sent.sequence_id in self.sequences

    def _load(self) -> tuple[int, int, int]:
        core = self.driver.core
        return core.scheduler.num_running, core.scheduler.num_waiting, core.kv_cache.num_free_blocks

    def _unfinished(self) -> list[Request]:
        table = self.driver.core.scheduler._table  # pyright: ignore[reportPrivateUsage]
        requests = [*table.running, *table.waiting]
        return sorted(requests, key=lambda request: request.key)

    def _step(self) -> None:
        """One step. The driver checks the books, the fake executor every rule of its border."""
        before, num_plans = self._unfinished(), len(self.driver.plans)
        self.driver.step()
        for plan in self.driver.plans[num_plans:]:
            self._check_plan(plan, before)

    def _check_plan(self, plan: StepPlan, before: list[Request]) -> None:
        self.sequences |= {new.sequence_id: new for new in plan.new}
        scheduled = [work.sequence_id for work in plan.scheduled]
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(scheduled) <= self.config.max_num_seqs
        assert sum(map(self._num_rows, plan.scheduled)) <= self.config.max_num_logit_rows
        assert not {*scheduled, *(new.sequence_id for new in plan.new)} & set(plan.removed)
        if not (self.config.async_scheduling or self.is_disturbed):
            assert scheduled or not before
        if not (self.config.async_scheduling or self.is_disturbed or self.config.long_prefill_token_threshold):
            # The first are computed, all of them in every step: nobody is overtaken, so nobody starves.
            order = [request.sequence_id for request in before[: len(scheduled)]]
            assert sorted(scheduled) == sorted(order)

    def _num_rows(self, work: ScheduledSequence) -> int:
        new, start, end = self.sequences[work.sequence_id], work.num_computed_tokens, 0
        end = start + work.num_tokens
        num_rows = 1 + len(work.draft_token_ids)
        if new.sampling.prompt_logprobs is not None:
            num_rows = max(num_rows, min(end, new.num_prompt_tokens) - start)
        return num_rows

    def _check(self, sent: Sent) -> None:
        answer, request = sent.answer, sent.request
        prompt = list(unpack_int32(request.prompt_token_ids))
        finished, sampling = answer.finished, request.sampling
        if sent.is_dropped:
            return
        assert finished is not None
        if self._is_refused(prompt, sampling):
            assert finished.error is not None
            assert not answer.tokens
            return
        self._check_logprobs(answer, prompt, request)
        assert answer.num_cached_tokens < len(prompt)
        reads_cache = request.kv_hints is None or request.kv_hints.read_prefix_cache
        if not (self.config.enable_prefix_caching and reads_cache) or sampling.prompt_logprobs is not None:
            assert answer.num_cached_tokens == 0
        tokens, reason, stop_token_id = self._expected(prompt, request)
        if sent.is_late:
            assert finished.error is not None
            assert finished.error.name == "DeadlineExceededError"
            assert (answer.tokens, answer.waited_us) == ([], None)
        elif finished.error is not None:
            assert request.seed >= FAILING_SEED
            assert len(answer.tokens) == request.seed - FAILING_SEED
            assert answer.tokens == tokens[: len(answer.tokens)]
        elif finished.reason is FinishReason.ABORT:
            assert sent.is_aborted
            assert answer.tokens == tokens[: len(answer.tokens)]
            assert finished == Finished(answer.slot, FinishReason.ABORT)
        else:
            assert answer.tokens == tokens
            assert finished == Finished(answer.slot, reason, stop_token_id)
            assert sampling.prompt_logprobs is None or len(answer.prompt_logprobs) == len(prompt) - 1

    def _check_logprobs(self, answer: Answer, prompt: list[int], request: EngineCoreRequest) -> None:
        """One for each token that was delivered, and each of the prompt once."""
        for found, number, first, tokens in (
            (answer.logprobs, request.sampling.logprobs, prompt, answer.tokens),
            (answer.prompt_logprobs, request.sampling.prompt_logprobs, prompt[:1], prompt[1:]),
        ):
            if number is None:
                assert not found
                continue
            expected = logprobs_alone(first, tokens, number, vocab_size=VOCAB_SIZE, seed=request.seed)
            assert len(found) == len(expected) or (found is answer.prompt_logprobs and len(found) < len(expected))
            for one, other in zip(found, expected, strict=False):
                assert (one.token_ids, one.rank) == (other.token_ids, other.rank)
                assert list(one.logprobs) == pytest.approx(list(other.logprobs))

    def _is_refused(self, prompt: list[int], sampling: SamplingParams) -> bool:
        if not 0 < len(prompt) < self.config.max_model_len or not set(prompt) <= set(range(VOCAB_SIZE)):
            return True
        max_tokens = sampling.max_tokens or 0
        num_computed_tokens = max(min(len(prompt) + max_tokens, self.config.max_model_len) - 1, len(prompt))
        return num_computed_tokens > self.driver.core.kv_cache.num_blocks * self.config.block_size

    def _expected(self, prompt: list[int], request: EngineCoreRequest) -> tuple[list[int], FinishReason, int | None]:
        sampling = request.sampling
        ends = sorted({*request.eos_token_ids, *sampling.stop_token_ids})
        tokens = generate_alone(
            prompt,
            min(sampling.max_tokens or 0, self.config.max_model_len - len(prompt)),
            vocab_size=VOCAB_SIZE,
            seed=request.seed,
            min_tokens=sampling.min_tokens,
            end_token_ids=ends,
        )
        for index, token in enumerate(tokens):
            if token in ends and index >= sampling.min_tokens:
                stop_token_id = None if token in request.eos_token_ids else token
                return tokens[: index + 1], FinishReason.STOP, stop_token_id
        return tokens, FinishReason.LENGTH, None


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
