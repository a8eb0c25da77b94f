"""Runs steps: packs the scheduled tokens of all sequences, has them computed, and keeps what was sampled.

It trusts the plan in what `core` alone decides (blocks, counts) and nothing else: a sequence whose tokens or logits
are wrong is reported as failed, and the others of the step are computed as if it were not there. It does not know
what a model is.
"""

from collections.abc import Sequence

import attrs
import numpy as np

from trioengine.core.executor import NO_TOKEN, ScheduledSequence, SequenceFailure, StepPlan, StepResult
from trioengine.worker.backend import Backend, StepBatch
from trioengine.worker.sequences import SequenceState, sequence_state


@attrs.frozen(eq=False)
class _Row:
    """A scheduled sequence that can be computed."""

    index: int
    """Its place in the plan."""
    state: SequenceState
    first: int
    """Its first token to compute."""
    end: int

    @property
    def is_sampled(self) -> bool:
        return self.end == len(self.state.token_ids)


class ModelRunner:
    """A backend and the sequences that are being computed."""

    def __init__(self, backend: Backend, *, num_blocks: int, block_size: int) -> None:
        # Slots are 32-bit numbers.
        assert num_blocks * block_size < 2**31
        self._backend = backend
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._sequences: dict[int, SequenceState] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        for sequence_id in plan.removed:
            self._sequences.pop(sequence_id, None)
        for new in plan.new:
            assert new.sequence_id not in self._sequences
            self._sequences[new.sequence_id] = sequence_state(new, self._backend.vocab_size)
        rows = self._rows(plan.scheduled)
        tokens = [NO_TOKEN] * len(plan.scheduled)
        if rows:
            sampled_rows = [row for row in rows if row.is_sampled]
            sampled = self._backend.compute(self._pack(rows), [row.state for row in sampled_rows])
            for row, token_id in zip(sampled_rows, sampled, strict=True):
                if token_id is None:
                    row.state.failure = "The model's output for this sequence is not a number."
                else:
                    row.state.token_ids.append(token_id)
                    tokens[row.index] = token_id
        failures = [
            SequenceFailure(scheduled.sequence_id, failure)
            for scheduled in plan.scheduled
            if (failure := self._sequences[scheduled.sequence_id].failure) is not None
        ]
        return StepResult(plan.step, tokens, failures)

    def _rows(self, scheduled: Sequence[ScheduledSequence]) -> list[_Row]:
        rows: list[_Row] = []
        for index, work in enumerate(scheduled):
            state = self._sequences[work.sequence_id]
            state.add_blocks(work.new_block_ids)
            first, end = work.num_computed_tokens, work.num_computed_tokens + work.num_tokens
            if state.failure is None:
                assert first < end <= len(state.token_ids)
                assert end <= len(state.block_ids) * self._block_size
                rows.append(_Row(index, state, first, end))
        return rows

    def _pack(self, rows: Sequence[_Row]) -> StepBatch:
        counts = np.array([row.end - row.first for row in rows], np.int32)
        query_start = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=query_start[1:])
        firsts = np.array([row.first for row in rows], np.int32)
        owners = np.arange(len(rows), dtype=np.int32).repeat(counts)
        positions = np.arange(query_start[-1], dtype=np.int32) + (firsts - query_start[:-1])[owners]
        token_ids: list[int] = []
        block_table = np.zeros((len(rows), max(len(row.state.block_ids) for row in rows)), np.int32)
        for i, row in enumerate(rows):
            token_ids += row.state.token_ids[row.first : row.end]
            block_table[i, : len(row.state.block_ids)] = row.state.block_ids
        # A wrong block id would overwrite another sequence's memory.
        assert block_table.min() >= 0
        assert block_table.max() < self._num_blocks
        blocks = block_table[owners, positions // self._block_size]
        is_sampled = np.array([row.is_sampled for row in rows])
        return StepBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=positions,
            slots=blocks * np.int32(self._block_size) + positions % np.int32(self._block_size),
            query_start=query_start,
            seq_lens=firsts + counts,
            block_table=block_table,
            logit_rows=query_start[1:][is_sampled] - np.int32(1),
        )
