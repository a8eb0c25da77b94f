"""Log probabilities on their way from the core's columns to a caller's values.

They wait as bytes, and become values when they are read: few are asked for, and an output handler has no time for many.
"""

import attrs

from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.messages import LogprobColumns, unpack_int32
from trioengine.types.output import Logprob, PositionLogprobs


@attrs.frozen
class LogprobEntry:
    """Log probabilities at the place of one token: the token's, then the most likely ones', or those of other ids."""

    rank: int
    """Of the token."""
    token_ids: bytes
    """int32, one per pair."""
    logprobs: bytes
    """float32, one per pair."""

    def to_position(self, tokenizer: Tokenizer, *, has_ranks: bool = True) -> PositionLogprobs:
        """The values, with the bytes of the tokens. `has_ranks`: those behind the first are the most likely ones."""
        token_ids = unpack_int32(self.token_ids)
        logprobs = memoryview(self.logprobs).cast("f")
        chosen = Logprob(token_ids[0], logprobs[0], self.rank, tokenizer.token_bytes(token_ids[0]))
        top: list[Logprob] = []
        for place in range(1, len(token_ids)):
            token_id, logprob = token_ids[place], logprobs[place]
            # Equals share the best place.
            rank = top[-1].rank if top and top[-1].logprob == logprob else place
            top.append(Logprob(token_id, logprob, rank if has_ranks else 0, tokenizer.token_bytes(token_id)))
        return PositionLogprobs(chosen, tuple(top))


def entries_by_slot(columns: LogprobColumns) -> dict[int, list[LogprobEntry]]:
    """The entries of each slot, in their order."""
    by_slot: dict[int, list[LogprobEntry]] = {}
    start = 0
    slots, counts, ranks = (unpack_int32(column) for column in (columns.slots, columns.counts, columns.ranks))
    for slot, count, rank in zip(slots, counts, ranks, strict=True):
        end = start + 4 * count
        entry = LogprobEntry(rank, columns.token_ids[start:end], columns.logprobs[start:end])
        by_slot.setdefault(slot, []).append(entry)
        start = end
    return by_slot
