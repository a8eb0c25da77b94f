"""The sequences of one step: which logits and hidden states are wanted of each, and what becomes of what they give.

What a step samples is kept in its sequences here. Nothing here computes, or knows what does.
"""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.sampler import SampledStatus
from trioengine_kernels.native.sampler import TokenLogprobs as LogprobArrays

from trioengine.core.executor import TokenLogprobs
from trioengine.worker.pooling import NotANumberError, Pooler
from trioengine.worker.sampling_table import LogitRows
from trioengine.worker.sequences import UNKNOWN_TOKEN, SequenceState

FAILURES: Mapping[int, str] = {
    SampledStatus.IS_NAN: "The model's output for this sequence is not a number.",
    SampledStatus.NOTHING_ALLOWED: (
        "No token is allowed in the next place: the grammar, allowed_token_ids, bad_words, min_tokens and the like"
        " together forbid all of them."
    ),
}


@attrs.define(eq=False)
class StepRow:
    """A scheduled sequence that can be computed."""

    index: int
    """Its place in the plan."""
    state: SequenceState
    first: int
    """Its first token to compute."""
    end: int
    """Behind the last."""
    num_drafts: int
    """The last of its tokens."""
    is_sampled: bool
    """Whether tokens are sampled after the last `1 + num_drafts`."""
    logit_row: int = 0
    """Its first row of logits: those about tokens of the prompt, then those that are sampled."""
    num_prompt_rows: int = 0
    has_placeholder: bool = False
    """Whether an `UNKNOWN_TOKEN` stands where its token will."""

    def want(self, wanted: LogitRows, first_input: int, first_mask: int) -> None:
        """Add its rows of logits.

        Args:
            wanted: the step's rows.
            first_input: where the sequence's tokens begin among those of the step.
            first_mask: the mask of its first sampled token; -1 is none.
        """
        self.logit_row = len(wanted.states)
        state = self.state
        if state.sampling.prompt_logprobs is not None:
            for place in range(self.first + 1, min(self.end + 1, state.num_prompt_tokens)):
                wanted.add(state, first_input + place - 1 - self.first, place, known=state.token_ids[place])
            self.num_prompt_rows = len(wanted.states) - self.logit_row
        if self.is_sampled:
            for number in range(1 + self.num_drafts):
                place = self.end - self.num_drafts + number
                mask_row = -1 if first_mask < 0 else first_mask + number
                wanted.add(state, first_input + place - 1 - self.first, place, mask_row=mask_row)

    def add_placeholder(self) -> None:
        """Let later steps be planned with the token that this one samples."""
        self.state.token_ids.append(UNKNOWN_TOKEN)
        self.state.num_unknown += 1
        self.has_placeholder = True

    def take_in(self, sampled: "SampledRows", outcome: "StepOutcome") -> None:
        """Keep what its rows gave: in the sequence, and for the result."""
        state, first = self.state, self.logit_row + self.num_prompt_rows
        if state.failure is not None:
            return  # In the step before, which was not done when this one was begun.
        if self.num_prompt_rows:
            prompt_rows = range(self.logit_row, first)
            state.failure = next((sampled.failures[each] for each in prompt_rows if each in sampled.failures), None)
            outcome.prompt_logprobs[self.index] = [sampled.token_logprobs(each) for each in prompt_rows]
        if not self.is_sampled:
            return
        num_accepted = 0
        if self.num_drafts:
            drafts = state.token_ids[-self.num_drafts :]
            del state.token_ids[-self.num_drafts :]
            while (
                num_accepted < self.num_drafts
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
        outcome.tokens[self.index] = sampled.tokens[last]
        if self.has_placeholder:
            state.token_ids[self.end] = sampled.tokens[last]
            state.num_unknown -= 1
        else:
            state.token_ids.extend(sampled.tokens[first : last + 1])
        if num_accepted:
            outcome.num_accepted[self.index] = num_accepted
        if sampled.num_logprobs and sampled.num_logprobs[last] >= 0:
            outcome.logprobs[self.index] = [sampled.token_logprobs(each) for each in range(first, last + 1)]


@attrs.frozen(eq=False)
class SampledRows:
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
class StepOutcome:
    """The fields of `StepResult`, while they are collected."""

    tokens: list[int]
    num_accepted: dict[int, int] = attrs.field(factory=dict[int, int])
    logprobs: dict[int, list[TokenLogprobs]] = attrs.field(factory=dict[int, list[TokenLogprobs]])
    prompt_logprobs: dict[int, list[TokenLogprobs]] = attrs.field(factory=dict[int, list[TokenLogprobs]])
    pooled: dict[int, NDArray[np.float32]] = attrs.field(factory=dict[int, NDArray[np.float32]])


@attrs.frozen(eq=False)
class _PooledRow:
    row: StepRow
    pooler: Pooler
    num_wanted: int
    """Of its tokens in this step, how many have hidden states that are wanted."""


@attrs.frozen(eq=False)
class HiddenRows:
    """The tokens of a step whose hidden states are wanted."""

    places: list[int] = attrs.field(factory=list[int])
    """In the step."""
    rows: list[_PooledRow] = attrs.field(factory=list[_PooledRow])

    def add(self, row: StepRow, pooler: Pooler, first_input: int) -> None:
        """Add a sequence, whose tokens begin at `first_input`."""
        wanted = pooler.wanted(row.first, row.end)
        self.places.extend(range(first_input + wanted.start - row.first, first_input + wanted.stop - row.first))
        self.rows.append(_PooledRow(row, pooler, len(wanted)))

    def pool(self, hidden: NDArray[np.float32], outcome: StepOutcome) -> None:
        """Give poolers their hidden states, and take the vectors of those sequences that are complete."""
        first = 0
        for each in self.rows:
            each.pooler.add(hidden[first : first + each.num_wanted])
            first += each.num_wanted
            state = each.row.state
            if each.row.end == len(state.token_ids):
                try:
                    outcome.pooled[each.row.index] = each.pooler.vectors()
                except NotANumberError:
                    state.failure = FAILURES[SampledStatus.IS_NAN]
