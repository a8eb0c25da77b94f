"""The draft model: a smaller model that guesses what the sequences of a runner say next.

It draws with the parameters, the seed and the place that the target will draw with. So where both expect the same, it
guesses right whatever the temperature is, and greedy requests are drafted greedily. (Daliri, Musco and Suresh 2024,
"Coupling without communication and drafter-invariant speculative decoding".) Grammars and custom processors are the
target's alone.

Its keys and values lie in the same blocks as the target's, so that what the core decides about blocks holds for both.
What is wrong in them costs accepted drafts, never a token: an answer that nobody drafts for is not computed at once,
and blocks that come from the offload store hold other tokens' keys and values. The target checks every draft.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
from trioengine_kernels.native.sampler import SampledStatus

from trioengine.worker.backend import Backend, StepBatch
from trioengine.worker.sampling_table import LogitRows, SamplingTable
from trioengine.worker.sequences import SequenceState

CATCH_UP_TOKENS = 16
"""Where no drafts are wanted, tokens are computed so many at a time, which costs little more than a single one."""


@attrs.frozen(eq=False)
class ComputedSequence:
    """A sequence after a step of the target."""

    index: int
    """Its place in the plan."""
    sequence_id: int
    state: SequenceState
    first: int
    """The first token that the step computed."""
    end: int
    """The step's tokens and all before them are in the target's cache, but for drafts that were wrong."""
    num_wanted: int
    """Drafts that are wanted after its tokens; 0 for one whose prompt is not complete."""
    is_prompt: bool
    """Whether nothing was sampled."""


@attrs.define(eq=False)
class _Progress:
    """What the draft model's cache holds of a sequence."""

    num_computed: int
    """So many of its tokens."""
    drafted: Sequence[int] = ()
    """Behind these."""


@attrs.frozen(eq=False)
class _Part:
    """Tokens of a sequence that are computed together."""

    sequence: ComputedSequence
    first: int
    end: int
    is_sampled: bool


class DraftModel:
    """A backend beside the target's."""

    def __init__(self, backend: Backend, *, block_size: int, max_tokens: int, max_model_len: int) -> None:
        """Begin with an empty cache.

        Args:
            backend: with as many blocks as the target's has in its first group.
            block_size: tokens of a block.
            max_tokens: that the backend computes at once. At least as many as a step has sequences.
            max_model_len: no drafts for sequences that would get longer.
        """
        self._backend = backend
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._progress: dict[int, _Progress] = {}

    def forget(self, sequence_id: int) -> None:
        """Forget a sequence, known or not."""
        self._progress.pop(sequence_id, None)

    def draft(self, sequences: Sequence[ComputedSequence], table: SamplingTable) -> Mapping[int, Sequence[int]]:
        """Compute what the target computed, and guess what comes next.

        Args:
            sequences: of the target's step, but for those that failed. Their tokens are as before when this returns.
            table: with their parameters.

        Returns:
            By `ComputedSequence.index` at most `num_wanted` drafts.
        """
        drafts: dict[int, list[int]] = {}
        num_known = {each.index: len(each.state.token_ids) for each in sequences}
        active: list[ComputedSequence] = []
        for parts in self._batches(self._pending(sequences)):
            active += self._compute(parts, table, drafts)
        drafting = active
        while active := [each for each in active if len(drafts[each.index]) < each.num_wanted]:
            parts: list[_Part] = []
            for each in active:
                token_ids = each.state.token_ids
                token_ids.append(drafts[each.index][-1])
                parts.append(_Part(each, len(token_ids) - 1, len(token_ids), is_sampled=True))
            active = self._compute(parts, table, drafts)
        for each in drafting:
            token_ids = each.state.token_ids
            self._progress[each.sequence_id].drafted = token_ids[num_known[each.index] :]
            del token_ids[num_known[each.index] :]
        return drafts

    def _pending(self, sequences: Sequence[ComputedSequence]) -> Iterator[_Part]:
        """What is to be computed before drafts can be."""
        for each in sequences:
            token_ids = each.state.token_ids
            progress = self._progress.get(each.sequence_id)
            if progress is None:
                progress = self._progress[each.sequence_id] = _Progress(each.first)
            # Accepted drafts that were inputs here are computed already.
            for place, token_id in enumerate(progress.drafted, progress.num_computed):
                if place == len(token_ids) or token_ids[place] != token_id:
                    break
                progress.num_computed = place + 1
            progress.drafted = ()
            num_wanted = min(each.num_wanted, self._max_model_len - len(token_ids))
            end = len(token_ids) if num_wanted > 0 else each.end
            first = min(progress.num_computed, end - 1)
            is_due = num_wanted > 0 or each.is_prompt or end - first >= CATCH_UP_TOKENS
            if is_due and end <= self._max_model_len:
                progress.num_computed = end
                yield _Part(each, first, end, num_wanted > 0)

    def _batches(self, parts: Iterator[_Part]) -> Iterator[list[_Part]]:
        """These parts in steps that are small enough."""
        batch: list[_Part] = []
        room = self._max_tokens
        for part in parts:
            first = part.first
            while first < part.end:
                if not room:
                    yield batch
                    batch, room = [], self._max_tokens
                end = min(part.end, first + room)
                batch.append(attrs.evolve(part, first=first, end=end, is_sampled=part.is_sampled and end == part.end))
                room -= end - first
                first = end
        if batch:
            yield batch

    def _compute(
        self, parts: Sequence[_Part], table: SamplingTable, drafts: dict[int, list[int]]
    ) -> list[ComputedSequence]:
        """Compute tokens, and add to `drafts` what comes after them; the sequences for which that worked."""
        rows, batch = self._pack(parts)
        self._backend.compute(batch)
        if not rows.states:
            return []
        result = self._backend.sample(attrs.evolve(table.arrays(rows), num_logprobs=None))
        sampled = [part.sequence for part in parts if part.is_sampled]
        drafted: list[ComputedSequence] = []
        for each, token_id, status in zip(sampled, result.token_ids.tolist(), result.status.tolist(), strict=True):
            if status == SampledStatus.SAMPLED:
                drafts.setdefault(each.index, []).append(token_id)
                drafted.append(each)
        return drafted

    def _pack(self, parts: Sequence[_Part]) -> tuple[LogitRows, StepBatch]:
        block_size = np.int32(self._block_size)
        firsts = np.array([part.first for part in parts], np.int32)
        ends = np.array([part.end for part in parts], np.int32)
        query_start = np.zeros(len(parts) + 1, np.int32)
        (ends - firsts).cumsum(out=query_start[1:])
        owners = np.arange(len(parts), dtype=np.int32).repeat(ends - firsts)
        positions = np.arange(query_start[-1], dtype=np.int32) + (firsts - query_start[:-1])[owners]
        rows, token_ids = LogitRows(), array("i")
        block_table = np.zeros((len(parts), int(ends.max() - 1) // self._block_size + 1), np.int32)
        for i, part in enumerate(parts):
            state = part.sequence.state
            token_ids += state.token_ids[part.first : part.end]
            if part.is_sampled:
                rows.add(state, len(token_ids) - 1, part.end)
            block_ids = state.block_ids[: block_table.shape[1]]
            block_table[i, : len(block_ids)] = block_ids
        slots = block_table[owners, positions // block_size] * block_size + positions % block_size
        batch = StepBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=positions,
            slots=slots,
            query_start=query_start,
            seq_lens=ends,
            block_table=block_table,
            logit_rows=np.array(rows.inputs, np.int32),
        )
        return rows, batch
