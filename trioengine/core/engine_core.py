"""`EngineCore`: messages in, steps on the executor, output out. Synchronous, without I/O.

A loop around it (`runtime`) moves the bytes: it gives messages to `handle`, calls `poll` in each turn and `step` while
`has_work`, and sends what `take_output` and `take_replies` return. Without work it waits, `idle_timeout_s` at most.
"""

import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from trioengine.core.background import Background
from trioengine.core.config import CoreConfig
from trioengine.core.executor import Executor
from trioengine.core.kv_cache_manager import KVCacheManager
from trioengine.core.lockstep import Lockstep, Wave
from trioengine.core.lora import LoRAAdapter, LoRAAdapters
from trioengine.core.operations import DeferredReply, run_call
from trioengine.core.outbox import Outbox
from trioengine.core.pause import Pause
from trioengine.core.request import Request, RequestEvent, make_encode_request, make_request
from trioengine.core.scheduler import Scheduler
from trioengine.core.step import StepOutcome
from trioengine.core.structured_output import Grammar, StructuredOutputs
from trioengine.core.weights import WeightUpdate
from trioengine.errors import DeadlineExceededError, RequestError
from trioengine.types.codec import error_to_data
from trioengine.types.messages import (
    AbortRequests,
    CallRequest,
    EncodeCoreRequest,
    EngineCoreRequest,
    Finished,
    PauseMode,
    Reply,
    SchedulerStats,
    StartWave,
    StepOutput,
    Stop,
    ToCore,
)
from trioengine.types.output import FinishReason

MAX_SLOT = 2**31 - 1
STATS_INTERVAL_S = 0.25
"""How old the numbers may be that a client was told last, while the core works for others."""

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Client:
    """A front end: its unfinished requests by slot, and its pending output."""

    requests: dict[int, Request] = attrs.field(factory=dict[int, Request])
    outbox: Outbox = attrs.field(factory=Outbox)
    replies: list[Reply] = attrs.field(factory=list[Reply])
    weight_version: str | None = None
    """That it was told last."""
    stats: SchedulerStats = attrs.field(factory=lambda: SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0, 0))
    """Those that it was told last."""
    told_s: float = -math.inf


