"""`Outbox`: one client's output until it is taken, over as many steps as that lasts.

It knows columns and their order, not what happens to a message afterwards.
"""

from array import array
from collections.abc import Mapping

from trioengine.types.messages import Finished, StepOutput


class Outbox:
    """Pending tokens and endings for one client.

    A slot belongs to one request until its `Finished` has been taken, so tokens of one slot are tokens of one request.
    """

    def __init__(self) -> None:
        # A token is appended with its slot; tokens of one slot are brought together only when there are several.
        self.slots = array("i")
        self.tokens = array("i")
        self._finished: list[Finished] = []
        self._sequence = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self.slots and not self._finished

    def finish(self, finished: Finished) -> None:
        """Add the last word about a slot; no token for it follows."""
        self._finished.append(finished)

    def take(self, step: int, timestamp_s: float) -> StepOutput | None:
        """Everything pending as the client's next message; None when there is nothing."""
        if self.is_empty:
            return None
        slots, tokens, counts = self.slots, self.tokens, b""
        if len(set(slots)) < len(slots):
            rows = _tokens_by_slot(slots, tokens)
            slots = array("i", rows)
            tokens = array("i", [token for row in rows.values() for token in row])
            counts = array("i", [len(row) for row in rows.values()]).tobytes()
        output = StepOutput(
            sequence=self._sequence,
            step=step,
            timestamp_s=timestamp_s,
            slots=slots.tobytes(),
            tokens=tokens.tobytes(),
            counts=counts,
            finished=tuple(self._finished),
        )
        self._sequence += 1
        self.slots, self.tokens, self._finished = array("i"), array("i"), []
        return output


def _tokens_by_slot(slots: "array[int]", tokens: "array[int]") -> Mapping[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for slot, token in zip(slots, tokens, strict=True):
        rows.setdefault(slot, []).append(token)
    return rows
