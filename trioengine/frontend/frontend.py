"""`Frontend`: every request and call of one engine client, between its callers and the core. Pure.

Three kinds of shell drive the same object (trio over ZMQ, blocking over ZMQ, blocking in process): they carry its
messages, and give each request a `Sink` and each call a reply handler. It knows neither sockets nor tasks.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

import attrs

from trioengine.errors import EngineClosedError, EngineDeadError, EngineGenerateError, TrioEngineError
from trioengine.frontend.input_processor import ProcessedEncodeRequest, ProcessedRequest
from trioengine.frontend.logprobs import entries_by_slot
from trioengine.frontend.pooling_state import PoolingSink, PoolingState, vectors_by_slot
from trioengine.frontend.request_state import RequestState
from trioengine.frontend.sink import Sink
from trioengine.types.codec import decode_reply, error_from_data
from trioengine.types.messages import (
    AbortRequests,
    Call,
    CallRequest,
    EncodeCoreRequest,
    EngineCoreRequest,
    Finished,
    Reply,
    StepOutput,
    pack_int32,
    unpack_int32,
)
from trioengine.types.output import FinishReason

R = TypeVar("R")

OUTPUT_SLICE_ROWS = 128
"""Rows handled between two moments at which other tasks may run."""


@attrs.frozen
class PendingCall:
    """A call whose reply has not come. Exactly one of the two handlers is called, once."""

    call_class: type[Call[Any]]
    on_reply: Callable[[Any], None]
    on_error: Callable[[TrioEngineError], None]


@attrs.frozen
class AddedRequest:
    """A registered request: what the core must be sent, and the handle to leave it by."""

    message: EngineCoreRequest | EncodeCoreRequest
    state: RequestState | PoolingState


class Frontend:
    """Routes between requests and the core by slot.

    A slot stays reserved after its request has ended on this side until the core's `Finished` for it arrives; rows
    that come until then are ignored, so one request's tokens never reach another.
    """

    def __init__(self) -> None:
        self._states: list[RequestState | PoolingState | None] = []
        self._free_slots: list[int] = []
        self._slots_by_external_id: dict[str, set[int]] = {}
        self._aborted_slots: dict[int, None] = {}  # An ordered set.
        self._calls: dict[int, PendingCall] = {}
        self._request_numbers = count()
        self._call_ids = count()
        self._next_sequence = 0
        self.dead_error: EngineDeadError | EngineClosedError | None = None
        """Why nothing can be asked any more. Set once, by `fail_all`."""

    # From callers

    def add(self, processed: ProcessedRequest, sink: Sink) -> AddedRequest:
        """Register a request; from now on outputs for it are expected. The message is to be sent to the core.

        Raises:
            EngineDeadError, EngineClosedError: the engine is gone.
        """
        self._raise_if_dead()
        slot = self._next_slot
        state = RequestState(slot, processed, sink)
        request_id = self._register(state)
        message = EngineCoreRequest(
            slot=slot,
            request_id=request_id,
            prompt_token_ids=pack_int32(processed.prompt_token_ids),
            sampling=processed.sampling,
            seed=processed.seed,
            eos_token_ids=processed.eos_token_ids,
            priority=processed.priority,
            cache_salt=processed.cache_salt,
            lora=processed.lora,
            reasoning_ended=processed.reasoning_ended,
        )
        return AddedRequest(message, state)

    def add_encode(self, processed: ProcessedEncodeRequest, sink: PoolingSink) -> AddedRequest:
        """As `add`, for a request for vectors."""
        self._raise_if_dead()
        slot = self._next_slot
        state = PoolingState(slot, processed, sink)
        request_id = self._register(state)
        message = EncodeCoreRequest(
            slot=slot,
            request_id=request_id,
            prompt_token_ids=pack_int32(processed.prompt_token_ids),
            pooling=processed.pooling,
            second_text_start=processed.second_text_start,
            priority=processed.priority,
            cache_salt=processed.cache_salt,
            lora=processed.lora,
        )
        return AddedRequest(message, state)

    def drop(self, state: RequestState | PoolingState) -> None:
        """The reader of this request has left: it is to be aborted, unless it has ended."""
        if state.is_open:
            state.drop()
            self._forget(state)

    def abort(self, external_id: str) -> None:
        """End all open requests with this caller's id; their readers get reason "abort". Unknown ids are ignored."""
        for slot in tuple(self._slots_by_external_id.get(external_id, ())):
            state = self._states[slot]
            assert state is not None
            state.end(FinishReason.ABORT)
            self._forget(state)

    def abort_all(self) -> None:
        """End all open requests with reason "abort"."""
        for external_id in tuple(self._slots_by_external_id):
            self.abort(external_id)

    def add_call(self, call: Call[R], pending: PendingCall) -> CallRequest:
        """Register a call. Send the result to the core.

        Raises:
            EngineDeadError, EngineClosedError: the engine is gone.
        """
        self._raise_if_dead()
        call_id = next(self._call_ids)
        self._calls[call_id] = pending
        return CallRequest(call_id, call)

    def take_aborts(self) -> AbortRequests | None:
        """What must be aborted since the last time asked, in one message; None if nothing."""
        if not self._aborted_slots:
            return None
        slots, self._aborted_slots = self._aborted_slots, {}
        return AbortRequests(tuple(slots))

    @property
    def has_aborts(self) -> bool:
        """Whether `take_aborts` has something."""
        return bool(self._aborted_slots)

    @property
    def num_open_requests(self) -> int:
        """Requests that someone waits for."""
        return sum(len(slots) for slots in self._slots_by_external_id.values())

    @property
    def num_reserved_slots(self) -> int:
        """Slots that the core may still send rows for."""
        return len(self._states) - len(self._free_slots)

    @property
    def _next_slot(self) -> int:
        """The slot of the request that is registered next."""
        return self._free_slots[-1] if self._free_slots else len(self._states)

    def _register(self, state: RequestState | PoolingState) -> str:
        """Take `_next_slot` for a request. Returns its name for the core, which no other request ever has."""
        if self._free_slots:
            self._free_slots.pop()
            self._states[state.slot] = state
        else:
            self._states.append(state)
        self._slots_by_external_id.setdefault(state.external_id, set()).add(state.slot)
        return f"{state.external_id}/{next(self._request_numbers)}"

    # From the core

    def receive(self, message: StepOutput | Reply) -> Iterator[None]:
        """Handle a message. Yields after each slice of a large one, so that the shell can let others run.

        Other methods may be called between slices. An error that one request causes ends this request only.
        """
        if isinstance(message, StepOutput):
            yield from self._receive_step(message)
        else:
            self._receive_reply(message)

    def fail_all(self, error: EngineDeadError | EngineClosedError) -> None:
        """The engine is gone: every request and call, now and later, gets this error after what it was sent before."""
        if self.dead_error is not None:
            return
        self.dead_error = error
        for state in self._states:
            if state is not None:
                state.fail(error)
        self._slots_by_external_id.clear()
        self._aborted_slots.clear()
        calls, self._calls = self._calls, {}
        for pending in calls.values():
            pending.on_error(error)

    def _receive_step(self, message: StepOutput) -> Iterator[None]:
        if message.sequence != self._next_sequence:
            self.fail_all(
                EngineDeadError(f"Outputs of the engine were lost: {message.sequence} came for {self._next_sequence}.")
            )
            return
        self._next_sequence += 1
        if message.cached_tokens or message.prompt_logprobs is not None or message.logprobs is not None:
            self._receive_besides(message)
        if message.pooled is not None:
            for slot, vectors in vectors_by_slot(message.pooled):
                if isinstance(state := self._states[slot], PoolingState):
                    state.receive_pooled(vectors)
        slots = unpack_int32(message.slots)
        tokens = unpack_int32(message.tokens).tolist()
        counts = unpack_int32(message.counts) if message.counts else None
        finished_by_slot = {finished.slot: finished for finished in message.finished}
        start = 0
        for row, slot in enumerate(slots):
            end = start + (1 if counts is None else counts[row])
            self._receive_row(slot, tokens[start:end], finished_by_slot.get(slot) if finished_by_slot else None)
            start = end
            if row % OUTPUT_SLICE_ROWS == OUTPUT_SLICE_ROWS - 1:
                yield
        for finished in message.finished:
            self._receive_finished(finished)

    def _receive_besides(self, message: StepOutput) -> None:
        """Hand out what belongs to the prompts or comes beside tokens; those who have left need none of it."""
        cached_tokens = unpack_int32(message.cached_tokens)
        for slot, num_cached_tokens in zip(cached_tokens[::2], cached_tokens[1::2], strict=True):
            if (state := self._states[slot]) is not None:
                state.receive_prompt(num_cached_tokens, ())
        if message.prompt_logprobs is not None:
            for slot, entries in entries_by_slot(message.prompt_logprobs).items():
                if (state := self._states[slot]) is not None:
                    state.receive_prompt(0, entries)
        if message.logprobs is not None:
            for slot, entries in entries_by_slot(message.logprobs).items():
                if (state := self._states[slot]) is not None:
                    state.receive_logprobs(entries)

    def _receive_row(self, slot: int, token_ids: list[int], finished: Finished | None) -> None:
        state = self._states[slot]
        if state is None or not state.is_open:
            return
        if finished is not None and finished.error is not None:
            finished = None  # The tokens are valid; `_receive_finished` delivers the error behind them.
        self._give(state, token_ids, finished)

    def _give(self, state: RequestState | PoolingState, token_ids: Sequence[int], finished: Finished | None) -> None:
        try:
            is_stopped = state.receive(token_ids, finished)
        except Exception as error:  # A border: a fault in one request's text must not reach the others.
            state.fail(EngineGenerateError(f"The output could not be processed: {type(error).__name__}: {error}"))
            is_stopped = True
        if is_stopped:
            self._forget(state)
        elif finished is not None:
            self._unname(state)  # Its slot is freed when the whole message has been handled.

    def _receive_finished(self, finished: Finished) -> None:
        """Free the slot. The request's reader has had its last output, unless no row came with this."""
        state = self._states[finished.slot]
        if state is None:
            return
        if finished.error is not None:
            state.fail(error_from_data(finished.error))
        else:
            self._give(state, (), finished)
        self._unname(state)
        # An abort that is still waiting here would hit the slot's next request.
        self._aborted_slots.pop(finished.slot, None)
        self._states[finished.slot] = None
        self._free_slots.append(finished.slot)

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

    def _forget(self, state: RequestState | PoolingState) -> None:
        """This side is done with the request; the core must be told."""
        self._unname(state)
        self._aborted_slots[state.slot] = None

    def _unname(self, state: RequestState | PoolingState) -> None:
        slots = self._slots_by_external_id.get(state.external_id)
        if slots is not None:
            slots.discard(state.slot)
            if not slots:
                del self._slots_by_external_id[state.external_id]

    def _raise_if_dead(self) -> None:
        if self.dead_error is not None:
            raise attrs.evolve(self.dead_error)
