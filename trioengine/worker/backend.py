"""What the runner asks of a backend: one step's tokens computed, and tokens chosen from their logits."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import attrs
import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.sampler import SampledTokens, SamplingArrays

from trioengine.core.executor import KVCacheGroup
from trioengine.models.config import ModelConfig
from trioengine.models.lora import LoRA
from trioengine.worker.pooling import Labels
from trioengine.worker.shared_operations import ComputedModel
from trioengine.worker.weight_transfer import ReplaceableWeights


@attrs.frozen(eq=False, kw_only=True)
class PackedTokens:
    """The packed tokens of one step, int32, C-contiguous."""

    token_ids: NDArray[np.int32]
    """[num_tokens]."""
    positions: NDArray[np.int32]
    """[num_tokens]: each token's place in its sequence."""
    query_start: NDArray[np.int32]
    """[num_seqs + 1]: the tokens of sequence i are `query_start[i]` to `query_start[i + 1] - 1`, its last ones."""
    seq_lens: NDArray[np.int32]
    """[num_seqs]: tokens of each sequence, those of this step included."""
    logit_rows: NDArray[np.int32]
    """[num_logit_rows]: the tokens whose successors are wanted."""
    lora_slots: NDArray[np.int32] | None = None
    """[num_tokens]: the slot of each token's adapter, 0 where it has none. None is 0 for all."""
    hidden_rows: NDArray[np.int32] = attrs.field(factory=lambda: np.empty(0, np.int32))
    """[num_hidden_rows]: the tokens whose hidden states are wanted, which are others."""


@attrs.frozen(eq=False, kw_only=True)
class StepBatch(PackedTokens):
    """A step with everything that it needs."""

    slots: NDArray[np.int32]
    """[num_kv_groups, num_tokens]: `block_id * block_size + offset`, where the token's key and value are stored."""
    block_table: NDArray[np.int32]
    """[num_kv_groups, num_seqs, max_blocks]: entries behind a sequence's last block are 0. Those that all its tokens of
    this step have left behind the group's window are -1, or blocks of others."""


@attrs.frozen(eq=False, kw_only=True)
class LaunchBatch(PackedTokens):
    """A step for a backend that remembers, by rows, what it was told of sequences: what is new.

    A token id of -1 is the last token that was sampled for the sequence, which only the backend may know yet.
    """

    rows: NDArray[np.int32]
    """[num_seqs]: the row of each sequence, below the backend's `max_num_seqs`."""
    block_updates: NDArray[np.int32]
    """[num_updates, 4]: KV group, row, place in the block table, block id. A row whose first place is among them is
    another sequence's from now on. An id of -1 is that of a block that no token sees any more."""
    logit_owners: NDArray[np.int32]
    """[num_logit_rows]: the row of the sequence that each row of logits is of."""
    sampled_rows: NDArray[np.int32]
    """[num_logit_rows]: of which row the token that is sampled is the last one then; -1 where it may be none."""


class Memory(Protocol):
    """What takes most of an executor's memory, in two parts, which are there at first.

    Dropping what was dropped, or loading what is there, does nothing.
    """

    def drop_weights(self) -> None:
        """Give the memory of the weights back."""
        ...

    def load_weights(self) -> None:
        """Read them again. When this raises, nothing has changed.

        Raises:
            CheckpointError: the files are gone, or not what they were.
            MemoryError: there is no memory for them.
        """
        ...

    def drop_kv_cache(self) -> None:
        """Give the memory of the KV cache back."""
        ...

    def make_kv_cache(self) -> None:
        """Make an empty one. When this raises, nothing has changed.

        Raises:
            MemoryError: there is no memory for it.
        """
        ...


class Backend(Memory, ComputedModel, ReplaceableWeights, Protocol):
    """A model with its KV cache."""

    @property
    def kv_cache_groups(self) -> Sequence[KVCacheGroup]:
        """As `Executor.kv_cache_groups`."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    def kv_block(self, group: int, block_id: int) -> NDArray[np.generic]:
        """What a block holds, until the next step: of any shape, the same for all blocks of a group."""
        ...

    def write_kv_block(self, group: int, block_id: int, data: NDArray[np.uint8] | None) -> None:
        """Fill a block with the bytes of what `kv_block` gave of one; None is zeros."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens of the model: ids 0 to `vocab_size - 1`."""
        ...

    @property
    def labels(self) -> Labels | None:
        """The classification head that the model has; None where it generates text. None while the weights sleep."""
        ...

    def load_lora(self, slot: int, lora: LoRA) -> None:
        """Put an adapter into a slot, 1 or above; what was there is forgotten. It stays there whatever sleeps."""
        ...

    def compute(self, batch: StepBatch) -> None:
        """Compute a step of at least one token. Its logits stay until the next."""
        ...

    def copy_logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """[len(rows), vocab_size]: these rows of the newest step's logits."""
        ...

    def hidden_states(self) -> NDArray[np.float32]:
        """[num_hidden_rows, hidden_size]: of the newest step's `hidden_rows`, behind the last norm. There until the
        next."""
        ...

    def sample(self, arrays: SamplingArrays) -> SampledTokens:
        """Choose a token for each row of the newest step's logits.

        Args:
            arrays: an entry for each of the step's `logit_rows`, at least one.
        """
        ...


@attrs.frozen(eq=False)
class StepNumbers:
    """What a step gave."""

    sampled: SampledTokens | None
    """None where nothing was to be sampled."""
    hidden_states: NDArray[np.float32] | None
    """As `Backend.hidden_states`; None where none were wanted."""


class LaunchedStep(Protocol):
    """A step that was begun."""

    def wait(self) -> StepNumbers:
        """What it gave, when it is done. May be called once, and in the order of the steps."""
        ...


@runtime_checkable
class AsyncBackend(Backend, Protocol):
    """A backend that begins a step and computes it while the host does something else.

    Steps are computed in the order in which they were begun, and two may be at once. What is called besides comes
    behind them.
    """

    @property
    def max_num_seqs(self) -> int:
        """Sequences that it remembers."""
        ...

    def launch(self, batch: LaunchBatch, sampling: SamplingArrays | None) -> LaunchedStep:
        """Begin a step.

        Args:
            batch: at least one token.
            sampling: how to choose the tokens of its `logit_rows`; None where there are none, or where their logits are
                to be read and sampled by `copy_logits` and `sample`, before another step is begun.
        """
        ...


def kv_cache_groups(model: ModelConfig, num_blocks: Sequence[int]) -> Sequence[KVCacheGroup]:
    """The KV groups of a model with so many blocks each."""
    return [KVCacheGroup(number, group.window) for number, group in zip(num_blocks, model.kv_groups, strict=True)]
