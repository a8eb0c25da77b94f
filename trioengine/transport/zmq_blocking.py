"""ZeroMQ without an event loop: sockets that never block, and `poll`, the one place where a core waits.

Knows no event loop, and nothing of what the messages mean.
"""

import contextlib
import enum
import math
import socket
import time
from collections.abc import Iterable, Sequence
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from trioengine.transport import frames
from trioengine.transport.frames import EVENTS, POLLIN, POLLOUT
from trioengine.transport.interface import MAX_READY_MESSAGES


class _Peer(enum.Enum):
    AWAITED = enum.auto()
    CONNECTED = enum.auto()
    REFUSING = enum.auto()
    LOST = enum.auto()


class BlockingSocket:
    """A DEALER towards one front end. Not for use from two threads at once."""

    def __init__(self, zmq_socket: zmq.Socket[bytes], *, owned_context: zmq.Context[zmq.Socket[bytes]] | None = None):
        """Take over `zmq_socket`, not yet connected, and `owned_context` (which must hold no other socket) if given."""
        self._socket = zmq_socket
        self._owned_context = owned_context
        self._peer = _Peer.AWAITED
        address = f"inproc://monitor-{zmq_socket.get(zmq.FD)}"
        zmq_socket.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        context = cast("zmq.Context[zmq.Socket[bytes]]", zmq_socket.context)  # pyright: ignore[reportUnknownMemberType]
        self._monitor = context.socket(zmq.PAIR)
        # Without a bound, as ZeroMQ's thread blocks, and `close` with it, when what it tells finds no room. It is read
        # late: a core that loads may be refused some times a second, for minutes.
        self._monitor.set(zmq.RCVHWM, 0)
        self._monitor.connect(address)

    @property
    def zmq_socket(self) -> zmq.Socket[bytes]:
        """The socket itself, for `poll`."""
        return self._socket

    @property
    def monitor(self) -> zmq.Socket[bytes]:
        """Readable when `is_peer_gone` is to be asked again, for `poll`."""
        return self._monitor

    @property
    def is_peer_gone(self) -> bool:
        """Whether the connection to the front end was lost, or closed there. What has come before can be drained.

        A front end that refuses us is gone too, as long as it does.
        """
        while int(self._monitor.get(EVENTS)) & POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if self._peer is _Peer.LOST:
                continue
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._peer = _Peer.CONNECTED
            else:
                self._peer = _Peer.LOST if self._peer is _Peer.CONNECTED else _Peer.REFUSING
        return self._peer in (_Peer.LOST, _Peer.REFUSING)

    @property
    def is_refused(self) -> bool:
        """Whether `is_peer_gone` says so of one that never took the connection: the keys differ, or it is no engine."""
        return self.is_peer_gone and self._peer is _Peer.REFUSING

    def drain(self, max_messages: int = MAX_READY_MESSAGES) -> list[list[bytes]]:
        """All messages that are here now, at most `max_messages`, the oldest first; an empty list for none."""
        messages: list[list[bytes]] = []
        while len(messages) < max_messages and (parts := frames.try_receive(self._socket)) is not None:
            messages.append(parts)
        return messages

    def try_send(self, parts: Sequence[bytes]) -> bool:
        """Send one message whole and return True; return False, having sent nothing, while the queue is full."""
        if frames.try_send(self._socket, parts):
            return True
        # ZeroMQ looks at most about once a millisecond whether the other side has made room; EVENTS makes it look.
        return bool(int(self._socket.get(EVENTS)) & POLLOUT) and frames.try_send(self._socket, parts)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close; messages that are not sent within `linger_s` are dropped. May be called again."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=math.ceil(linger_s * 1000))
        if self._owned_context is not None:
            self._owned_context.term()


class BlockingRouter:
    """The ROUTER of a front end without an event loop. Not for use from two threads at once."""

    def __init__(self, zmq_socket: zmq.Socket[bytes], *, owned_context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Take over the socket, and the context, which holds no other."""
        self._socket = zmq_socket
        self._owned_context = owned_context

    @property
    def zmq_socket(self) -> zmq.Socket[bytes]:
        """The socket itself, for whoever waits for messages."""
        return self._socket

    def drain(self, max_messages: int = MAX_READY_MESSAGES) -> list[list[bytes]]:
        """As `BlockingSocket.drain`. The first part of each is the identity of the core."""
        messages: list[list[bytes]] = []
        while len(messages) < max_messages and (parts := frames.try_receive(self._socket)) is not None:
            messages.append(parts)
        return messages

    def send(self, parts: Sequence[bytes]) -> None:
        """Send to the core named by the first part, without waiting: the queue towards a core has no bound.

        Raises:
            PeerUnreachableError: no such core is connected. Nothing was sent.
        """
        is_sent = frames.try_send(self._socket, parts)
        assert is_sent, "SNDHWM is 0"

    def close(self) -> None:
        """Close at once; unsent messages are dropped. May be called again."""
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._owned_context.term()


class Waker:
    """Lets other threads end the `poll` of a core."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def wake(self) -> None:
        """End the core's present `poll`, or else its next one. From any thread; without effect after `close`."""
        with contextlib.suppress(OSError):  # What is full wakes already.
            self._sender.send(b"\0")

    def clear(self) -> None:
        """Forget the wakes so far."""
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._receiver.fileno()

    def close(self) -> None:
        """Give the descriptors back. May be called again."""
        self._receiver.close()
        self._sender.close()


def poll(
    inboxes: Iterable[BlockingSocket],
    *,
    full: Iterable[BlockingSocket] = (),
    waker: Waker | None = None,
    timeout_s: float | None = None,
) -> bool:
    """Block until one of `inboxes` has a message or no peer any more, or one of `full` has room to send; False when the
    time ran out first.

    Args:
        inboxes: sockets to wait for messages on.
        full: sockets whose `try_send` has refused, waited for until they would take a message.
        waker: ends the wait too. Its wakes are forgotten then.
        timeout_s: None waits for ever, 0 only looks.
    """
    poller = zmq.Poller()
    flags: dict[BlockingSocket, int] = dict.fromkeys(inboxes, POLLIN)
    for each in full:
        flags[each] = flags.get(each, 0) | POLLOUT
    for each, wanted in flags.items():
        poller.register(each.zmq_socket, wanted)
        poller.register(each.monitor, zmq.POLLIN)
    if waker is not None:
        poller.register(waker, zmq.POLLIN)
    monitors = {each.monitor for each in flags}
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        is_any_gone = any(each.is_peer_gone for each in flags)
        left_s = 0.0 if is_any_gone else max(0.0, end_s - time.monotonic())
        events = dict(poller.poll(None if left_s == math.inf else math.ceil(left_s * 1000)))
        if waker is not None and waker.fileno() in events:
            waker.clear()
        if is_any_gone or events.keys() - monitors:
            return True
        if not events:
            return False
        # A monitor alone may have told of a connection that was made.
