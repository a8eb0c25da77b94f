"""One client on `/v1/stream`: carries messages, runs requests, and does what the session says.

`openai.stream_protocol` decides; `stream_requests` answers; this moves. Its tasks: one reads, one writes, one for each
request, and those that wait for the server's end. All requests live in the connection's own nursery, so that its end,
however it comes, leaves them all at once.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import trio

from trioengine.errors import EngineClosedError
from trioengine.openai.stream_protocol import (
    Action,
    CancelRequest,
    CloseConnection,
    ResumeRequest,
    StartRequest,
    StreamSession,
    parse_message,
)
from trioengine.server.failures import log_failure
from trioengine.types.stream_messages import STREAM_PATH, StreamLimits

HELLO_TIMEOUT_S = 20.0
LONG_MESSAGE_CHARS = 256 * 1024
"""Longer messages take over 5 ms to parse, which an event loop should not wait for."""
CLOSE_TIMEOUT_S = 5.0


class MessageTransport(Protocol):
    """A WebSocket that has been accepted, whoever made it. One task reads and one writes."""

    async def receive(self) -> str | bytes | None:
        """The next message; None once the client has gone."""
        ...

    async def send(self, texts: Sequence[bytes]) -> None:
        """Send these messages, in as few writes as can be. Does nothing once the client has gone."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """Close. Does nothing once it is closed."""
        ...


class LiveRequest:
    """One request, as those who answer it see it."""

    def __init__(self, connection: "StreamConnection", id_: str) -> None:
        self._connection = connection
        self._session = connection.session
        self._id = id_
        self.engine_ids: Sequence[str] = ()
        """What the engine knows it by, once it does."""
        self.scope = trio.CancelScope()
        self._readers = trio.lowlevel.ParkingLot()
        self.is_over = False
        """Whether nobody is told any more: a new request may have its id."""

    @property
    def may_read(self) -> bool:
        """Whether its next output may be read now."""
        return self._session.may_read(self._id)

    async def wait_to_read(self) -> None:
        """Return when its next output may be read: there is credit, and not too much waits to be sent."""
        while not self._session.may_read(self._id):
            await self._readers.park()

    def started(
        self, num_prompt_tokens: int, warnings: Sequence[str] = (), more: Mapping[str, object] | None = None
    ) -> None:
        """The engine has it, by `engine_ids`."""
        if not self.is_over:
            self._session.started(self._id, num_prompt_tokens, warnings, more)
            self._connection.wake_writer()

    def chunk(self, data: bytes) -> None:
        """Something new: a JSON object."""
        if not self.is_over:
            self._session.chunk(self._id, data)
            self._connection.wake_writer()

    def done(self, finish: Sequence[str] = (), usage: Mapping[str, object] | None = None) -> None:
        """It has ended well."""
        if not self.is_over:
            self.is_over = True
            self._connection.act(self._session.done(self._id, finish, usage))

    def fail(self, error: Exception) -> None:
        """It has ended with this."""
        if not self.is_over:
            self.is_over = True
            self._connection.act(self._session.fail(self._id, error))

    def resume(self) -> None:
        """Let it look again whether it may read."""
        self._readers.unpark_all()


Answer = Callable[[LiveRequest, StartRequest], Awaitable[None]]
"""Runs a request to its end: `done`, or an exception."""


class StreamConnection:
    """One client."""

    def __init__(
        self,
        transport: MessageTransport,
        answer: Answer,
        abort: Callable[[str], None],
        *,
        model_name: str,
        limits: StreamLimits,
        shutdown: trio.Event | None = None,
        stop: trio.Event | None = None,
    ) -> None:
        """`abort` ends a request of the engine's by its name. `shutdown` and `stop` are the server's: no new requests,
        and the end of those that run.
        """
        self.session = StreamSession(model_name, limits)
        self._transport = transport
        self._answer = answer
        self._abort = abort
        self._shutdown = shutdown
        self._stop = stop
        self._requests: dict[str, LiveRequest] = {}
        self._writer = trio.lowlevel.ParkingLot()
        self._closing: CloseConnection | None = None
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Serve until the client or the server ends it. Leaving aborts every request, without awaiting."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._write)
            if self._shutdown is not None:
                nursery.start_soon(self._watch_shutdown, self._shutdown)
            if self._stop is not None:
                nursery.start_soon(self._watch_stop, self._stop)
            nursery.start_soon(self._time_hello)
            await self._read()
            nursery.cancel_scope.cancel()

    def act(self, actions: Sequence[Action]) -> None:
        """Do what the session says."""
        for action in actions:
            match action:
                case StartRequest():
                    request = LiveRequest(self, action.create.id)
                    self._requests[action.create.id] = request
                    assert self._nursery is not None
                    self._nursery.start_soon(self._run_request, request, action)
                case CancelRequest(id_):
                    self._cancel(id_)
                case ResumeRequest(id_):
                    if (request := self._requests.get(id_)) is not None:
                        request.resume()
                case CloseConnection():
                    self._closing = action
                    for request in self._requests.values():
                        request.is_over = True
                        request.scope.cancel()
        self.wake_writer()

    def wake_writer(self) -> None:
        """There is something to send."""
        if self._writer:  # It mostly runs already, or is told already.
            self._writer.unpark()

    def _cancel(self, id_: str) -> None:
        request = self._requests.get(id_)
        if request is None:
            return
        if self.session.is_live(id_):
            for engine_id in request.engine_ids:
                self._abort(engine_id)
            return
        # The client has been told already.
        request.is_over = True
        request.scope.cancel()

    async def _read(self) -> None:
        while True:
            message = await self._transport.receive()
            if message is None:
                return
            if isinstance(message, bytes):
                self.act(self.session.receive_bytes())
            elif len(message) < LONG_MESSAGE_CHARS:
                self.act(self.session.receive(parse_message(message)))
            else:
                parsed = await trio.to_thread.run_sync(parse_message, message, abandon_on_cancel=True)
                self.act(self.session.receive(parsed))

    async def _write(self) -> None:
        session = self.session
        while True:
            while not session.has_waiting and self._closing is None:
                await self._writer.park()
            was_congested = session.is_congested
            texts = session.take_waiting()
            if texts:
                await self._transport.send(texts)
            if was_congested:
                for request in self._requests.values():
                    request.resume()
            if self._closing is not None and not session.has_waiting:
                await self._transport.close(self._closing.code, self._closing.reason)
                # The client answers, or goes; who does neither is left.
                await trio.sleep(CLOSE_TIMEOUT_S)
                assert self._nursery is not None
                self._nursery.cancel_scope.cancel()

    async def _run_request(self, request: LiveRequest, start: StartRequest) -> None:
        try:
            with request.scope:
                await self._answer(request, start)
        except Exception as error:
            # A border: whatever a request raises is the answer to it.
            log_failure(f"A request of {STREAM_PATH}", error)
            request.fail(error)
        finally:
            if self._requests.get(start.create.id) is request:
                del self._requests[start.create.id]

    async def _time_hello(self) -> None:
        await trio.sleep(HELLO_TIMEOUT_S)
        self.act(self.session.time_out())

    async def _watch_shutdown(self, shutdown: trio.Event) -> None:
        await shutdown.wait()
        self.act(self.session.drain())

    async def _watch_stop(self, stop: trio.Event) -> None:
        await stop.wait()
        for request in list(self._requests.values()):
            request.scope.cancel()
            request.fail(EngineClosedError("The server has stopped."))
