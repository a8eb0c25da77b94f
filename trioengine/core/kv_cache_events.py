"""`KVCacheEventLog`: what happened to cached blocks, for routers that follow which core has which prefix."""

from collections import deque
from itertools import islice

from trioengine.types.messages import KVCacheEvent, KVCacheEvents

MAX_NUM_EVENTS = 65_536
"""About 20 MB with blocks of 16 tokens."""


class KVCacheEventLog:
    """The newest events, numbered from 1. Any number of readers ask for those after the last one they know."""

    def __init__(self, max_num_events: int = MAX_NUM_EVENTS) -> None:
        self._events: deque[KVCacheEvent] = deque(maxlen=max_num_events)
        self._last = 0

    def append(self, event: KVCacheEvent) -> None:
        """Record what has happened. The oldest event makes room."""
        self._events.append(event)
        self._last += 1

    def after(self, number: int) -> KVCacheEvents:
        """The events after the one of this number, as far as they are kept."""
        num_wanted = max(0, self._last - max(0, number))
        num_kept = min(num_wanted, len(self._events))
        events = tuple(islice(self._events, len(self._events) - num_kept, None))
        return KVCacheEvents(last=self._last, num_lost=num_wanted - num_kept, events=events)
