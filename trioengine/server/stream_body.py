"""The body of a streamed response, and who leaves the engine's requests when nobody reads it.

A route must enter its requests before the headers go out, so that wrong parameters are a 400, but Quart sends headers
and body after the route has returned, and a client may vanish in between, so that the body is never looked at. So
requests are left by a task of its own, in the nursery that Quart-Trio runs each HTTP request in: that nursery is
cancelled when the client disconnects and when the response has been sent, whichever comes first. The same task ends
the requests when the server stops: their reader then gets `EngineClosedError`, and can still say so to the client.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

import trio
from quart.wrappers.response import ResponseBody

from trioengine.client.interface import OutputStream
from trioengine.errors import EngineGenerateError
from trioengine.openai.completion_stream import CompletionEvents
from trioengine.openai.sse import PING
from trioengine.server.failures import log_failure
from trioengine.server.open_requests import OpenRequest
from trioengine.types.output import RequestOutput

PING_INTERVAL_S = 5.0


class Entered(Protocol):
    """What is entered and left: one request, or several."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Events(Protocol):
    """What makes bytes of outputs; `EventStream` does."""

    def events(self, output: RequestOutput, /) -> bytes:
        """The events of an output."""
        ...

    def error_event(self, error: Exception, /) -> bytes:
        """The last event of a stream that fails."""
        ...


async def enter_request(
    requests: Entered, stop: trio.Event | None = None, *, on_left: Callable[[], None] | None = None
) -> trio.CancelScope:
    """Enter a request from inside a route. It is left when the HTTP request ends, the scope is cancelled, or at `stop`.

    `on_left` is called then.

    Raises:
        RequestError: as entering raises. Nothing needs to be left then, and `on_left` has been called.
    """
    nursery = trio.lowlevel.current_task().parent_nursery
    assert nursery is not None, "a route runs in a task that Quart-Trio started"
    on_left = on_left or _nothing
    try:
        await requests.__aenter__()
    except BaseException:
        on_left()
        raise
    # No checkpoint since the request was entered, and a task that is started gets to its first one even when its
    # nursery is cancelled already: so it is always left.
    scope = trio.CancelScope()
    nursery.start_soon(_leave_at_end, requests, scope, stop, on_left)
    return scope


async def _leave_at_end(
    requests: Entered, scope: trio.CancelScope, stop: trio.Event | None, on_left: Callable[[], None]
) -> None:
    try:
        with scope:
            if stop is None:
                await trio.sleep_forever()
            else:
                await stop.wait()
    finally:
        on_left()
        await requests.__aexit__(None, None, None)


def _nothing() -> None:
    pass


