"""`FakeExecutor`: an `Executor` without a model, which forgives nothing.

Its KV cache is real in what matters: the entry of a token depends on the token and on the entry before it, which is
read through the block table. So a step that was scheduled wrongly, a block that two sequences share, or a token lost in
a preemption changes every later token, and the answer is no longer what `generate_alone` says. A plan that breaks the
rules of `core.executor` raises AssertionError at once.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import attrs

from trioengine.core.executor import (
    NO_TOKEN,
    KVCacheGroup,
    NewSequence,
    ScheduledSequence,
    SequenceFailure,
    StepPlan,
    StepResult,
)
from trioengine.types.params import SamplingParams

_MASK = 2**64 - 1
_NOTHING_WRITTEN = -1


@attrs.frozen
class Fail:
    """In a script: computing this token fails, with this message."""

    message: str


Script = Sequence[int | Fail]
"""What comes instead of the first generated tokens."""


def generate_alone(
    prompt: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int,
    seed: int = 0,
    min_tokens: int = 0,
    end_token_ids: Sequence[int] = (),
    script: Script = (),
) -> list[int]:
    """The tokens that a `FakeExecutor` generates for a prompt, however it is batched, split or preempted.

    It does not stop at end tokens, and takes no `Fail`.
    """
    entry = 0
    for token in prompt:
        entry = _next_entry(entry, token)
    generated: list[int] = []
    for num_generated in range(num_tokens):
        suppressed = end_token_ids if num_generated < min_tokens else ()
        token = _choose(entry, seed, num_generated, vocab_size, suppressed, script)
        assert isinstance(token, int)
        generated.append(token)
        entry = _next_entry(entry, token)
    return generated


class FakeExecutor:
    """Deterministic, strict and fast. `scripts` maps a prompt to the first tokens that follow it.

    `before_step`, called with every plan, may raise, wait or record.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 1000,
        scripts: Mapping[tuple[int, ...], Script] | None = None,
        before_step: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._scripts = scripts or {}
        self._before_step = before_step
        self._sequences: dict[int, _Sequence] = {}
        self._block_holders: dict[int, int] = {}
        self._entries = [_NOTHING_WRITTEN] * (num_blocks * block_size)
        self._results: deque[StepResult] = deque()
        self._is_closed = False

    @property
    def kv_cache_groups(self) -> Sequence[KVCacheGroup]:
        """One: all layers."""
        return (KVCacheGroup(self._num_blocks),)

    @property
    def num_offload_blocks(self) -> int:
        """None."""
        return 0

    def check_sampling(self, sampling: SamplingParams) -> None:
        """As `Executor.check_sampling`."""

    def sleep(self, level: int) -> None:
        """As `Executor.sleep`."""

    def wake_up(self, tags: Sequence[str]) -> None:
        """As `Executor.wake_up`."""

    @property
    def sequence_ids(self) -> set[int]:
        """The sequences that it has been told of and not told to forget."""
        return set(self._sequences)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def submit(self, plan: StepPlan) -> None:
        """Check and compute a step."""
        assert not self._is_closed, "submit after close"
        if self._before_step:
            self._before_step(plan)
        for sequence_id in plan.removed:
            self._remove(sequence_id)
        for new in plan.new:
            self._add(new)
        scheduled = [work.sequence_id for work in plan.scheduled]
        assert len(set(scheduled)) == len(scheduled), f"scheduled twice in one step: {scheduled}"
        tokens: list[int] = []
        failures: list[SequenceFailure] = []
        for work in plan.scheduled:
            token = self._compute(work)
            if isinstance(token, Fail):
                failures.append(SequenceFailure(work.sequence_id, token.message))
                token = NO_TOKEN
            tokens.append(token)
        self._results.append(StepResult(plan.step, tokens, failures))

    def result(self) -> StepResult:
        """The result of the oldest step not fetched."""
        assert self._results, "no step was submitted"
        return self._results.popleft()

    def close(self) -> None:
        """Take no more steps."""
        self._is_closed = True

    def _add(self, new: NewSequence) -> None:
        assert new.sequence_id not in self._sequences, f"sequence {new.sequence_id} is new twice"
        assert 0 < new.num_prompt_tokens <= len(new.token_ids), f"no tokens: {new}"
        assert all(0 <= token < self._vocab_size for token in new.token_ids), f"not in the vocabulary: {new}"
        prompt = tuple(new.token_ids[: new.num_prompt_tokens])
        self._sequences[new.sequence_id] = _Sequence(
            parameters=new, token_ids=list(new.token_ids), script=self._scripts.get(prompt, ())
        )

    def _remove(self, sequence_id: int) -> None:
        assert sequence_id in self._sequences, f"sequence {sequence_id} is removed, but not known"
        for block_id in self._sequences.pop(sequence_id).block_table:
            del self._block_holders[block_id]
            start = block_id * self._block_size
            self._entries[start : start + self._block_size] = [_NOTHING_WRITTEN] * self._block_size

    def _compute(self, work: ScheduledSequence) -> int | Fail:
        sequence = self._sequences.get(work.sequence_id)
        assert sequence, f"sequence {work.sequence_id} is scheduled, but not known"
        self._append_blocks(sequence, work)
        end = work.num_computed_tokens + work.num_tokens
        assert work.num_computed_tokens == sequence.num_computed_tokens, f"not where {sequence} is: {work}"
        assert work.num_tokens > 0, f"nothing to do: {work}"
        assert end <= len(sequence.token_ids), f"more tokens than {sequence} has: {work}"
        assert end <= len(sequence.block_table) * self._block_size, f"no room in the blocks of {sequence}: {work}"
        entry = (
            self._entries[self._place(sequence, sequence.num_computed_tokens - 1)] if work.num_computed_tokens else 0
        )
        for position in range(work.num_computed_tokens, end):
            entry = _next_entry(entry, sequence.token_ids[position])
            self._entries[self._place(sequence, position)] = entry
        sequence.num_computed_tokens = end
        return NO_TOKEN if end < len(sequence.token_ids) else self._sample(sequence, entry)

    def _append_blocks(self, sequence: "_Sequence", work: ScheduledSequence) -> None:
        for block_id in work.new_block_ids:
            assert 0 <= block_id < self._num_blocks, f"no such block: {work}"
            holder = self._block_holders.setdefault(block_id, work.sequence_id)
            assert holder == work.sequence_id, f"block {block_id} belongs to sequence {holder}: {work}"
            assert block_id not in sequence.block_table, f"block {block_id} is in the table already: {work}"
            sequence.block_table.append(block_id)

    def _place(self, sequence: "_Sequence", position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return sequence.block_table[block] * self._block_size + offset

    def _sample(self, sequence: "_Sequence", entry: int) -> int | Fail:
        parameters = sequence.parameters
        num_generated = len(sequence.token_ids) - parameters.num_prompt_tokens
        suppressed = parameters.end_token_ids if num_generated < parameters.sampling.min_tokens else ()
        token = _choose(entry, parameters.seed, num_generated, self._vocab_size, suppressed, sequence.script)
        if isinstance(token, int):
            sequence.token_ids.append(token)
        return token


@attrs.define
class _Sequence:
    parameters: NewSequence
    token_ids: list[int]
    script: Script
    block_table: list[int] = attrs.field(factory=list[int])
    num_computed_tokens: int = 0


def _next_entry(entry: int, token: int) -> int:
    # Knuth's 64-bit linear congruential generator, stirred by the token; only its upper bits are used.
    return (entry * 6364136223846793005 + token * 2 + 1442695040888963407) & _MASK


def _choose(
    entry: int, seed: int, num_generated: int, vocab_size: int, suppressed: Sequence[int], script: Script
) -> int | Fail:
    if num_generated < len(script):
        return script[num_generated]
    token = (_next_entry(_next_entry(entry, seed), 0) >> 32) % vocab_size
    while token in suppressed:
        token = (token + 1) % vocab_size
    return token
