"""Runs steps: packs the scheduled tokens of all sequences, has them computed, and keeps what was sampled.

It trusts the plan in what `core` alone decides (blocks, counts) and nothing else: a sequence whose tokens or logits
are wrong is reported as failed, and the others of the step are computed as if it were not there. It does not know
what a model is.

Where the backend can (`AsyncBackend`), `launch` only begins a step. The token that it samples stands as `UNKNOWN_TOKEN`
in its sequence until `finish`, and the next step may be launched with it: the backend puts in what it has sampled last
for the sequence. Some steps must know it, and their `launch` finishes those before it first: steps with drafts or a
draft model, with custom logits processors, with `logprob_token_ids`, and with `bad_words` of a sequence whose newest
token is not known.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.sampler import MIN_LOGPROB, ChangedLogits, SampledTokens, SamplingArrays

from trioengine.config.engine import LogprobsMode
from trioengine.core.executor import (
    NO_TOKEN,
    NewSequence,
    SequenceFailure,
    StepPlan,
    StepResult,
)
from trioengine.tokenizer.bad_words import BadWordsRules
from trioengine.worker.backend import AsyncBackend, Backend, LaunchedStep
from trioengine.worker.draft import ComputedSequence, DraftModel
from trioengine.worker.logits_processors import LogitsProcessorError, LogitsProcessors, process_logits
from trioengine.worker.packing import block_updates, pack_launch, pack_step
from trioengine.worker.sampling_table import LogitRows, SamplingTable
from trioengine.worker.sequences import SequenceState, sequence_state
from trioengine.worker.step_rows import FAILURES, HiddenRows, SampledRows, StepOutcome, StepRow


@attrs.define(eq=False)
class _Step:
    """A step from `launch` to `finish`."""

    plan: StepPlan
    """Of `scheduled` only its length and the ids are what they were, once `launch` has returned."""
    states: Sequence[SequenceState]
    """Of `plan.scheduled`."""
    rows: list[StepRow] = attrs.field(factory=list[StepRow])
    wanted: LogitRows = attrs.field(factory=LogitRows)
    hidden: HiddenRows = attrs.field(factory=HiddenRows)
    updates: list[NDArray[np.int32]] = attrs.field(factory=list[NDArray[np.int32]])
    """New blocks, as `block_updates` has them."""
    launched: LaunchedStep | None = None
    num_logprobs: Sequence[int] = ()
    """As `SampledRows.num_logprobs`."""
    result: StepResult | None = None
    """Once it is known."""


class ModelRunner:
    """A backend and the sequences that are being computed."""

    def __init__(
        self,
        backend: Backend,
        *,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        logits_processors: LogitsProcessors | None = None,
        draft_model: DraftModel | None = None,
        bad_words_rules: BadWordsRules | None = None,
    ) -> None:
        self._backend = backend
        self._async_backend = backend if isinstance(backend, AsyncBackend) else None
        self._block_size = backend.block_size
        self._num_blocks = [group.num_blocks for group in backend.kv_cache_groups]
        # Slots are 32-bit numbers.
        assert max(self._num_blocks) * self._block_size < 2**31
        self._sequences: dict[int, SequenceState] = {}
        self._table = SamplingTable(backend.vocab_size, logprobs_mode)
        self._logits_processors = logits_processors or LogitsProcessors({})
        self._draft_model = draft_model
        self._bad_words_rules = bad_words_rules
        self._steps: deque[_Step] = deque()
        self.num_waits = 0
        """How often a step could be begun only when those before it were finished."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. None is in flight."""
        self.launch(plan)
        return self.finish()

    def launch(self, plan: StepPlan) -> None:
        """Begin a step; where the backend cannot, compute it. What is in `plan.scheduled` may be changed afterwards."""
        for sequence_id in plan.removed:
            state = self._sequences.pop(sequence_id, None)
            if state is not None:
                self._table.remove(state)
            if self._draft_model is not None:
                self._draft_model.forget(sequence_id)
        for new in plan.new:
            self._add(new)
        if self._must_know_tokens(plan):
            self.num_waits += 1
            self.settle()
        step = _Step(plan, [self._sequences[work.sequence_id] for work in plan.scheduled])
        self._steps.append(step)
        self._add_rows(step)
        if not step.rows:
            step.result = self._result(step, None, None)
        elif self._async_backend is not None:
            self._launch(step, self._async_backend)
        else:
            self._compute(step)

    def finish(self) -> StepResult:
        """What the oldest step in flight gave. Waits for it."""
        step = self._steps.popleft()
        return step.result or self._finish(step)

    def settle(self) -> None:
        """Wait for all steps that were launched. Their results stay to be fetched."""
        for step in self._steps:
            step.result = step.result or self._finish(step)

    def _must_know_tokens(self, plan: StepPlan) -> bool:
        """Whether steps that are computed now have to be finished before this one can be begun."""
        if all(step.result is not None for step in self._steps):
            return False
        return self._draft_model is not None or any(
            work.draft_token_ids or _needs_host(self._sequences[work.sequence_id]) for work in plan.scheduled
        )

    def _add(self, new: NewSequence) -> None:
        assert new.sequence_id not in self._sequences
        bad_words = None if self._bad_words_rules is None else self._bad_words_rules.of(new.sampling)
        state = sequence_state(new, self._backend.vocab_size, bad_words, self._backend.labels)
        if state.failure is None and new.sampling.bad_words and bad_words is None:
            state.failure = "Words cannot be forbidden here: there is no tokenizer."
        if state.failure is None:
            try:
                state.processors = self._logits_processors.bind(new.sampling)
            except LogitsProcessorError as error:
                state.failure = str(error)
        self._table.add(state)
        self._sequences[new.sequence_id] = state

    def _add_rows(self, step: _Step) -> None:
        """Find the sequences that can be computed, and what is wanted of them."""
        num_groups, masks, num_tokens = len(self._num_blocks), step.plan.masks, 0
        for index, (work, state) in enumerate(zip(step.plan.scheduled, step.states, strict=True)):
            num_held = len(state.block_ids) // num_groups
            state.add_blocks(work.new_block_ids)
            first, end = work.num_computed_tokens, work.num_computed_tokens + work.num_tokens
            if state.failure is not None:
                continue
            state.token_ids.extend(work.draft_token_ids)
            num_drafts, num_known = len(work.draft_token_ids), len(state.token_ids)
            assert first < end <= num_known
            assert not num_drafts or end == num_known
            assert end <= len(state.block_ids) // num_groups * self._block_size
            is_sampled = end == num_known and state.sampling.max_tokens != 0
            row = StepRow(index, state, first, end, num_drafts, is_sampled)
            row.want(step.wanted, num_tokens, -1 if masks is None else masks.first_rows.get(index, -1))
            if state.pooler is not None:
                step.hidden.add(row, state.pooler, num_tokens)
            if work.new_block_ids and self._async_backend is not None:
                new_block_ids = state.block_ids[num_held * num_groups :]
                step.updates.append(block_updates(state.row, num_held, new_block_ids, num_groups))
            step.rows.append(row)
            num_tokens += end - first

    def _compute(self, step: _Step) -> None:
        """Compute a step now."""
        self._backend.compute(
            pack_step(
                step.rows,
                step.wanted.inputs,
                step.hidden.places,
                block_size=self._block_size,
                num_blocks=self._num_blocks,
                block_groups=range(len(self._num_blocks)),
                has_loras=True,
            )
        )
        hidden = self._backend.hidden_states() if step.hidden.rows else None
        step.result = self._result(step, self._sample(step) if step.wanted.states else None, hidden)

    def _launch(self, step: _Step, backend: AsyncBackend) -> None:
        """Begin a step, and finish it where the next one can only be planned with its tokens."""
        wanted, masks = step.wanted, step.plan.masks
        has_drafts = any(row.num_drafts for row in step.rows)
        owners = [state.row for state in wanted.states]
        sampled_rows = [
            row if known < 0 and not has_drafts else -1 for row, known in zip(owners, wanted.known, strict=True)
        ]
        batch = pack_launch(step.rows, wanted.inputs, step.hidden.places, owners, sampled_rows, step.updates)
        is_read = bool(wanted.custom or wanted.listed)
        if not wanted.states or is_read:
            step.launched = backend.launch(batch, None)
        else:
            arrays = self._table.arrays(wanted, None if masks is None else masks.bits)
            step.num_logprobs = _num_logprobs(arrays)
            step.launched = backend.launch(batch, arrays)
        if is_read:
            hidden = step.launched.wait().hidden_states
            step.result = self._result(step, self._sample(step), hidden)
        elif has_drafts or self._draft_model is not None:
            step.result = self._finish(step)
        else:
            for row in step.rows:
                if row.is_sampled:
                    row.add_placeholder()

    def _finish(self, step: _Step) -> StepResult:
        """The result of a step that was launched."""
        assert step.launched is not None
        numbers = step.launched.wait()
        step.launched = None
        sampled = None
        if numbers.sampled is not None:
            sampled = _sampled_rows(numbers.sampled, step.num_logprobs, {}, {})
        return self._result(step, sampled, numbers.hidden_states)

    def _result(self, step: _Step, sampled: SampledRows | None, hidden: NDArray[np.float32] | None) -> StepResult:
        """Keep what a step gave, and have drafts made."""
        plan, outcome = step.plan, StepOutcome([NO_TOKEN] * len(step.states))
        if step.hidden.rows:
            step.hidden.pool(_NO_STATES if hidden is None else hidden, outcome)
        if sampled is not None:
            for row in step.rows:
                row.take_in(sampled, outcome)
        started_s = time.perf_counter()
        drafts: Mapping[int, Sequence[int]] = {}
        if self._draft_model is not None:
            drafts = self._draft_model.draft(_computed(step.rows, plan), self._table)
        failures = [
            SequenceFailure(work.sequence_id, state.failure)
            for work, state in zip(plan.scheduled, step.states, strict=True)
            if state.failure is not None
        ]
        return StepResult(
            plan.step,
            outcome.tokens,
            failures,
            num_accepted=outcome.num_accepted,
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
            drafts=drafts,
            draft_seconds=time.perf_counter() - started_s,
            pooled=outcome.pooled,
        )

    def _sample(self, step: _Step) -> SampledRows:
        """Choose tokens from the logits of the step that was computed last."""
        wanted, masks = step.wanted, step.plan.masks
        changed, failures = self._process(wanted)
        arrays = self._table.arrays(wanted, None if masks is None else masks.bits, changed)
        result = self._backend.sample(arrays)
        return _sampled_rows(result, _num_logprobs(arrays), failures, self._listed_logprobs(wanted))

    def _listed_logprobs(self, wanted: LogitRows) -> Mapping[int, tuple[Sequence[int], Sequence[float]]]:
        """By row the tokens that its request lists, and the log probabilities that the model gives them."""
        if not wanted.listed:
            return {}
        found: dict[int, tuple[Sequence[int], Sequence[float]]] = {}
        for row, logits in zip(wanted.listed, self._backend.copy_logits(wanted.listed), strict=True):
            token_ids = wanted.states[row].sampling.logprob_token_ids
            assert token_ids is not None
            with np.errstate(all="ignore"):  # A row that is NaN has failed, and nobody sees this.
                logits = logits - logits.max()
                logprobs = logits[list(token_ids)] - np.log(np.exp(logits).sum(dtype=np.float64))
            found[row] = token_ids, np.maximum(logprobs, MIN_LOGPROB).tolist()
        return found

    def _process(self, wanted: LogitRows) -> tuple[ChangedLogits | None, dict[int, str]]:
        """What custom processors make of the rows that have some, and by row why they failed."""
        failures: dict[int, str] = {}
        if not wanted.custom:
            return None, failures
        logits = self._backend.copy_logits(wanted.custom)
        for values, row in zip(logits, wanted.custom, strict=True):
            state, place = wanted.states[row], wanted.places[row]
            # Copies, as the code that gets them is not ours.
            prompt = state.token_ids[: state.num_prompt_tokens]
            output = state.token_ids[state.num_prompt_tokens : place]
            try:
                process_logits(state.processors, prompt, output, values)
            except LogitsProcessorError as error:
                failures[row] = str(error)
        rows = np.full(len(wanted.states), -1, np.int32)
        rows[wanted.custom] = np.arange(len(wanted.custom), dtype=np.int32)
        return ChangedLogits(rows, logits), failures


