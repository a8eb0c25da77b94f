"""`StatusPage`: a few numbers in memory that a core process and its parent share.

The core's watch thread writes a tick, its loop writes when a step began; the parent reads both without asking anyone,
so a core that hangs in a step, or is stopped, is noticed. Each number is eight aligned bytes, written at once: by a
memoryview, as `struct` clears the place before it writes there, and the parent would read that the core ticked never.
"""

import mmap
import os
import tempfile
import time

_PAGE_BYTES = 4096
_TICK = 0
_STEP_STARTED = 1

MAX_TICK_AGE_S = 5.0
"""A core whose last tick is older is stopped, or swapped out."""


class StatusPage:
    """One page, mapped here. Times are of the monotonic clock, which all processes of a machine share."""

    def __init__(self, fd: int) -> None:
        """Map the page behind this descriptor, and own it."""
        self.fd = fd
        self._memory = mmap.mmap(fd, _PAGE_BYTES)
        self._numbers = memoryview(self._memory).cast("d")

    @classmethod
    def create(cls) -> "StatusPage":
        """A new page. Its descriptor may be passed to one core."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("trioengine-status")
        else:  # macOS
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            os.ftruncate(fd, _PAGE_BYTES)
            page = cls(fd)
        except BaseException:
            os.close(fd)
            raise
        page.tick()
        return page

    def tick(self) -> None:
        """The core is alive."""
        self._numbers[_TICK] = time.monotonic()

    def begin_step(self) -> None:
        """A step begins."""
        self._numbers[_STEP_STARTED] = time.monotonic()

    def end_step(self) -> None:
        """No step is under way."""
        self._numbers[_STEP_STARTED] = 0.0

    def trouble(self, *, step_timeout_s: float) -> str | None:
        """What is wrong with the core, if anything. A core that was stopped and goes on is well again."""
        now = time.monotonic()
        tick = self._numbers[_TICK]
        if now - tick > MAX_TICK_AGE_S:
            return f"has shown no sign of life for {now - tick:.1f} s"
        step_started = self._numbers[_STEP_STARTED]
        if step_started and now - step_started > step_timeout_s:
            return f"has been in one step for {now - step_started:.1f} s (step_timeout_s is {step_timeout_s:g})"
        return None

    def close(self) -> None:
        """Unmap and close. May be called again."""
        if not self._memory.closed:
            self._numbers.release()
            self._memory.close()
            os.close(self.fd)
