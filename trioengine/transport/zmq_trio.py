"""A ZeroMQ socket for trio: `await receive()` and `await send()`, without threads and without polling.

ZeroMQ signals all that happens to a socket through one descriptor, and it does so on edges: once any call on the
socket has looked at the news, the descriptor is silent, whoever the news was for. Two rules follow, and keep every
wait honest:

* Whoever has used the socket while others wait reads EVENTS (which looks at all the news there is), and wakes those
  whom it lets go on. A task that goes to wait has found EVENTS, or a failed call, to say no after the last look.
* One waiting task watches the descriptor, the rest are parked. A watcher that leaves, for whatever reason, hands on.

Knows nothing of addresses, of the meaning of messages, or of who is at the other end.
"""

from collections.abc import Sequence

import trio
import zmq
from trio.lowlevel import ParkingLot, cancel_shielded_checkpoint, checkpoint_if_cancelled, enable_ki_protection

from trioengine.transport import frames
from trioengine.transport.frames import EVENTS, POLLIN, POLLOUT
from trioengine.transport.interface import MAX_READY_MESSAGES


class TrioSocket:
    """A DEALER, PAIR, PUSH, PULL or ROUTER socket whose waits are trio's.

    Any number of tasks may receive and send at once. Messages are lists of bytes; each is received by one task, whole;
    those from one sending task keep their order. The socket must not be used elsewhere from now on.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, owned_context: zmq.Context[zmq.Socket[bytes]] | None = None):
        """Take over `socket`, and `owned_context` (which must hold no other socket) if one is given.

        Raises:
            ValueError: a ROUTER with a bounded send queue. EVENTS does not tell which of its peers has room, so nobody
                could wait for one; with SNDHWM 0 sending never waits.
        """
        if socket.get(zmq.TYPE) == zmq.ROUTER and socket.get(zmq.SNDHWM) != 0:
            raise ValueError("a ROUTER needs SNDHWM 0 here")
        self._socket = socket
        self._owned_context = owned_context
        self._descriptor = int(socket.get(zmq.FD))
        self._receivers = ParkingLot()
        self._senders = ParkingLot()
        self._watching_for: ParkingLot | None = None
        """The lot in which the task that watches the descriptor would stand if it were parked."""
        self._is_watcher_woken = False
        self._num_waiting = 0
        self._is_closed = False

    @enable_ki_protection
    async def receive(self) -> list[bytes]:
        """Wait for the next message. A cancelled call has taken none.

        Raises:
            trio.ClosedResourceError: the socket is closed, or was closed while this waited.
        """
        await checkpoint_if_cancelled()
        parts = self._receive()
        if parts is not None:
            await cancel_shielded_checkpoint()
            return parts
        while parts is None:
            await self._wait(self._receivers)
            parts = self._receive()
        return parts  # with no checkpoint since it was taken, so that it cannot be lost

    @enable_ki_protection
    def receive_nowait(self) -> list[bytes]:
        """The next message, or `trio.WouldBlock` if there is none now."""
        parts = self._receive()
        if parts is None:
            raise trio.WouldBlock
        return parts

    @enable_ki_protection
    def receive_ready_nowait(self, max_messages: int = MAX_READY_MESSAGES) -> list[list[bytes]]:
        """All messages that are here now, at most `max_messages`, the oldest first; an empty list for none."""
        messages: list[list[bytes]] = []
        while len(messages) < max_messages and (parts := self._receive()) is not None:
            messages.append(parts)
        return messages

    @enable_ki_protection
    async def send(self, parts: Sequence[bytes]) -> None:
        """Send one message whole, waiting while the queue is full. A cancelled call has sent nothing.

        Raises:
            PeerUnreachableError: a ROUTER knows no peer of the identity in the first part; nothing was sent.
            trio.ClosedResourceError: the socket is closed, or was closed while this waited.
        """
        await checkpoint_if_cancelled()
        if self._send(parts):
            await cancel_shielded_checkpoint()
            return
        while True:
            await self._wait(self._senders)
            if self._send(parts):
                return

    @enable_ki_protection
    def send_nowait(self, parts: Sequence[bytes]) -> None:
        """Send one message whole, or raise `trio.WouldBlock` (or what `send` raises) and send nothing."""
        if not self._send(parts):
            raise trio.WouldBlock

    @enable_ki_protection
    def close(self) -> None:
        """Close at once: everyone who waits gets `trio.ClosedResourceError`, unsent messages are dropped.

        May be called again. With an owned context this returns when ZeroMQ's threads have ended, about 0.2 ms.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._watching_for is not None:
            trio.lowlevel.notify_closing(self._descriptor)
        self._receivers.unpark_all()
        self._senders.unpark_all()
        self._socket.close(linger=0)
        if self._owned_context is not None:
            self._owned_context.term()

    def _receive(self) -> list[bytes] | None:
        while True:
            self._check_open()
            parts = frames.try_receive(self._socket)
            if self._num_waiting == 0:
                return parts
            events = self._wake_waiters()
            if parts is not None or not events & POLLIN:
                return parts
            # A message came between the two looks; the descriptor will not tell of it again.

    def _send(self, parts: Sequence[bytes]) -> bool:
        is_sent = False
        while True:
            self._check_open()
            events = 0
            try:
                is_sent = frames.try_send(self._socket, parts)
            finally:
                if self._num_waiting != 0:
                    events = self._wake_waiters()
            if is_sent or not events & POLLOUT:
                return is_sent

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this ZeroMQ socket is closed")

    async def _wait(self, lot: ParkingLot) -> None:
        """Return when it is worth trying again. The caller must then use the socket, or find it closed."""
        self._num_waiting += 1
        try:
            if self._watching_for is None:
                await self._watch(lot)
            else:
                await lot.park()
        finally:
            self._num_waiting -= 1

    async def _watch(self, lot: ParkingLot) -> None:
        self._watching_for = lot
        try:
            await trio.lowlevel.wait_readable(self._descriptor)
        except trio.ClosedResourceError:
            pass  # woken by _wake_one() or close(), which say so in this way
        except BaseException:
            self._stop_watching()
            if self._num_waiting > 1 and not self._is_closed:
                self._wake_waiters()  # one of them watches from now on
            raise
        self._stop_watching()

    def _stop_watching(self) -> None:
        self._watching_for = None
        self._is_watcher_woken = False

    def _wake_waiters(self) -> int:
        """Read EVENTS, wake one task for each thing it allows, see to it that somebody watches; return EVENTS.

        One of each kind is enough: a woken task uses the socket, so it comes here again and wakes the next.
        """
        events = int(self._socket.get(EVENTS))
        is_one_woken = False
        if events & POLLIN:
            is_one_woken |= self._wake_one(self._receivers)
        if events & POLLOUT:
            is_one_woken |= self._wake_one(self._senders)
        if self._watching_for is None and not is_one_woken:
            (self._receivers or self._senders).unpark()  # it finds nothing, and watches
        return events

    def _wake_one(self, lot: ParkingLot) -> bool:
        if self._watching_for is lot:
            if not self._is_watcher_woken:
                self._is_watcher_woken = True
                trio.lowlevel.notify_closing(self._descriptor)
            return True
        return bool(lot.unpark())
