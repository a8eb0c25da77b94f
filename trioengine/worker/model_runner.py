"""Runs steps: packs the scheduled tokens of all sequences, has them computed, and keeps what was sampled.

It trusts the plan in what `core` alone decides (blocks, counts) and nothing else: a sequence whose tokens or logits
are wrong is reported as failed, and the others of the step are computed as if it were not there. It does not know
what a model is.
"""

import time
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.sampler import MIN_LOGPROB, ChangedLogits, SampledStatus
from trioengine_kernels.native.sampler import TokenLogprobs as LogprobArrays

from trioengine.config.engine import LogprobsMode
from trioengine.core.executor import (
    NO_TOKEN,
    NewSequence,
    ScheduledSequence,
    SequenceFailure,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)
from trioengine.tokenizer.bad_words import BadWordsRules
from trioengine.worker.backend import Backend, StepBatch
from trioengine.worker.draft import ComputedSequence, DraftModel
from trioengine.worker.logits_processors import LogitsProcessorError, LogitsProcessors, process_logits
from trioengine.worker.packing import pack_step
from trioengine.worker.pooling import NotANumberError, Pooler
from trioengine.worker.sampling_table import LogitRows, SamplingTable
from trioengine.worker.sequences import SequenceState, sequence_state

_FAILURES: Mapping[int, str] = {
    SampledStatus.IS_NAN: "The model's output for this sequence is not a number.",
    SampledStatus.NOTHING_ALLOWED: (
        "No token is allowed in the next place: the grammar, allowed_token_ids, bad_words, min_tokens and the like"
        " together forbid all of them."
    ),
}


