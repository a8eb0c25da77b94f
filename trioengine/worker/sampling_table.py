"""The sampling rules of sequences as the arrays of one call of a sampler.

What does not change from step to step stands in columns, a row for each known sequence, so that a step gathers it
without looking at the sequences. Rules that depend on a place in a sequence are looked at only for sequences that have
rules. What no row of a step uses is left out.
"""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.sampler import ChangedLogits, LogitBias, Masks, Penalties, RaggedIds, SamplingArrays

from trioengine.config.engine import LogprobsMode
from trioengine.worker.sequences import SequenceState

_NO_LOGPROBS = -1
"""In `num_logprobs`: not even the token's own."""


_MIN_ROWS = 16


@attrs.define(eq=False)
class _Columns:
    """What does not change from step to step, a row for each sequence; unused rows mean nothing."""

    temperature: NDArray[np.float32] = attrs.field(factory=lambda: np.zeros(0, np.float32))
    top_k: NDArray[np.int32] = attrs.field(factory=lambda: np.zeros(0, np.int32))
    top_p: NDArray[np.float32] = attrs.field(factory=lambda: np.zeros(0, np.float32))
    min_p: NDArray[np.float32] = attrs.field(factory=lambda: np.zeros(0, np.float32))
    seed: NDArray[np.uint64] = attrs.field(factory=lambda: np.zeros(0, np.uint64))
    repetition: NDArray[np.float32] = attrs.field(factory=lambda: np.zeros(0, np.float32))
    presence: NDArray[np.float32] = attrs.field(factory=lambda: np.zeros(0, np.float32))
    frequency: NDArray[np.float32] = attrs.field(factory=lambda: np.zeros(0, np.float32))
    num_logprobs: NDArray[np.int32] = attrs.field(factory=lambda: np.zeros(0, np.int32))
    num_prompt_logprobs: NDArray[np.int32] = attrs.field(factory=lambda: np.zeros(0, np.int32))
    has_rules: NDArray[np.bool_] = attrs.field(factory=lambda: np.zeros(0, np.bool_))

    def resize(self, num_rows: int) -> None:
        """Make room for more rows."""
        for field in attrs.fields(_Columns):
            column = getattr(self, field.name)
            setattr(self, field.name, np.concatenate((column, np.zeros(num_rows - len(column), column.dtype))))


@attrs.define(eq=False)
class LogitRows:
    """What a step wants of its rows of logits. Lists with an entry for each row."""

    states: list[SequenceState] = attrs.field(factory=list[SequenceState])
    """Whose row it is."""
    places: list[int] = attrs.field(factory=list[int])
    """The place in its sequence of the token that the row is about; those before it are `state.token_ids`'."""
    known: list[int] = attrs.field(factory=list[int])
    """The prompt's token that stands in this place, or -1 where one is to be sampled."""
    mask_rows: list[int] = attrs.field(factory=list[int])
    """Which row of the plan's masks binds it, or -1."""
    inputs: list[int] = attrs.field(factory=list[int])
    """Its place among the step's tokens."""
    custom: list[int] = attrs.field(factory=list[int])
    """Not for each row: the rows that custom processors change."""
    listed: list[int] = attrs.field(factory=list[int])
    """Not for each row: those that want log probabilities of `logprob_token_ids`."""

    def add(self, state: SequenceState, input_index: int, place: int, *, known: int = -1, mask_row: int = -1) -> None:
        """Append a row."""
        if state.processors and known < 0:
            self.custom.append(len(self.states))
        if state.sampling.logprob_token_ids and known < 0:
            self.listed.append(len(self.states))
        self.states.append(state)
        self.places.append(place)
        self.known.append(known)
        self.mask_rows.append(mask_row)
        self.inputs.append(input_index)


