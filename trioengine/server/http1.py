"""Hypercorn's HTTP/1.1 protocol, changed where it would harm a server that faces a network.

- Pipelined bytes never make `handle` wait: Hypercorn's own waits inside it until the response has ended, so nobody
  reads the socket and a disconnect goes unseen. Here `handle` returns, and `resume` goes on once the response is done.
- HTTP/2 in clear text is refused: an `Upgrade: h2c` is ignored (RFC 9110, 7.8), prior knowledge gets a 505.
- A head that is too large is refused with 431 however it arrives: h11 counts only what it holds of an unfinished one.
- A body with both a length and an encoding is refused: a proxy in front may see its end elsewhere (RFC 9112, 6.1).
- A request that is refused here gets a JSON body like every other error.
- A client that waits before it sends a body of too many bytes is not told to go on.
- While the server drains, responses say `connection: close`.
- WebSockets are `websocket.py`'s; a refused upgrade ends the connection.
- A status has its reason phrase: it may be empty, but programs such as h2load then take no notice of the status.
- The head of an answer of known length is one write with its body; a part of a stream goes by h11, which would only
  frame it.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

import h11
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Body, Data, EndBody, Request, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol, H11WSConnection
from hypercorn.typing import H11SendableEvent

from trioengine.openai.errors import status_reply
from trioengine.server.handlers import Handlers
from trioengine.server.request_body import is_too_long
from trioengine.server.websocket import WebSocketStream

_BAD_REQUEST = 400
_REQUEST_HEADER_FIELDS_TOO_LARGE = 431
_HTTP_VERSION_NOT_SUPPORTED = 505
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_REASON_OFFSET = len("HTTP/1.1 200 ")


class _PausedError(Exception):
    """h11 holds bytes of the next request, which must wait until the response to this one has ended."""


class _RefusedError(Exception):
    """The request is answered with an error status here, and the connection ends."""

    def __init__(self, status: int) -> None:
        self.status = status


class _PauseByRaising:
    """Stands where Hypercorn keeps the event that it waits for while paused: raises instead of waiting."""

    async def clear(self) -> None:
        pass

    async def set(self) -> None:
        pass

    async def wait(self) -> None:
        raise _PausedError

    def is_set(self) -> bool:
        return False


class Http1Protocol(H11Protocol):
    """One HTTP/1.1 connection's protocol state, WebSockets included."""

    num_paused_bytes: int = 0
    """How much a client has sent beyond the request that is being answered, about: reset by `resume`."""

    def __init__(self, *args: Any, write: Callable[[bytes], Awaitable[None]], max_body_bytes: int) -> None:
        """`write` sends bytes as they are. `max_body_bytes` is of a message of a WebSocket, too."""
        super().__init__(*args)
        self.can_read = _PauseByRaising()
        self._write = write
        self._max_body_bytes = max_body_bytes
        self._is_chunked = False
        self._held_head = b""
        self._is_head_request = False
        self._is_body_too_long = False

    async def handle(self, event: Event) -> None:
        """Take bytes from the client, or its end. Waits only while the application has too much unread."""
        try:
            await super().handle(event)
        except _PausedError:
            self.num_paused_bytes += len(event.data) if isinstance(event, RawData) else 0
        except _RefusedError as refused:
            await self._refuse(refused.status)

    async def resume(self) -> None:
        """Go on with the bytes that came during the last response."""
        self.num_paused_bytes = 0
        try:
            await self._handle_events()
        except _PausedError:
            pass
        except _RefusedError as refused:
            await self._refuse(refused.status)

    @property
    def has_unparsed_bytes(self) -> bool:
        """Whether more has come than the request that was answered last."""
        return bool(self.connection.trailing_data[0])

    @property
    def is_input_unfinished(self) -> bool:
        """Whether the client may still be sending, so that closing now could cost it what was sent to it last."""
        if isinstance(self.connection, H11WSConnection):
            return True
        is_complete = self.connection.their_state in (h11.IDLE, h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        return not is_complete or self.has_unparsed_bytes

    async def stream_send(self, event: StreamEvent) -> None:
        """Send a part of the application's response. Waits while the client does not read."""
        if self._is_chunked and isinstance(event, Body) and self.connection.our_state is h11.SEND_BODY:
            # A part of a stream. h11 would write the same, and take longer for it than the kernel does.
            await self._write(b"%x\r\n%b\r\n" % (len(event.data), event.data))
            return
        if isinstance(event, Data):
            # Frames of a WebSocket.
            await self._write(event.data)
            return
        if isinstance(event, Response) and event.status_code >= 200 and self.context.terminated.is_set():
            event = _with_connection_close(event)
        await super().stream_send(event)
        if isinstance(event, EndBody) and isinstance(self.connection, H11WSConnection):
            await self.send(Closed())

    def goodbye(self) -> bytes:
        """The bytes that tell an open WebSocket that the server goes away (1001); else nothing."""
        return self.stream.goodbye() if isinstance(self.stream, WebSocketStream) else b""

    async def _create_stream(self, request: h11.Request) -> None:
        if not _asks_for_websocket(request):
            await super()._create_stream(request)
            return
        assert isinstance(self.connection, h11.Connection)
        stream = WebSocketStream(
            self.app,
            cast(Handlers, self.task_group).spawn,
            self.stream_send,
            stream_id=STREAM_ID,
            is_tls=self.ssl,
            client=self.client,
            server=self.server,
            max_message_bytes=self._max_body_bytes,
        )
        self.stream = cast(Any, stream)
        self.connection = H11WSConnection(self.connection)
        await stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method="GET",
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        await self.context.mark_request()

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        if self._is_body_too_long and isinstance(event, h11.InformationalResponse):
            return
        try:
            data = self.connection.send(event) or b""
        except h11.LocalProtocolError:
            if self.connection.their_state != h11.ERROR:
                raise
            return
        if isinstance(event, h11.Response) and not event.reason:
            data = data[:_REASON_OFFSET] + _REASONS.get(event.status_code, b"") + data[_REASON_OFFSET:]
        data = self._held_head + data
        self._held_head = b""
        if isinstance(event, h11.Response):
            # h11 has decided how the body is framed.
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in data.lower()
            if not self._is_chunked:
                # One write with the body. The head of a stream is news by itself: that it has begun.
                self._held_head = data
                return
        if data:
            await self.send(RawData(data=data))

    async def _check_protocol(self, event: h11.Request) -> None:
        self._is_head_request = event.method == b"HEAD"
        self._is_body_too_long = is_too_long(event.headers, self._max_body_bytes)
        if event.http_version > b"1.1":
            raise _RefusedError(_HTTP_VERSION_NOT_SUPPORTED)
        # Each field with its colon, space and line end.
        num_bytes = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
        if num_bytes > self.config.h11_max_incomplete_size:
            raise _RefusedError(_REQUEST_HEADER_FIELDS_TOO_LARGE)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
            raise _RefusedError(_BAD_REQUEST)

    async def _send_error_response(self, status_code: int) -> None:
        phrase = _REASONS.get(status_code, b"").decode()
        body = status_reply(status_code, f"The request cannot be read as HTTP/1.1: {phrase}.").body
        headers = [(b"connection", b"close"), *self.config.response_headers("h11")]
        if self._is_head_request:
            body = b""
        else:
            headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        if body:
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    async def _refuse(self, status: int) -> None:
        await self._send_error_response(status)
        await self.send(Closed())


def _asks_for_websocket(request: h11.Request) -> bool:
    if request.method != b"GET":
        return False
    headers: dict[bytes, bytes] = {}
    for name, value in request.headers:  # h11 has made the names lower case. A list may stand in several fields.
        headers[name] = headers[name] + b"," + value.lower() if name in headers else value.lower()
    tokens = [token.strip() for token in headers.get(b"connection", b"").split(b",")]
    return b"upgrade" in tokens and headers.get(b"upgrade", b"").strip() == b"websocket"


def _with_connection_close(event: Response) -> Response:
    kept = [(name, value) for name, value in event.headers if name.lower() != b"connection"]
    return Response(event.stream_id, [*kept, (b"connection", b"close")], event.status_code)
