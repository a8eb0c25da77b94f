"""Addresses of an ASGI application that are WebSockets, answered without Quart.

Under Quart-Trio a WebSocket's receive buffer has no bound, and a handler that fails closes with 1000. So these are
taken before the application: its `asgi_app` is wrapped, as Quart means it to be.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
    WebsocketScope,
)

from trioengine.server.context import ServerContext
from trioengine.server.responses_socket import RESPONSES_PATH, ResponsesConnection
from trioengine.server.routes.responses import owner_of
from trioengine.server.stream_requests import StreamRequests, stream_connection
from trioengine.server.websocket import TEXTS_EXTENSION
from trioengine.types.stream_messages import STREAM_PATH

WebSocketHandler = Callable[["AsgiWebSocket", WebsocketScope], Awaitable[None]]
"""Serves one WebSocket, which it accepts, to its end."""


class AsgiWebSocket:
    """A WebSocket of an ASGI server's; after `accept` a `stream_connection.MessageTransport`."""

    def __init__(self, scope: WebsocketScope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        self._receive = receive
        self._send = send
        # Another server than ours takes one message at a time.
        extensions = cast("Mapping[str, Mapping[str, object] | None]", scope).get("extensions") or {}
        self._takes_texts = TEXTS_EXTENSION in extensions
        self._has_ended = False

    async def accept(self) -> None:
        """Accept the upgrade. Nothing else comes before."""
        await self._receive()
        await self._send({"type": "websocket.accept", "subprotocol": None, "headers": []})

    async def receive(self) -> str | bytes | None:
        """The next message; None once the client has gone."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            self._has_ended = True
            return None
        text = message.get("text")
        return message.get("bytes") if text is None else text

    async def send(self, texts: Sequence[bytes]) -> None:
        """Send these messages with one write."""
        if self._takes_texts:
            await self._send(cast(ASGISendEvent, {"type": "websocket.send", "texts": texts}))
            return
        for text in texts:
            await self._send({"type": "websocket.send", "bytes": None, "text": text.decode()})

    async def close(self, code: int, reason: str) -> None:
        """Close."""
        if not self._has_ended:
            await self._send({"type": "websocket.close", "code": code, "reason": reason})


class WebSocketRoutes:
    """An ASGI application: WebSockets at these addresses go to their handlers, all else to `app`."""

    def __init__(self, app: ASGIFramework, handlers: Mapping[str, WebSocketHandler]) -> None:
        """`handlers` by path, below the server's root path."""
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Handle one ASGI scope."""
        if scope["type"] == "websocket":
            handler = self._handlers.get(scope["path"].removeprefix(scope["root_path"]))
            if handler is not None:
                await handler(AsgiWebSocket(scope, receive, send), scope)
                return
        await self._app(scope, receive, send)


def websocket_handlers(context: ServerContext, prefix: str = "") -> Mapping[str, WebSocketHandler]:
    """The WebSockets of OpenAI's application, by path."""
    return {prefix + STREAM_PATH: stream_handler(context), prefix + RESPONSES_PATH: responses_handler(context)}


def stream_handler(context: ServerContext) -> WebSocketHandler:
    """Serves `/v1/stream` over the engine of this context."""
    requests = StreamRequests(context)

    async def handle(websocket: AsgiWebSocket, scope: WebsocketScope) -> None:
        del scope
        await websocket.accept()
        await stream_connection(websocket, context, requests).run()

    return handle


def responses_handler(context: ServerContext) -> WebSocketHandler:
    """Serves the Responses API, as OpenAI's SDK speaks it on WebSockets."""

    async def handle(websocket: AsgiWebSocket, scope: WebsocketScope) -> None:
        headers = {name: value for name, value in scope["headers"] if name == b"authorization"}
        owner = owner_of(context, headers.get(b"authorization", b"").decode("latin-1"))
        await websocket.accept()
        await ResponsesConnection(context, websocket, owner).run()

    return handle
