"""The draft model: a smaller model that guesses what the sequences of a runner say next.

It draws with the parameters, the seed and the place that the target will draw with. So where both expect the same, it
guesses right whatever the temperature is, and greedy requests are drafted greedily. (Daliri, Musco and Suresh 2024,
"Coupling without communication and drafter-invariant speculative decoding".) Grammars and custom processors are the
target's alone.

Its keys and values lie in the same blocks as the target's, so that what the core decides about blocks holds for both.
What is wrong in them would cost accepted drafts, never a token: the target checks every draft.
"""

from collections.abc import Iterator, Mapping, Sequence

import attrs
from trioengine_kernels.native.sampler import SampledStatus

from trioengine.config.resolve import ResolvedConfig
from trioengine.core.executor import KVCacheGroup
from trioengine.errors import ConfigError
from trioengine.models.config import ModelConfig
from trioengine.worker.backend import Backend
from trioengine.worker.packing import pack_step
from trioengine.worker.sampling_table import LogitRows, SamplingTable
from trioengine.worker.sequences import SequenceState

CATCH_UP_TOKENS = 16
"""Where no drafts are wanted, tokens are computed so many at a time, which costs little more than a single one."""


def draft_block_group(windows: Sequence[int | None]) -> int:
    """Which of the target's KV groups, given by their windows, a draft model shares the blocks of.

    Raises:
        ConfigError: all have windows, so that a sequence's blocks go to others before it ends.
    """
    if None in windows:
        return windows.index(None)
    raise ConfigError(
        "A draft model needs a model with layers that see all tokens, as it keeps its own in the same blocks; all"
        " layers of this one have windows.",
        option="speculative_config",
    )


def draft_config(config: ResolvedConfig, target: Sequence[KVCacheGroup], model: ModelConfig) -> ResolvedConfig:
    """The sizes of a draft model, which shares its target's blocks, wants one row of logits of each sequence, and is
    computed without graphs.

    Args:
        config: the target's sizes.
        target: the target's KV groups.
        model: the draft model.

    Raises:
        ConfigError: as `draft_block_group`.
    """
    num_blocks = target[draft_block_group([group.window for group in target])].num_blocks
    return attrs.evolve(
        config,
        num_kv_blocks=[num_blocks] * len(model.kv_groups),
        max_num_logit_rows=config.max_num_seqs,
        cudagraph_capture_sizes=(),
    )


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

    @property
    def state(self) -> SequenceState:
        """Of the sequence."""
        return self.sequence.state


class DraftModel:
    """A backend beside the target's."""

    def __init__(
        self, backend: Backend, groups: Sequence[KVCacheGroup], *, max_tokens: int, max_model_len: int
    ) -> None:
        """Begin with an empty cache.

        Args:
            backend: each of its groups has as many blocks as the target's first one without a window.
            groups: the target's.
            max_tokens: that the backend computes at once. At least as many as a step has sequences.
            max_model_len: no drafts for sequences that would get longer.

        Raises:
            ConfigError: as `draft_block_group`.
        """
        self._backend = backend
        self._num_blocks = [group.num_blocks for group in groups]
        self._block_groups = [draft_block_group([each.window for each in groups])] * len(backend.kv_cache_groups)
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._progress: dict[int, _Progress] = {}

    def drop_weights(self) -> None:
        """As `Memory.drop_weights`."""
        self._backend.drop_weights()

    def load_weights(self) -> None:
        """As `Memory.load_weights`."""
        self._backend.load_weights()

    def drop_kv_cache(self) -> None:
        """As `Memory.drop_kv_cache`."""
        self._backend.drop_kv_cache()

    def make_kv_cache(self) -> None:
        """As `Memory.make_kv_cache`."""
        self._backend.make_kv_cache()

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
        rows, num_tokens = LogitRows(), 0
        for part in parts:
            num_tokens += part.end - part.first
            if part.is_sampled:
                rows.add(part.state, num_tokens - 1, part.end)
        self._backend.compute(
            pack_step(
                parts,
                rows.inputs,
                block_size=self._backend.block_size,
                num_blocks=self._num_blocks,
                block_groups=self._block_groups,
            )
        )
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
