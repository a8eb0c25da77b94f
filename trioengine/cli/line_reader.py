"""Lines of standard input for a Trio program.

It waits for the descriptor, so no thread is left behind in a read that nobody can cancel.
"""

import os

import trio

MAX_READ_BYTES = 65536


class LineReader:
    """Lines from a descriptor, without a thread and without blocking other tasks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._may_wait = True
        self._waiting = b""
        self._has_ended = False

    async def read_line(self) -> str | None:
        """The next line without its end, or None at the end of input. Cancelling loses nothing."""
        while b"\n" not in self._waiting and not self._has_ended:
            await self._wait()
            part = os.read(self._fd, MAX_READ_BYTES)
            self._has_ended = not part
            self._waiting += part
        if not self._waiting:
            return None
        line, _, self._waiting = self._waiting.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")

    async def _wait(self) -> None:
        if self._may_wait:
            try:
                await trio.lowlevel.wait_readable(self._fd)
                return
            except PermissionError:
                # What is always readable, as a regular file and /dev/null are, epoll refuses.
                self._may_wait = False
        await trio.lowlevel.checkpoint()
