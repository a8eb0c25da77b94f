"""`RequestQueue`: requests in the order in which they come: by priority, then by arrival."""

import bisect
from collections.abc import Iterator
from operator import attrgetter

from trioengine.core.request import Request

_key = attrgetter("key")


def insert_in_order(requests: list[Request], request: Request) -> None:
    """Put a request into its place among others that are in order."""
    if not requests or requests[-1].key < request.key:
        requests.append(request)
    else:
        bisect.insort(requests, request, key=_key)


class RequestQueue:
    """Requests that wait. A preempted one, or one that was held elsewhere, comes back to the place that it had."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, position: int) -> Request:
        return self._requests[position]

    def add(self, request: Request) -> None:
        """Take a request in."""
        insert_in_order(self._requests, request)

    def remove(self, request: Request) -> None:
        """Take a request out. It is here."""
        position = bisect.bisect_left(self._requests, request.key, key=_key)
        assert self._requests[position] is request
        del self._requests[position]
