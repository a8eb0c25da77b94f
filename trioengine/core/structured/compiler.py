"""Compiles grammars in threads, so that the core's loop goes on: each compilation has a time limit of its own.

It does not know how that is done; that is the given function's.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

from trioengine.errors import RequestError, TrioEngineError, UnavailableError
from trioengine.types.structured import PARAM

NUM_THREADS = 2
MAX_NUM_STUCK = 4
"""Compilations past their time limit that may still run, each in a thread that cannot be stopped."""
STACK_BYTES = 64 << 20
"""Grammars are compiled recursively, natively: a chain of rules as long as the size limits allow must fit. Memory is
taken as it is used."""

KeyT = TypeVar("KeyT")
CompiledT = TypeVar("CompiledT")

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class Job(Generic[KeyT, CompiledT]):
    """One compilation."""

    key: KeyT
    compiled: CompiledT | None = None
    error: TrioEngineError | None = None
    """Set instead of `compiled` when it failed."""
    is_wanted: bool = True
    """A job that nobody wants any more is left out, if it has not begun."""


class CompilerThreads(Generic[KeyT, CompiledT]):
    """Runs `compile_key` for one key after the other, in a few threads that start with the first job.

    The methods are called by one thread; `wake` is called by others.
    """

    def __init__(
        self,
        compile_key: Callable[[KeyT], CompiledT],
        *,
        wake: Callable[[], None],
        time_limit_s: float,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        """Start nothing yet.

        Args:
            compile_key: called in a thread. What it raises, if it is no `TrioEngineError`, becomes a `RequestError`.
            wake: called after a job has ended, so that someone calls `take_ended`.
            time_limit_s: a job that takes longer ends with a `RequestError`.
            prepare: called in the thread before each job, outside its time limit, by one thread at a time.
        """
        self._compile_key = compile_key
        self._prepare = prepare
        self._wake = wake
        self._time_limit_s = time_limit_s
        self._changed = threading.Condition()
        self._preparing = threading.Lock()
        self._queue: deque[Job[KeyT, CompiledT]] = deque()
        self._ended: deque[Job[KeyT, CompiledT]] = deque()
        self._num_threads = 0
        self._num_stuck = 0
        self._is_closed = False

    def submit(self, key: KeyT) -> Job[KeyT, CompiledT]:
        """Queue a compilation.

        Raises:
            UnavailableError: too many compilations hang.
        """
        job = Job[KeyT, CompiledT](key)
        with self._changed:
            if self._num_stuck >= MAX_NUM_STUCK:
                raise UnavailableError("Too many grammars are being compiled that take too long.")
            self._queue.append(job)
            if self._num_threads < NUM_THREADS:
                self._start_thread()
            self._changed.notify()
        return job

    def take_ended(self) -> list[Job[KeyT, CompiledT]]:
        """The jobs that have ended since the last call."""
        if not self._ended:
            return []
        with self._changed:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    def close(self) -> None:
        """Let the threads end, without waiting for one that compiles. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        self._num_threads += 1
        # The size counts for threads that are started from now on, in the whole process, so it is put back.
        previous = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._run, name="grammar compiler", daemon=True).start()
        finally:
            threading.stack_size(previous)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._is_closed:
                        return
                    self._changed.wait()
                job = self._queue.popleft()
            if job.is_wanted and not self._compile(job):
                return

    def _compile(self, job: Job[KeyT, CompiledT]) -> bool:
        """Do a job; whether this thread has a place left, which it loses when it takes too long."""
        compiled = error = None
        try:
            with self._preparing:
                self._prepare()
        except Exception as failure:  # The border of the job: what is wrong with one is that job's answer.
            self._end(job, None, _as_engine_error(failure))
            return True
        timer = threading.Timer(self._time_limit_s, self._expire, [job])
        timer.daemon = True
        timer.start()
        try:
            compiled = self._compile_key(job.key)
        except BaseException as failure:  # The same border; a panic of native code is no `Exception`.
            error = _as_engine_error(failure)
        timer.cancel()
        return self._end(job, compiled, error)

    def _end(self, job: Job[KeyT, CompiledT], compiled: CompiledT | None, error: TrioEngineError | None) -> bool:
        with self._changed:
            if job.error is not None:
                self._num_stuck -= 1
                return False
            job.compiled, job.error = compiled, error
            self._ended.append(job)
        self._wake()
        return True

    def _expire(self, job: Job[KeyT, CompiledT]) -> None:
        with self._changed:
            if job.compiled is not None or job.error is not None or self._is_closed:
                return
            job.error = RequestError(
                f"The grammar of {PARAM} took more than {self._time_limit_s:g} s to compile.", param=PARAM
            )
            self._ended.append(job)
            self._num_stuck += 1
            self._num_threads -= 1
            self._start_thread()
        self._wake()


def _as_engine_error(error: BaseException) -> TrioEngineError:
    if isinstance(error, TrioEngineError):
        return error
    logger.debug("A grammar did not compile.", exc_info=error)
    words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:300]
    return RequestError(f"The grammar of {PARAM} cannot be compiled: {words}.", param=PARAM)
