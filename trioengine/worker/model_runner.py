# pyright: basic
"""Runs steps: packs the scheduled tokens of all sequences, computes them, and samples where a prompt is complete.

It trusts the plan in what `core` alone decides (blocks, counts) and nothing else: a sequence whose tokens or logits
are wrong is reported as failed, and the others of the step are computed as if it were not there.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor
from trioengine_kernels.paged_attention import plan_attention

from trioengine.core.executor import NO_TOKEN, ScheduledSequence, SequenceFailure, StepPlan, StepResult
from trioengine.models.decoder import DecoderInput
from trioengine.models.loader import LoadedModel
from trioengine.worker.kv_cache import allocate_kv_cache
from trioengine.worker.sampler import sample_tokens
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
    """A model with its KV cache and the sequences that are being computed."""

    def __init__(self, model: LoadedModel, *, num_blocks: int, block_size: int) -> None:
        self._model = model
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._kv_cache = allocate_kv_cache(model.config, num_blocks, block_size)
        self._sequences: dict[int, SequenceState] = {}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        for sequence_id in plan.removed:
            self._sequences.pop(sequence_id, None)
        for new in plan.new:
            assert new.sequence_id not in self._sequences
            self._sequences[new.sequence_id] = sequence_state(new, self._model.config.vocab_size)
        rows = self._rows(plan.scheduled)
        tokens = [NO_TOKEN] * len(plan.scheduled)
        if rows:
            sampled_rows = [row for row in rows if row.is_sampled]
            logits = self._model.decoder.forward(self._pack(rows), self._kv_cache)
            self._sample(sampled_rows, logits, tokens)
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

    def _pack(self, rows: Sequence[_Row]) -> DecoderInput:
        counts = np.array([row.end - row.first for row in rows])
        query_start = np.concatenate(([0], counts.cumsum()))
        firsts = np.array([row.first for row in rows])
        owners = np.arange(len(rows)).repeat(counts)
        positions = np.arange(query_start[-1]) + (firsts - query_start[:-1])[owners]
        token_ids: list[int] = []
        block_table = np.zeros((len(rows), max(len(row.state.block_ids) for row in rows)), np.int32)
        for i, row in enumerate(rows):
            token_ids += row.state.token_ids[row.first : row.end]
            block_table[i, : len(row.state.block_ids)] = row.state.block_ids
        # A wrong block id would overwrite another sequence's memory; the index operations check it, negative ones too.
        assert block_table.min() >= 0
        assert block_table.max() < self._num_blocks
        blocks = block_table[owners, positions // self._block_size].astype(np.int64)
        return DecoderInput(
            token_ids=torch.tensor(token_ids),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(blocks * self._block_size + positions % self._block_size),
            attention=plan_attention(
                torch.from_numpy(block_table),
                torch.from_numpy(query_start),
                torch.from_numpy(firsts + counts),
                block_size=self._block_size,
                window=self._model.config.sliding_window,
            ),
            logit_rows=torch.tensor(
                [last for row, last in zip(rows, query_start[1:] - 1, strict=True) if row.is_sampled], dtype=torch.int64
            ),
        )

    def _sample(self, rows: Sequence[_Row], logits: Tensor, tokens: list[int]) -> None:
        if not rows:
            return
        sampled = sample_tokens([row.state for row in rows], logits)
        # Sampling a row with NaN gives the place of a NaN, so one look tells.
        is_wrong = logits.gather(1, sampled.unsqueeze(1)).isnan().flatten().tolist()
        for row, token_id, wrong in zip(rows, sampled.tolist(), is_wrong, strict=True):
            if wrong:
                row.state.failure = "The model's output for this sequence is not a number."
            else:
                row.state.token_ids.append(token_id)
                tokens[row.index] = token_id
