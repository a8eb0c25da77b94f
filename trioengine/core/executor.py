"""The border between scheduling and the device: what a step computes (`StepPlan`), what comes back (`StepResult`).

`core` decides, an `Executor` computes. A sequence is known to the executor from the step in whose `new` it stands
until the step in whose `removed` it stands; a preempted sequence is removed and comes back as new.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.types.messages import UpdateWeights
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import PoolingParams

NO_TOKEN = -1
"""In `StepResult.tokens`: nothing was sampled, for this sequence's prompt is not complete, or its `max_tokens` is 0."""


@attrs.frozen
class KVCacheGroup:
    """Layers whose tokens need the same blocks. Most models have one group; those with windows in some layers two.

    Each group has block ids of its own, 0 to `num_blocks - 1`.
    """

    num_blocks: int
    window: int | None = None
    """Each token sees itself and the `window - 1` before it, so blocks behind the window may be used for others. None
    is all tokens."""


@attrs.frozen
class BlockCopy:
    """A block's content on its way between the KV cache and the offload store."""

    group: int
    block_id: int
    offload_slot: int
    """Its place in the store: 0 to the store's number of blocks of this group - 1."""


@attrs.frozen
class LoRALoad:
    """An adapter takes a slot, in place of what was in it. No sequence that is known computes with that any more."""

    slot: int
    """1 to the executor's number of slots."""
    lora_id: int
    """As `Executor.add_lora` was told."""


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
    lora_slot: int = 0
    """The slot of its adapter, which stays there while the sequence is known; 0 is no adapter."""
    pooling: PoolingParams | None = None
    """Vectors are wanted of it, not tokens; complete. `sampling.max_tokens` is 0 then."""
    second_text_start: int | None = None
    """The first token of the second text, where it is two and the model tells them apart."""


@attrs.define
class ScheduledSequence:
    """One sequence's part of a step: its next tokens are computed and written to the KV cache.

    Tokens `num_computed_tokens` to `num_computed_tokens + num_tokens` are inputs. When that reaches the end of the
    known tokens, one token is sampled, and the executor appends it to its copy of the sequence. Tokens before
    `num_computed_tokens` of a new sequence are in the blocks that it is given: others have computed them, at the latest
    in this same step (keys and values of a layer are stored for all of a step's tokens before any is read).

    With `draft_token_ids` the inputs end with these, behind all known tokens, and after each of the last
    `1 + len(draft_token_ids)` inputs a token is sampled as always. Drafts are accepted as long as they are what was
    sampled in their place; the first token that is not, or the one after the last draft, ends what the sequence gets.
    So drafts change the number of steps, never the tokens.

    The core changes the same object for the next step: an executor that is not done when `submit` returns must have
    copied what it needs.
    """

    sequence_id: int
    num_computed_tokens: int
    num_tokens: int
    new_block_ids: Sequence[int] = ()
    """Appended to the sequence's block table before the step. Of n groups of layers each has its own, block after
    block: with two groups, a block of the first, its counterpart of the second, the next of the first, and so on; -1
    stands for one that is behind its group's window already."""
    draft_token_ids: Sequence[int] = ()
    """The last of the inputs; `num_tokens` counts them."""
    max_new_drafts: int = 0
    """The most tokens that the executor's draft model, if it has one, drafts after what this step samples. The
    sequence's blocks have room for so many tokens behind its inputs."""


@attrs.frozen(eq=False)
class TokenMasks:
    """Which tokens may be sampled, where a grammar binds."""

    first_rows: Mapping[int, int]
    """By index in `StepPlan.scheduled`: the row of `bits` for its first sampled token; one more row for each draft."""
    bits: NDArray[np.int32]
    """[num_rows, ceil(vocab_size / 32)]: token t may be sampled where bit `t % 32` of word `t // 32` is set. Valid
    until the step's result is fetched."""


@attrs.frozen
class StepPlan:
    """Everything that one step needs. Applied in the order: `removed`, `saves`, `loads`, `lora_loads`, `new`,
    `scheduled`."""

    step: int
    scheduled: Sequence[ScheduledSequence]
    new: Sequence[NewSequence] = ()
    removed: Sequence[int] = ()
    """Sequence ids to forget. Their blocks may already belong to others in this same step."""
    masks: TokenMasks | None = None
    saves: Sequence[BlockCopy] = ()
    """Blocks to copy into the offload store, before this step or a load changes them."""
    loads: Sequence[BlockCopy] = ()
    """Blocks to fill from the offload store."""
    lora_loads: Sequence[LoRALoad] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(sequence.num_tokens for sequence in self.scheduled)


@attrs.frozen
class SequenceFailure:
    """One sequence could not be computed. The others of the step are unaffected.

    Where it is the place behind accepted drafts that fails, these count, and the sequence fails in the next step.
    """

    sequence_id: int
    message: str


@attrs.frozen
class TokenLogprobs:
    """Log probabilities at one token's place: of the token, then of the most likely ones in their order, or of
    `SamplingParams.logprob_token_ids`."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Finite."""
    rank: int
    """Of the first."""


