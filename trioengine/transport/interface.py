"""What both ends of the wire can do, whatever carries the bytes: ZeroMQ, or memory in tests.

`tests/conformance` holds the promises that every implementation keeps.
"""

from collections.abc import Sequence
from typing import Protocol

MAX_READY_MESSAGES = 1024
"""Messages taken at one go, so that a flood cannot keep its reader from everything else."""

CORE_SEND_HIGH_WATER_MARK = 16
"""Messages that wait in a core for one front end before `try_send` refuses."""


class FrontEndSocket(Protocol):
    """A front end's mailbox. The first part of each message, in and out, is the identity of the core."""

    async def receive(self) -> list[bytes]:
        """Wait for the next message. A cancelled call has taken none.

        Raises:
            trio.ClosedResourceError: the socket is closed, or was closed while this waited.
        """
        ...

    def receive_nowait(self) -> list[bytes]:
        """The next message, if one is here.

        Raises:
            trio.WouldBlock: none is.
            trio.ClosedResourceError: the socket is closed.
        """
        ...

    def receive_ready_nowait(self, max_messages: int = MAX_READY_MESSAGES) -> list[list[bytes]]:
        """All messages that are here now, the oldest first; an empty list when there is none.

        Raises:
            trio.ClosedResourceError: the socket is closed.
        """
        ...

    async def send(self, parts: Sequence[bytes]) -> None:
        """Send one message whole, waiting while the queue is full. A cancelled call has sent nothing.

        Raises:
            PeerUnreachableError: no such core is connected; nothing was sent.
            trio.ClosedResourceError: the socket is closed, or was closed while this waited.
        """
        ...

    def send_nowait(self, parts: Sequence[bytes]) -> None:
        """Send one message whole, or nothing.

        Raises:
            trio.WouldBlock: the queue is full (never towards a core: that queue has no bound).
            PeerUnreachableError: no such core is connected.
            trio.ClosedResourceError: the socket is closed.
        """
        ...

    def close(self) -> None:
        """Close at once, waking everyone who waits. Unsent messages are dropped. May be called again."""
        ...


class CoreSocket(Protocol):
    """A core's mailbox towards one front end. Nothing here blocks."""

    def drain(self, max_messages: int = MAX_READY_MESSAGES) -> list[list[bytes]]:
        """All messages that are here now, the oldest first; an empty list when there is none."""
        ...

    def try_send(self, parts: Sequence[bytes]) -> bool:
        """Send one message whole and return True; return False, having sent nothing, while the queue is full."""
        ...

    def close(self) -> None:
        """Close at once. Unsent messages are dropped. May be called again."""
        ...
