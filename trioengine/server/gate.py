"""What every request passes on its way to the application, whatever the application is.

Who may come in (`access.py`), how long a body may be and take, a request id, one line in the log. All of it per
request: to a part of a streamed response it adds one plain call that counts. Knows nothing about routes.
"""

import json
from collections.abc import Awaitable, Iterable, Sequence
from typing import cast
from uuid import uuid4

import trio
from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    HTTPScope,
    Scope,
    WebsocketScope,
)

from trioengine.config.server import ServerConfig
from trioengine.errors import AuthenticationError, BodyTooLargeError, RequestError, SlowRequestError
from trioengine.openai.errors import error_body
from trioengine.server.access import AccessRules, Caller, Header, caller_of
from trioengine.server.access_log import AccessLog, Exchange, peer_name
from trioengine.server.request_body import is_too_long

MIN_BODY_BYTES_PER_S = 1024
"""A body may take one second longer for each so many bytes that have come."""
MAX_REQUEST_ID_BYTES = 128
WEBSOCKET_REFUSED = 1008
"""Policy violation, as RFC 6455 has it."""
GOING_AWAY = 1001
REQUEST_ID = "request_id"
"""The key of a scope's `state` under which applications find the request's id."""

_SWITCHING_PROTOCOLS = 101
_GOOD_ENDS = frozenset({1000, 1001, 1005})
"""Close codes of a client that means to go; 1005 is none."""


class Gate:
    """An ASGI application that lets requests through to `app`, or answers them itself.

    A refused request is answered with OpenAI's error object and its connection ends: its body may be on its way.
    A body that is too long, or too slow, cancels `app`; then 413 or 408 is sent, unless the response has begun.
    """

    def __init__(self, app: ASGIFramework, config: ServerConfig, rules: AccessRules, shutdown: trio.Event) -> None:
        """Let through to `app` what `rules` and the limits in `config` allow. After `shutdown` no key is waited for."""
        self._app = app
        self._config = config
        self._rules = rules
        self._shutdown = shutdown
        self._root_path = config.root_path.rstrip("/")
        self._log = AccessLog(config.disable_access_log_for_endpoints) if config.access_log else None

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Handle one ASGI scope. Cancellable at every await."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        path = self._path_below_root(scope)
        caller = caller_of(scope["headers"])
        exchange = Exchange(
            method=scope["method"] if scope["type"] == "http" else "WEBSOCKET",
            path=path,
            peer=peer_name(scope["client"]),
            request_id=_request_id(scope["headers"]),
            started_s=trio.current_time(),
        )
        cast("dict[str, object]", scope["state"])[REQUEST_ID] = exchange.request_id
        try:
            if scope["type"] == "http":
                headers = [*self._rules.response_headers(caller), (b"x-request-id", exchange.request_id.encode())]
                passing = _PassingRequest(self._config, exchange, headers, receive, send)
                await self._handle_http(scope, path, caller, passing)
            else:
                await self._handle_websocket(scope, caller, _PassingWebSocket(exchange, receive, send))
        finally:
            if self._log is not None:
                self._log.write(exchange, trio.current_time())

    def _path_below_root(self, scope: HTTPScope | WebsocketScope) -> str:
        """Where the request goes. A proxy may have taken the root path away: an application gets it back."""
        root = self._root_path
        if not root:
            return scope["path"]
        path = scope["path"]
        if path == root or path.startswith(root + "/"):
            path = path[len(root) :] or "/"
        scope["root_path"] = root
        scope["path"] = root + path
        return path

    async def _handle_http(self, scope: HTTPScope, path: str, caller: Caller, passing: "_PassingRequest") -> None:
        error = self._rules.check_caller(scope, caller)
        if error is None and self._rules.is_preflight(scope, caller):
            await passing.answer_preflight(self._rules.preflight_headers(caller))
            return
        error = error or self._rules.check_key(scope, path, caller) or passing.check_length(scope["headers"])
        if error is None:
            error = await passing.run(self._app, scope)
        if error is not None:
            await passing.refuse(error)

    async def _handle_websocket(self, scope: WebsocketScope, caller: Caller, passing: "_PassingWebSocket") -> None:
        error = self._rules.check_caller(scope, caller)
        if error is None and caller.authorization is not None and self._rules.needs_key:
            error = None if self._rules.is_key(caller.authorization) else AuthenticationError("The API key is wrong.")
        if error is not None:
            await passing.refuse(error)
            return
        has_key = caller.authorization is not None or not self._rules.needs_key
        if has_key or await passing.receive_key(self._rules, self._config.header_timeout_s, self._shutdown):
            await self._app(scope, passing.receive, passing.send)


