"""One client's connection: reads the socket, drives an HTTP protocol, ends.

Hypercorn 0.18's own connection class must not face a network: an error in one connection ends the whole server, its
writes are shielded without a limit, with Quart-Trio its keep-alive timer never starts, and pipelined bytes hide a
disconnect. This one stands in for it around the same protocol classes. What it promises: whatever goes wrong here ends
this connection only; the client's end is seen at once, also in the middle of a response and behind pipelined bytes; no
write waits for ever; and a connection that is over leaves no task and no descriptor. Knows nothing about other
connections.
"""

import contextlib
import logging
import socket
import ssl
from typing import Any, cast

import attrs
import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState, TaskGroup

from trioengine.config.server import ServerConfig
from trioengine.server.handlers import Handlers
from trioengine.server.http1 import Http1Protocol
from trioengine.server.http2 import Http2Protocol

RECEIVE_BYTES = 64 * 1024
WRITE_SLICE_BYTES = 64 * 1024
MAX_PAUSED_BYTES = 256 * 1024
"""How much a client may send ahead while its response is on its way. More ends the connection, because behind bytes
that nobody reads its disconnect would go unseen."""
HANDLER_GRACE_S = 1.0
"""How long an application may take to end by itself once its client has gone."""
LINGER_S = 30.0
LINGER_GAP_S = 5.0
NUM_WRITES_PER_CHECKPOINT = 16
"""A write that the kernel takes at once gives way to other tasks every so often only: a checkpoint costs more."""

logger = logging.getLogger(__name__)


@attrs.frozen
class Service:
    """What all connections of one server share."""

    app: AppWrapper
    config: ServerConfig
    tls: ssl.SSLContext | None
    hypercorn_config: HypercornConfig
    context: WorkerContext
    """Its `terminated` event is set when the server drains."""
    state: dict[str, object]
    """The lifespan's state, of which every request gets a copy."""


