"""`EngineCore`: messages in, steps on the executor, output out. Synchronous, without I/O.

A loop around it (`runtime`) moves the bytes: it gives messages to `handle`, calls `step` while `has_work`, and sends
what `take_output` returns.
"""

import logging
import time
from collections.abc import Callable, Iterable

import attrs

from trioengine.core.config import CoreConfig
from trioengine.core.executor import Executor
from trioengine.core.kv_cache_manager import KVCacheManager
from trioengine.core.operations import run_call
from trioengine.core.outbox import Outbox
from trioengine.core.request import Request, make_request
from trioengine.core.scheduler import Scheduler, StepOutcome
from trioengine.types.codec import error_to_data
from trioengine.types.messages import (
    AbortRequests,
    CallRequest,
    EngineCoreRequest,
    Finished,
    Reply,
    StepOutput,
    Stop,
    ToCore,
)
from trioengine.types.output import FinishReason

MAX_SLOT = 2**31 - 1

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Client:
    """A front end: its unfinished requests by slot, and its pending output."""

    requests: dict[int, Request] = attrs.field(factory=dict[int, Request])
    outbox: Outbox = attrs.field(factory=Outbox)


class EngineCore:
    """All requests of one core.

    Every `EngineCoreRequest` gets exactly one `Finished`: at its end, when it is aborted, when it is refused and when
    it fails. Only one for a slot that is in use is dropped without an answer, for an answer would end the slot's
    present request in the eyes of the front end; no front end that keeps to the protocol sends one.

    An exception from the executor leaves `step` and is the end of this core.
    """

    def __init__(self, config: CoreConfig, executor: Executor, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.kv_cache = KVCacheManager(executor.kv_cache_groups[0].num_blocks, config.block_size)
        self.scheduler = Scheduler(config, self.kv_cache)
        self._config = config
        self._executor = executor
        self._clock = clock
        self._clients: dict[int, _Client] = {}
        self._num_arrivals = 0
        self._step = 0
        self._step_ended_s = clock()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do. Output may be pending without."""
        return self.scheduler.has_work

    def handle(self, client: int, message: ToCore) -> Reply | None:
        """Take in a client's message; the reply, to a `CallRequest`.

        `Stop` is for the loop around the core, not for the core.
        """
        match message:
            case EngineCoreRequest():
                self._add(client, message)
            case AbortRequests(slots):
                for slot in slots:
                    self._abort(client, slot)
            case CallRequest():
                return run_call(self, message)
            case Stop():
                raise TypeError("Stop ends the loop around the core.")
        return None

    def step(self) -> None:
        """Compute one step; its output is pending afterwards.

        Raises:
            Exception: whatever the executor raised. The core must not be used any more.
        """
        plan = self.scheduler.schedule()
        self._executor.submit(plan)
        outcome = self.scheduler.update(plan, self._executor.result())
        self._step = plan.step
        self._step_ended_s = self._clock()
        self._emit(outcome)

    def take_output(self, client: int) -> StepOutput | None:
        """A client's pending output, which is then no longer pending; None when there is none.

        Of steps not taken since the last call there is one message. Messages of a client are numbered without a gap.
        """
        state = self._clients.get(client)
        return state.outbox.take(self._step, self._step_ended_s) if state else None

    def clients_with_output(self) -> Iterable[int]:
        """The clients for which `take_output` returns something."""
        return [client for client, state in self._clients.items() if not state.outbox.is_empty]

    def drop_client(self, client: int) -> None:
        """Forget a client that is gone, with its requests and its output."""
        state = self._clients.pop(client, None)
        if state:
            for request in state.requests.values():
                self.scheduler.abort(request)

    def check_integrity(self) -> None:
        """Return when the core's books are right.

        Raises:
            AssertionError: saying what is wrong.
        """
        self.scheduler.check_integrity()
        num_requests = sum(len(state.requests) for state in self._clients.values())
        num_scheduled = self.scheduler.num_running + self.scheduler.num_waiting
        if num_requests != num_scheduled:
            raise AssertionError(f"Clients have {num_requests} requests, the scheduler {num_scheduled}")

    def _add(self, client: int, message: EngineCoreRequest) -> None:
        state = self._clients.setdefault(client, _Client())
        slot = message.slot
        if slot in state.requests or not 0 <= slot <= MAX_SLOT:
            logger.error("Ignored request %.80r of client %d: slot %d is not free.", message.request_id, client, slot)
            return
        try:
            request = make_request(client, message, self._num_arrivals, self._config)
            self.scheduler.add(request)
        except Exception as error:  # A border: what is wrong with one request is that request's answer.
            state.outbox.finish(Finished(slot, FinishReason.ABORT, error=error_to_data(error)))
            return
        self._num_arrivals += 1
        state.requests[slot] = request

    def _abort(self, client: int, slot: int) -> None:
        state = self._clients.get(client)
        request = state.requests.get(slot) if state else None
        if request:
            self.scheduler.abort(request)
            self._emit_finished(request)

    def _emit(self, outcome: StepOutcome) -> None:
        clients = self._clients
        for request, token in zip(outcome.requests, outcome.tokens, strict=True):
            outbox = clients[request.client].outbox
            outbox.slots.append(request.slot)
            outbox.tokens.append(token)
        for request in outcome.finished:
            self._emit_finished(request)

    def _emit_finished(self, request: Request) -> None:
        assert request.finished is not None
        state = self._clients[request.client]
        del state.requests[request.slot]
        state.outbox.finish(request.finished)
