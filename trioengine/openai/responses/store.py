"""What is kept of responses: bounded in number and bytes, forgotten after a while, the oldest that ended first.

It knows no clock: whoever asks says what time it is, in seconds of a clock that only goes forward.
"""

from collections.abc import Mapping, Sequence

import attrs

from trioengine.errors import NotFoundError, RequestError, UnavailableError
from trioengine.openai.responses.events import Event, ResponseEvents, ResponseStatus
from trioengine.openai.responses.items import Item, num_item_bytes
from trioengine.openai.sse import dumps

_EVENT_OVERHEAD_BYTES = 200


@attrs.frozen(kw_only=True)
class StoreLimits:
    """How much is kept, and how long."""

    max_responses: int = 10_000
    max_bytes: int = 256 * 1024 * 1024
    """An estimate of the memory that all of them take. What two responses share counts twice."""
    time_to_live_s: float = 3600.0
    """Since a response ended. 0 keeps none."""


@attrs.define(eq=False)
class StoredResponse:
    """One of them."""

    state: ResponseEvents
    owner: str
    """Who may ask for it."""
    conversation: tuple[Item, ...]
    """What it answers."""
    is_background: bool = False
    log: list[Event] | None = None
    """Its events so far; None where they are not kept."""
    num_bytes: int = 0
    ended_s: float | None = None

    @property
    def id(self) -> str:
        """Of the response."""
        return self.state.id

    @property
    def items(self) -> Sequence[Item]:
        """The conversation with the answer."""
        return (*self.conversation, *self.state.items)


class ResponseStore:
    """The responses of one process."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        """Start empty."""
        self.num_bytes = 0
        self._limits = limits or StoreLimits()
        self._responses: dict[str, StoredResponse] = {}
        self._ended: dict[str, StoredResponse] = {}
        """In the order in which they ended."""
        self._homes: dict[str, str] = {}
        """An item's id -> the response that was stored last of those that have it."""

    def __len__(self) -> int:
        return len(self._responses)

    def check_room(self) -> None:
        """Return while there is room for a response that has not ended.

        Raises:
            UnavailableError: all that there may be are running.
        """
        if len(self._responses) - len(self._ended) >= self._limits.max_responses:
            raise UnavailableError("There are too many responses in the background.")

    def add(self, response: StoredResponse) -> None:
        """Keep one. The oldest that ended make room for it."""
        self._responses[response.id] = response
        self._grow(response, _num_bytes(response))

    def log(self, response: StoredResponse, events: Sequence[Event]) -> None:
        """Add events to those that are kept of a response. Where there is no room for them, none are any more."""
        if response.log is None:
            return
        response.log += events
        self._grow(response, sum(len(event.data) + _EVENT_OVERHEAD_BYTES for event in events))

    def end(self, response: StoredResponse, now_s: float) -> None:
        """The response has ended: from now on it may be forgotten. Nothing where it was."""
        if response.id not in self._responses or response.ended_s is not None:
            return
        response.ended_s = now_s
        self._ended[response.id] = response
        self._homes.update((item.id, response.id) for item in response.items)
        log_bytes = sum(len(event.data) + _EVENT_OVERHEAD_BYTES for event in response.log or ())
        self._grow(response, _num_bytes(response) + log_bytes - response.num_bytes)
        self.forget_old(now_s)

    def get(self, response_id: str, owner: str, now_s: float, param: str = "response_id") -> StoredResponse:
        """The response with this id.

        Raises:
            NotFoundError: there is none, or not for this owner.
        """
        self.forget_old(now_s)
        response = self._responses.get(response_id)
        if response is None or response.owner != owner:
            raise NotFoundError(f"There is no response {response_id[:100]}.", param=param)
        return response

    def conversation(self, response_id: str, owner: str, now_s: float) -> Sequence[Item]:
        """What goes on from a response.

        Raises:
            NotFoundError: as `get` raises.
            RequestError: it has not ended, or has no answer to go on from.
        """
        param = "previous_response_id"
        response = self.get(response_id, owner, now_s, param)
        if not response.state.status.is_final:
            raise RequestError(f"{param}: the response has not ended.", param=param)
        if response.state.status in (ResponseStatus.FAILED, ResponseStatus.CANCELLED):
            raise RequestError(f"{param}: the response has {response.state.status.value}.", param=param)
        return response.items

    def known_items(self, item_ids: Sequence[str], owner: str, now_s: float) -> Mapping[str, Item]:
        """Those of these items that are stored for this owner, by id."""
        self.forget_old(now_s)
        found: dict[str, Item] = {}
        for item_id in item_ids:
            response = self._responses.get(self._homes.get(item_id, ""))
            if response is not None and response.owner == owner:
                found.update((item.id, item) for item in response.items if item.id == item_id)
        return found

    def delete(self, response: StoredResponse) -> None:
        """Forget one. Nothing where it is forgotten already."""
        if self._responses.pop(response.id, None) is None:
            return
        self._ended.pop(response.id, None)
        self.num_bytes -= response.num_bytes
        for item in response.items:
            if self._homes.get(item.id) == response.id:
                del self._homes[item.id]

    def forget_old(self, now_s: float) -> None:
        """Forget what ended longer ago than responses live."""
        limit_s = now_s - self._limits.time_to_live_s
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if oldest.ended_s is None or oldest.ended_s > limit_s:
                return
            self.delete(oldest)

    def _grow(self, response: StoredResponse, num_bytes: int) -> None:
        if self._responses.get(response.id) is not response:
            return  # It was deleted while it ran.
        response.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self._is_over() and self._ended:
            self.delete(next(iter(self._ended.values())))
        if self.num_bytes > self._limits.max_bytes and response.log is not None:
            # Only what runs is left.
            freed = sum(len(event.data) + _EVENT_OVERHEAD_BYTES for event in response.log)
            response.log = None
            response.num_bytes -= freed
            self.num_bytes -= freed

    def _is_over(self) -> bool:
        return self.num_bytes > self._limits.max_bytes or len(self._responses) > self._limits.max_responses


def _num_bytes(response: StoredResponse) -> int:
    return len(dumps(response.state.fields())) + sum(map(num_item_bytes, response.items))