class _PassingRequest:
    """One request and its response, as they pass."""

    def __init__(
        self,
        config: ServerConfig,
        exchange: Exchange,
        headers: Sequence[Header],
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
    ) -> None:
        self._max_body_bytes = config.max_body_bytes
        self._body_timeout_s = config.body_timeout_s
        self._exchange = exchange
        self._headers = headers
        self._receive = receive
        self._send = send
        self._num_body_bytes = 0
        self._waited_s = 0.0
        self._is_body_complete = False
        self._scope = trio.CancelScope()
        self._error: RequestError | None = None

    def check_length(self, headers: Iterable[Header]) -> RequestError | None:
        """What is wrong with the length that the body is going to have."""
        return self._too_large() if is_too_long(headers, self._max_body_bytes) else None

    async def run(self, app: ASGIFramework, scope: HTTPScope) -> RequestError | None:
        """Call the application. What is wrong with the body, if nothing has been sent yet that says otherwise."""
        with self._scope:
            await app(scope, self.receive, self.send)
        if self._scope.cancelled_caught and self._error is None:
            self._error = SlowRequestError("The body of the request took too long to arrive.")
        return self._error if self._exchange.status is None else None

    async def refuse(self, error: RequestError) -> None:
        """Answer with this error."""
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]  # HTTP/2 strips the latter.
        if isinstance(error, AuthenticationError):
            headers.append((b"www-authenticate", b"Bearer"))
        await self._answer(error.status, headers, error_body(error))

    async def answer_preflight(self, headers: Sequence[Header] | None) -> None:
        """Answer a browser that asks what a page may do. None: nothing."""
        await self._answer(403 if headers is None else 204, headers or [], b"")

    async def _answer(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if status != 204:
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def receive(self) -> ASGIReceiveEvent:
        if self._is_body_complete:
            return await self._receive()
        # Only the time counts in which the application waits for the client, and not the client for the application.
        started_s = trio.current_time()
        allowed_s = self._body_timeout_s + self._num_body_bytes / MIN_BODY_BYTES_PER_S
        self._scope.deadline = started_s + allowed_s - self._waited_s
        message = await self._receive()
        self._scope.deadline = float("inf")
        self._waited_s += trio.current_time() - started_s
        if message["type"] != "http.request":
            self._is_body_complete = True
            return message
        self._is_body_complete = not message["more_body"]
        self._num_body_bytes += len(message["body"])
        if self._num_body_bytes > self._max_body_bytes:
            self._error = self._too_large()
            self._scope.cancel()
            await trio.lowlevel.checkpoint()
        return message

    def send(self, message: ASGISendEvent) -> Awaitable[None]:
        # Not async: each part of a streamed response comes by here.
        exchange = self._exchange
        if message["type"] == "http.response.body":
            exchange.num_sent_bytes += len(message.get("body", b""))
            exchange.is_complete = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            exchange.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        return self._send(message)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The request's body is longer than {self._max_body_bytes} bytes.")


class _PassingWebSocket:
    """One WebSocket, as it passes."""

    def __init__(self, exchange: Exchange, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        self._exchange = exchange
        self._receive = receive
        self._send = send
        self._is_accepted_here = False
        self._has_told_of_connect = False
        self._first: ASGIReceiveEvent | None = None
        """The message with the key, where it says something else too."""

    async def receive_key(self, rules: AccessRules, timeout_s: float, shutdown: trio.Event) -> bool:
        """Whether the first message has an `api_key`: a browser's WebSocket cannot send headers. Else closed.

        The WebSocket is accepted for that, so the application's own `websocket.accept` goes nowhere. `{"api_key": KEY}`
        is for us alone; a message with other fields is for the application too.
        """
        self._is_accepted_here = True
        await self._receive()
        await self._forward({"type": "websocket.accept", "subprotocol": None, "headers": []})
        message: ASGIReceiveEvent | None = None
        with trio.move_on_after(timeout_s) as waiting:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_at, shutdown, waiting)
                message = await self._receive()
                nursery.cancel_scope.cancel()
        if message is not None and message["type"] == "websocket.receive":
            fields = _object_in(message.get("text") or "")
            key = fields.get("api_key")
            if isinstance(key, str) and rules.is_key(b"Bearer " + key.encode("utf-8", "replace")):
                self._first = message if len(fields) > 1 else None
                return True
        if message is None and shutdown.is_set():
            await self._send({"type": "websocket.close", "code": GOING_AWAY, "reason": "The server shuts down."})
        elif message is None or message["type"] != "websocket.disconnect":
            reason = "The first message must be an object with an api_key of this server's."
            await self._send({"type": "websocket.close", "code": WEBSOCKET_REFUSED, "reason": reason})
        return False

    async def refuse(self, error: RequestError) -> None:
        """Answer the upgrade with this error."""
        body = error_body(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if isinstance(error, AuthenticationError):
            headers.append((b"www-authenticate", b"Bearer"))
        await self.send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "websocket.http.response.body", "body": body, "more_body": False})

    async def receive(self) -> ASGIReceiveEvent:
        if self._is_accepted_here and not self._has_told_of_connect:
            self._has_told_of_connect = True
            await trio.lowlevel.checkpoint()
            return {"type": "websocket.connect"}
        if self._first is not None:
            first, self._first = self._first, None
            await trio.lowlevel.checkpoint()
            return first
        message = await self._receive()
        if message["type"] == "websocket.disconnect" and message["code"] in _GOOD_ENDS:
            self._exchange.is_complete = True
        return message

    async def send(self, message: ASGISendEvent) -> None:
        if self._is_accepted_here and message["type"] == "websocket.accept":
            await trio.lowlevel.checkpoint()
            return
        await self._forward(message)

    async def _forward(self, message: ASGISendEvent) -> None:
        exchange = self._exchange
        match message["type"]:
            case "websocket.accept":
                exchange.status = _SWITCHING_PROTOCOLS
            case "websocket.http.response.start":
                exchange.status = message["status"]
            case "websocket.close" | "websocket.http.response.body":
                exchange.is_complete = True
                exchange.status = exchange.status or 403
            case "websocket.send":
                texts = cast("Sequence[bytes]", message.get("texts", ()))  # As `websocket.py` takes them.
                exchange.num_sent_bytes += sum(map(len, texts))
                exchange.num_sent_bytes += len(message.get("bytes") or message.get("text") or "")
            case _:
                pass
        await self._send(message)


async def _cancel_at(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _object_in(text: str) -> dict[str, object]:
    """The JSON object in a text; an empty one where there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _request_id(headers: Iterable[Header]) -> str:
    """The client's own, where it may stand in a header and a line of the log; else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and len(value) <= MAX_REQUEST_ID_BYTES:
            text = value.decode("latin-1")
            if text.isascii() and text.isprintable() and text and " " not in text:
                return text
    return uuid4().hex
