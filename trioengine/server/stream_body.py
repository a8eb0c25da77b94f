"""The body of a streamed response, and who leaves the engine's request when nobody reads it.

A route must enter the request before the headers go out, so that wrong parameters are a 400, but Quart sends headers
and body after the route has returned, and a client may vanish in between, so that the body is never looked at. So
the request is left by a task of its own, in the nursery that Quart-Trio runs each HTTP request in: that nursery is
cancelled when the client disconnects and when the response has been sent, whichever comes first. The same task ends
the request when the server stops: its reader then gets `EngineClosedError`, and can still say so to the client.
"""

import logging
from types import TracebackType
from typing import Self

import trio
from quart.wrappers.response import ResponseBody

from trioengine.client.interface import OutputStream
from trioengine.errors import EngineGenerateError, TrioEngineError
from trioengine.openai.sse import PING, EventStream
from trioengine.types.output import RequestOutput

PING_INTERVAL_S = 5.0

logger = logging.getLogger(__name__)


async def enter_request(outputs: OutputStream, stop: trio.Event | None = None) -> trio.CancelScope:
    """Enter a request from inside a route. It is left when the HTTP request ends, the scope is cancelled, or at `stop`.

    Raises:
        RequestError: as entering raises. Nothing needs to be left then.
    """
    nursery = trio.lowlevel.current_task().parent_nursery
    assert nursery is not None, "a route runs in a task that Quart-Trio started"
    await outputs.__aenter__()
    # No checkpoint since the request was entered, and a task that is started gets to its first one even when its
    # nursery is cancelled already: so it is always left.
    scope = trio.CancelScope()
    nursery.start_soon(_leave_at_end, outputs, scope, stop)
    return scope


async def _leave_at_end(outputs: OutputStream, scope: trio.CancelScope, stop: trio.Event | None) -> None:
    try:
        with scope:
            if stop is None:
                await trio.sleep_forever()
            else:
                await stop.wait()
    finally:
        await outputs.__aexit__(None, None, None)


class StreamBody(ResponseBody):
    """Server-sent events of a request that has been entered. Not an async generator: nothing is left for its end."""

    def __init__(self, outputs: OutputStream, events: EventStream, request_scope: trio.CancelScope) -> None:
        """Read `outputs`, write `events`; cancelling `request_scope` leaves the request."""
        self._outputs = outputs
        self._events = events
        self._request_scope = request_scope
        self._has_output = False
        self._has_ended = False

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
        while not self._has_ended:
            try:
                data = await self._next_events()
            except StopAsyncIteration:
                data = self._fail(EngineGenerateError("The engine's outputs ended without a last one."))
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
            output = await self._first_output()
            if output is None:
                return PING
            self._has_output = True
        self._has_ended = output.finished
        return self._events.events(output)

    async def _first_output(self) -> RequestOutput | None:
        with trio.move_on_after(PING_INTERVAL_S):
            return await self._outputs.__anext__()
        return None

    def _fail(self, error: Exception) -> bytes:
        self._has_ended = True
        level = logging.WARNING if isinstance(error, TrioEngineError) else logging.ERROR
        logger.log(level, "A stream ended with an error: %r", error, exc_info=error)
        return self._events.error_event(error)
