"""The wire between a front end and its cores without ZeroMQ: two objects and a queue, for tests under `MockClock`.

Keeps the promises of `transport.interface`, which `tests/conformance/test_transport.py` checks on both kinds. A core
scripted as a trio task waits with `wait_readable` and `wait_writable`, where a real one blocks in `transport.poll`.
"""

from collections import deque
from collections.abc import Sequence

import trio
from trio.lowlevel import ParkingLot

from trioengine.errors import PeerUnreachableError
from trioengine.transport.interface import CORE_SEND_HIGH_WATER_MARK, MAX_READY_MESSAGES


class MemoryRouter:
    """A front end's mailbox in memory (a `FrontEndSocket`)."""

    def __init__(self) -> None:
        self._inbox: deque[list[bytes]] = deque()
        self._dealers: dict[bytes, MemoryDealer] = {}
        self._changed = ParkingLot()
        self._is_closed = False

    async def receive(self) -> list[bytes]:
        """Wait for the next message; a cancelled call has taken none."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._inbox or self._is_closed:
            parts = self.receive_nowait()
            await trio.lowlevel.cancel_shielded_checkpoint()
            return parts
        while not self._inbox and not self._is_closed:
            await self._changed.park()
        return self.receive_nowait()

    def receive_nowait(self) -> list[bytes]:
        """The next message, or `trio.WouldBlock`."""
        messages = self.receive_ready_nowait(1)
        if not messages:
            raise trio.WouldBlock
        return messages[0]

    def receive_ready_nowait(self, max_messages: int = MAX_READY_MESSAGES) -> list[list[bytes]]:
        """All messages that are here now, at most `max_messages`."""
        self._check_open()
        messages = [self._inbox.popleft() for _ in range(min(max_messages, len(self._inbox)))]
        for identity, *_ in messages:
            if identity in self._dealers:
                self._dealers[identity].note_taken()
        return messages

    async def send(self, parts: Sequence[bytes]) -> None:
        """Send to the core named by the first part; never waits, but is a checkpoint."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.send_nowait(parts)
        await trio.lowlevel.cancel_shielded_checkpoint()

    def send_nowait(self, parts: Sequence[bytes]) -> None:
        """Send to the core named by the first part, or raise `PeerUnreachableError`."""
        self._check_open()
        identity, *rest = parts
        if identity not in self._dealers:
            raise PeerUnreachableError(f"no peer is connected as {identity!r}")
        self._dealers[identity].deliver(rest)

    def close(self) -> None:
        """Close, waking everyone who waits."""
        self._is_closed = True
        self._changed.unpark_all()

    def connect(self, identity: bytes) -> "MemoryDealer":
        """A new core's end of the link. Nobody else may be connected under this identity."""
        assert identity not in self._dealers
        self._dealers[identity] = dealer = MemoryDealer(self, identity)
        return dealer

    def deliver(self, parts: list[bytes]) -> None:
        """For `MemoryDealer`: put one message, identity first, into the inbox."""
        self._inbox.append(parts)
        self._changed.unpark()

    def disconnect(self, identity: bytes) -> None:
        """For `MemoryDealer`: forget a core. What it has sent stays."""
        self._dealers.pop(identity, None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this mailbox is closed")


class MemoryDealer:
    """A core's mailbox in memory (a `CoreSocket`). Made by `MemoryRouter.connect`."""

    def __init__(self, router: MemoryRouter, identity: bytes) -> None:
        self._router = router
        self._identity = identity
        self._inbox: deque[list[bytes]] = deque()
        self._num_unread = 0
        self._changed = ParkingLot()

    def drain(self, max_messages: int = MAX_READY_MESSAGES) -> list[list[bytes]]:
        """All messages that are here now, at most `max_messages`."""
        return [self._inbox.popleft() for _ in range(min(max_messages, len(self._inbox)))]

    def try_send(self, parts: Sequence[bytes]) -> bool:
        """Send and return True, or return False while the front end has `CORE_SEND_HIGH_WATER_MARK` unread."""
        if self._num_unread >= CORE_SEND_HIGH_WATER_MARK:
            return False
        self._num_unread += 1
        self._router.deliver([self._identity, *parts])
        return True

    def close(self) -> None:
        """Leave: sending to this core fails from now on."""
        self._router.disconnect(self._identity)

    async def wait_readable(self) -> None:
        """Wait until `drain` returns something."""
        await trio.lowlevel.checkpoint()
        while not self._inbox:
            await self._changed.park()

    async def wait_writable(self) -> None:
        """Wait until `try_send` returns True."""
        await trio.lowlevel.checkpoint()
        while self._num_unread >= CORE_SEND_HIGH_WATER_MARK:
            await self._changed.park()

    def deliver(self, parts: list[bytes]) -> None:
        """For `MemoryRouter`: put one message into the inbox."""
        self._inbox.append(parts)
        self._changed.unpark_all()

    def note_taken(self) -> None:
        """For `MemoryRouter`: one message has been read."""
        self._num_unread -= 1
        self._changed.unpark_all()
