"""Hypercorn's HTTP/2 protocol, changed where it would harm a server that faces a network.

- A handler whose client reads nothing waits, which Hypercorn means to do and does not, and not for ever.
- A client that waits before it sends a body is told to go on, unless the body has too many bytes.
- Data for a stream that has been answered already is dropped: it would end the connection, the client's other
  streams with it.
- While the server drains, new streams are refused in the way that lets a client try again elsewhere.
- A client that opens streams only to reset them is cut off (CVE-2023-44487).
- WebSockets are HTTP/1.1's only, and this says so: browsers then open a connection of that kind for them.
- Streams with something to send take turns. Hypercorn's tree of priorities, which RFC 9113 has deprecated, let a stream
  wait for as long as new ones with short answers came.
"""

import contextlib
from collections.abc import Iterable
from typing import Any, cast

import h2.events
import h2.exceptions
import trio
from h2.errors import ErrorCodes
from h2.events import Event
from h2.settings import SettingCodes
from hypercorn.events import Closed
from hypercorn.protocol.events import Body, Data
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, H2Protocol, StreamBuffer
from hypercorn.typing import Event as AsyncEvent
from priority.priority import DeadlockError, MissingStreamError

from trioengine.server.request_body import is_too_long, is_waited_with

MAX_RESETS = 200
"""How many streams a client may reset in quick succession: a page with so many answers that is closed, and more."""
RESETS_PER_S = 20.0
"""How fast it may go on after that."""


class StreamTurns:
    """Whose turn it is to send, of the streams that have something: each once before any again. Stands where Hypercorn
    keeps its tree of priorities, whose methods these are.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._ready: dict[int, None] = {}
        """In the order of their turns."""

    def __next__(self) -> int:
        """The next stream, which then comes last; DeadlockError where none has anything to send."""
        if not self._ready:
            raise DeadlockError
        stream_id = next(iter(self._ready))
        del self._ready[stream_id]
        self._ready[stream_id] = None
        return stream_id

    def insert_stream(self, stream_id: int) -> None:
        """A new stream, which has something to send until it is blocked."""
        self._known.add(stream_id)
        self._ready[stream_id] = None

    def remove_stream(self, stream_id: int) -> None:
        """The stream has ended."""
        self._known.discard(stream_id)
        self._ready.pop(stream_id, None)

    def block(self, stream_id: int) -> None:
        """The stream has nothing to send, or may not."""
        self._ready.pop(stream_id, None)

    def unblock(self, stream_id: int) -> None:
        """The stream may have something to send; MissingStreamError where there is none."""
        if stream_id not in self._known:
            raise MissingStreamError(stream_id)
        self._ready.setdefault(stream_id)

    def reprioritize(self, **_: object) -> None:
        """What clients say of priorities changes nothing."""


class _StalledError(Exception):
    """The client has not taken anything of this stream for too long."""


class Http2Protocol(H2Protocol):
    """One HTTP/2 connection's protocol state."""

    def __init__(self, *arguments: Any, write_timeout_s: float, max_body_bytes: int) -> None:
        super().__init__(*arguments)
        self._max_body_bytes = max_body_bytes
        self.stream_buffers = _BoundedBuffers(write_timeout_s)
        self.priority = cast(Any, StreamTurns())
        self._num_resets = 0.0
        self._last_reset_s = trio.current_time()
        del self.connection.local_settings[SettingCodes.ENABLE_CONNECT_PROTOCOL]

    async def stream_send(self, event: StreamEvent) -> None:
        """Send a part of the application's response. Waits while the client does not read, until its time is over."""
        if isinstance(event, (Body, Data)) and event.stream_id not in self.streams:
            # It goes nowhere, and an application that does not listen must still let others run.
            await trio.lowlevel.checkpoint()
            return
        try:
            await super().stream_send(event)
        except _StalledError:
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self.connection.reset_stream(event.stream_id, ErrorCodes.CANCEL)
            await self._flush()
            await self._close_stream(event.stream_id)

    async def _handle_events(self, events: list[Event]) -> None:
        for event in events:
            # One by one: whether data has a stream depends on what came before it.
            if self._is_to_be_handled(event):
                await super()._handle_events([event])
        await self._flush()
        if self._num_resets > MAX_RESETS:
            self.connection.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            await self._flush()
            await self.send(Closed())

    def _is_to_be_handled(self, event: Event) -> bool:
        match event:
            case h2.events.RequestReceived(stream_id=int(stream_id)) if self.context.terminated.is_set():
                with contextlib.suppress(h2.exceptions.ProtocolError):  # The client has closed it in the same breath.
                    self.connection.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
                return False
            case h2.events.RequestReceived(stream_id=int(stream_id), headers=list(headers)) if _is_connect(headers):
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    self.connection.reset_stream(stream_id, ErrorCodes.HTTP_1_1_REQUIRED)
                return False
            case h2.events.RequestReceived(stream_id=int(stream_id), stream_ended=None):
                headers = cast("list[tuple[bytes, bytes]]", event.headers)
                if is_waited_with(headers) and not is_too_long(headers, self._max_body_bytes):
                    with contextlib.suppress(h2.exceptions.ProtocolError):
                        self.connection.send_headers(stream_id, [(b":status", b"100")])
                return True
            case h2.events.DataReceived(stream_id=int(stream_id)) if stream_id not in self.streams:
                # It has used up some of the connection's window, which the other streams need.
                self.connection.acknowledge_received_data(event.flow_controlled_length or 0, stream_id)
                return False
            case h2.events.StreamReset():
                now_s = trio.current_time()
                worked_off = (now_s - self._last_reset_s) * RESETS_PER_S
                self._num_resets = max(0.0, self._num_resets - worked_off) + 1
                self._last_reset_s = now_s
                return True
            case _:
                return True


def _is_connect(headers: Iterable[object]) -> bool:
    return any(header == (b":method", b"CONNECT") for header in headers)


class _BoundedBuffer(StreamBuffer):
    """Lets its handler go on when little is left in it, and not before.

    Hypercorn's lets it go on after every piece that it takes *out*, also after none: with a closed window it takes out
    nothing on every write, so a handler whose client reads nothing filled memory at 500 MB a second.
    """

    write_timeout_s: float

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= BUFFER_HIGH_WATER:
            await self._paused.clear()
            await self._wait_for_client(self._paused)

    async def drain(self) -> None:
        await self._wait_for_client(self._is_empty)

    async def pop(self, max_length: int) -> bytes:
        length = min(len(self.buffer), max_length)
        data = bytes(self.buffer[:length])
        del self.buffer[:length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data

    async def _wait_for_client(self, event: AsyncEvent) -> None:
        with trio.move_on_after(self.write_timeout_s) as waiting:
            await event.wait()
        if waiting.cancelled_caught:
            raise _StalledError


class _BoundedBuffers(dict[int, StreamBuffer]):
    """The buffers of a connection's streams. Hypercorn makes each, and uses it before anyone else could swap it."""

    def __init__(self, write_timeout_s: float) -> None:
        super().__init__()
        self._write_timeout_s = write_timeout_s

    def __setitem__(self, stream_id: int, buffer: StreamBuffer) -> None:
        buffer.__class__ = _BoundedBuffer
        cast(_BoundedBuffer, buffer).write_timeout_s = self._write_timeout_s
        super().__setitem__(stream_id, buffer)
