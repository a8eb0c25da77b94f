"""`/v1/stream` without an HTTP server: over trio-websocket, in a nursery of the application's own.

    async with open_engine() as engine, trio.open_nursery() as nursery:
        await nursery.start(serve_stream, engine, ServerConfig(port=8001))

The same protocol, the same rules of keys, origins and hosts. One connection's fault is its own here too: the server
that trio-websocket has would end with it.
"""

import functools
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, cast

import trio
import trio_websocket

from trioengine.client.interface import EngineClient
from trioengine.config.server import ServerConfig
from trioengine.errors import AuthenticationError, NotFoundError, RequestError
from trioengine.openai.errors import error_reply
from trioengine.openai.stream_protocol import CloseCode
from trioengine.server.access import AccessRules, caller_of
from trioengine.server.context import ServerContext
from trioengine.server.listeners import bind_listeners, close_listeners, is_loopback
from trioengine.server.stream_requests import StreamRequests, stream_connection
from trioengine.server.tls import load_tls
from trioengine.types.stream_messages import STREAM_PATH

if TYPE_CHECKING:
    from hypercorn.typing import WebsocketScope

PING_INTERVAL_S = 20.0
_BACKLOG = 1024
_SCOPE = cast("WebsocketScope", {"type": "websocket"})

logger = logging.getLogger(__name__)