@attrs.define(eq=False)
class _Row:
    """A scheduled sequence that can be computed."""

    index: int
    """Its place in the plan."""
    state: SequenceState
    first: int
    """Its first token to compute."""
    end: int
    num_drafts: int
    """The last of its tokens."""
    is_sampled: bool
    """Whether tokens are sampled after the last `1 + num_drafts`."""
    logit_row: int = 0
    """Its first row of logits: those about tokens of the prompt, then those that are sampled."""
    num_prompt_rows: int = 0


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
        self._block_size = backend.block_size
        self._num_blocks = [group.num_blocks for group in backend.kv_cache_groups]
        # Slots are 32-bit numbers.
        assert max(self._num_blocks) * self._block_size < 2**31
        self._sequences: dict[int, SequenceState] = {}
        self._table = SamplingTable(backend.vocab_size, logprobs_mode)
        self._logits_processors = logits_processors or LogitsProcessors({})
        self._draft_model = draft_model
        self._bad_words_rules = bad_words_rules

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        for sequence_id in plan.removed:
            state = self._sequences.pop(sequence_id, None)
            if state is not None:
                self._table.remove(state)
            if self._draft_model is not None:
                self._draft_model.forget(sequence_id)
        for new in plan.new:
            self._add(new)
        outcome = _Outcome([NO_TOKEN] * len(plan.scheduled))
        rows = self._rows(plan.scheduled)
        if rows:
            wanted, hidden = LogitRows(), _HiddenRows()
            self._backend.compute(self._pack(rows, wanted, hidden, plan.masks))
            if hidden.rows:
                _pool(hidden.rows, self._backend.hidden_states(), outcome)
            if wanted.states:
                sampled = self._sample(wanted, plan.masks)
                for row in rows:
                    _take_in(row, sampled, outcome)
        started_s = time.perf_counter()
        drafts: Mapping[int, Sequence[int]] = {}
        if self._draft_model is not None:
            drafts = self._draft_model.draft(_computed(rows, plan), self._table)
        failures = [
            SequenceFailure(scheduled.sequence_id, failure)
            for scheduled in plan.scheduled
            if (failure := self._sequences[scheduled.sequence_id].failure) is not None
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

    def _rows(self, scheduled: Sequence[ScheduledSequence]) -> list[_Row]:
        rows: list[_Row] = []
        for index, work in enumerate(scheduled):
            state = self._sequences[work.sequence_id]
            state.add_blocks(work.new_block_ids)
            first, end = work.num_computed_tokens, work.num_computed_tokens + work.num_tokens
            if state.failure is None:
                state.token_ids.extend(work.draft_token_ids)
                num_drafts, num_known = len(work.draft_token_ids), len(state.token_ids)
                assert first < end <= num_known
                assert not num_drafts or end == num_known
                assert end <= len(state.block_ids) // len(self._num_blocks) * self._block_size
                is_sampled = end == num_known and state.sampling.max_tokens != 0
                rows.append(_Row(index, state, first, end, num_drafts, is_sampled))
        return rows

    def _pack(
        self, rows: Sequence[_Row], wanted: LogitRows, hidden: "_HiddenRows", masks: TokenMasks | None
    ) -> StepBatch:
        """The tokens of these sequences, one after another. Fills `wanted` and `hidden`."""
        num_tokens = 0
        for row in rows:
            _want(row, wanted, num_tokens, -1 if masks is None else masks.first_rows.get(row.index, -1))
            if row.state.pooler is not None:
                hidden.add(row, row.state.pooler, num_tokens)
            num_tokens += row.end - row.first
        return pack_step(
            rows,
            wanted.inputs,
            hidden.places,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            block_groups=range(len(self._num_blocks)),
            has_loras=True,
        )

    def _sample(self, wanted: LogitRows, masks: TokenMasks | None) -> "_Sampled":
        changed, failures = self._process(wanted)
        arrays = self._table.arrays(wanted, None if masks is None else masks.bits, changed)
        result = self._backend.sample(arrays)
        for row in np.flatnonzero(result.status).tolist():
            failures.setdefault(row, _FAILURES[int(result.status[row])])
        num_logprobs: list[int] = [] if arrays.num_logprobs is None else arrays.num_logprobs.tolist()
        return _Sampled(
            result.token_ids.tolist(), failures, result.logprobs, num_logprobs, self._listed_logprobs(wanted)
        )

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


@attrs.frozen(eq=False)
class _Sampled:
    """What the rows of logits of a step gave."""

    tokens: Sequence[int]
    """[num_rows], and so on."""
    failures: Mapping[int, str]
    """By row."""
    logprobs: LogprobArrays | None
    num_logprobs: Sequence[int]
    """Of the most likely tokens, -1 where not even the token's own is wanted; empty where `logprobs` is None."""
    listed: Mapping[int, tuple[Sequence[int], Sequence[float]]]
    """By row, in place of the most likely tokens: others, and their log probabilities."""

    def token_logprobs(self, row: int) -> TokenLogprobs:
        """The log probabilities of a row that wants some."""
        assert self.logprobs is not None
        num = self.num_logprobs[row]
        token_ids, logprobs = self.listed.get(row) or (
            self.logprobs.top_token_ids[row, :num].tolist(),
            self.logprobs.top[row, :num].tolist(),
        )
        return TokenLogprobs(
            [self.tokens[row], *token_ids],
            [float(self.logprobs.chosen[row]), *logprobs],
            int(self.logprobs.rank[row]),
        )


@attrs.frozen(eq=False)
class _Outcome:
    """The fields of `StepResult`, while they are collected."""

    tokens: list[int]
    num_accepted: dict[int, int] = attrs.field(factory=dict[int, int])
    logprobs: dict[int, list[TokenLogprobs]] = attrs.field(factory=dict[int, list[TokenLogprobs]])
    prompt_logprobs: dict[int, list[TokenLogprobs]] = attrs.field(factory=dict[int, list[TokenLogprobs]])
    pooled: dict[int, NDArray[np.float32]] = attrs.field(factory=dict[int, NDArray[np.float32]])


@attrs.frozen(eq=False)
class _PooledRow:
    row: _Row
    pooler: Pooler
    num_wanted: int
    """Of its tokens in this step, how many have hidden states that are wanted."""


@attrs.frozen(eq=False)
class _HiddenRows:
    """The tokens of a step whose hidden states are wanted."""

    places: list[int] = attrs.field(factory=list[int])
    """In the step."""
    rows: list[_PooledRow] = attrs.field(factory=list[_PooledRow])

    def add(self, row: _Row, pooler: Pooler, first_input: int) -> None:
        """Add a sequence, whose tokens begin at `first_input`."""
        wanted = pooler.wanted(row.first, row.end)
        self.places.extend(range(first_input + wanted.start - row.first, first_input + wanted.stop - row.first))
        self.rows.append(_PooledRow(row, pooler, len(wanted)))


def _pool(rows: Sequence[_PooledRow], hidden: NDArray[np.float32], outcome: "_Outcome") -> None:
    """Give poolers their hidden states, and take the vectors of those sequences that are complete."""
    first = 0
    for each in rows:
        each.pooler.add(hidden[first : first + each.num_wanted])
        first += each.num_wanted
        state = each.row.state
        if each.row.end == len(state.token_ids):
            try:
                outcome.pooled[each.row.index] = each.pooler.vectors()
            except NotANumberError:
                state.failure = _FAILURES[SampledStatus.IS_NAN]


def _want(row: _Row, wanted: LogitRows, first_input: int, first_mask: int) -> None:
    """Add a sequence's rows of logits: those about tokens of the prompt, then those that are sampled.

    Args:
        row: the sequence.
        wanted: the step's rows.
        first_input: where the sequence's tokens begin among those of the step.
        first_mask: the mask of its first sampled token; -1 is none.
    """
    row.logit_row = len(wanted.states)
    state = row.state
    if state.sampling.prompt_logprobs is not None:
        for place in range(row.first + 1, min(row.end + 1, state.num_prompt_tokens)):
            wanted.add(state, first_input + place - 1 - row.first, place, known=state.token_ids[place])
        row.num_prompt_rows = len(wanted.states) - row.logit_row
    if row.is_sampled:
        for number in range(1 + row.num_drafts):
            place = row.end - row.num_drafts + number
            mask_row = -1 if first_mask < 0 else first_mask + number
            wanted.add(state, first_input + place - 1 - row.first, place, mask_row=mask_row)


def _take_in(row: _Row, sampled: _Sampled, outcome: _Outcome) -> None:
    """Keep what a sequence's rows gave: in the sequence, and for the result."""
    state, first = row.state, row.logit_row + row.num_prompt_rows
    if row.num_prompt_rows:
        prompt_rows = range(row.logit_row, first)
        state.failure = next((sampled.failures[each] for each in prompt_rows if each in sampled.failures), None)
        outcome.prompt_logprobs[row.index] = [sampled.token_logprobs(each) for each in prompt_rows]
    if not row.is_sampled:
        return
    num_accepted = 0
    if row.num_drafts:
        drafts = state.token_ids[-row.num_drafts :]
        del state.token_ids[-row.num_drafts :]
        while (
            num_accepted < row.num_drafts
            and first + num_accepted not in sampled.failures
            and sampled.tokens[first + num_accepted] == drafts[num_accepted]
        ):
            num_accepted += 1
    if num_accepted and first + num_accepted in sampled.failures:
        # What was accepted counts, as it does without drafts; the next step fails where this one did.
        num_accepted -= 1
    last = first + num_accepted
    state.failure = state.failure or sampled.failures.get(last)
    if state.failure is not None:
        return
    outcome.tokens[row.index] = sampled.tokens[last]
    state.token_ids.extend(sampled.tokens[first : last + 1])
    if num_accepted:
        outcome.num_accepted[row.index] = num_accepted
    if sampled.num_logprobs and sampled.num_logprobs[last] >= 0:
        outcome.logprobs[row.index] = [sampled.token_logprobs(each) for each in range(first, last + 1)]


def _computed(rows: Sequence[_Row], plan: StepPlan) -> list[ComputedSequence]:
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