class EngineCore:
    """All requests of one core.

    Every request gets exactly one `Finished`: at its end, when it is aborted, when it is refused and when
    it fails. Only one for a slot that is in use is dropped without an answer, for an answer would end the slot's
    present request in the eyes of the front end; no front end that keeps to the protocol sends one.

    An exception from the executor leaves `step` and is the end of this core.
    """

    def __init__(
        self,
        config: CoreConfig,
        executor: Executor,
        structured_outputs: StructuredOutputs | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        background: Background | None = None,
    ) -> None:
        """Without `structured_outputs`, requests that need them are refused. `background` does slow work of operations;
        without, steps wait for it."""
        self.kv_cache = KVCacheManager(
            executor.kv_cache_groups,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            num_offload_blocks=executor.num_offload_blocks,
            record_events=config.enable_kv_cache_events,
        )
        self.loras = LoRAAdapters(config.max_loras, config.max_cpu_loras, executor.remove_lora)
        self.scheduler = Scheduler(config, self.kv_cache, self.loras, structured_outputs)
        self.executor = executor
        self.pause = Pause()
        self.background = background or Background()
        self.weight_update = WeightUpdate()
        self.weight_version: str | None = None
        """Of the weights that steps compute with; None before the first update."""
        self._wave = Wave(executor) if isinstance(executor, Lockstep) else None
        self._config = config
        self._structured_outputs = structured_outputs
        self._clock = clock
        self._clients: dict[int, _Client] = {}
        self._held: dict[int, Request] = {}  # By sequence id: those that the scheduler must not have yet.
        self._deferred: list[DeferredReply] = []
        # When, and whose: those that had not begun when they came in. Entries of others are left out lazily.
        self._queue_deadlines: list[tuple[float, int, Request]] = []
        self._num_arrivals = 0
        self._step = 0
        self._step_ended_s = clock()
        self._submitted_s: deque[float] = deque()  # When the steps in flight were.

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do. Output may be pending without."""
        return self.scheduler.has_work or self.is_in_wave

    @property
    def needs_lockstep(self) -> bool:
        """Whether its steps need those of other cores, which `StartWave` must wake."""
        return self._wave is not None

    @property
    def is_in_wave(self) -> bool:
        """Whether other cores may wait for this one's next step."""
        return self._wave is not None and self._wave.is_on

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: queued, held by a pause, or waiting for their grammars."""
        return self.scheduler.num_waiting + len(self._held)

    def handle(self, client: int, message: ToCore) -> Reply | None:
        """Take in a client's message; the reply to a `CallRequest`, unless it comes later, by `take_replies`.

        `Stop` is for the loop around the core, not for the core.
        """
        match message:
            case EngineCoreRequest() | EncodeCoreRequest():
                self._add(client, message)
            case AbortRequests(slots):
                self._abort(client, slots)
                self._settle_replies()
            case CallRequest():
                reply = run_call(self, client, message)
                if isinstance(reply, DeferredReply):
                    self._clients.setdefault(client, _Client())
                    self._deferred.append(reply)
                self._settle_replies()
                return reply if isinstance(reply, Reply) else None
            case StartWave():
                if self._wave is not None:
                    self._wave.start(client)
            case Stop():
                raise TypeError("Stop ends the loop around the core.")
        return None

    def poll(self) -> None:
        """Let requests go on whose grammars have been compiled, and drop those that have waited too long for their
        first step, and replies whose work is done. Cheap; for each turn of the loop."""
        if self._held and self._structured_outputs is not None and self._structured_outputs.poll():
            self._release()
            self._settle_replies()
        if self._queue_deadlines and self._drop_overdue():
            self._settle_replies()
        if self._deferred:
            self._settle_replies()

    def idle_timeout_s(self) -> float | None:
        """How long the loop may wait, when there is no work, until `poll` has to be called again; None is for ever."""
        deadlines = self._queue_deadlines
        while deadlines and not deadlines[0][2].waits_for_first_step:
            heapq.heappop(deadlines)
        return max(0.0, deadlines[0][0] - self._clock()) if deadlines else None

    def step(self) -> None:
        """Plan and submit a step if one may be, and take in the result of the oldest one in flight when no other may be
        submitted before; its output is pending afterwards.

        Raises:
            Exception: whatever the executor raised. The core must not be used any more.
        """
        scheduler = self.scheduler
        plan = None
        if scheduler.may_schedule:
            plan = scheduler.schedule()
            if plan is not None:
                self._submitted_s.append(self._clock())
                self.executor.submit(plan)
                self._emit_preempted()
        if self._wave is not None and not (plan is not None and plan.scheduled):
            self._wave.execute_dummy()
        if scheduler.num_in_flight and (plan is None or not scheduler.may_schedule):
            self._take_result()
        if self._wave is not None:
            self._wave.end_turn(has_work=scheduler.has_work)
        if self._deferred:
            self._settle_replies()
        if self.loras.has_leaving:
            self.loras.forget_unused(self.used_loras())

    def take_output(self, client: int) -> StepOutput | None:
        """A client's pending output, which is then no longer pending; None when there is none.

        Of steps not taken since the last call there is one message. Messages of a client are numbered without a gap.
        """
        state = self._clients.get(client)
        if state is None or state.outbox.is_empty:
            return None
        return self._take(state, self.stats())

    def take_stats(self, client: int) -> StepOutput | None:
        """A message that has nothing but how the core does, for a client without output; None when it knows.

        What other clients ask for, and a pause, change the numbers too. They are told when the core comes to rest, and
        from time to time before.
        """
        state = self._clients.setdefault(client, _Client())
        if self.has_work and self._clock() < state.told_s + STATS_INTERVAL_S:
            return None
        stats = self.stats()
        return None if stats == state.stats else self._take(state, stats)

    def _take(self, state: _Client, stats: SchedulerStats) -> StepOutput | None:
        weight_version = None
        if state.weight_version != self.weight_version:
            weight_version = state.weight_version = self.weight_version
        state.stats, state.told_s = stats, self._clock()
        return state.outbox.take(self._step, self._step_ended_s, stats, weight_version)

    def stats(self) -> SchedulerStats:
        """How the core does now."""
        scheduler, kv_cache = self.scheduler, self.kv_cache
        speculator = scheduler.drafting.speculator
        drafts = speculator.statistics if speculator else None
        return SchedulerStats(
            running=scheduler.num_running,
            waiting=self.num_waiting,
            kv_cache_usage=kv_cache.usage,
            num_steps=scheduler.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_cache_queries=kv_cache.num_queried_tokens,
            num_prefix_cache_hits=kv_cache.num_hit_tokens,
            num_draft_tokens=drafts.num_draft_tokens if drafts else 0,
            num_accepted_tokens=drafts.num_accepted_tokens if drafts else 0,
        )

    def take_replies(self, client: int) -> Sequence[Reply]:
        """Replies that were not ready when `handle` returned. The output that came before them is taken before."""
        state = self._clients.get(client)
        if not state or not state.replies:
            return ()
        replies, state.replies = state.replies, []
        return replies

    def clients_with_output(self) -> Iterable[int]:
        """The clients for which `take_output` returns something."""
        return [client for client, state in self._clients.items() if not state.outbox.is_empty]

    def drop_client(self, client: int) -> None:
        """Forget a client that is gone, with its requests and its output."""
        if self._wave is not None:
            self._wave.drop_client(client)
        state = self._clients.pop(client, None)
        if state:
            for request in state.requests.values():
                self._end(request, RequestEvent.ABORTED, Finished(request.slot, FinishReason.ABORT))
            # What it has asked for is done nevertheless, but whoever gets its number is not told.
            self._deferred = [
                attrs.evolve(deferred, client=None) if deferred.client == client else deferred
                for deferred in self._deferred
            ]
            self._settle_replies()

    def abort_all(self) -> None:
        """Abort every request."""
        for client, state in self._clients.items():
            self._abort(client, list(state.requests))

    def begin_pause(self, mode: PauseMode, *, is_sleep: bool = False) -> None:
        """Pause, and do with present requests what the mode says."""
        self.pause.begin(mode, self._num_arrivals, is_sleep=is_sleep)
        if mode is PauseMode.ABORT:
            self.abort_all()
        self.apply_pause()

    def apply_pause(self) -> None:
        """Do what `pause` says, after it has changed."""
        self.scheduler.is_paused = self.pause.is_frozen
        self._release()

    def has_any_of(self, sequence_ids: Iterable[int]) -> bool:
        """Whether one of these requests has not ended."""
        return not {request.sequence_id for request in self._requests()}.isdisjoint(sequence_ids)

    def awaited_ids(self) -> frozenset[int]:
        """The requests that a pause, which has begun, lets go on to their ends. What another pause holds or keeps is
        none of them: waiting for it could take for ever."""
        if self.pause.is_frozen:
            return frozenset()
        ids = (request.sequence_id for request in self._requests())
        return frozenset(sequence_id for sequence_id in ids if not self.pause.holds(sequence_id))

    def used_loras(self) -> frozenset[LoRAAdapter]:
        """The adapters of all requests that have not ended."""
        return frozenset(request.lora for request in self._requests() if request.lora is not None)

    def check_integrity(self) -> None:
        """Return when the core's books are right.

        Raises:
            AssertionError: saying what is wrong.
        """
        self.scheduler.check_integrity()
        num_requests = sum(len(state.requests) for state in self._clients.values())
        num_known = self.scheduler.num_running + self.num_waiting
        if num_requests != num_known:
            raise AssertionError(
                f"Clients have {num_requests} requests, the scheduler and the held ones are {num_known}"
            )

    # Requests

    def _requests(self) -> Iterator[Request]:
        for state in self._clients.values():
            yield from state.requests.values()

    def _add(self, client: int, message: EngineCoreRequest | EncodeCoreRequest) -> None:
        state = self._clients.setdefault(client, _Client())
        slot = message.slot
        if slot in state.requests or not 0 <= slot <= MAX_SLOT:
            logger.error("Ignored request %.80r of client %d: slot %d is not free.", message.request_id, client, slot)
            return
        try:
            request = self._make_request(client, message)
        except Exception as error:  # A border: what is wrong with one request is that request's answer.
            state.outbox.finish(Finished(slot, FinishReason.ABORT, error=error_to_data(error)))
            return
        request.arrived_s = self._clock()
        self._num_arrivals += 1
        state.requests[slot] = request
        if message.queue_timeout_s is not None:
            self._expect_within(request, message.queue_timeout_s)
        self._held[request.sequence_id] = request
        self._release_if_allowed(request)

    def _make_request(self, client: int, message: EngineCoreRequest | EncodeCoreRequest) -> Request:
        lora = None if message.lora is None else self.loras.find(message.lora)
        match message:
            case EngineCoreRequest():
                request = make_request(client, message, self._num_arrivals, self._config, lora)
                self.executor.check_sampling(request.sampling)
                self.scheduler.check(request)
                request.grammar = self._start_grammar(request, message)
            case EncodeCoreRequest():
                request = make_encode_request(client, message, self._num_arrivals, self._config, lora)
                self.executor.check_pooling(message.pooling)
                self.scheduler.check(request)
        return request

    def _start_grammar(self, request: Request, message: EngineCoreRequest) -> Grammar | None:
        params, budget = request.sampling.structured_outputs, request.sampling.thinking_token_budget
        if params is None and budget is None:
            return None
        if self._structured_outputs is None:
            param = "thinking_token_budget" if params is None else "structured_outputs"
            raise RequestError("This engine has no structured outputs.", param=param)
        eos_token_ids = tuple(sorted(request.eos_token_ids))
        return self._structured_outputs.start(params, request.token_ids, eos_token_ids, message.reasoning_ended, budget)

    def _release(self) -> None:
        """Hand on those held that are held no more."""
        for request in list(self._held.values()):
            self._release_if_allowed(request)

    def _release_if_allowed(self, request: Request) -> None:
        if not self._is_held_no_more(request):
            return
        del self._held[request.sequence_id]
        grammar = request.grammar
        if grammar is not None and grammar.error is not None:
            error = error_to_data(grammar.error)
            _end_held(request, RequestEvent.FAILED, Finished(request.slot, FinishReason.ABORT, error=error))
            self._emit_finished(request)
        else:
            if grammar is not None and grammar.is_free:
                request.grammar = None
            self.scheduler.add(request)

    def _is_held_no_more(self, request: Request) -> bool:
        grammar = request.grammar
        is_compiled = grammar is None or grammar.is_ready or grammar.error is not None
        return is_compiled and not self.pause.holds(request.sequence_id)

    def _abort(self, client: int, slots: Iterable[int]) -> None:
        state = self._clients.get(client)
        if state is None:
            return
        for slot in slots:
            request = state.requests.get(slot)
            if request is not None:
                self._end(request, RequestEvent.ABORTED, Finished(slot, FinishReason.ABORT))
                self._emit_finished(request)

    def _expect_within(self, request: Request, timeout_s: float) -> None:
        """Let a new request end if it has not begun in time."""
        deadlines = self._queue_deadlines
        if len(deadlines) > 2 * self.num_waiting + 64:
            # Most have begun or are gone, and would otherwise be kept until their time has come.
            deadlines[:] = [entry for entry in deadlines if entry[2].waits_for_first_step]
            heapq.heapify(deadlines)
        heapq.heappush(deadlines, (request.arrived_s + timeout_s, request.sequence_id, request))

    def _drop_overdue(self) -> bool:
        """End those whose time to begin has passed; whether there was one."""
        deadlines, now, has_dropped = self._queue_deadlines, self._clock(), False
        while deadlines and (deadlines[0][0] <= now or not deadlines[0][2].waits_for_first_step):
            request = heapq.heappop(deadlines)[2]
            if request.waits_for_first_step:
                error = DeadlineExceededError(f"The request waited for {now - request.arrived_s:.3g} s to be begun.")
                finished = Finished(request.slot, FinishReason.ABORT, error=error_to_data(error))
                self._end(request, RequestEvent.FAILED, finished)
                self._emit_finished(request)
                has_dropped = True
        return has_dropped

    def _end(self, request: Request, event: RequestEvent, finished: Finished) -> None:
        """End a request from outside of the steps, wherever it is."""
        if self._held.pop(request.sequence_id, None) is None:
            self.scheduler.end(request, event, finished)
            return
        if request.grammar is not None and self._structured_outputs is not None:
            self._structured_outputs.abandon(request.grammar)
        _end_held(request, event, finished)

    # Results

    def _take_result(self) -> None:
        result = self.executor.result()
        outcome = self.scheduler.update(result)
        now, submitted_s = self._clock(), self._submitted_s.popleft()
        speculator = self.scheduler.drafting.speculator
        if speculator is not None and result.tokens:
            # A step begins when the one before it has ended.
            speculator.observe_step(now - max(submitted_s, self._step_ended_s), result.draft_seconds)
        self._step, self._step_ended_s = result.step, now
        self._emit_preempted()
        self._emit(outcome, submitted_s)

    def _emit_preempted(self) -> None:
        for request in self.scheduler.take_preempted():
            state = self._clients.get(request.client)
            # Nothing may be said of a slot behind its end: another request may have it then.
            if state is not None and state.requests.get(request.slot) is request:
                state.outbox.add_preempted(request.slot)

    def _emit(self, outcome: StepOutcome, submitted_s: float) -> None:
        clients = self._clients
        for request in outcome.started:
            outbox = clients[request.client].outbox
            outbox.add_scheduled(request.slot, submitted_s - request.arrived_s)
            if request.num_cached_tokens:
                outbox.add_cached_tokens(request.slot, request.num_cached_tokens)
        if len(clients) == 1:
            (state,) = clients.values()
            state.outbox.slots.fromlist([request.slot for request in outcome.requests])
            state.outbox.tokens.fromlist(outcome.tokens)
        else:
            for request, token in zip(outcome.requests, outcome.tokens, strict=True):
                outbox = clients[request.client].outbox
                outbox.slots.append(request.slot)
                outbox.tokens.append(token)
        for request, logprobs in outcome.logprobs:
            clients[request.client].outbox.add_logprobs(request.slot, logprobs)
        for request, logprobs in outcome.prompt_logprobs:
            clients[request.client].outbox.add_prompt_logprobs(request.slot, logprobs)
        for request, vectors in outcome.pooled:
            clients[request.client].outbox.add_pooled(request.slot, vectors)
        for request in outcome.finished:
            self._emit_finished(request)

    def _emit_finished(self, request: Request) -> None:
        assert request.finished is not None
        state = self._clients[request.client]
        del state.requests[request.slot]
        state.outbox.finish(request.finished)

    def _settle_replies(self) -> None:
        """Give replies that have become ready."""
        for deferred in list(self._deferred):
            reply = deferred.attempt()
            if reply is not None:
                self._deferred.remove(deferred)
                if deferred.client is not None:
                    self._clients[deferred.client].replies.append(reply)


def _end_held(request: Request, event: RequestEvent, finished: Finished) -> None:
    request.apply(event)
    request.finished = finished