class StreamBody(ResponseBody):
    """Server-sent events of a request that has been entered. Not an async generator: nothing is left for its end."""

    def __init__(
        self,
        outputs: OutputStream,
        events: Events,
        request_scope: trio.CancelScope,
        open_request: OpenRequest | None = None,
        opening: bytes = b"",
    ) -> None:
        """Read `outputs`, write `events`, count in `open_request`; cancelling `request_scope` leaves the request.

        `opening` is written at once.
        """
        self._outputs = outputs
        self._events = events
        self._request_scope = request_scope
        self._open_request = open_request or OpenRequest("", "", 0.0)
        self._opening = opening
        self._has_output = False
        self._has_ended = False
        self._first: RequestOutput | None = None
        """An output that was waited for before the body is read."""

    async def wait_for_output(self) -> None:
        """Wait for the first output, not longer than until a ping is due: what is wrong by then can still be a status.

        Raises:
            TrioEngineError: why there is none.
        """
        self._first = await _first_output(self._outputs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._request_scope.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next events, never empty: a ping while the request waits, an error event when it fails."""
        if self._opening:
            opening, self._opening = self._opening, b""
            return opening
        while not self._has_ended:
            try:
                data = await self._next_events()
            except StopAsyncIteration:
                data = self._fail(_ended_early())
            except Exception as error:
                # A border: the headers are sent, so that an event is all that can still tell.
                data = self._fail(error)
            if data:
                return data
        raise StopAsyncIteration

    async def _next_events(self) -> bytes:
        if self._has_output:
            # Tokens come steadily now; a cancel scope for each would cost more than the rest of this function.
            output = await self._outputs.__anext__()
        else:
            output = self._first or await _first_output(self._outputs)
            if output is None:
                return PING
            self._has_output = True
        self._has_ended = output.finished
        self._open_request.num_tokens = output.num_generated_tokens
        return self._events.events(output)

    def _fail(self, error: Exception) -> bytes:
        self._has_ended = True
        return _failure(self._events, error)


class BatchBody(ResponseBody):
    """Server-sent events of several requests that have been entered, as their outputs come.

    A task for each request reads it, in a nursery that the body's own `async with` opens. What comes while the client
    is written to becomes one write.
    """

    def __init__(
        self,
        streams: Sequence[OutputStream],
        events: Sequence[CompletionEvents],
        request_scope: trio.CancelScope,
        open_request: OpenRequest,
    ) -> None:
        """Read `streams`, write `events`, one for each; cancelling `request_scope` leaves all requests."""
        self._streams = streams
        self._events = events
        self._request_scope = request_scope
        self._open_request = open_request
        self._latest: dict[int, RequestOutput] = {}
        self._num_running = len(streams)
        # Without a buffer: while the client does not read, each request's own channel merges what comes.
        self._send, self._receive = trio.open_memory_channel[tuple[int, RequestOutput | Exception]](0)
        self._nursery_manager = trio.open_nursery()
        self._has_output = False
        self._has_ended = False
        self._first: RequestOutput | None = None
        """An output of the first stream that was waited for before the body is read."""

    async def wait_for_output(self) -> None:
        """As of a `StreamBody`, for the first request: what is asked for besides the prompt is the same for all.

        Raises:
            TrioEngineError: why there is none.
        """
        self._first = await _first_output(self._streams[0])

    async def __aenter__(self) -> Self:
        nursery = await self._nursery_manager.__aenter__()
        self._nursery = nursery
        for index, stream in enumerate(self._streams):
            nursery.start_soon(self._read, index, stream)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._request_scope.cancel()
        self._nursery.cancel_scope.cancel()
        await self._nursery_manager.__aexit__(exc_type, exc_value, tb)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next events, never empty: a ping while all requests wait, an error event when one fails."""
        while not self._has_ended:
            received = await self._wait()
            if received is None:
                return PING
            parts: list[bytes] = []
            while received is not None and not self._has_ended:
                parts.append(self._take(*received))
                received = self._next_nowait()
            data = b"".join(parts)
            if data:
                return data
        raise StopAsyncIteration

    async def _wait(self) -> tuple[int, RequestOutput | Exception] | None:
        if self._has_output:
            return await self._receive.receive()
        with trio.move_on_after(PING_INTERVAL_S):
            received = await self._receive.receive()
            self._has_output = True
            return received
        return None

    def _next_nowait(self) -> tuple[int, RequestOutput | Exception] | None:
        try:
            return self._receive.receive_nowait()
        except trio.WouldBlock:
            return None

    def _take(self, index: int, output: RequestOutput | Exception) -> bytes:
        events = self._events[index]
        if isinstance(output, Exception):
            self._has_ended = True
            return _failure(events, output)
        self._latest[index] = output
        self._open_request.num_tokens = sum(latest.num_generated_tokens for latest in self._latest.values())
        data = events.chunks(output, self._latest.values())
        self._num_running -= output.finished
        if self._num_running == 0:
            self._has_ended = True
            data += events.end(self._latest.values())
        return data

    async def _read(self, index: int, stream: OutputStream) -> None:
        try:
            if index == 0 and self._first is not None:
                await self._send.send((index, self._first))
                if self._first.finished:
                    return
            async for output in stream:
                await self._send.send((index, output))
                if output.finished:
                    return
            await self._send.send((index, _ended_early()))
        except Exception as error:
            # A border, as in `StreamBody`.
            await self._send.send((index, error))


async def _first_output(outputs: OutputStream) -> RequestOutput | None:
    """None when a ping is due before it."""
    with trio.move_on_after(PING_INTERVAL_S):
        return await outputs.__anext__()
    return None


def _ended_early() -> EngineGenerateError:
    return EngineGenerateError("The engine's outputs ended without a last one.")


def _failure(events: Events, error: Exception) -> bytes:
    log_failure("A stream", error)
    return events.error_event(error)
