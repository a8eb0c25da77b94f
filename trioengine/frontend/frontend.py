"""`Frontend`: every request and call of one engine client, between its callers and the cores. Pure.

Three kinds of shell drive the same object (trio over ZMQ, blocking over ZMQ, blocking in process): they carry its
messages, and give each request a `Sink` and each call a reply handler. It knows neither sockets nor tasks.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

import attrs

from trioengine.errors import (
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineGenerateError,
    TrioEngineError,
)
from trioengine.frontend.admission import AdmissionLimits, AdmissionQueue
from trioengine.frontend.deadlines import DeadlineHeap
from trioengine.frontend.input_processor import ProcessedEncodeRequest, ProcessedRequest
from trioengine.frontend.load_balancer import LoadBalancer, RankLoad, check_rank
from trioengine.frontend.logprobs import entries_by_slot
from trioengine.frontend.parent_request import Child, ParentRequest
from trioengine.frontend.pooling_state import PoolingSink, PoolingState, vectors_by_slot
from trioengine.frontend.request_state import RequestState
from trioengine.frontend.sink import ChildSink, Sink
from trioengine.observability.request_log import log_arrival
from trioengine.observability.stats import FinishedRequestStats, IterationStats, StatLogger
from trioengine.types.codec import check_call, decode_reply, error_from_data
from trioengine.types.messages import (
    AbortRequests,
    Call,
    CallRequest,
    EncodeCoreRequest,
    EngineCoreRequest,
    ErrorData,
    Finished,
    GetKVCacheEvents,
    Ready,
    Reply,
    SchedulerStats,
    StepOutput,
    pack_int32,
    unpack_int32,
)
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams
from trioengine.types.request import Deadlines

R = TypeVar("R")

logger = logging.getLogger(__name__)


@attrs.frozen
class PendingCall:
    """A call whose reply has not come. Exactly one of the two handlers is called, once."""

    call_class: type[Call[Any]]
    on_reply: Callable[[Any], None]
    on_error: Callable[[TrioEngineError], None]


@attrs.frozen
class AddedRequest:
    """A registered request: what which core must be sent, and the handle to leave it by."""

    rank: int
    messages: Sequence[EngineCoreRequest | EncodeCoreRequest]
    """One for each answer, all for the core of this rank."""
    wakes: Sequence[int]
    """The ranks that must be sent a `StartWave` behind the messages: `core.lockstep` says why it is all or none."""
    state: ParentRequest


@attrs.define(eq=False)
class _Rank:
    """What is known of one core, and its slots."""

    number: int
    children: list[Child | None] = attrs.field(factory=list["Child | None"])
    """By slot."""
    free_slots: list[int] = attrs.field(factory=list[int])
    aborted_slots: dict[int, None] = attrs.field(factory=dict[int, None])
    """An ordered set."""
    next_sequence: int = 0
    stats: SchedulerStats | None = None
    in_flight: int = 0
    """Requests sent since `stats`."""
    weight_version: str | None = None
    needs_lockstep: bool = False
    ended: list[FinishedRequestStats] = attrs.field(factory=list[FinishedRequestStats])
    """Requests that no `StatLogger` has been told of."""

    @property
    def num_reserved_slots(self) -> int:
        return len(self.children) - len(self.free_slots)

    @property
    def load(self) -> RankLoad:
        if self.stats is None:
            return RankLoad(in_flight=self.in_flight)
        return RankLoad(self.stats.waiting, self.stats.running, self.in_flight, self.stats.kv_cache_usage)


class Frontend:
    """Routes between requests and cores by slot.

    A slot stays reserved after its request has ended on this side until the core's `Finished` for it arrives; rows
    that come until then are ignored, so one request's tokens never reach another.
    """

    def __init__(
        self,
        *,
        num_cores: int = 1,
        first_rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        balancer: LoadBalancer | None = None,
        admission: AdmissionLimits | None = None,
        stat_loggers: Sequence[StatLogger] = (),
        chunk_size: int = 128,
        enable_log_requests: bool = False,
    ) -> None:
        """With the options of `EngineConfig`.

        Args:
            num_cores: here they are numbered from 0.
            first_rank: the rank of the first, by which requests and statistics name it.
            clock: seconds; deadlines and statistics are of it.
            stat_loggers: none makes no statistics. One that raises is dropped.
            chunk_size: rows of a message handled between two moments at which other tasks may run.
        """
        self._ranks = [_Rank(number) for number in range(num_cores)]
        self._first_rank = first_rank
        self._clock = clock
        self._balancer = LoadBalancer() if balancer is None else balancer
        self._queue = AdmissionQueue(AdmissionLimits() if admission is None else admission)
        self._stat_loggers = list(stat_loggers)
        self._chunk_size = chunk_size
        self._logs_requests = enable_log_requests
        self._parents_by_external_id: dict[str, dict[ParentRequest, None]] = {}
        self._num_open_requests = 0
        self._deadlines = DeadlineHeap()
        self._calls: dict[int, PendingCall] = {}
        # Beside a number it makes a request's name one of its own, also among those of other front ends.
        self._name_suffix = secrets.token_hex(6)
        self._request_numbers = count()
        self._call_ids = count()
        self.dead_error: EngineDeadError | EngineClosedError | None = None
        """Why nothing can be asked any more. Set once, by `fail_all`."""

    # From callers

    def check_admission(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Return when a request of so many answers may come now. What waits is what has not had its first output.

        Raises:
            UnavailableError: too much waits already.
        """
        self._queue.check(n, num_prompt_tokens)

    def add(self, processed: ProcessedRequest, sink: Sink, *, waited_s: float = 0.0) -> AddedRequest:
        """Register a request; from now on outputs for it are expected. The messages are to be sent to the core.

        Args:
            waited_s: for how long the request has been in this process; its deadlines count from then.

        Raises:
            EngineDeadError, EngineClosedError: the engine is gone.
            UnavailableError: the engine is full.
            DeadlineExceededError: one of its deadlines has passed already.
            RequestError: there is no core of the rank that it names.
        """
        queue_timeout_s = _queue_timeout_s(processed.deadlines, waited_s)
        n = processed.sampling.n
        parent = self._new_parent(processed, n, waited_s)
        sinks = [sink] if n == 1 else [ChildSink(sink, index) for index in range(n)]
        first = RequestState(processed, parent, sinks[0])
        children = [first, *(RequestState(processed, parent, each, first) for each in sinks[1:])]
        rank = self._register(parent, children)
        prompt_token_ids = pack_int32(processed.prompt_token_ids)
        messages = [
            EngineCoreRequest(
                slot=child.slot,
                request_id=self._internal_id(processed.external_id),
                prompt_token_ids=prompt_token_ids,
                sampling=processed.sampling if n == 1 else _child_sampling(processed.sampling, index),
                seed=(processed.seed + index) % 2**64,
                eos_token_ids=processed.eos_token_ids,
                priority=processed.priority,
                cache_salt=processed.cache_salt,
                reasoning_ended=processed.reasoning_ended,
                lora=processed.lora,
                queue_timeout_s=queue_timeout_s,
                kv_hints=processed.kv_hints,
            )
            for index, child in enumerate(children)
        ]
        if rank.weight_version is not None:
            sink.put_weight_version(rank.weight_version)
        return AddedRequest(parent.rank, messages, self._wakes(rank), parent)

    def add_encode(
        self, processed: ProcessedEncodeRequest, sink: PoolingSink, *, waited_s: float = 0.0
    ) -> AddedRequest:
        """As `add`, for a request for vectors."""
        queue_timeout_s = _queue_timeout_s(processed.deadlines, waited_s)
        parent = self._new_parent(processed, 1, waited_s)
        state = PoolingState(processed, parent, sink)
        rank = self._register(parent, (state,))
        message = EncodeCoreRequest(
            slot=state.slot,
            request_id=self._internal_id(processed.external_id),
            prompt_token_ids=pack_int32(processed.prompt_token_ids),
            pooling=processed.pooling,
            second_text_start=processed.second_text_start,
            priority=processed.priority,
            cache_salt=processed.cache_salt,
            lora=processed.lora,
            queue_timeout_s=queue_timeout_s,
        )
        return AddedRequest(parent.rank, (message,), self._wakes(rank), parent)

    def drop(self, state: ParentRequest) -> None:
        """The reader of this request has left: it is to be aborted, unless it has ended."""
        for child in state.children:
            if child.is_registered:
                child.drop()
                self._abort(child)

    def abort(self, external_id: str) -> None:
        """End all open requests with this caller's id; their readers get reason "abort". Unknown ids are ignored."""
        for parent in tuple(self._parents_by_external_id.get(external_id, ())):
            for child in parent.children:
                if child.is_registered:
                    self._end(child)

    def abort_all(self) -> None:
        """End all open requests with reason "abort"."""
        for external_id in tuple(self._parents_by_external_id):
            self.abort(external_id)

    def cores_of(self, call: Call[Any]) -> Sequence[int]:
        """Which cores a call is for.

        Raises:
            RequestError: there is no core of the rank that it names.
        """
        if not isinstance(call, GetKVCacheEvents) or call.data_parallel_rank is None:
            return range(len(self._ranks))
        check_rank(call.data_parallel_rank, len(self._ranks), self._first_rank)
        return (call.data_parallel_rank - self._first_rank,)

    def add_call(self, call: Call[R], pending: PendingCall, rank: int = 0) -> CallRequest:
        """Register a call. Send the result to the core of this rank.

        Raises:
            EngineDeadError, EngineClosedError: the engine is gone.
            RequestError: no core could read it.
        """
        self._raise_if_dead()
        check_call(call)
        assert 0 <= rank < len(self._ranks)
        call_id = next(self._call_ids)
        self._calls[call_id] = pending
        return CallRequest(call_id, call)

    def take_aborts(self) -> Sequence[tuple[int, AbortRequests]]:
        """What must be aborted since the last time asked: the ranks of cores, and one message for each."""
        messages: list[tuple[int, AbortRequests]] = []
        for rank in self._ranks:
            if rank.aborted_slots:
                messages.append((rank.number, AbortRequests(tuple(rank.aborted_slots))))
                rank.aborted_slots = {}
            if rank.ended:
                self._record(rank, IterationStats(self._first_rank + rank.number))
        return messages

    @property
    def has_aborts(self) -> bool:
        """Whether `take_aborts` has something."""
        return any(rank.aborted_slots for rank in self._ranks)

    def set_ready(self, rank: int, ready: Ready) -> None:
        """The core of this rank takes requests."""
        self._ranks[rank].needs_lockstep = ready.needs_lockstep

    # Time

    @property
    def next_deadline_s(self) -> float | None:
        """The clock's time at which `expire` must be called next; None while nothing can expire. A later `add` or
        `receive` may bring it forward.
        """
        return self._deadlines.next_s

    def expire(self, now_s: float) -> None:
        """End the requests whose deadlines have passed, with `DeadlineExceededError` after the output that waits."""
        for parent, name in self._deadlines.take_due(now_s):
            error = _deadline_error(name, getattr(parent.deadlines, name))
            self._fail(next(child for child in parent.children if child.is_registered), error)

    # Counts

    @property
    def num_cores(self) -> int:
        """Cores that requests are balanced between."""
        return len(self._ranks)

    @property
    def num_open_requests(self) -> int:
        """Requests that someone waits for."""
        return self._num_open_requests

    @property
    def num_queued_requests(self) -> int:
        """Answers whose first output has not come."""
        return self._queue.num_requests

    @property
    def num_reserved_slots(self) -> int:
        """Slots that the cores may still send rows for."""
        return sum(rank.num_reserved_slots for rank in self._ranks)

    # From the cores

    def receive(self, rank: int, message: StepOutput | Reply) -> Iterator[None]:
        """Handle a message of this core. Yields after each slice of a large one, so that the shell can let others run.

        Other methods may be called between slices. An error that one request causes ends this request only.
        """
        if isinstance(message, StepOutput):
            yield from self._receive_step(self._ranks[rank], message)
        else:
            self._receive_reply(message)

    def fail_all(self, error: EngineDeadError | EngineClosedError) -> None:
        """The engine is gone: every request and call, now and later, gets this error after what it was sent before."""
        if self.dead_error is not None:
            return
        self.dead_error = error
        for rank in self._ranks:
            for child in rank.children:
                if child is not None and child.is_registered:
                    self._fail(child, error)
            rank.aborted_slots.clear()
            if rank.ended:
                self._record(rank, IterationStats(self._first_rank + rank.number))
        calls, self._calls = self._calls, {}
        for pending in calls.values():
            pending.on_error(error)

    def _receive_step(self, rank: _Rank, message: StepOutput) -> Iterator[None]:
        if message.sequence != rank.next_sequence:
            self.fail_all(
                EngineDeadError(f"Outputs of the engine were lost: {message.sequence} came for {rank.next_sequence}.")
            )
            return
        rank.next_sequence += 1
        now_s = self._clock()
        stats = IterationStats(self._first_rank + rank.number, message.stats) if self._stat_loggers else None
        if message.stats is not None:
            rank.stats, rank.in_flight = message.stats, 0
        self._receive_besides(rank, message, stats)
        latencies_s = None if stats is None else stats.inter_token_latencies_s
        finished_by_slot = {finished.slot: finished for finished in message.finished if finished.error is None}
        children, chunk_size = rank.children, self._chunk_size
        for row, (slot, token_ids) in enumerate(_rows(message), start=1):
            child = children[slot]
            if child is not None and child.is_registered:
                before_s, child.last_row_s = child.last_row_s, now_s
                if before_s is None:
                    self._receive_first(child, now_s, stats)
                elif latencies_s is not None:
                    latencies_s.append((now_s - before_s) / len(token_ids))
                num_before = child.num_tokens
                # An error comes behind its tokens, which are valid: `_receive_finished` delivers it.
                self._give(child, token_ids, finished_by_slot.get(slot) if finished_by_slot else None)
                if stats is not None:  # Tokens behind a stop string are none of the answer's.
                    stats.num_generated_tokens += child.num_tokens - num_before
            if row % chunk_size == 0:
                yield
        for finished in message.finished:
            self._receive_finished(rank, finished, stats)
        if stats is not None:
            self._record(rank, stats)

    def _receive_besides(self, rank: _Rank, message: StepOutput, stats: IterationStats | None) -> None:
        """Hand out what comes beside tokens; those who have left need none of it."""
        children = rank.children
        if message.weight_version is not None:
            rank.weight_version = message.weight_version
            for child in children:
                if child is not None:
                    child.receive_weight_version(message.weight_version)
        for slot, waited_us in _pairs(message.scheduled):
            if (child := children[slot]) is not None and child.parent.queue_s is None:
                child.parent.queue_s = waited_us / 1e6
        for slot in unpack_int32(message.preempted):
            if (child := children[slot]) is not None:
                child.parent.num_preemptions += 1
            if stats is not None:
                stats.num_preemptions += 1
        for slot, num_cached_tokens in _pairs(message.cached_tokens):
            if (child := children[slot]) is not None:
                child.receive_prompt(num_cached_tokens, ())
                if child is child.parent.children[0]:
                    child.parent.num_cached_tokens = num_cached_tokens
        if message.prompt_logprobs is not None:
            for slot, entries in entries_by_slot(message.prompt_logprobs).items():
                if (child := children[slot]) is not None:
                    child.receive_prompt(0, entries)
        if message.logprobs is not None:
            for slot, entries in entries_by_slot(message.logprobs).items():
                if (child := children[slot]) is not None:
                    child.receive_logprobs(entries)
        if message.pooled is not None:
            for slot, vectors in vectors_by_slot(message.pooled):
                if isinstance(child := children[slot], PoolingState):
                    child.receive_pooled(vectors)

    def _receive_first(self, child: Child, now_s: float, stats: IterationStats | None) -> None:
        """The first tokens of an answer have come."""
        self._leave_queue(child)
        parent = child.parent
        if parent.first_token_s is None:
            parent.first_token_s = now_s
            if stats is not None:
                stats.times_to_first_token_s.append(now_s - parent.arrival_s)
                stats.num_prompt_tokens += parent.num_prompt_tokens
                stats.num_cached_tokens += parent.num_cached_tokens
        if parent.deadlines.inter_token_s is not None:
            self._deadlines.add(parent)

    def _give(self, child: Child, token_ids: Sequence[int], finished: Finished | None) -> None:
        try:
            is_stopped = child.receive(token_ids, finished)
        except Exception as error:  # A border: a fault in one request's text must not reach the others.
            self._fail(child, _processing_error(error))
            return
        if is_stopped:
            self._abort(child, FinishReason.STOP)
        elif finished is not None:
            self._close(child, finished.reason)  # Its slot is freed when the whole message has been handled.

    def _receive_finished(self, rank: _Rank, finished: Finished, stats: IterationStats | None) -> None:
        """Free the slot. The request's reader has had its last output, unless no row came with this."""
        child = rank.children[finished.slot]
        if child is None:
            return
        if child.is_registered:
            if stats is not None and child.parent.holds_queued_tokens and finished.reason is not FinishReason.ABORT:
                # There was nothing to generate.
                stats.num_prompt_tokens += child.parent.num_prompt_tokens
                stats.num_cached_tokens += child.parent.num_cached_tokens
            if finished.error is not None:
                self._fail(child, _error_of_core(finished.error, child.parent.deadlines))
            else:
                self._give(child, (), finished)
        # An abort that is still waiting here would hit the slot's next request.
        rank.aborted_slots.pop(finished.slot, None)
        rank.children[finished.slot] = None
        rank.free_slots.append(finished.slot)

    def _receive_reply(self, reply: Reply) -> None:
        pending = self._calls.pop(reply.call_id, None)
        if pending is None:
            return
        if reply.error is not None:
            pending.on_error(error_from_data(reply.error))
            return
        try:
            value = decode_reply(pending.call_class, reply.value)
        except TrioEngineError as error:
            pending.on_error(error)
        else:
            pending.on_reply(value)

    # Beginnings and endings

    def _new_parent(
        self, processed: ProcessedRequest | ProcessedEncodeRequest, n: int, waited_s: float
    ) -> ParentRequest:
        """Admit a request and choose its core."""
        self._raise_if_dead()
        self._queue.check(n, len(processed.prompt_token_ids))
        rank = self._balancer.choose(
            [rank.load for rank in self._ranks],
            rank=processed.data_parallel_rank,
            session_id=processed.session_id,
            first_rank=self._first_rank,
        )
        return ParentRequest(processed, rank, self._clock() - waited_s)

    def _register(self, parent: ParentRequest, children: Sequence[Child]) -> _Rank:
        """Give an admitted request its slots. From now on it ends by `_close` alone."""
        rank = self._ranks[parent.rank]
        for child in children:
            if rank.free_slots:
                child.slot = rank.free_slots.pop()
                rank.children[child.slot] = child
            else:
                child.slot = len(rank.children)
                rank.children.append(child)
        parent.children = children
        parent.num_open = len(children)
        rank.in_flight += len(children)
        self._queue.enter(len(children), parent.num_prompt_tokens)
        self._parents_by_external_id.setdefault(parent.external_id, {})[parent] = None
        self._num_open_requests += 1
        self._deadlines.add(parent)
        if self._logs_requests:
            processed = parent.processed
            log_arrival(
                processed.external_id,
                parent.num_prompt_tokens,
                processed.sampling if isinstance(processed, ProcessedRequest) else processed.pooling,
                priority=processed.priority,
                lora=processed.lora,
            )
        return rank

    def _internal_id(self, external_id: str) -> str:
        """A name for the core, which no other request ever has."""
        return f"{external_id}-{self._name_suffix}{next(self._request_numbers):x}"

    def _wakes(self, rank: _Rank) -> Sequence[int]:
        return [each.number for each in self._ranks] if rank.needs_lockstep else ()

    def _end(self, child: Child) -> None:
        """End an open answer with reason "abort"."""
        try:
            child.end(FinishReason.ABORT)
        except Exception as error:  # The same border as in `_give`.
            self._fail(child, _processing_error(error))
        else:
            self._abort(child)

    def _fail(self, child: Child, error: TrioEngineError) -> None:
        """End the whole request with an error that one of its answers has met."""
        for other in child.parent.children:
            if other is not child and other.is_registered:
                other.give_up()
                self._abort(other, None)
        child.fail(error)
        self._abort(child, None)

    def _abort(self, child: Child, reason: FinishReason | None = FinishReason.ABORT) -> None:
        """This side is done with an answer; the core must be told. None is an error."""
        self._close(child, reason)
        self._ranks[child.parent.rank].aborted_slots[child.slot] = None

    def _close(self, child: Child, reason: FinishReason | None) -> None:
        """This side is done with an answer."""
        if not child.is_registered:
            return
        child.is_registered = False
        self._leave_queue(child)
        parent = child.parent
        parent.num_open -= 1
        if parent.num_open > 0:
            return
        self._num_open_requests -= 1
        parents = self._parents_by_external_id[parent.external_id]
        del parents[parent]
        if not parents:
            del self._parents_by_external_id[parent.external_id]
        self._deadlines.discard(parent)
        word = "error" if reason is None else reason.value
        if self._stat_loggers:
            self._ranks[parent.rank].ended.append(parent.finished_stats(word, self._clock()))

    def _leave_queue(self, child: Child) -> None:
        if child.is_queued:
            child.is_queued = False
            parent = child.parent
            # The first of its answers to leave stands for the prompt.
            is_first = parent.holds_queued_tokens
            parent.holds_queued_tokens = False
            self._queue.leave(parent.num_prompt_tokens if is_first else 0)

    def _record(self, rank: _Rank, stats: IterationStats) -> None:
        """Tell the loggers, also of the requests that have ended since the last time."""
        stats.finished, rank.ended = rank.ended, []
        for stat_logger in tuple(self._stat_loggers):
            try:
                stat_logger.record(stats)
            except Exception:  # A border: it may be a plug-in.
                logger.exception("%s failed and is told nothing any more.", type(stat_logger).__name__)
                self._stat_loggers.remove(stat_logger)

    def _raise_if_dead(self) -> None:
        if self.dead_error is not None:
            raise attrs.evolve(self.dead_error)


