"""`FakeExecutor`: an `Executor` without a model, which forgives nothing.

Its KV cache is real in what matters: the entry of a token depends on the token and on the entry before it, which is
read through the block table. A sequence that starts with cached blocks must find in them what its own tokens give, and
nobody may write into a block that another sequence has. So a step that was scheduled wrongly, a block that was given
away too early, or a token lost in a preemption fails an assertion or changes every later token, and the answer is no
longer what `generate_alone` says. A plan that breaks the rules of `core.executor` raises AssertionError at once.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, cast

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.core.executor import (
    NO_TOKEN,
    BlockCopy,
    KVCacheGroup,
    LoRALoad,
    NewSequence,
    ScheduledSequence,
    SequenceFailure,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)
from trioengine.errors import CheckpointError, RequestError
from trioengine.types.messages import UpdateWeights, WeightTensor
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import PoolingParams

BROKEN_LORA = "broken"
"""The path of an adapter that cannot be read."""
_MASK = 2**64 - 1
_STEP = math.log(2)
_NOTHING_WRITTEN = -1
_WRONG = -2
"""The entry of a token that could not be computed, or was computed from another such."""


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
    lora_path: str | None = None,
    weight: int = 0,
) -> list[int]:
    """The tokens that a `FakeExecutor` generates for a prompt, however it is batched, split or preempted.

    It does not stop at end tokens, and takes no `Fail`. `weight` is what it was given as new weights.
    """
    entry = _entry_after(prompt, _first_entry(lora_path, weight))
    seed ^= weight
    generated: list[int] = []
    for num_generated in range(num_tokens):
        suppressed = set(end_token_ids) if num_generated < min_tokens else set[int]()
        is_allowed = _allowed(None, 0, 0, None, suppressed)
        token = _choose(entry, seed, num_generated, vocab_size, script, is_allowed)
        assert isinstance(token, int)
        generated.append(token)
        entry = _next_entry(entry, token)
    return generated


def logprobs_alone(
    prompt: Sequence[int], tokens: Sequence[int], num_top: int, *, vocab_size: int, seed: int = 0
) -> list[TokenLogprobs]:
    """The log probabilities that a `FakeExecutor` has for tokens that follow a prompt, which may be empty."""
    entry = _entry_after(prompt)
    logprobs: list[TokenLogprobs] = []
    for token in tokens:
        logprobs.append(_logprobs(entry, seed, token, num_top, vocab_size))
        entry = _next_entry(entry, token)
    return logprobs


def pooled_alone(prompt: Sequence[int]) -> NDArray[np.float32]:
    """The vector that a `FakeExecutor` has for a prompt, however it is batched, split or preempted."""
    return np.array(_halves(_entry_after(prompt)), np.float32)


def new_weight(value: int) -> WeightTensor:
    """What `UpdateWeights` gives a `FakeExecutor`, where `generate_alone` has it as `weight`."""
    return WeightTensor("weight", "float32", (1,), array("f", [value]).tobytes())


class FakeExecutor:
    """Deterministic, strict and fast. `scripts` maps a prompt to the first tokens that follow it.

    `before_step`, called with every plan, may raise, wait or record. `draft_model` says what follows some tokens; it is
    asked where a plan wants drafts. `fails` says which sequence fails at which of its generated tokens, `fails_load`
    which loads from the offload store fail. `sleep_error` and `wake_error` are raised by `sleep` and `wake_up` while
    they are set.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 1000,
        scripts: Mapping[tuple[int, ...], Script] | None = None,
        before_step: Callable[[StepPlan], None] | None = None,
        draft_model: Callable[[Sequence[int]], Sequence[int]] | None = None,
        num_offload_blocks: int = 0,
        fails: Callable[[NewSequence, int], bool] = lambda _sequence, _num_generated: False,
        fails_load: Callable[[BlockCopy], bool] = lambda _: False,
        max_loras: int = 0,
    ) -> None:
        self.sleep_error: Exception | None = None
        self.wake_error: Exception | None = None
        self.sleep_levels: list[int] = []
        """Of the calls of `sleep`."""
        self.loras: dict[int, str] = {}
        """The paths of adapters, by their ids."""
        self.prepare_error: Exception | None = None
        """Raised by `prepare_weights` while it is set."""
        self.profiles: list[str] = []
        """The paths of those that were stopped."""
        self._profile: str | None = None
        self._weight = 0
        self._staged_weight: int | None = None
        self._prepared_weight: int | None = None
        self._max_loras = max_loras
        self._lora_slots: dict[int, str] = {}
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._scripts = scripts or {}
        self._before_step = before_step
        self._draft_model = draft_model
        self._num_offload_blocks = num_offload_blocks
        self._fails = fails
        self._fails_load = fails_load
        self._sequences: dict[int, _Sequence] = {}
        self._block_holders: dict[int, set[int]] = {}
        self._entries = [_NOTHING_WRITTEN] * (num_blocks * block_size)
        self._offloaded: dict[int, list[int]] = {}
        self._in_flight: deque[tuple[StepPlan, StepPlan, StepResult]] = deque()
        self._asleep: set[str] = set()
        self._is_closed = False

    @property
    def kv_cache_groups(self) -> Sequence[KVCacheGroup]:
        """One: all layers."""
        return (KVCacheGroup(self._num_blocks),)

    @property
    def num_offload_blocks(self) -> int:
        """As it was made with."""
        return self._num_offload_blocks

    def check_sampling(self, sampling: SamplingParams) -> None:
        """As `Executor.check_sampling`."""

    def add_lora(self, lora_id: int, path: str) -> None:
        """As `Executor.add_lora`; every path has an adapter, but `BROKEN_LORA`."""
        assert lora_id not in self.loras, f"added twice: {lora_id}"
        if path == BROKEN_LORA:
            raise CheckpointError("It is broken.", path=path)
        self.loras[lora_id] = path

    def remove_lora(self, lora_id: int) -> None:
        """As `Executor.remove_lora`."""
        del self.loras[lora_id]

    def check_pooling(self, pooling: PoolingParams) -> None:
        """As `Executor.check_pooling`."""

    def update_weights(self, update: UpdateWeights) -> None:
        """As `Executor.update_weights`. There is one tensor, `new_weight`; a file's is the length of its path."""
        for tensor in update.tensors:
            if (tensor.name, tensor.shape) != ("weight", (1,)):
                raise RequestError(f"The tensor {tensor.name!r} is wrong.", param="tensors")
            (value,) = array("f", tensor.data)
            self._staged_weight = int(value)
        if update.path is not None:
            self._staged_weight = len(update.path)

    def discard_weights(self) -> None:
        """As `Executor.discard_weights`."""
        self._staged_weight = self._prepared_weight = None

    def prepare_weights(self) -> None:
        """As `Executor.prepare_weights`."""
        assert self._staged_weight is not None, "no new weights"
        if self.prepare_error is not None:
            raise self.prepare_error
        self._prepared_weight = self._staged_weight

    def apply_weights(self) -> None:
        """As `Executor.apply_weights`."""
        assert self._prepared_weight is not None, "not prepared"
        assert "weights" not in self._asleep, "asleep"
        self._weight = self._prepared_weight
        self.discard_weights()

    def start_profile(self, prefix: str | None) -> None:
        """As `Executor.start_profile`."""
        if self._profile is not None:
            raise RequestError("A profile is being recorded.")
        self._profile = f"{prefix}.json"

    def stop_profile(self) -> str:
        """As `Executor.stop_profile`. There is no file."""
        if self._profile is None:
            raise RequestError("No profile is being recorded.")
        self.profiles.append(self._profile)
        self._profile = None
        return self.profiles[-1]

    def collective_rpc(self, method: str, arguments: str) -> Sequence[str]:
        """As `Executor.collective_rpc`. There is one method, `echo`."""
        if method != "echo":
            raise RequestError(f"There is no method {method!r}.", param="method")
        return (arguments,)

    @property
    def asleep(self) -> frozenset[str]:
        """What sleeps."""
        return frozenset(self._asleep)

    def sleep(self, level: int) -> None:
        """As `Executor.sleep`."""
        assert not self._in_flight, "a step is in flight"
        assert not self._sequences, f"sequences {self.sequence_ids} are known"
        assert level in (1, 2), f"no such level: {level}"
        assert not self._asleep, "it sleeps already"
        if self.sleep_error is not None:
            raise self.sleep_error
        self.sleep_levels.append(level)
        self._asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: Sequence[str]) -> None:
        """As `Executor.wake_up`."""
        assert set(tags) <= self._asleep, f"not asleep: {tags}"
        if self.wake_error is not None:
            raise self.wake_error
        self._asleep -= set(tags)
        if "kv_cache" in tags:
            self._entries = [_NOTHING_WRITTEN] * len(self._entries)

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
        assert not self._asleep, "submit while asleep"
        assert len(self._in_flight) < 2, "three steps in flight"
        copied = _copy(plan)
        if self._before_step:
            self._before_step(plan)
        for sequence_id in plan.removed:
            self._remove(sequence_id)
        for save in plan.saves:
            assert 0 <= save.offload_slot < self._num_offload_blocks, f"no such slot: {save}"
            self._offloaded[save.offload_slot] = self._entries[self._slice(save.block_id)]
        failed_loads = [load for load in plan.loads if not self._load(load)]
        for lora_load in plan.lora_loads:
            self._load_lora(lora_load)
        for new in plan.new:
            self._add(new)
        scheduled = [work.sequence_id for work in plan.scheduled]
        assert len(set(scheduled)) == len(scheduled), f"scheduled twice in one step: {scheduled}"
        works = [(self._sequence(work), work) for work in plan.scheduled]
        outputs = [self._write(sequence, work) for sequence, work in works]
        result = StepResult(plan.step, [], [], {}, {}, {}, {}, failed_loads=failed_loads)
        for index, (sequence, work) in enumerate(works):
            self._check_beginning(sequence, work)
            self._sample(index, sequence, work, outputs[index], plan.masks, result)
        self._in_flight.append((plan, copied, result))

    def result(self) -> StepResult:
        """The result of the oldest step not fetched."""
        assert self._in_flight, "no step was submitted"
        plan, copied, result = self._in_flight.popleft()
        # Of a plan in flight only the entries may change, not which they are.
        assert _copy(plan, copied.scheduled) == copied, f"changed while in flight: {plan}, was {copied}"
        ids = [[work.sequence_id for work in scheduled] for scheduled in (plan.scheduled, copied.scheduled)]
        assert ids[0] == ids[1], f"changed while in flight: {ids}"
        return result

    def close(self) -> None:
        """Take no more steps."""
        self._is_closed = True

    def _add(self, new: NewSequence) -> None:
        assert new.sequence_id not in self._sequences, f"sequence {new.sequence_id} is new twice"
        assert 0 < new.num_prompt_tokens <= len(new.token_ids), f"no tokens: {new}"
        assert all(0 <= token < self._vocab_size for token in new.token_ids), f"not in the vocabulary: {new}"
        prompt = tuple(new.token_ids[: new.num_prompt_tokens])
        self._sequences[new.sequence_id] = _Sequence(
            parameters=new,
            token_ids=list(new.token_ids),
            script=self._scripts.get(prompt, ()),
            first_entry=_first_entry(self._lora_path(new.lora_slot), self._weight),
        )

    def _lora_path(self, slot: int) -> str | None:
        if not slot:
            return None
        assert slot in self._lora_slots, f"there is no adapter in slot {slot}"
        return self._lora_slots[slot]

    def _load_lora(self, load: LoRALoad) -> None:
        assert 1 <= load.slot <= self._max_loras, f"no such slot: {load}"
        users = [each for each in self._sequences.values() if each.parameters.lora_slot == load.slot]
        assert not users, f"sequences have the adapter in this slot: {load}, {users}"
        self._lora_slots[load.slot] = self.loras[load.lora_id]

    def _remove(self, sequence_id: int) -> None:
        assert sequence_id in self._sequences, f"sequence {sequence_id} is removed, but not known"
        for block_id in self._sequences.pop(sequence_id).block_table:
            self._block_holders[block_id].remove(sequence_id)

    def _load(self, load: BlockCopy) -> bool:
        assert not self._block_holders.get(load.block_id), f"sequences have this block: {load}"
        assert load.offload_slot in self._offloaded, f"nothing was saved there: {load}"
        is_loaded = not self._fails_load(load)
        entries = self._offloaded[load.offload_slot] if is_loaded else [_WRONG] * self._block_size
        self._entries[self._slice(load.block_id)] = entries
        return is_loaded

    def _sequence(self, work: ScheduledSequence) -> "_Sequence":
        """The sequence of an entry, with its new blocks."""
        sequence = self._sequences.get(work.sequence_id)
        assert sequence, f"sequence {work.sequence_id} is scheduled, but not known"
        for block_id in work.new_block_ids:
            assert 0 <= block_id < self._num_blocks, f"no such block: {work}"
            assert block_id not in sequence.block_table, f"block {block_id} is in the table already: {work}"
            sequence.block_table.append(block_id)
            self._block_holders.setdefault(block_id, set()).add(work.sequence_id)
        if sequence.has_failed:
            return sequence
        start, end = work.num_computed_tokens, work.num_computed_tokens + work.num_tokens
        num_drafts = len(work.draft_token_ids)
        is_complete = end - num_drafts == len(sequence.token_ids)
        assert start == sequence.num_computed_tokens or not sequence.is_started, f"not where {sequence} is: {work}"
        assert work.num_tokens > num_drafts, f"nothing to do: {work}"
        assert end - num_drafts <= len(sequence.token_ids), f"more tokens than {sequence} has: {work}"
        assert is_complete or not (num_drafts or work.max_new_drafts), f"drafts in a prompt: {work}"
        num_slots = len(sequence.block_table) * self._block_size
        assert end + work.max_new_drafts <= num_slots, f"no room in the blocks of {sequence}: {work}"
        return sequence

    def _write(self, sequence: "_Sequence", work: ScheduledSequence) -> Sequence[int]:
        """Write the entries of a step's inputs, and return them."""
        if sequence.has_failed:
            return ()
        start = work.num_computed_tokens
        inputs = [*sequence.token_ids, *work.draft_token_ids]
        if sequence.is_started:
            entry = self._entries[self._place(sequence, start - 1)]
            assert entry != _NOTHING_WRITTEN, f"nothing before {start} in the blocks of {sequence}"
        else:
            entry = _entry_after(inputs[:start], sequence.first_entry)
        entries: list[int] = []
        for position in range(start, start + work.num_tokens):
            entry = _next_entry(entry, inputs[position])
            entries.append(entry)
            place = self._place(sequence, position)
            for other_id in self._block_holders[place // self._block_size] - {work.sequence_id}:
                other = self._sequences[other_id]
                is_used = other.is_started and not other.has_failed and position < other.num_computed_tokens
                if is_used and self._entries[place] != _WRONG:
                    assert self._entries[place] == entry, f"block of {sequence} belongs to sequence {other_id}"
            self._entries[place] = entry
        return entries

    def _check_beginning(self, sequence: "_Sequence", work: ScheduledSequence) -> None:
        """Check that others have computed this beginning of a new sequence."""
        if sequence.is_started:
            return
        sequence.is_started = True
        pooling = sequence.parameters.pooling
        is_all_needed = pooling is not None and pooling.needs_all_tokens
        assert not (is_all_needed and work.num_computed_tokens), f"every token of {sequence} must be computed"
        entry, is_wrong = sequence.first_entry, False
        for position in range(work.num_computed_tokens):
            entry = _next_entry(entry, sequence.token_ids[position])
            found = self._entries[self._place(sequence, position)]
            is_wrong |= found == _WRONG
            assert found in (entry, _WRONG), f"something else at {position} in the blocks of {sequence}"
        if is_wrong:
            self._spoil(sequence, work)

    def _spoil(self, sequence: "_Sequence", work: ScheduledSequence) -> None:
        """Nobody may use what a sequence leaves behind of this step."""
        for position in range(work.num_computed_tokens, work.num_computed_tokens + work.num_tokens):
            self._entries[self._place(sequence, position)] = _WRONG

    def _place(self, sequence: "_Sequence", position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return sequence.block_table[block] * self._block_size + offset

    def _slice(self, block_id: int) -> slice:
        return slice(block_id * self._block_size, (block_id + 1) * self._block_size)

    def _sample(
        self,
        index: int,
        sequence: "_Sequence",
        work: ScheduledSequence,
        entries: Sequence[int],
        masks: TokenMasks | None,
        result: StepResult,
    ) -> None:
        """Fill in the result's fields for one sequence."""
        if sequence.has_failed:  # In a plan that was made before anybody knew.
            cast(list[int], result.tokens).append(NO_TOKEN)
            return
        sampling = sequence.parameters.sampling
        start, end = work.num_computed_tokens, work.num_computed_tokens + work.num_tokens
        num_drafts = len(work.draft_token_ids)
        is_complete = end - num_drafts == len(sequence.token_ids)
        sequence.num_computed_tokens = end
        if sampling.prompt_logprobs is not None:
            seed = sequence.parameters.seed ^ self._weight
            followers = sequence.token_ids[start + 1 : sequence.parameters.num_prompt_tokens]
            part = [
                _logprobs(entry, seed, token, sampling.prompt_logprobs, self._vocab_size)
                for entry, token in zip(entries, followers, strict=False)  # The last inputs may have no follower.
            ]
            if part:
                _set(result.prompt_logprobs, index, part)
        token: int | Fail = NO_TOKEN
        if is_complete and sampling.max_tokens != 0:
            token = self._sample_tokens(index, sequence, work, entries[-1 - num_drafts :], masks, result)
        elif is_complete and self._fails(sequence.parameters, 0):
            token = Fail("It was to fail.")
        if isinstance(token, Fail):
            sequence.has_failed = True
            self._spoil(sequence, work)
            cast(list[SequenceFailure], result.failures).append(SequenceFailure(work.sequence_id, token.message))
        elif is_complete and sequence.parameters.pooling is not None:
            # The entry of a token depends on all before it, whoever computed them.
            _set(result.pooled, index, np.array(_halves(entries[-1]), np.float32))
        elif token != NO_TOKEN and self._draft_model is not None and work.max_new_drafts:
            _set(result.drafts, index, self._draft_model(sequence.token_ids)[: work.max_new_drafts])
        cast(list[int], result.tokens).append(token if isinstance(token, int) else NO_TOKEN)

    def _sample_tokens(
        self,
        index: int,
        sequence: "_Sequence",
        work: ScheduledSequence,
        entries: Sequence[int],
        masks: TokenMasks | None,
        result: StepResult,
    ) -> int | Fail:
        """Sample after each of these entries, up to the first draft that is not what was sampled; the last token."""
        parameters, num_drafts = sequence.parameters, len(work.draft_token_ids)
        sampling, seed = parameters.sampling, parameters.seed ^ self._weight
        logprobs: list[TokenLogprobs] = []
        token: int | Fail = NO_TOKEN
        for row, entry in enumerate(entries):
            num_generated = len(sequence.token_ids) - parameters.num_prompt_tokens
            suppressed = set(parameters.end_token_ids) if num_generated < sampling.min_tokens else set[int]()
            is_allowed = _allowed(masks, index, row, sampling.allowed_token_ids, suppressed)
            token = _choose(entry, seed, num_generated, self._vocab_size, sequence.script, is_allowed)
            if self._fails(parameters, num_generated):
                token = Fail("It was to fail.")
            if isinstance(token, Fail):
                if row == 0:
                    return token
                row -= 1  # What was accepted counts, and the next step fails.
                token = sequence.token_ids[-1]
                sequence.num_computed_tokens -= num_drafts - row
                _set(result.num_accepted, index, row)
                break
            sequence.token_ids.append(token)
            if sampling.logprobs is not None:
                logprobs.append(
                    _logprobs(entry, seed, token, sampling.logprobs, self._vocab_size, sampling.logprob_token_ids)
                )
            if row == num_drafts or token != work.draft_token_ids[row]:
                sequence.num_computed_tokens -= num_drafts - row
                _set(result.num_accepted, index, row)
                break
        if logprobs:
            _set(result.logprobs, index, logprobs)
        return token


def _halves(entry: int) -> Sequence[int]:
    return [entry >> shift & 0xFFFF for shift in range(0, 64, 16)]


@attrs.define
class _Sequence:
    parameters: NewSequence
    token_ids: list[int]
    script: Script
    block_table: list[int] = attrs.field(factory=list[int])
    num_computed_tokens: int = 0
    is_started: bool = False
    has_failed: bool = False
    first_entry: int = 0


def _copy(plan: StepPlan, scheduled: Sequence[ScheduledSequence] | None = None) -> StepPlan:
    """A plan that nobody else can change; its entries are these, or copies."""
    entries = [attrs.evolve(work) for work in plan.scheduled] if scheduled is None else scheduled
    new = [attrs.evolve(new, token_ids=tuple(new.token_ids)) for new in plan.new]
    return attrs.evolve(
        plan,
        scheduled=entries,
        new=new,
        removed=tuple(plan.removed),
        masks=None,
        saves=tuple(plan.saves),
        loads=tuple(plan.loads),
        lora_loads=tuple(plan.lora_loads),
    )


def _next_entry(entry: int, token: int) -> int:
    # Knuth's 64-bit linear congruential generator, stirred by the token; only its upper bits are used.
    return _WRONG if entry == _WRONG else (entry * 6364136223846793005 + token * 2 + 1442695040888963407) & _MASK


def _first_entry(lora_path: str | None, weight: int) -> int:
    """What an adapter and new weights make of the model: all entries depend on it."""
    return weight if lora_path is None else _entry_after(tuple(lora_path.encode()), weight)


def _entry_after(tokens: Sequence[int], entry: int = 0) -> int:
    for token in tokens:
        entry = _next_entry(entry, token)
    return entry


def _choose(
    entry: int, seed: int, num_generated: int, vocab_size: int, script: Script, is_allowed: Callable[[int], bool]
) -> int | Fail:
    if num_generated < len(script):
        scripted = script[num_generated]
        if isinstance(scripted, Fail) or is_allowed(scripted):
            return scripted
    best = _best(entry, seed, vocab_size)
    for place in range(vocab_size):
        token = (best + place) % vocab_size
        if is_allowed(token):
            return token
    return Fail("No token is allowed.")


def _allowed(
    masks: TokenMasks | None, index: int, row: int, allowed_token_ids: Sequence[int] | None, suppressed: Set[int]
) -> Callable[[int], bool]:
    bits = None if masks is None or index not in masks.first_rows else masks.bits[masks.first_rows[index] + row]

    def is_allowed(token: int) -> bool:
        is_in_mask = bits is None or bool(int(bits[token // 32]) >> (token % 32) & 1)
        return is_in_mask and token not in suppressed and (allowed_token_ids is None or token in allowed_token_ids)

    return is_allowed


def _best(entry: int, seed: int, vocab_size: int) -> int:
    return (_next_entry(_next_entry(entry, seed), 0) >> 32) % vocab_size


def _logprobs(
    entry: int, seed: int, token: int, num_top: int, vocab_size: int, listed: Sequence[int] | None = None
) -> TokenLogprobs:
    """Each token is half as likely as the one before it, the best one first."""
    best = _best(entry, seed, vocab_size)
    places: Sequence[int] = range(vocab_size if num_top == -1 else num_top)
    if listed:
        places = [(token_id - best) % vocab_size for token_id in listed]
    rank = (token - best) % vocab_size + 1
    token_ids = [token, *((best + place) % vocab_size for place in places)]
    return TokenLogprobs(token_ids, [-rank * _STEP, *(-(place + 1) * _STEP for place in places)], rank)


def _set(mapping: Mapping[int, Any], index: int, value: object) -> None:
    """Fill in a result that is being made."""
    cast(dict[int, Any], mapping)[index] = value