_NO_STATES = np.empty((0, 0), np.float32)


def _needs_host(state: SequenceState) -> bool:
    """Whether a sequence's next token can only be chosen when all before it are known to the host."""
    if state.failure is not None:
        return False
    has_unknown_words = state.rules.bad_words is not None and state.num_unknown > 0
    return bool(state.processors or state.sampling.logprob_token_ids) or has_unknown_words


def _num_logprobs(arrays: SamplingArrays) -> Sequence[int]:
    return () if arrays.num_logprobs is None else arrays.num_logprobs.tolist()


def _sampled_rows(
    result: SampledTokens,
    num_logprobs: Sequence[int],
    failures: dict[int, str],
    listed: Mapping[int, tuple[Sequence[int], Sequence[float]]],
) -> SampledRows:
    """`failures` are those that are known already."""
    for row in np.flatnonzero(result.status).tolist():
        failures.setdefault(row, FAILURES[int(result.status[row])])
    return SampledRows(result.token_ids.tolist(), failures, result.logprobs, num_logprobs, listed)


def _computed(rows: Sequence[StepRow], plan: StepPlan) -> list[ComputedSequence]:
    """The step's sequences for the draft model."""
    computed: list[ComputedSequence] = []
    for row in rows:
        work, state = plan.scheduled[row.index], row.state
        if state.failure is None:
            # A sampled token is not computed yet, and of the drafts before it only those that were right count.
            end = len(state.token_ids) - 1 if row.is_sampled else row.end
            num_wanted = work.max_new_drafts if row.is_sampled else 0
            computed.append(
                ComputedSequence(row.index, work.sequence_id, state, row.first, end, num_wanted, not row.is_sampled)
            )
    return computed
