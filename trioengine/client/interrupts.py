"""`Interrupts`: Ctrl-C, and other threads, in the middle of blocking work.

An engine without an event loop does its books in the thread that Python interrupts, and half-done books would be the
end of it. So Ctrl-C waits while they are done, a step at most, and is handed to the application's own handler where
raising is safe. Outside of blocking calls nothing is changed. For the same reason threads take turns.
"""

import contextlib
import inspect
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType, TracebackType
from typing import Any

from trioengine.errors import EngineClosedError


class Interrupts:
    """`with interrupts:` is blocking work; it may be entered again inside. Only the main thread sees Ctrl-C at all.

    A thread that enters waits until no other is inside. Ctrl-C ends the wait.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_closing = False
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        """The application's; None while nothing is changed."""
        self._depth = 0
        self._is_due = False
        self._may_raise = False

    def __enter__(self) -> "Interrupts":
        try:
            self._lock.acquire()
            self._begin()
        except BaseException:  # Ctrl-C may come on either side of having the lock.
            with contextlib.suppress(RuntimeError):
                self._lock.release()
            raise
        return self

    def _begin(self) -> None:
        if self._handler is not None:
            self._depth += 1
            return
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            return  # Nobody in Python hears of it.
        self._is_due = False
        try:
            signal.signal(signal.SIGINT, self._note)
        except ValueError:  # This is not the main thread.
            return
        self._handler = handler

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._depth > 0:
                self._depth -= 1
            elif self._handler is not None:
                handler, self._handler = self._handler, None
                signal.signal(signal.SIGINT, handler)
                if self._is_due:
                    self._is_due = False
                    handler(signal.SIGINT, inspect.currentframe())
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def last(self) -> Generator[None]:
        """The last blocking work: a thread that is inside is made to leave."""
        self._is_closing = True
        with self:
            yield

    def check(self) -> None:
        """Let Ctrl-C raise here, if it has come.

        Raises:
            KeyboardInterrupt, or what the application's handler raises.
            EngineClosedError: another thread closes the engine.
        """
        if self._is_closing:
            raise EngineClosedError("The engine is closed.")
        if self._is_due and self._handler is not None:
            self._is_due = False
            self._handler(signal.SIGINT, inspect.currentframe())

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """A block that does nothing but wait: Ctrl-C ends it at once."""
        self._may_raise = True
        try:
            self.check()
            yield
        finally:
            self._may_raise = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._may_raise and self._handler is not None:
            self._handler(number, frame)
        else:
            self._is_due = True
