"""Runs one ASGI application call per request, in its connection's nursery.

This is Hypercorn's `TaskGroup` with two differences. The message that tells of a disconnect never waits, whatever the
application has left unread, and frees whoever waits to bring more. And what an application raises is logged here and
ends its own request only. Knows nothing about sockets.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import cast

import trio
from hypercorn.config import Config
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveEvent,
    ASGISendEvent,
    HTTPDisconnectEvent,
    Scope,
    WebsocketDisconnectEvent,
)

MAX_WAITING_MESSAGES = 10
_ABNORMAL_CLOSURE = 1006

logger = logging.getLogger(__name__)


class Inbox:
    """The messages for one application call. `put` waits while it is full; a disconnect never waits.

    Every end of a request comes with a disconnect, which also frees whoever waits in `put`.
    """

    def __init__(self, *, is_websocket: bool) -> None:
        self._send, self._receive = trio.open_memory_channel[ASGIReceiveEvent](MAX_WAITING_MESSAGES)
        self._disconnect: HTTPDisconnectEvent | WebsocketDisconnectEvent = (
            {"type": "websocket.disconnect", "code": _ABNORMAL_CLOSURE} if is_websocket else {"type": "http.disconnect"}
        )

    async def put(self, message: ASGIReceiveEvent) -> None:
        """Hand `message` over. Does nothing once the application was told of a disconnect."""
        if message["type"] in ("http.disconnect", "websocket.disconnect"):
            self._disconnect = cast("HTTPDisconnectEvent | WebsocketDisconnectEvent", message)
            self._send.close()
            return
        try:
            try:
                self._send.send_nowait(message)
            except trio.WouldBlock:
                await self._send.send(message)
        except trio.ClosedResourceError:
            pass

    async def receive(self) -> ASGIReceiveEvent:
        """The next message; after the last one the disconnect, again and again, as ASGI asks for."""
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            return self._disconnect


class Handlers:
    """What Hypercorn's protocol classes start their tasks with. The nursery belongs to the connection."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    async def spawn_app(
        self,
        app: AppWrapper,
        config: Config,
        scope: Scope,
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Start the application for one request and return the function that puts messages into its inbox."""
        inbox = Inbox(is_websocket=scope["type"] == "websocket")
        self._nursery.start_soon(_run_handler, app, scope, inbox, send)
        return inbox.put

    def spawn(self, func: Callable[..., Awaitable[object]], *args: object) -> None:
        """Start one of the protocol's own tasks."""
        self._nursery.start_soon(func, *args)


async def _run_handler(
    app: AppWrapper, scope: Scope, inbox: Inbox, send: Callable[[ASGISendEvent | None], Awaitable[None]]
) -> None:
    try:
        await app(scope, inbox.receive, send, trio.to_thread.run_sync, trio.from_thread.run)
    except* Exception:
        # A border: the protocol turns it into a 500, a cut response or a WebSocket's 1011. A `Cancelled` beside it
        # goes on, and then there is nobody left to answer.
        logger.exception("The application failed in %s", _describe(scope))
    # Hypercorn's word for "the application has ended": answers for it where it has not.
    await send(None)


def _describe(scope: Scope) -> str:
    if scope["type"] == "lifespan":
        return "its lifespan"
    return f"{scope['type']} {scope['path']}"
