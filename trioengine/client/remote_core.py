"""`RemoteCore`: a core on another machine, of whose process nothing is known but what it answers."""

import trio

from trioengine.errors import EngineDeadError

HEARTBEAT_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 5.0
"""How late an answer may be, besides the time that a step may take: a core answers between two steps."""


class RemoteCore:
    """Answers to a link's questions, counted (a `client.link.WatchedCore`)."""

    def __init__(self, rank: int, step_timeout_s: float) -> None:
        self._rank = rank
        self._step_timeout_s = step_timeout_s
        self._num_asked = 0
        self._num_answered = 0
        self._heard_at_s: float | None = None
        self._gone = trio.Event()

    def __str__(self) -> str:
        return f"the engine core of rank {self._rank}"

    def ask(self) -> int:
        """Count a question; its number."""
        self._num_asked += 1
        return self._num_asked

    def note_ready(self) -> None:
        """The core takes questions from now on."""
        self._heard_at_s = trio.current_time()

    def note_answer(self, number: int) -> bool:
        """The core has answered this question; False where it has not answered the one before."""
        is_next = number == self._num_answered + 1
        self._num_answered = number
        self._heard_at_s = trio.current_time()
        return is_next

    def note_gone(self) -> None:
        """The connection has ended."""
        self._gone.set()

    def trouble(self) -> EngineDeadError | None:
        """Why the core cannot be relied on now, if so."""
        if self._gone.is_set():
            return self.exit_error()
        limit_s = self._step_timeout_s + ANSWER_TIMEOUT_S
        if self._heard_at_s is not None and trio.current_time() - self._heard_at_s > limit_s:
            return EngineDeadError(f"{self} has not answered for {limit_s:g} s.".capitalize())
        return None

    def exit_error(self) -> EngineDeadError:
        """What is known of its end."""
        return EngineDeadError(f"{self} is no longer connected.".capitalize())

    async def wait(self) -> None:
        """Wait until it is gone."""
        await self._gone.wait()