class Connection:
    """Serves one accepted socket, which it closes."""

    def __init__(self, sock: socket.socket, service: Service) -> None:
        self._sock = sock
        self._service = service
        self._config = service.config
        self._transport = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = self._transport
        self._protocol: Http1Protocol | Http2Protocol | None = None
        self._write_lock = trio.Lock()
        self._num_writes = 0
        self._scope = trio.CancelScope()
        # Cancelled when the connection is over; its deadline is the header timeout or the keep-alive timeout.
        self._reading = trio.CancelScope()
        # Cancelled to make the reading task go on with pipelined bytes.
        self._waiting_for_data = trio.CancelScope()
        self._lingering = trio.CancelScope()
        self._is_idle = True
        self._is_lost = False
        self._is_finished = False

    async def run(self) -> None:
        """Serve until the client or the protocol ends the connection. Raises nothing but `Cancelled`."""
        try:
            with self._scope:
                if await self._shake_hands():
                    await self._serve()
                    await self._linger()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # The client vanished between two of our calls.
        except* Exception:
            # A border: a client can provoke errors in protocol code (HTTP/2 DATA after an early response, a path
            # that is not ASCII), and the other connections have nothing to do with it.
            logger.warning("A connection ended because of an error", exc_info=True)
        finally:
            self._transport.socket.close()

    def begin_shutdown(self) -> None:
        """Close at once if no request is in flight; otherwise the response in flight is the last one."""
        self._lingering.cancel()
        if self._is_idle:
            self._finish()

    def abort(self) -> None:
        """End now, whatever is in flight. An open WebSocket is told, if the kernel takes the bytes at once."""
        protocol = self._protocol
        if isinstance(protocol, Http1Protocol) and self._service.tls is None and not self._write_lock.locked():
            # Gone already, or it does not read: then it will see the end of the connection.
            with contextlib.suppress(OSError):
                self._sock.send(protocol.goodbye())
        self._scope.cancel()

    async def _shake_hands(self) -> bool:
        if self._service.tls is None:
            return True
        stream = trio.SSLStream(self._transport, self._service.tls, server_side=True, https_compatible=True)
        try:
            with trio.fail_after(self._config.header_timeout_s):
                await stream.do_handshake()
        except (trio.BrokenResourceError, trio.TooSlowError):
            return False
        self._stream = stream
        return True

    async def _serve(self) -> None:
        # Never cancels the nursery itself: a scope around it leaves the nursery's own errors and result alone.
        with trio.CancelScope() as handlers_scope:
            async with trio.open_nursery() as nursery:
                protocol = self._protocol = self._make_protocol(nursery)
                self._reading.deadline = trio.current_time() + self._config.header_timeout_s
                with self._reading:
                    await protocol.initiate()
                    await self._read(protocol)
                if self._is_finished and not self._is_lost:
                    self._send_fin()
                await protocol.handle(Closed())
                handlers_scope.deadline = trio.current_time() + HANDLER_GRACE_S

    def _make_protocol(self, nursery: trio.Nursery) -> Http1Protocol | Http2Protocol:
        is_http2 = isinstance(self._stream, trio.SSLStream) and self._stream.selected_alpn_protocol() == "h2"
        arguments = (
            self._service.app,
            self._service.hypercorn_config,
            self._service.context,
            cast(TaskGroup, Handlers(nursery)),  # Only its context manager is missing, which no protocol uses.
            ConnectionState(self._service.state),
            self._service.tls is not None,
            _address(self._sock.family, self._sock.getpeername()),
            _address(self._sock.family, self._sock.getsockname()),
            self._on_protocol_event,
        )
        if is_http2:
            return Http2Protocol(
                *arguments,
                write_timeout_s=self._config.write_timeout_s,
                max_body_bytes=self._config.max_body_bytes,
            )
        return Http1Protocol(*arguments, write=self._write, max_body_bytes=self._config.max_body_bytes)

    async def _read(self, protocol: Http1Protocol | Http2Protocol) -> None:
        """Feed the protocol until the client has gone. Cancelled through `_reading`."""
        while not self._is_lost:
            with trio.CancelScope() as self._waiting_for_data:
                await self._read_until_lost(protocol)
            if self._waiting_for_data.cancelled_caught and isinstance(protocol, Http1Protocol):
                await protocol.resume()

    async def _read_until_lost(self, protocol: Http1Protocol | Http2Protocol) -> None:
        while not self._is_lost:
            data = await self._receive()
            if not data:
                self._is_lost = True
                return
            # HTTP/2 has frames that belong to no request; it says itself when one begins.
            if self._is_idle and isinstance(protocol, Http1Protocol):
                self._is_idle = False
                self._reading.deadline = trio.current_time() + self._config.header_timeout_s
            await protocol.handle(RawData(data))
            if isinstance(protocol, Http1Protocol) and protocol.num_paused_bytes > MAX_PAUSED_BYTES:
                logger.warning("A client sent more than %d bytes ahead of its response", MAX_PAUSED_BYTES)
                self._is_lost = True

    async def _receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(RECEIVE_BYTES))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def _on_protocol_event(self, event: Event) -> None:
        # Closed and Updated must not be checkpoints: Quart-Trio cancels the handler that sends them as soon as its
        # response is complete, and the rest of what the protocol does then would be lost.
        match event:
            case RawData():
                await self._write(event.data)
            case Closed():
                self._finish()
            case Updated():
                self._on_idle(event.idle)
            case _:
                raise AssertionError(f"unknown protocol event {event!r}")

    def _on_idle(self, is_idle: bool) -> None:
        self._is_idle = is_idle
        if not is_idle:
            self._reading.deadline = float("inf")
            return
        self._reading.deadline = trio.current_time() + self._config.keep_alive_timeout_s
        if self._service.context.terminated.is_set():
            self._finish()
        elif isinstance(self._protocol, Http1Protocol) and self._protocol.has_unparsed_bytes:
            self._is_idle = False
            self._reading.deadline = trio.current_time() + self._config.header_timeout_s
            self._waiting_for_data.cancel()

    def _finish(self) -> None:
        """The connection has no further use: stop reading, let the handlers end."""
        self._is_finished = True
        self._reading.cancel()

    def _lose(self) -> None:
        """The client does not get what is sent any more, or only a part of it: nothing more may be sent."""
        self._is_lost = True
        self._reading.cancel()

    async def _write(self, data: bytes) -> None:
        """Send all of `data`; once the client has gone, nothing. Cancelled halfway, the connection is lost."""
        if self._is_lost:
            await trio.lowlevel.checkpoint()
            return
        try:
            num_sent = self._send_now(data)
            if num_sent < len(data):
                await self._write_rest(memoryview(data)[num_sent:])
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            self._lose()
        except trio.Cancelled:
            self._lose()
            raise
        self._num_writes += 1
        if self._num_writes % NUM_WRITES_PER_CHECKPOINT == 0:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()

    def _send_now(self, data: bytes) -> int:
        """How many bytes the kernel has taken at once, which is mostly all: no scope, no lock, no loop is needed.

        None while another write is under way, and none with TLS.
        """
        if self._stream is not self._transport or self._write_lock.locked():
            return 0
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    async def _write_rest(self, rest: memoryview) -> None:
        # Nobody can have come in between since some of it was sent: then the lock is free, and taken without waiting.
        try:
            self._write_lock.acquire_nowait()
        except trio.WouldBlock:
            await self._write_lock.acquire()
        try:
            for start in range(0, 0 if self._is_lost else len(rest), WRITE_SLICE_BYTES):
                with trio.fail_after(self._config.write_timeout_s):
                    await self._stream.send_all(rest[start : start + WRITE_SLICE_BYTES])
        finally:
            self._write_lock.release()

    def _send_fin(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._is_lost = True

    async def _linger(self) -> None:
        """Read and drop what the client still sends, for a while, before the socket is closed.

        Closing a socket with unread bytes resets the connection, and the client may lose the response that told it
        what was wrong with them.
        """
        if not self._is_finished or self._is_lost or self._service.context.terminated.is_set():
            return
        if isinstance(self._protocol, Http1Protocol) and not self._protocol.is_input_unfinished:
            return
        self._lingering.deadline = trio.current_time() + LINGER_S
        with self._lingering:
            while True:
                with trio.move_on_after(LINGER_GAP_S) as gap:
                    if not await self._receive():
                        return
                if gap.cancelled_caught:
                    return


def _address(family: int, name: Any) -> tuple[str, int] | None:
    """The host and port in a socket's name; None for a family without."""
    return (name[0], name[1]) if family in (socket.AF_INET, socket.AF_INET6) else None