class SamplingTable:
    """The parameters of all known sequences."""

    def __init__(self, vocab_size: int, logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS) -> None:
        self._vocab_size = vocab_size
        self._are_logprobs_processed = logprobs_mode is LogprobsMode.PROCESSED_LOGPROBS
        self._columns = _Columns()
        self._num_rows = 0
        self._free_rows: list[int] = []

    def add(self, state: SequenceState) -> None:
        """Give a sequence its row."""
        if not self._free_rows:
            self._grow()
        state.row = row = self._free_rows.pop()
        sampling, columns = state.sampling, self._columns
        columns.temperature[row] = 0.0 if sampling.is_greedy else sampling.temperature
        columns.top_k[row] = sampling.top_k
        columns.top_p[row] = sampling.top_p
        columns.min_p[row] = sampling.min_p
        columns.seed[row] = state.seed
        columns.repetition[row] = sampling.repetition_penalty
        columns.presence[row] = sampling.presence_penalty
        columns.frequency[row] = sampling.frequency_penalty
        # Those of ids that the caller lists are not the sampler's to find.
        columns.num_logprobs[row] = self._num_logprobs(0 if sampling.logprob_token_ids else sampling.logprobs)
        columns.num_prompt_logprobs[row] = self._num_logprobs(sampling.prompt_logprobs)
        columns.has_rules[row] = not state.rules.is_empty

    def remove(self, state: SequenceState) -> None:
        """Take a sequence's row back."""
        self._free_rows.append(state.row)

    def arrays(
        self, rows: LogitRows, mask_bits: NDArray[np.int32] | None = None, changed: ChangedLogits | None = None
    ) -> SamplingArrays:
        """The parameters and rules of a step's rows.

        Args:
            rows: at least one.
            mask_bits: what `rows.mask_rows` are rows of.
            changed: what custom processors made of logits.
        """
        index = np.array([state.row for state in rows.states], np.intp)
        forced = None if max(rows.known) < 0 else np.array(rows.known, np.int32)
        columns = self._columns
        num_logprobs = columns.num_logprobs[index]
        ruled = columns.has_rules[index]
        if forced is not None:
            num_logprobs = np.where(forced < 0, num_logprobs, columns.num_prompt_logprobs[index])
            ruled &= forced < 0
        ruled_rows = np.flatnonzero(ruled).tolist()
        return SamplingArrays(
            temperature=columns.temperature[index],
            top_k=columns.top_k[index],
            top_p=columns.top_p[index],
            min_p=columns.min_p[index],
            seed=columns.seed[index],
            # The same when the sequence is computed again after a preemption, or with other drafts.
            position=np.array(rows.places, np.int64),
            changed=changed,
            masks=None if mask_bits is None else Masks(np.array(rows.mask_rows, np.int32), mask_bits),
            logit_bias=_logit_bias(rows, ruled_rows),
            penalties=self._penalties(rows, ruled_rows, index),
            forbidden=_forbidden(rows, ruled_rows),
            allowed=_ragged(len(rows.states), {row: rows.states[row].rules.allowed_ids for row in ruled_rows}),
            forced=forced,
            num_logprobs=num_logprobs if num_logprobs.max() > _NO_LOGPROBS else None,
            logprobs_are_processed=self._are_logprobs_processed,
        )

    def _num_logprobs(self, wanted: int | None) -> int:
        if wanted is None:
            return _NO_LOGPROBS
        return self._vocab_size if wanted < 0 else min(wanted, self._vocab_size)

    def _grow(self) -> None:
        old_size = self._num_rows
        self._num_rows = max(_MIN_ROWS, 2 * old_size)
        self._columns.resize(self._num_rows)
        # The lowest first, so that no row is above the number of sequences.
        self._free_rows.extend(reversed(range(old_size, self._num_rows)))

    def _penalties(self, rows: LogitRows, ruled_rows: Sequence[int], index: NDArray[np.intp]) -> Penalties | None:
        seen = _ragged(
            len(rows.states),
            {
                row: np.frombuffer(rows.states[row].token_ids, np.int32)[: rows.places[row]]
                for row in ruled_rows
                if rows.states[row].rules.has_penalties
            },
        )
        if seen is None:
            return None
        columns = self._columns
        num_prompt_tokens = np.array([state.num_prompt_tokens for state in rows.states], np.int64)
        return Penalties(
            seen=seen,
            num_prompt_tokens=np.minimum(num_prompt_tokens, np.diff(seen.starts)),
            repetition=columns.repetition[index],
            presence=columns.presence[index],
            frequency=columns.frequency[index],
        )


def _logit_bias(rows: LogitRows, ruled_rows: Sequence[int]) -> LogitBias | None:
    ids = _ragged(len(rows.states), {row: rows.states[row].rules.bias_ids for row in ruled_rows})
    if ids is None:
        return None
    return LogitBias(ids, np.concatenate([rows.states[row].rules.bias_values for row in ruled_rows]))


def _forbidden(rows: LogitRows, ruled_rows: Sequence[int]) -> RaggedIds | None:
    forbidden: dict[int, NDArray[np.int32]] = {}
    for row in ruled_rows:
        state = rows.states[row]
        forbidden[row] = state.rules.forbidden(state.token_ids, rows.places[row], state.num_prompt_tokens)
    return _ragged(len(rows.states), forbidden)


def _ragged(num_rows: int, ids: Mapping[int, NDArray[np.int32]]) -> RaggedIds | None:
    """Ids by row, in the order of the rows; None where no row has any."""
    counts = np.zeros(num_rows + 1, np.int64)
    for row, row_ids in ids.items():
        counts[row + 1] = len(row_ids)
    starts = counts.cumsum()
    return RaggedIds(starts, np.concatenate(list(ids.values()))) if starts[-1] else None
