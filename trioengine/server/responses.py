"""The responses of one application: the store, and the actor that makes those in the background.

The actor is one task of `open_responses`, its mailbox a channel of jobs. Each job runs in the actor's own nursery,
which ends with the block: a background response lives as long as the server, not as the connection that asked for it.
State changes between two awaits only, so that nothing is locked.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import attrs
import trio

from trioengine.client.interface import OutputStream
from trioengine.config.server import ServerConfig
from trioengine.errors import EngineClosedError, EngineGenerateError, RequestError
from trioengine.openai.responses.events import Event, ResponseEvents
from trioengine.openai.responses.items import Item
from trioengine.openai.responses.store import ResponseStore, StoredResponse, StoreLimits
from trioengine.openai.responses.translate import ResponsePlan
from trioengine.server.failures import log_failure
from trioengine.types.output import RequestOutput

SWEEP_INTERVAL_S = 60.0
"""How often the store is looked through for what is too old, when nobody asks."""


@attrs.define(eq=False)
class BackgroundResponse:
    """A response that is being made."""

    stored: StoredResponse
    plan: ResponsePlan
    outputs: OutputStream
    on_output: Callable[[RequestOutput], None]
    on_left: Callable[[], None]
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    entered: trio.Event = attrs.field(factory=trio.Event)
    """Set once the engine has it, or has refused it."""
    refusal: Exception | None = None
    news: trio.Event = attrs.field(factory=trio.Event)
    """Set and replaced when there are events."""

    def tell(self) -> None:
        """Wake those who wait for events."""
        self.news.set()
        self.news = trio.Event()


class Responses:
    """What an application knows of its responses."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        """Without `open_responses` around it there are no responses in the background."""
        self.store = ResponseStore(limits)
        self._running: dict[str, BackgroundResponse] = {}
        self._send, self._receive = trio.open_memory_channel[BackgroundResponse](float("inf"))
        self._is_open = False

    def check_background(self) -> None:
        """Return while a response can be made in the background.

        Raises:
            RequestError: this application makes none.
            UnavailableError: there are too many.
        """
        if not self._is_open:
            raise RequestError("background: this server makes no responses in the background.", param="background")
        self.store.check_room()

    async def start(self, response: BackgroundResponse) -> None:
        """Begin a response in the background, after `check_background`, and return once the engine has taken it.

        Cancelled before that, nothing is left of it.

        Raises:
            TrioEngineError: the engine refuses it. Nothing is kept.
        """
        self.store.add(response.stored)
        self._running[response.stored.id] = response
        self._send.send_nowait(response)
        try:
            await response.entered.wait()
        except trio.Cancelled:
            self.delete(response.stored)
            raise
        if response.refusal is not None:
            raise response.refusal

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """A response.

        Raises:
            NotFoundError: there is none, or not for this owner.
        """
        return self.store.get(response_id, owner, trio.current_time())

    def conversation(self, response_id: str | None, owner: str) -> Sequence[Item]:
        """What goes on from a response; nothing from none.

        Raises:
            NotFoundError, RequestError: as the store raises.
        """
        if response_id is None:
            return ()
        return self.store.conversation(response_id, owner, trio.current_time())

    def known_items(self, item_ids: Sequence[str], owner: str) -> Mapping[str, Item]:
        """Those of these items that are stored for this owner, by id."""
        return self.store.known_items(item_ids, owner, trio.current_time()) if item_ids else {}

    def keep(self, state: ResponseEvents, owner: str, conversation: tuple[Item, ...]) -> None:
        """Store a response that has ended."""
        stored = StoredResponse(state, owner, conversation)
        self.store.add(stored)
        self.store.end(stored, trio.current_time())

    def running(self, stored: StoredResponse) -> BackgroundResponse | None:
        """Who makes it; None once it has ended."""
        return self._running.get(stored.id)

    def cancel(self, stored: StoredResponse) -> None:
        """End a response; the engine is told without waiting. Nothing where it has ended.

        Raises:
            RequestError: it was not made in the background.
        """
        if not stored.is_background:
            raise RequestError("Only responses in the background can be cancelled.", param="response_id")
        response = self._running.get(stored.id)
        if response is not None:
            self._end(response, stored.state.cancel())

    def delete(self, stored: StoredResponse) -> None:
        """Forget a response, and end it where it runs."""
        self.store.delete(stored)
        response = self._running.get(stored.id)
        if response is not None:
            self._end(response, stored.state.cancel())

    async def run(
        self, stop: trio.Event | None, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """The actor. Runs until it is cancelled, or `stop` is set, which fails all that runs."""
        self._is_open = True
        try:
            async with trio.open_nursery() as jobs:
                task_status.started()
                jobs.start_soon(self._sweep)
                jobs.start_soon(self._start_jobs, jobs)
                if stop is None:
                    await trio.sleep_forever()
                else:
                    await stop.wait()
                self._is_open = False
                for response in list(self._running.values()):
                    self._fail(response, EngineClosedError("The server has stopped."))
                jobs.cancel_scope.cancel()
        finally:
            self._is_open = False

    async def _start_jobs(self, jobs: trio.Nursery) -> None:
        async for response in self._receive:
            jobs.start_soon(self._run_job, response)

    async def _sweep(self) -> None:
        while True:
            await trio.sleep(SWEEP_INTERVAL_S)
            self.store.forget_old(trio.current_time())

    async def _run_job(self, response: BackgroundResponse) -> None:
        try:
            with response.scope:
                await self._read(response)
        except Exception as error:
            # A border: an error of one response is told to whoever asks for it.
            if isinstance(error, RequestError):
                error = response.plan.as_written(error)
            if not response.entered.is_set():
                response.refusal = error
                self._forget(response)
            else:
                self._fail(response, error)
        finally:
            response.entered.set()
            self._running.pop(response.stored.id, None)
            response.on_left()

    async def _read(self, response: BackgroundResponse) -> None:
        async with response.outputs as outputs:
            self._add(response, response.stored.state.begin())
            response.entered.set()
            async for output in outputs:
                response.on_output(output)
                events = response.stored.state.feed(output)
                if output.finished:
                    self._end(response, events)
                    return
                self._add(response, events)
        raise EngineGenerateError("The engine's outputs ended without a last one.")

    def _add(self, response: BackgroundResponse, events: Sequence[Event]) -> None:
        self.store.log(response.stored, events)
        response.tell()

    def _end(self, response: BackgroundResponse, events: Sequence[Event]) -> None:
        self._running.pop(response.stored.id, None)
        self.store.log(response.stored, events)
        self.store.end(response.stored, trio.current_time())
        response.scope.cancel()
        response.tell()

    def _fail(self, response: BackgroundResponse, error: Exception) -> None:
        log_failure("A response in the background", error)
        self._end(response, response.stored.state.fail(error))

    def _forget(self, response: BackgroundResponse) -> None:
        self._running.pop(response.stored.id, None)
        self.store.delete(response.stored)


def store_limits(config: ServerConfig) -> StoreLimits:
    """How much this server keeps, and how long."""
    return StoreLimits(max_bytes=config.responses_max_bytes, time_to_live_s=config.responses_ttl_s)


@asynccontextmanager
async def open_responses(
    limits: StoreLimits | None = None, *, stop: trio.Event | None = None
) -> AsyncGenerator[Responses]:
    """The responses of an application that makes some in the background, for as long as the block lasts.

    Open it around the server. Leaving the block ends what runs; nothing that is stored outlives the process.

    Args:
        limits: of what is stored; `store_limits` reads them from a `ServerConfig`.
        stop: once it is set, what runs fails with an error, and is told so.
    """
    responses = Responses(limits)
    error: Exception | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(responses.run, stop)
        try:
            yield responses
        except Exception as raised:
            error = raised  # Kept out of the nursery, which would wrap it in a group.
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
