"""Slow work beside the steps, and operations whose replies wait for it.

Work is done in one thread, in its order, and never touches what the core decides: only the loop does, when it polls.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import attrs

R = TypeVar("R")


def _none() -> None:
    return None


@attrs.frozen
class Later:
    """What a handler returns whose reply has to wait."""

    attempt: Callable[[], bool]
    """Goes on with the operation, and says whether it is done. May raise."""
    value: Callable[[], object] = _none
    """The reply, when it is done."""


class Job(Generic[R]):
    """Work that was begun."""

    def __init__(self, work: Callable[[], R]) -> None:
        self._work = work
        self._values: list[R] = []
        self._error: BaseException | None = None
        self.is_done = False

    def run(self) -> None:
        """Do it."""
        try:
            self._values.append(self._work())
        except BaseException as error:  # It belongs to whoever takes the result.
            self._error = error
        self.is_done = True

    def result(self) -> R:
        """What came of it, or raise what it raised. It is done."""
        assert self.is_done
        if self._error is not None:
            raise self._error
        return self._values[0]


class Background:
    """A thread for slow work."""

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        """`wake` is called in the thread when a job is done. Without, work is done at once by whoever gives it."""
        self._wake = wake
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], R]) -> Job[R]:
        """Have work done, after all that was given before."""
        job = Job(work)
        if self._wake is None:
            job.run()
            return job
        if self._thread is None:
            # A daemon: work that never ends must not keep a process alive that wants to end.
            self._thread = threading.Thread(target=self._loop, name="trioengine-background", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Wait for the work that was begun, and end the thread. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        assert self._wake is not None
        while (job := self._jobs.get()) is not None:
            job.run()
            self._wake()
