"""`Pause`: whether the core takes requests on and computes them, as pauses and sleep want it."""

import attrs

from trioengine.errors import RequestError
from trioengine.types.messages import PauseMode

MEMORY_TAGS = ("weights", "kv_cache")
"""What sleeps and wakes up."""


@attrs.define
class Pause:
    """The state of pauses and sleep. They do not know of each other: the core computes when there is neither."""

    mode: PauseMode | None = None
    """Of the pause, until it is resumed."""
    sleep_mode: PauseMode | None = None
    """Of the sleep, from the moment it was asked for until nothing sleeps any more."""
    asleep: frozenset[str] = frozenset()
    """What sleeps."""
    first_held: int = 0
    """While present requests go on to their ends: the first arrival that does not."""

    @property
    def is_on(self) -> bool:
        """Whether new requests wait."""
        return self.mode is not None or self.sleep_mode is not None

    @property
    def is_frozen(self) -> bool:
        """Whether nothing is computed at all."""
        return bool(self.asleep) or any(
            mode is not None and mode is not PauseMode.WAIT for mode in (self.mode, self.sleep_mode)
        )

    def holds(self, arrival: int) -> bool:
        """Whether the request of this arrival waits outside the scheduler, until a pause ends that lets others go on.

        Also while nothing is computed at all, so that what ends first does not let it in.
        """
        return PauseMode.WAIT in (self.mode, self.sleep_mode) and arrival >= self.first_held

    def begin(self, mode: PauseMode, num_arrivals: int, *, is_sleep: bool) -> None:
        """Pause, with so many requests having arrived until now."""
        if not self.is_on:
            self.first_held = num_arrivals
        if is_sleep:
            self.sleep_mode = mode
        else:
            self.mode = mode

    def wake_up(self, tags: tuple[str, ...]) -> frozenset[str]:
        """Which of these sleep.

        Raises:
            RequestError: there is no such tag.
        """
        for tag in tags:
            if tag not in MEMORY_TAGS:
                raise RequestError(f"tags must be of {', '.join(MEMORY_TAGS)}, not {tag[:80]!r}.", param="tags")
        return self.asleep & frozenset(tags or MEMORY_TAGS)
