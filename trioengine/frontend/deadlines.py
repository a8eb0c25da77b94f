"""`DeadlineHeap`: which request's time is over next. An entry may be too early, so that a token costs nothing here."""

import heapq
from collections.abc import Sequence
from itertools import count

from trioengine.frontend.parent_request import ParentRequest

_MIN_SIZE_TO_CLEAN = 64


class DeadlineHeap:
    """A heap of the times at which requests must be looked at again.

    What a request has received since it was entered only puts its deadline off, so its entry is at worst too early:
    when its time has come the request is asked, and entered again for later. Its first token alone can bring a deadline
    forward (that of the next token); it is then entered a second time.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ParentRequest]] = []
        self._numbers = count()
        self._open: dict[ParentRequest, None] = {}

    @property
    def next_s(self) -> float | None:
        """The earliest of these times; None if there is none."""
        while self._heap and self._heap[0][2] not in self._open:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, parent: ParentRequest) -> None:
        """Look at a request when its next deadline has come, if it has one."""
        deadline = parent.next_deadline()
        if deadline is not None:
            self._open[parent] = None
            heapq.heappush(self._heap, (deadline[0], next(self._numbers), parent))

    def discard(self, parent: ParentRequest) -> None:
        """A request has ended."""
        if self._open.pop(parent, self) is self:
            return
        if len(self._heap) > max(_MIN_SIZE_TO_CLEAN, 4 * len(self._open)) or not self._open:
            self._heap = [entry for entry in self._heap if entry[2] in self._open]
            heapq.heapify(self._heap)

    def take_due(self, now_s: float) -> Sequence[tuple[ParentRequest, str]]:
        """The requests whose time is over, and the names of their deadlines. They are forgotten."""
        due: list[tuple[ParentRequest, str]] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, _, parent = heapq.heappop(self._heap)
            if parent not in self._open:
                continue
            deadline = parent.next_deadline()
            if deadline is not None and deadline[0] <= now_s:
                del self._open[parent]
                due.append((parent, deadline[1]))
            elif deadline is not None:
                heapq.heappush(self._heap, (deadline[0], next(self._numbers), parent))
        return due