def _rows(message: StepOutput) -> Iterable[tuple[int, Sequence[int]]]:
    """Slot and tokens of each row."""
    slots, tokens = unpack_int32(message.slots), unpack_int32(message.tokens)
    if not message.counts:
        return zip(slots, zip(tokens), strict=True)
    return _long_rows(slots, tokens.tolist(), unpack_int32(message.counts))


def _long_rows(slots: Sequence[int], tokens: list[int], counts: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    start = 0
    for slot, num_tokens in zip(slots, counts, strict=True):
        yield slot, tokens[start : start + num_tokens]
        start += num_tokens


def _pairs(column: bytes) -> Iterable[tuple[int, int]]:
    if not column:
        return ()
    values = unpack_int32(column)
    return zip(values[::2], values[1::2], strict=True)


def _child_sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    """Of one of several answers: the prompt's log probabilities are computed once, unless there is nothing else."""
    is_silent = index > 0 and sampling.max_tokens != 0
    return attrs.evolve(sampling, n=1, prompt_logprobs=None if is_silent else sampling.prompt_logprobs)


def _queue_timeout_s(deadlines: Deadlines, waited_s: float) -> float | None:
    """Within how many seconds the core must have begun.

    Raises:
        DeadlineExceededError: it is too late already.
    """
    due = _deadline_to_begin(deadlines)
    if due is None:
        return None
    limit_s, name = due
    if limit_s <= waited_s:
        raise _deadline_error(name, limit_s, " before it was sent")
    return limit_s - waited_s


def _deadline_to_begin(deadlines: Deadlines) -> tuple[float, str] | None:
    """Within how many seconds a request must have begun, and which deadline says so."""
    names = ("queue_s", "first_token_s", "total_s")
    limits = ((getattr(deadlines, name), name) for name in names)
    return min(((limit_s, name) for limit_s, name in limits if limit_s is not None), default=None)


def _error_of_core(data: ErrorData, deadlines: Deadlines) -> TrioEngineError:
    """Why the core ended a request. Of its deadlines the core knows the earliest only, and not its name."""
    error = error_from_data(data)
    due = _deadline_to_begin(deadlines)
    if isinstance(error, DeadlineExceededError) and due is not None:
        return _deadline_error(due[1], due[0], " before it was begun")
    return error


def _deadline_error(name: str, limit_s: float, when: str = "") -> DeadlineExceededError:
    return DeadlineExceededError(f"The request's deadline has passed{when}: deadlines.{name} is {limit_s:g}.")


def _processing_error(error: Exception) -> EngineGenerateError:
    return EngineGenerateError(f"The output could not be processed: {type(error).__name__}: {error}")