async def serve_stream(
    engine: EngineClient,
    config: ServerConfig | None = None,
    *,
    shutdown: trio.Event | None = None,
    stop: trio.Event | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `/v1/stream` over this engine until `shutdown` is set and the last request has ended.

    Cancelling ends everything at once, and aborts what runs.

    Args:
        config: the address, keys, origins and limits of the server; what is about HTTP has no meaning.
        shutdown: once it is set, nothing more is accepted, and each connection closes (1001) behind its last request.
        stop: once it is set, the requests that run end with an error.
        task_status: gets the addresses as URLs once connections are accepted.

    Raises:
        ServerStartError: the address cannot be bound.
    """
    config = ServerConfig() if config is None else config
    shutdown = trio.Event() if shutdown is None else shutdown
    tls = load_tls(config)
    sockets = await bind_listeners(config)
    try:
        context = ServerContext(engine, config, shutdown, stop)
        serve_one = stream_handler(context, AccessRules(config, is_loopback=is_loopback(sockets)))
        places = _Places(config.max_connections)
        listeners: list[_BoundedListener] = []
        for sock in sockets:
            sock.listen(_BACKLOG)
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
            listeners.append(_BoundedListener(listener if tls is None else trio.SSLListener(listener, tls), places))
        scheme = "ws" if tls is None else "wss"

        async def serve_guarded(stream: trio.abc.Stream) -> None:
            try:
                await serve_one(stream)
            except* Exception:
                # A border: a client can provoke errors in protocol code, and the others have nothing to do with it.
                logger.warning("A connection ended because of an error", exc_info=True)
            finally:
                places.give_back()
                await trio.aclose_forcefully(stream)

        async with trio.open_nursery() as connections:  # noqa: SIM117
            async with trio.open_nursery() as accepting:
                accept = functools.partial(trio.serve_listeners, handler_nursery=connections)
                await accepting.start(accept, serve_guarded, listeners)
                task_status.started([f"{scheme}://{_name(sock.getsockname())}" for sock in sockets])
                await shutdown.wait()
                accepting.cancel_scope.cancel()
    finally:
        close_listeners(sockets)


def stream_handler(context: ServerContext, rules: AccessRules) -> Callable[[trio.abc.Stream], Awaitable[None]]:
    """What serves one connection that a listener of the application's own has accepted, to its end.

    It raises what goes wrong in the connection, in a group.
    """
    requests = StreamRequests(context)

    async def handle(stream: trio.abc.Stream) -> None:
        transport: _Transport | None = None
        may_serve = False
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as hesitating:
                if context.shutdown is not None:
                    nursery.start_soon(_end_on_shutdown, context.shutdown, hesitating)
                # Who vanishes before the upgrade is waited for as long as who hesitates: trio-websocket does not tell.
                with trio.move_on_after(context.config.header_timeout_s):
                    upgrade = await trio_websocket.wrap_server_stream(
                        nursery,
                        stream,
                        message_queue_size=1,
                        max_message_size=context.config.max_body_bytes,
                        receive_buffer_size=65536,
                    )
                    accepted = await _accept(upgrade, rules)
                    if accepted is not None:
                        websocket, may_serve = accepted
                        transport = _Transport(websocket)
                if transport is not None and not may_serve:
                    may_serve = await transport.receive_key(rules, context.config.header_timeout_s)
            if transport is not None and may_serve:
                nursery.start_soon(_ping, transport.websocket, nursery.cancel_scope)
                await _serve(transport, context, requests)
            elif transport is not None and hesitating.cancelled_caught:
                await transport.close(CloseCode.GOING_AWAY, "The server shuts down.")
            nursery.cancel_scope.cancel()

    return handle


async def _end_on_shutdown(shutdown: trio.Event, scope: trio.CancelScope) -> None:
    await shutdown.wait()
    scope.cancel()


async def _serve(transport: "_Transport", context: ServerContext, requests: StreamRequests) -> None:
    connection = stream_connection(transport, context, requests)
    try:
        await connection.run()
    except* Exception:
        # A border: the client is told before the connection ends.
        logger.exception("A connection failed")
        await transport.close(CloseCode.INTERNAL_ERROR, "The server failed.")


async def _accept(
    upgrade: trio_websocket.WebSocketRequest, rules: AccessRules
) -> tuple[trio_websocket.WebSocketConnection, bool] | None:
    """The WebSocket, and whether its key is known; None where it may not be."""
    caller = caller_of([(name.lower(), value) for name, value in upgrade.headers])
    error: RequestError | None = rules.check_caller(_SCOPE, caller)
    if error is None and upgrade.path.partition("?")[0] != STREAM_PATH:
        error = NotFoundError("There is nothing at this address.")
    if error is None and caller.authorization is not None and rules.needs_key:
        error = None if rules.is_key(caller.authorization) else AuthenticationError("The API key is wrong.")
    if error is None:
        return await upgrade.accept(), caller.authorization is not None or not rules.needs_key
    reply = error_reply(error)
    await upgrade.reject(reply.status, extra_headers=[(b"content-type", b"application/json")], body=reply.body)
    return None


class _Places:
    """How many more connections there may be."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting = trio.lowlevel.ParkingLot()

    async def wait_for_one(self) -> None:
        while self._num_free <= 0:
            await self._waiting.park()

    def take(self) -> None:
        self._num_free -= 1

    def give_back(self) -> None:
        self._num_free += 1
        self._waiting.unpark_all()


class _BoundedListener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts while there is a place: who comes then waits in the kernel's queue, and takes no descriptor."""

    def __init__(self, listener: trio.abc.Listener[trio.abc.Stream], places: _Places) -> None:
        self._listener = listener
        self._places = places

    async def accept(self) -> trio.abc.Stream:
        await self._places.wait_for_one()
        stream = await self._listener.accept()
        self._places.take()
        return stream

    async def aclose(self) -> None:
        await self._listener.aclose()


class _Transport:
    """A `stream_connection.MessageTransport` over trio-websocket."""

    def __init__(self, websocket: trio_websocket.WebSocketConnection) -> None:
        self.websocket = websocket
        self._first: str | bytes | None = None

    async def receive_key(self, rules: AccessRules, timeout_s: float) -> bool:
        """Whether the first message has an `api_key` of this server's. Else it is closed."""
        with trio.move_on_after(timeout_s):
            self._first = await self.receive()
        try:
            fields = json.loads(self._first or "")
        except (ValueError, RecursionError):
            fields = None
        key = cast("dict[str, object]", fields).get("api_key") if isinstance(fields, dict) else None
        if isinstance(key, str) and rules.is_key(b"Bearer " + key.encode("utf-8", "replace")):
            return True
        await self.close(
            CloseCode.POLICY_VIOLATION, "The first message must be an object with an api_key of this server's."
        )
        return False

    async def receive(self) -> str | bytes | None:
        """The next message; None once the client has gone."""
        if self._first is not None:
            first, self._first = self._first, None
            await trio.lowlevel.checkpoint()
            return first
        try:
            return await self.websocket.get_message()
        except trio_websocket.ConnectionClosed:
            return None

    async def send(self, texts: Sequence[bytes]) -> None:
        """Send these messages. Does nothing once the client has gone."""
        try:
            for text in texts:
                await self.websocket.send_message(text.decode())
        except trio_websocket.ConnectionClosed:
            await trio.lowlevel.checkpoint()

    async def close(self, code: int, reason: str) -> None:
        """Close, and wait for the client's own closing, for a while."""
        with trio.move_on_after(5.0):
            await self.websocket.aclose(code, reason[:120])


async def _ping(websocket: trio_websocket.WebSocketConnection, connection_scope: trio.CancelScope) -> None:
    """End the connection of a client that does not answer."""
    while True:
        await trio.sleep(PING_INTERVAL_S)
        with trio.move_on_after(PING_INTERVAL_S) as waiting:
            try:
                await websocket.ping()
            except trio_websocket.ConnectionClosed:
                return
        if waiting.cancelled_caught:
            with trio.move_on_after(1.0):
                await websocket.aclose(CloseCode.INTERNAL_ERROR, "A ping was not answered.")
            connection_scope.cancel()
            return


def _name(name: object) -> str:
    if isinstance(name, tuple):
        host, port = cast("tuple[str, int]", name)[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return str(name)
