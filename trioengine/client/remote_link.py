"""One WebSocket to a server that has an engine: what is said over it, and who waits for the answers.

Carries messages of `/v1/stream` (`docs/stream-protocol.md`); `client.remote` knows what they mean.
"""

import itertools
import json
import socket
import ssl
import urllib.parse
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

import attrs
import trio
import trio_websocket

from trioengine.errors import (
    AuthenticationError,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineGenerateError,
    ForbiddenError,
    PeerUnreachableError,
    RequestError,
    TrioEngineError,
)
from trioengine.types.native_json import JsonObject, error_from_json
from trioengine.types.stream_messages import (
    PROTOCOL_VERSION,
    STREAM_PATH,
    Cancel,
    ClientMessage,
    Create,
    Credit,
    Endpoint,
    Hello,
    write_message,
)

CREDITS = 32
"""Chunks of one request that may wait here. What is beyond them the server merges."""
CREDITS_AT_ONCE = 16
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
PING_INTERVAL_S = 20.0
PING_TIMEOUT_S = 20.0
MAX_MESSAGE_BYTES = 1 << 30
"""The server is trusted: its outputs may be long."""
_POLICY_VIOLATION = 1008


@attrs.frozen
class ServerAddress:
    """Where a server's stream is."""

    url: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, tls: ssl.SSLContext | None) -> "ServerAddress":
        """From the URL of a server.

        Raises:
            ConfigError: it is none.
        """
        parts = urllib.parse.urlsplit(url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        try:
            is_usable = scheme in ("ws", "wss") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_usable = False
        if not is_usable or (tls is not None and scheme == "ws"):
            raise ConfigError(f"url must be like ws://127.0.0.1:8000 (wss with TLS), not {url!r}.", option="url")
        path = parts.path.rstrip("/").removesuffix(STREAM_PATH).removesuffix("/v1") + STREAM_PATH
        return cls(urllib.parse.urlunsplit((scheme, parts.netloc, path, "", "")), tls)


class Exchange:
    """One request of one connection: what came and was not read. Leaving it cancels what is unfinished."""

    def __init__(self, link: "RemoteLink", id_: str, name: str) -> None:
        self.name = name
        """The caller's."""
        self.num_prompt_tokens = 0
        self.warnings: tuple[str, ...] = ()
        self._link = link
        self._id = id_
        self._chunks: deque[Mapping[str, Any]] = deque()
        self._num_taken = 0
        self._is_started = False
        self._is_over = False
        self._is_left = False
        self._error: TrioEngineError | None = None
        self._reader = trio.lowlevel.ParkingLot()

    @property
    def num_waiting_chunks(self) -> int:
        """What came and was not read."""
        return len(self._chunks)

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    # From the server

    def on_started(self, message: Mapping[str, Any]) -> None:
        """The engine has it."""
        self.num_prompt_tokens = message["prompt_tokens"]
        self.warnings = tuple(message["warnings"])
        self._is_started = True
        self._reader.unpark_all()

    def on_chunk(self, data: Mapping[str, Any]) -> None:
        """Something new came."""
        self._chunks.append(data)
        self._reader.unpark_all()

    def on_end(self, error: TrioEngineError | None = None) -> None:
        """Nothing more will come. The first time counts."""
        if not self._is_over:
            self._is_over, self._error = True, error
        self._reader.unpark_all()

    # From the reader

    async def wait_started(self) -> None:
        """Return once the engine has it. Raises its error."""
        while not (self._is_started or self._is_over):
            await self._reader.park()
        if self._error is not None and not self._chunks and not self._is_started:
            raise attrs.evolve(self._error)

    async def next(self) -> Mapping[str, Any] | None:
        """The next chunk, None at the end. Cancelled, it has taken none."""
        if self._chunks or self._is_over or self._is_left:
            await trio.lowlevel.checkpoint()
        while not (self._chunks or self._is_over or self._is_left):
            await self._reader.park()
        if self._is_left:
            raise EngineClosedError("The stream was read after its block was left.")
        if self._chunks:
            return self.next_nowait()
        if self._error is not None:
            # A copy: others may have been given the same object.
            raise attrs.evolve(self._error)
        return None

    def next_nowait(self) -> Mapping[str, Any] | None:
        """The next chunk where it is here."""
        if not self._chunks:
            return None
        self._num_taken += 1
        if self._num_taken == CREDITS_AT_ONCE and not self._is_over:
            self._num_taken = 0
            self._link.send(Credit(self._id, CREDITS_AT_ONCE))
        return self._chunks.popleft()

    def leave(self) -> None:
        """Read no more. What is unfinished is cancelled. Does not wait."""
        if self._is_left:
            return
        self._is_left = True
        self._chunks.clear()
        self._link.forget(self._id, cancels=not self._is_over)
        self._reader.unpark_all()

    def abort(self) -> None:
        """Let it end, with reason "abort". Does not wait."""
        self._link.send(Cancel(self._id))


class RemoteLink:
    """One connection, from its greeting to its loss."""

    def __init__(self, address: "ServerAddress", api_key: str | None) -> None:
        self._address = address
        self._api_key = api_key
        self.error: TrioEngineError | None = None
        """Why it has ended; None while it lives."""
        self._exchanges: dict[str, Exchange] = {}
        self._ids = itertools.count(1)
        self._unsent: deque[ClientMessage] = deque()
        self._writer = trio.lowlevel.ParkingLot()
        self._socket: trio.socket.SocketType | None = None
        self._websocket: trio_websocket.WebSocketConnection | None = None

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Connect, then carry messages until the connection is lost.

        Raises:
            TrioEngineError: it could not connect. Later it raises nothing.
        """
        is_started = False
        error: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                with trio.fail_after(CONNECT_TIMEOUT_S):
                    self._websocket = websocket = await self._connect(nursery)
                is_started = True
                task_status.started()
                nursery.start_soon(self._write, websocket)
                nursery.start_soon(self._ping, websocket)
                try:
                    await self._read(websocket)
                except trio_websocket.ConnectionClosed:
                    if not isinstance(self.error, EngineClosedError):
                        raise
                    # `close` waits for the server, whom trio-websocket's own task in this nursery listens to.
                    await trio.sleep_forever()
        except* Exception as group:
            # A border: whatever happens to the connection is its end, and nothing else's.
            error = _leaf(group)
        finally:
            # The WebSocket's own closing waits; the end of the socket makes the server abort as well.
            if self._socket is not None:
                self._socket.close()
        if not is_started:
            raise _connect_error(error, self._address)
        self.end(EngineDeadError("The connection to the engine's server was lost.", cause=repr(error)))

    @property
    def num_waiting_chunks(self) -> int:
        """What came, of all requests, and was not read."""
        return sum(exchange.num_waiting_chunks for exchange in self._exchanges.values())

    def exchange(self, endpoint: Endpoint, body: JsonObject, name: str = "") -> Exchange:
        """Send a request. Whoever calls leaves the exchange, whatever happens."""
        id_ = str(next(self._ids))
        exchange = Exchange(self, id_, name)
        if self.error is not None:
            exchange.on_end(self.error)
            return exchange
        self._exchanges[id_] = exchange
        self.send(Create(id_, endpoint, body, CREDITS))
        return exchange

    def send(self, message: ClientMessage) -> None:
        """Send a message as soon as may be. Does not wait."""
        if self.error is None:
            self._unsent.append(message)
            self._writer.unpark()

    def forget(self, id_: str, *, cancels: bool) -> None:
        """Hear nothing more of a request."""
        if self._exchanges.pop(id_, None) is not None and cancels:
            self.send(Cancel(id_))

    def abort(self, name: str) -> None:
        """End all requests of this name."""
        for exchange in self._exchanges.values():
            if exchange.name == name and name:
                exchange.abort()

    def end(self, error: TrioEngineError) -> None:
        """Nothing more will come: all who wait get this, behind what came."""
        if self.error is None:
            self.error = error
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            exchange.on_end(error)

    async def close(self) -> None:
        """Tell the server that this is meant to be the end (1000). Waits for its answer, but not for long."""
        if self.error is None and self._websocket is not None:
            self.end(EngineClosedError("The engine is closed."))
            with trio.move_on_after(CLOSE_TIMEOUT_S):
                await self._websocket.aclose()

    async def _connect(self, nursery: trio.Nursery) -> trio_websocket.WebSocketConnection:
        headers = [] if self._api_key is None else [(b"authorization", b"Bearer " + self._api_key.encode())]
        parts = urllib.parse.urlsplit(self._address.url)
        assert parts.hostname is not None
        is_tls = parts.scheme == "wss"
        transport = await trio.open_tcp_stream(parts.hostname, parts.port or (443 if is_tls else 80))
        self._socket = transport.socket
        transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = transport
        if is_tls:
            tls = self._address.tls or ssl.create_default_context()
            stream = trio.SSLStream(transport, tls, server_hostname=parts.hostname, https_compatible=True)
            # Else its failure would be waited for, not raised.
            await stream.do_handshake()
        websocket = await trio_websocket.wrap_client_stream(
            nursery,
            stream,
            parts.netloc.rpartition("@")[2],
            parts.path,
            extra_headers=headers,
            message_queue_size=64,
            max_message_size=MAX_MESSAGE_BYTES,
            receive_buffer_size=65536,
        )
        await websocket.send_message(write_message(Hello(PROTOCOL_VERSION)))
        greeting = json.loads(await websocket.get_message())
        if greeting.get("type") != "hello":
            raise PeerUnreachableError(f"The server does not speak this protocol: {str(greeting)[:300]}")
        return websocket

    async def _read(self, websocket: trio_websocket.WebSocketConnection) -> None:
        while True:
            message = cast("dict[str, Any]", json.loads(await websocket.get_message()))
            exchange = self._exchanges.get(message.get("id", ""))
            if exchange is None:
                continue  # It was left, or the message is about the connection, which ends then.
            match message["type"]:
                case "chunk":
                    exchange.on_chunk(message["data"])
                case "started":
                    exchange.on_started(message)
                case "done":
                    del self._exchanges[message["id"]]
                    exchange.on_end()
                case "error":
                    del self._exchanges[message["id"]]
                    exchange.on_end(_error_of(message))
                case _:
                    pass

    async def _write(self, websocket: trio_websocket.WebSocketConnection) -> None:
        while True:
            while not self._unsent:
                await self._writer.park()
            await websocket.send_message(write_message(self._unsent.popleft()))

    async def _ping(self, websocket: trio_websocket.WebSocketConnection) -> None:
        while True:
            await trio.sleep(PING_INTERVAL_S)
            with trio.fail_after(PING_TIMEOUT_S):
                await websocket.ping()


def _error_of(message: Mapping[str, Any]) -> TrioEngineError:
    error = message["error"]
    known = error_from_json(message.get("native"), error["message"])
    if known is None and message["status"] == RequestError.status:
        return RequestError(error["message"], param=error["param"])
    return known if known is not None else EngineGenerateError(error["message"])


def _connect_error(error: Exception | None, address: ServerAddress) -> TrioEngineError:
    if isinstance(error, TrioEngineError):
        return error
    if isinstance(error, trio_websocket.ConnectionRejected):
        body = (error.body or b"")[:300].decode("utf-8", "replace")
        problem = f"The server refuses with status {error.status_code}: {body}"
        kinds = {401: AuthenticationError, 403: ForbiddenError}
        return kinds.get(error.status_code, PeerUnreachableError)(problem)
    if isinstance(error, trio_websocket.ConnectionClosed) and error.reason is not None:
        problem = f"The server closes with {error.reason.code}: {error.reason.reason}"
        is_refused = error.reason.code == _POLICY_VIOLATION
        return AuthenticationError(problem) if is_refused else PeerUnreachableError(problem)
    return PeerUnreachableError(f"There is no engine at {address.url}: {error!r}"[:500])


def _leaf(error: BaseException) -> Exception:
    while isinstance(error, BaseExceptionGroup):
        error = cast(Any, error).exceptions[0]
    return cast(Exception, error)