@attrs.frozen
class StepResult:
    """What one step sampled."""

    step: int
    tokens: Sequence[int]
    """One per entry of `StepPlan.scheduled`, in its order: the sampled token, or `NO_TOKEN`."""
    failures: Sequence[SequenceFailure] = ()
    """Their entries in `tokens` are `NO_TOKEN`. The core removes them in a later plan; the one that is in flight then
    may still have them, and whatever comes of that is ignored."""
    num_accepted: Mapping[int, int] = attrs.field(factory=dict[int, int])
    """By index in `StepPlan.scheduled`, for entries with drafts: how many were accepted. They come before the token in
    `tokens`. Absent is 0."""
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = attrs.field(factory=dict[int, Sequence[TokenLogprobs]])
    """By index, for sequences that asked for them: one per new token, accepted drafts included."""
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = attrs.field(factory=dict[int, Sequence[TokenLogprobs]])
    """By index, for sequences that asked for them: of the prompt's tokens that follow this step's inputs."""
    drafts: Mapping[int, Sequence[int]] = attrs.field(factory=dict[int, Sequence[int]])
    """By index: what the executor's draft model expects after the new tokens."""
    draft_seconds: float = 0.0
    """Of the step's time, what the draft model took."""
    pooled: Mapping[int, NDArray[np.float32]] = attrs.field(factory=dict[int, NDArray[np.float32]])
    """By index, for sequences with `pooling`, in the step that reaches the end of their tokens: [width], or [tokens,
    width] where each token has a vector."""
    failed_loads: Sequence[BlockCopy] = ()
    """Blocks that could not be filled. What was computed from them is wrong."""


class Executor(Protocol):
    """Computes steps. Not thread-safe; called by the core's loop only.

    One whose steps need those of the executors of other cores is a `core.lockstep.Lockstep` besides.
    """

    @property
    def kv_cache_groups(self) -> Sequence[KVCacheGroup]:
        """The groups of layers, at least one, and the blocks that a plan may name."""
        ...

    @property
    def num_offload_blocks(self) -> int:
        """Blocks of each group that the offload store holds; 0 where there is none."""
        ...

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Return when every rule of these parameters can be kept here: its custom logits processors are known and
        take their arguments.

        Raises:
            RequestError: naming the field at fault.
        """
        ...

    def add_lora(self, lora_id: int, path: str) -> None:
        """Read an adapter, so that plans can load it. Whether the executor sleeps does not matter.

        May be called by another thread than the others.

        Raises:
            CheckpointError: its files cannot be read, or are not of an adapter of this model.
            RequestError: it is larger than adapters may be here. `param` is "path".
        """
        ...

    def remove_lora(self, lora_id: int) -> None:
        """Forget an adapter that no later plan loads. A slot that has it keeps it until another comes."""
        ...

    def check_pooling(self, pooling: PoolingParams) -> None:
        """Return when these vectors can be had here.

        Raises:
            RequestError: naming the field at fault.
        """
        ...

    def submit(self, plan: StepPlan) -> None:
        """Start a step. May return before it is done."""
        ...

    def result(self) -> StepResult:
        """Wait for the oldest step submitted and not yet fetched, and return what it sampled.

        Several may be in flight. A later one's inputs then hold tokens that the core does not know yet: the executor
        appends what a step samples before it computes the next.
        """
        ...

    def sleep(self, level: int) -> None:
        """Give memory back until `wake_up`: level 1 the KV cache's and the offload store's, level 2 the weights'
        too. No step is in flight, and no sequence is known any more."""
        ...

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory again for "weights", "kv_cache" or both. Blocks are empty then.

        Raises:
            TrioEngineError: it cannot be had; the executor still sleeps.
        """
        ...

    def update_weights(self, update: UpdateWeights) -> None:
        """Check new weights and keep them, beside those that are kept already. May be called by another thread.

        Raises:
            RequestError: names what is wrong; nothing of this update is kept.
            CheckpointError: the file cannot be read.
        """
        ...

    def discard_weights(self) -> None:
        """Forget the new weights that are kept and not applied."""
        ...

    def prepare_weights(self) -> None:
        """Make a model with the new weights that are kept. May be called by another thread, as it is slow; all goes on
        meanwhile as always.

        Raises:
            CheckpointError: the model's files are gone, or not what they were.
            UnavailableError: there is not enough memory for it.
        """
        ...

    def apply_weights(self) -> None:
        """Compute with the model that was prepared, in all steps that are submitted from now on. The weights are
        awake."""
        ...

    def start_profile(self, prefix: str | None) -> None:
        """Record what the steps compute that are submitted from now on.

        Raises:
            RequestError: it does already.
            UnavailableError: no file can be written.
        """
        ...

    def stop_profile(self) -> str:
        """Write what was recorded; the path of the file, whose name begins with the prefix.

        Raises:
            RequestError: nothing was.
            UnavailableError: it cannot be written.
        """
        ...

    def collective_rpc(self, method: str, arguments: str) -> Sequence[str]:
        """As `CollectiveRPC`: each worker's result, as JSON.

        Raises:
            RequestError: there is no such method, or it does not take these arguments.
        """
        ...

    def close(self) -> None:
        """Give the device's memory back. Idempotent."""
        ...
