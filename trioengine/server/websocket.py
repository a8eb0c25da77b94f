"""One WebSocket of one connection: frames on one side, an ASGI application on the other.

Stands where Hypercorn's `WSStream` stands and drives `wsproto` itself, because that one offers compression to whoever
asks, checks no pong, answers broken frames with silence and counts no bytes of what its application leaves unread. What
this one promises:

- A message over the limit closes with 1009, text that is not UTF-8 with 1007, frames that are none with 1002.
- While the application leaves `MAX_UNREAD_BYTES` unread, the socket is not read.
- A ping every `PING_INTERVAL_S`; a client that has not answered by the next is closed with 1011.
- An application that fails closes with 1011, one that returns with 1000; with `goodbye`, 1001.
- Before the application has accepted, bytes of the client's are an error (400). No extension is ever agreed on.

Beside ASGI's `websocket.send` it takes `texts`: a sequence of UTF-8 texts, each a message, for one write; the scope's
extension `TEXTS_EXTENSION` says so.
"""

import base64
import binascii
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, cast
from urllib.parse import unquote

import trio
from hypercorn.protocol.events import Body, Data, EndBody, EndData, Event, Request, Response, StreamClosed
from hypercorn.typing import AppWrapper, ASGIReceiveEvent, ASGISendEvent, WebsocketScope
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import generate_accept_token

PING_INTERVAL_S = 20.0
MAX_UNREAD_BYTES = 64 * 1024
"""An application that leaves more unread is not brought more. A single message may be longer."""
MAX_UNREAD_MESSAGES = 64
LAST_FRAME_TIMEOUT_S = 1.0
"""How long a client that is taken for dead may take to be told."""
TEXTS_EXTENSION = "trioengine.texts"
_VERSION = b"13"
_TEXT, _BINARY = 0x81, 0x82
"""The first byte of a frame that is a whole message."""
_NO_BODY = [(b"content-length", b"0"), (b"connection", b"close")]

logger = logging.getLogger(__name__)


def frame(payload: bytes, first_byte: int = _TEXT) -> bytes:
    """A message as the server sends it: one frame, not masked (RFC 6455, 5.2)."""
    length = len(payload)
    if length < 126:
        return bytes((first_byte, length)) + payload
    if length < 65536:
        return bytes((first_byte, 126)) + length.to_bytes(2, "big") + payload
    return bytes((first_byte, 127)) + length.to_bytes(8, "big") + payload


class Inbox:
    """What an application has not read. Full, it makes whoever brings more wait."""

    def __init__(self) -> None:
        self._messages: deque[tuple[ASGIReceiveEvent, int]] = deque()
        self._num_bytes = 0
        self._readers = trio.lowlevel.ParkingLot()
        self._writers = trio.lowlevel.ParkingLot()
        self._disconnect: ASGIReceiveEvent | None = None

    @property
    def is_full(self) -> bool:
        """Whether the next message has to wait."""
        return self._num_bytes >= MAX_UNREAD_BYTES or len(self._messages) >= MAX_UNREAD_MESSAGES

    def put_nowait(self, message: ASGIReceiveEvent, num_bytes: int = 0) -> None:
        """Hand a message over; dropped after the disconnect."""
        if self._disconnect is None:
            self._messages.append((message, num_bytes))
            self._num_bytes += num_bytes
            self._readers.unpark()

    async def wait_for_room(self) -> None:
        """Return when the next message need not wait, or goes nowhere."""
        while self.is_full and self._disconnect is None:
            await self._writers.park()

    def disconnect(self, code: int) -> None:
        """Tell of the end, behind what waits. The first time counts."""
        if self._disconnect is None:
            self._disconnect = {"type": "websocket.disconnect", "code": code}
        self._readers.unpark_all()
        self._writers.unpark_all()

    async def receive(self) -> ASGIReceiveEvent:
        """The next message; after the last the disconnect, again and again."""
        if not self._messages and self._disconnect is None:
            while not self._messages and self._disconnect is None:
                await self._readers.park()
        else:
            await trio.lowlevel.checkpoint()
        if not self._messages:
            return cast(ASGIReceiveEvent, self._disconnect)
        message, num_bytes = self._messages.popleft()
        self._num_bytes -= num_bytes
        if not self.is_full:
            self._writers.unpark_all()
        return message


