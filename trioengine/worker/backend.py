"""What the runner asks of a backend: one step's tokens computed, and tokens chosen from their logits."""

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.sampler import SampledTokens, SamplingArrays


@attrs.frozen(eq=False)
class StepBatch:
    """The packed tokens of one step, int32, C-contiguous. Every block id is one of the cache."""

    token_ids: NDArray[np.int32]
    """[num_tokens]."""
    positions: NDArray[np.int32]
    """[num_tokens]: each token's place in its sequence."""
    slots: NDArray[np.int32]
    """[num_tokens]: `block_id * block_size + offset`, where the token's key and value are stored."""
    query_start: NDArray[np.int32]
    """[num_seqs + 1]: the tokens of sequence i are `query_start[i]` to `query_start[i + 1] - 1`, its last ones."""
    seq_lens: NDArray[np.int32]
    """[num_seqs]: tokens of each sequence, those of this step included."""
    block_table: NDArray[np.int32]
    """[num_seqs, max_blocks]: entries behind a sequence's last block are 0."""
    logit_rows: NDArray[np.int32]
    """[num_logit_rows]: the tokens whose successors are wanted."""


class Backend(Protocol):
    """A model with its KV cache."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the model: ids 0 to `vocab_size - 1`."""
        ...

    def compute(self, batch: StepBatch) -> None:
        """Compute a step of at least one token. Its logits stay until the next."""
        ...

    def copy_logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """[len(rows), vocab_size]: these rows of the newest step's logits."""
        ...

    def sample(self, arrays: SamplingArrays) -> SampledTokens:
        """Choose a token for each row of the newest step's logits.

        Args:
            arrays: an entry for each of the step's `logit_rows`, at least one.
        """
        ...
