"""The border between scheduling and the device: what a step computes (`StepPlan`), what comes back (`StepResult`).

`core` decides, an `Executor` computes. A sequence is known to the executor from the step in whose `new` it stands
until the step in whose `removed` it stands; a preempted sequence is removed and comes back as new.
"""

from collections.abc import Sequence
from typing import Protocol

import attrs

from trioengine.types.params import SamplingParams

NO_TOKEN = -1
"""In `StepResult.tokens`: this sequence's prompt is not complete, so nothing was sampled."""


@attrs.frozen
class NewSequence:
    """A sequence that the executor does not know yet."""

    sequence_id: int
    token_ids: Sequence[int]
    """All tokens known: the prompt and, after a preemption, what was generated before it."""
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    """Unsigned 64 bits; with the position it determines the random numbers of every token."""
    end_token_ids: Sequence[int] = ()
    """Tokens that must not be sampled before `sampling.min_tokens` tokens are generated."""


@attrs.define
class ScheduledSequence:
    """One sequence's part of a step: its next tokens are computed and written to the KV cache.

    Tokens `num_computed_tokens` to `num_computed_tokens + num_tokens` are inputs. When that reaches the end of the
    known tokens, one token is sampled, and the executor appends it to its copy of the sequence. The core changes the
    same object for the next step once the result is fetched.
    """

    sequence_id: int
    num_computed_tokens: int
    num_tokens: int
    new_block_ids: Sequence[int] = ()
    """Appended to the sequence's block table before the step."""


@attrs.frozen
class StepPlan:
    """Everything that one step needs. Applied in the order: `removed`, `new`, `scheduled`."""

    step: int
    scheduled: Sequence[ScheduledSequence]
    new: Sequence[NewSequence] = ()
    removed: Sequence[int] = ()
    """Sequence ids to forget. Their blocks may already belong to others in this same step."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(sequence.num_tokens for sequence in self.scheduled)


@attrs.frozen
class SequenceFailure:
    """One sequence could not be computed. The others of the step are unaffected."""

    sequence_id: int
    message: str


@attrs.frozen
class StepResult:
    """What one step sampled."""

    step: int
    tokens: Sequence[int]
    """One per entry of `StepPlan.scheduled`, in its order: the sampled token, or `NO_TOKEN`."""
    failures: Sequence[SequenceFailure] = ()
    """Their entries in `tokens` are `NO_TOKEN`. The core removes them in a later plan."""


class Executor(Protocol):
    """Computes steps. Not thread-safe; called by the core's loop only."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache that a plan may name: ids 0 to `num_blocks - 1`."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Start a step. May return before it is done."""
        ...

    def result(self) -> StepResult:
        """Wait for the oldest step submitted and not yet fetched, and return what it sampled."""
        ...

    def close(self) -> None:
        """Give the device's memory back. Idempotent."""
        ...