class Handshake:
    """The upgrade that a client asks for."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], http_version: str) -> None:
        found = {name.lower(): value for name, value in headers}
        self._is_http1 = http_version == "1.1"
        self._key = found.get(b"sec-websocket-key")
        self._has_version = found.get(b"sec-websocket-version") == _VERSION
        offered = found.get(b"sec-websocket-protocol", b"").decode("latin-1").split(",")
        self.subprotocols = [name.strip() for name in offered if name.strip()]

    @property
    def refusal(self) -> tuple[int, Sequence[tuple[bytes, bytes]]] | None:
        """Status and headers for one that cannot be."""
        if not self._has_version:
            return 426, [(b"sec-websocket-version", _VERSION)]
        if self._is_http1 and not _is_key(self._key):
            return 400, []
        return None

    def answer(
        self, subprotocol: str | None, headers: Iterable[tuple[bytes, bytes]]
    ) -> tuple[int, Sequence[tuple[bytes, bytes]]]:
        """Status and headers of the one that accepts.

        Raises:
            ValueError: the client has not offered the subprotocol, or a header is not the application's to set.
        """
        answer: list[tuple[bytes, bytes]] = []
        if subprotocol is not None:
            if subprotocol not in self.subprotocols:
                raise ValueError(f"the client has not offered the subprotocol {subprotocol!r}")
            answer.append((b"sec-websocket-protocol", subprotocol.encode()))
        if self._is_http1:
            assert self._key is not None
            answer += [(b"sec-websocket-accept", generate_accept_token(self._key))]
            answer += [(b"upgrade", b"WebSocket"), (b"connection", b"Upgrade")]
        for name, value in headers:
            if name.lower().startswith((b"sec-websocket-", b":")):
                raise ValueError(f"an application may not set the header {name!r}")
            answer.append((name, value))
        return (101 if self._is_http1 else 200), answer


class WebSocketStream:
    """One WebSocket, from its upgrade to its end."""

    def __init__(
        self,
        app: AppWrapper,
        spawn: Callable[..., object],
        send: Callable[[Event], Awaitable[None]],
        *,
        stream_id: int,
        is_tls: bool,
        client: tuple[str, int] | None,
        server: tuple[str, int] | None,
        max_message_bytes: int,
    ) -> None:
        """`spawn` starts a task of the connection's; `send` takes what Hypercorn's protocol classes take."""
        self._app = app
        self._spawn = spawn
        self._send = send
        self._stream_id = stream_id
        self._scheme = "wss" if is_tls else "ws"
        self._client = client
        self._server = server
        self._max_message_bytes = max_message_bytes
        self._inbox = Inbox()
        self._handshake: Handshake | None = None
        self._connection: Connection | None = None
        """None until it is accepted."""
        self._response: tuple[int, list[tuple[bytes, bytes]]] | None = None
        """What the application answers instead of accepting."""
        self._has_answered = False
        self._is_closing = False
        """A close frame was sent, or an answer to the upgrade was given: nothing more may be sent."""
        self._is_over = False
        """The connection's protocol has let it go."""
        self._parts: list[str | bytes] = []
        self._num_part_bytes = 0
        self._has_pong = True
        self._pinging = trio.CancelScope()
        self._scope: WebsocketScope | None = None

    # Hypercorn's protocol classes call these.

    @property
    def idle(self) -> bool:
        """Whether it has ended."""
        return self._is_closing

    async def handle(self, event: Event) -> None:
        """Take what the client sent, or its end. Waits only while the application has too much unread."""
        if self._is_over:
            return
        match event:
            case Request():
                await self._begin(event)
            case Body() | Data() if self._connection is None:
                if not self._is_closing:
                    await self._refuse(400)
                self._let_go(CloseReason.ABNORMAL_CLOSURE)
            case Body() | Data():
                await self._receive(event.data)
            case StreamClosed():
                self._let_go(CloseReason.NORMAL_CLOSURE if self._is_closing else CloseReason.ABNORMAL_CLOSURE)
            case _:
                pass

    def goodbye(self) -> bytes:
        """The frame that tells an open one that the server goes away (1001); else nothing."""
        if self._connection is None or self._is_closing:
            return b""
        self._is_closing = True
        return self._connection.send(CloseConnection(code=CloseReason.GOING_AWAY))

    # The upgrade

    async def _begin(self, request: Request) -> None:
        self._handshake = Handshake(request.headers, request.http_version)
        refusal = self._handshake.refusal
        if refusal is not None:
            await self._refuse(*refusal)
            return
        path, _, query = request.raw_path.partition(b"?")
        self._scope = cast(
            WebsocketScope,
            {
                "type": "websocket",
                "asgi": {"spec_version": "2.3", "version": "3.0"},
                "scheme": self._scheme,
                "http_version": request.http_version,
                "path": unquote(path.decode("ascii")),
                "raw_path": path,
                "query_string": query,
                "root_path": "",
                "headers": request.headers,
                "client": self._client,
                "server": self._server,
                "state": request.state.copy(),
                "subprotocols": self._handshake.subprotocols,
                "extensions": {"websocket.http.response": {}, TEXTS_EXTENSION: {}},
            },
        )
        self._inbox.put_nowait({"type": "websocket.connect"})
        self._spawn(self._run_app, self._scope)

    async def _refuse(self, status: int, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self._is_closing = True
        await self._send(Response(self._stream_id, [*headers, *_NO_BODY], status))
        await self._send(EndBody(self._stream_id))

    async def _run_app(self, scope: WebsocketScope) -> None:
        has_failed = False
        try:
            await self._app(scope, self._inbox.receive, self._take, trio.to_thread.run_sync, trio.from_thread.run)
        except* Exception:
            # A border, as `handlers` has it for HTTP: one request's failure is its own.
            has_failed = True
            logger.exception("The application failed in websocket %s", scope["path"])
        if self._is_over:
            return
        if self._connection is not None:
            await self._close(CloseReason.INTERNAL_ERROR if has_failed else CloseReason.NORMAL_CLOSURE)
        elif not self._has_answered and not self._is_closing:
            await self._refuse(500)
        await self._end()

    # What the application sends

    async def _take(self, message: ASGISendEvent) -> None:
        if self._is_over:
            await trio.lowlevel.checkpoint()  # Whoever does not listen must still let others run.
            return
        fields = cast("Mapping[str, Any]", message)
        match message["type"]:
            case "websocket.send" if self._connection is not None:
                await self._send_message(fields)
            case "websocket.close" if self._connection is not None:
                await self._close(fields.get("code") or CloseReason.NORMAL_CLOSURE, fields.get("reason") or None)
            case _ if self._is_closing:
                await trio.lowlevel.checkpoint()
            case "websocket.accept" if self._connection is None:
                await self._accept(fields.get("subprotocol"), fields.get("headers") or ())
            case "websocket.close":
                await self._refuse(403)
            case "websocket.http.response.start" if self._connection is None:
                headers = [(bytes(name), bytes(value)) for name, value in fields.get("headers", ())]
                self._response = (int(fields["status"]), headers)
            case "websocket.http.response.body" if self._response is not None:
                await self._respond(fields.get("body", b""), is_last=not fields.get("more_body", False))
            case kind:
                raise RuntimeError(f"{kind} makes no sense in this state of a WebSocket")

    async def _accept(self, subprotocol: str | None, headers: Iterable[tuple[bytes, bytes]]) -> None:
        assert self._handshake is not None
        status, answer = self._handshake.answer(subprotocol, headers)
        self._connection = Connection(ConnectionType.SERVER)
        await self._send(Response(self._stream_id, list(answer), status))
        self._spawn(self._ping)

    async def _respond(self, body: bytes, *, is_last: bool) -> None:
        assert self._response is not None
        if not self._has_answered:
            self._has_answered = True
            status, headers = self._response
            await self._send(Response(self._stream_id, headers, status))
        if body:
            await self._send(Body(self._stream_id, bytes(body)))
        if is_last:
            self._is_closing = True
            await self._send(EndBody(self._stream_id))

    async def _send_message(self, message: Mapping[str, Any]) -> None:
        if self._is_closing:
            await trio.lowlevel.checkpoint()
            return
        texts = cast("Sequence[bytes] | None", message.get("texts"))
        if texts is not None:
            data = b"".join([frame(text) for text in texts])
        elif (payload := message.get("bytes")) is not None:
            data = frame(bytes(payload), _BINARY)
        else:
            data = frame(message["text"].encode())
        await self._send(Data(self._stream_id, data))

    async def _close(self, code: int, reason: str | None = None) -> None:
        if self._is_closing or self._connection is None:
            return
        self._is_closing = True
        data = self._connection.send(CloseConnection(code=code, reason=reason))
        await self._send(Data(self._stream_id, data))
        await self._send(EndData(self._stream_id))

    async def _end(self) -> None:
        """Let the connection go on, or end, without this."""
        self._let_go(CloseReason.NORMAL_CLOSURE)
        await self._send(StreamClosed(self._stream_id))

    def _let_go(self, code: int) -> None:
        self._is_over = True
        self._pinging.cancel()
        self._inbox.disconnect(code)

    # What the client sends

    async def _receive(self, data: bytes) -> None:
        connection = self._connection
        assert connection is not None
        if connection.state not in (ConnectionState.OPEN, ConnectionState.LOCAL_CLOSING):
            return
        connection.receive_data(data)
        for event in connection.events():
            match event:
                case TextMessage() | BytesMessage():
                    await self._receive_part(event)
                case Ping():
                    await self._send_control(Pong(bytes(event.payload)))
                case Pong():
                    self._has_pong = True
                case CloseConnection(code, reason):
                    await self._answer_close(connection, code, reason)
                case _:
                    pass
            if self._is_over:
                return

    async def _receive_part(self, event: TextMessage | BytesMessage) -> None:
        if self._is_closing:
            return
        data = event.data
        num_bytes = len(data) if isinstance(data, (bytes, bytearray)) or data.isascii() else len(data.encode())
        self._num_part_bytes += num_bytes
        if self._num_part_bytes > self._max_message_bytes:
            reason = f"A message may have {self._max_message_bytes} bytes."
            await self._close(CloseReason.MESSAGE_TOO_BIG, reason)
            self._let_go(CloseReason.MESSAGE_TOO_BIG)
            await self._send(StreamClosed(self._stream_id))
            return
        if data:
            self._parts.append(data if isinstance(data, str) else bytes(data))
        if not event.message_finished:
            return
        parts, num_message_bytes = self._parts, self._num_part_bytes
        self._parts, self._num_part_bytes = [], 0
        is_text = isinstance(event, TextMessage)
        message: ASGIReceiveEvent = {
            "type": "websocket.receive",
            "text": "".join(cast("list[str]", parts)) if is_text else None,
            "bytes": None if is_text else b"".join(cast("list[bytes]", parts)),
        }
        await self._inbox.wait_for_room()
        self._inbox.put_nowait(message, num_message_bytes)

    async def _answer_close(self, connection: Connection, code: int, reason: str | None) -> None:
        """The client has closed, has answered our closing, or has sent what is no frame."""
        is_fault = connection.state in (ConnectionState.OPEN, ConnectionState.LOCAL_CLOSING)
        if not self._is_closing:
            self._is_closing = True
            answer = CloseConnection(code=code, reason=reason if is_fault else None)
            await self._send(Data(self._stream_id, connection.send(answer)))
        self._let_go(int(code))
        await self._send(StreamClosed(self._stream_id))

    # Pings

    async def _send_control(self, event: Ping | Pong) -> None:
        if self._connection is not None and not self._is_closing:
            await self._send(Data(self._stream_id, self._connection.send(event)))

    async def _ping(self) -> None:
        with self._pinging:
            while True:
                await trio.sleep(PING_INTERVAL_S)
                if self._inbox.is_full:
                    continue  # Its answers are not read now.
                if not self._has_pong:
                    break
                self._has_pong = False
                await self._send_control(Ping(b"trioengine"))
        if self._pinging.cancelled_caught or self._is_over:
            return
        with trio.move_on_after(LAST_FRAME_TIMEOUT_S):
            await self._close(CloseReason.INTERNAL_ERROR, "A ping was not answered.")
        await self._end()


def _is_key(key: bytes | None) -> bool:
    """Whether it is 16 bytes in base64 (RFC 6455, 4.2.1)."""
    try:
        return key is not None and len(base64.b64decode(key.strip(), validate=True)) == 16
    except binascii.Error:
        return False
