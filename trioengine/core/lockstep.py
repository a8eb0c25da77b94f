"""Cores that compute in step: their executors' steps are collective operations, which wait for every one of them.

A *wave* is a time in which all cores run turns. In each turn every core computes one step, an empty one where it has
nothing to do, and they learn together whether any has work left. Between waves all are idle, and wait for messages.

A request that reaches an idle core begins a turn there, which the others must join. So a front end sends `StartWave` to
*every* core, the request's own included, behind each request. Cores read these at different times, perhaps in different
waves: they count them, and a wave does not end while their counts differ. Hence whoever has not got a `StartWave` yet
that another has got is still in a turn, or comes into one when it gets it, and nobody waits alone.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Lockstep(Protocol):
    """What an executor has besides, if its steps need those of the other cores."""

    def execute_dummy(self) -> None:
        """Take part in the others' next step with nothing of one's own. In order with `submit`, and like that it may
        return before it is done."""
        ...

    def maximum(self, values: Sequence[int]) -> Sequence[int]:
        """The largest of all cores' values, place by place. Waits until each core has called it as often as this."""
        ...


class Wave:
    """One core's part in waves. `end_turn` follows each step that computes something, or else `execute_dummy`."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.is_on = False
        """Whether the others may wait for a turn of this core."""
        self._lockstep = lockstep
        self._num_starts: Counter[int] = Counter()  # By client.
        self._num_gone = 0

    def start(self, client: int) -> None:
        """Take in a `StartWave`."""
        self._num_starts[client] += 1
        self.is_on = True

    def drop_client(self, client: int) -> None:
        """Expect nothing more of a client that is gone.

        It may have started a wave at some cores only, so this starts one everywhere, and counts like it.
        """
        del self._num_starts[client]
        self._num_gone += 1
        self.is_on = True

    def execute_dummy(self) -> None:
        """Compute the empty step of a turn."""
        self._lockstep.execute_dummy()

    def end_turn(self, *, has_work: bool) -> None:
        """Agree with the others on whether there is another turn. Waits for them."""
        self.settle(self._lockstep.maximum(self.vote(has_work=has_work)))

    def vote(self, *, has_work: bool) -> Sequence[int]:
        """What this core brings to the agreement."""
        num_starts, num_gone = self._num_starts.total(), self._num_gone
        return int(has_work), num_starts, -num_starts, num_gone, -num_gone

    def settle(self, maximum: Sequence[int]) -> None:
        """Take in the largest of all cores' votes, place by place."""
        has_any_work, most_starts, minus_least_starts, most_gone, minus_least_gone = maximum
        self.is_on = bool(has_any_work) or most_starts != -minus_least_starts or most_gone != -minus_least_gone
