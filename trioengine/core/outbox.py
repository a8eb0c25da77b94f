"""`Outbox`: one client's output until it is taken, over as many steps as that lasts.

It knows columns and their order, not what happens to a message afterwards.
"""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trioengine.core.executor import TokenLogprobs
from trioengine.types.messages import (
    Finished,
    LogprobColumns,
    PooledOutput,
    SchedulerStats,
    StepOutput,
    pack_int32,
)

MAX_INT32 = 2**31 - 1


class Outbox:
    """Pending tokens and endings for one client.

    A slot belongs to one request until its `Finished` has been taken, so tokens of one slot are tokens of one request.
    """

    def __init__(self) -> None:
        # A token is appended with its slot; tokens of one slot are brought together only when there are several.
        self.slots = array("i")
        self.tokens = array("i")
        self._finished: list[Finished] = []
        self._scheduled = array("i")
        self._preempted = array("i")
        self._cached_tokens = array("i")
        self._logprobs = _LogprobRows()
        self._prompt_logprobs = _LogprobRows()
        self._pooled: list[tuple[int, NDArray[np.float32]]] = []
        self._sequence = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        # How much was cached comes with `scheduled`, and log probabilities and vectors with tokens and ends.
        return not (self.slots or self._finished or self._scheduled or self._preempted or self._prompt_logprobs.slots)

    def finish(self, finished: Finished) -> None:
        """Add the last word about a slot; no token for it follows."""
        self._finished.append(finished)

    def add_scheduled(self, slot: int, waited_s: float) -> None:
        """Add how long a slot's request waited for its first step."""
        self._scheduled.extend((slot, min(max(0, round(waited_s * 1e6)), MAX_INT32)))

    def add_preempted(self, slot: int) -> None:
        """Add that a slot's request, which has not ended, lost its blocks."""
        self._preempted.append(slot)

    def add_cached_tokens(self, slot: int, num_tokens: int) -> None:
        """Add how many tokens of a slot's prompt were cached, before the slot's first token."""
        self._cached_tokens.extend((slot, num_tokens))

    def add_logprobs(self, slot: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add log probabilities of a slot's newest tokens, one for each."""
        self._logprobs.add(slot, logprobs)

    def add_prompt_logprobs(self, slot: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add log probabilities of the next tokens of a slot's prompt."""
        self._prompt_logprobs.add(slot, logprobs)

    def add_pooled(self, slot: int, vectors: NDArray[np.float32]) -> None:
        """Add a slot's vectors, [width] or [rows, width]. Its end is added, too."""
        self._pooled.append((slot, vectors))

    def take(
        self,
        step: int,
        timestamp_s: float,
        stats: SchedulerStats | None = None,
        weight_version: str | None = None,
    ) -> StepOutput | None:
        """Everything pending as the client's next message; None when there is nothing, and no `stats` either."""
        if self.is_empty and stats is None:
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
            logprobs=self._logprobs.take(),
            prompt_logprobs=self._prompt_logprobs.take(),
            cached_tokens=self._cached_tokens.tobytes(),
            pooled=_pooled_output(self._pooled) if self._pooled else None,
            scheduled=self._scheduled.tobytes(),
            preempted=self._preempted.tobytes(),
            stats=stats,
            weight_version=weight_version,
        )
        self._sequence += 1
        self.slots, self.tokens, self._finished = array("i"), array("i"), []
        self._scheduled, self._preempted, self._cached_tokens = array("i"), array("i"), array("i")
        self._pooled = []
        return output


class _LogprobRows:
    """Log probabilities in columns, an entry for each token."""

    def __init__(self) -> None:
        self._clear()

    def add(self, slot: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Append entries."""
        for entry in logprobs:
            self.slots.append(slot)
            self._counts.append(len(entry.token_ids))
            self._ranks.append(entry.rank)
            self._token_ids.extend(entry.token_ids)
            self._logprobs.extend(entry.logprobs)

    def take(self) -> LogprobColumns | None:
        """All entries, which are then no longer here; None when there is none."""
        if not self.slots:
            return None
        columns = (self.slots, self._counts, self._ranks, self._token_ids, self._logprobs)
        self._clear()
        return LogprobColumns(*(column.tobytes() for column in columns))

    def _clear(self) -> None:
        self.slots, self._counts, self._ranks, self._token_ids = (array("i") for _ in range(4))
        self._logprobs = array("f")


def _pooled_output(pooled: Sequence[tuple[int, NDArray[np.float32]]]) -> PooledOutput:
    return PooledOutput(
        slots=pack_int32([slot for slot, _ in pooled]),
        num_rows=pack_int32([len(vectors) if vectors.ndim == 2 else -1 for _, vectors in pooled]),
        widths=pack_int32([vectors.shape[-1] for _, vectors in pooled]),
        values=b"".join([np.ascontiguousarray(vectors, np.float32).tobytes() for _, vectors in pooled]),
    )


def _tokens_by_slot(slots: "array[int]", tokens: "array[int]") -> Mapping[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for slot, token in zip(slots, tokens, strict=True):
        rows.setdefault(slot, []).append(token)
    return rows
