# pyright: basic
"""What the worker remembers of each sequence between steps: its tokens, its blocks and how to sample.

A sequence that cannot be computed is remembered with the reason, so that it fails alone. Nothing here computes.
"""

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.core.executor import NewSequence
from trioengine.types.params import SamplingParams

_UINT64 = 2**64


@attrs.define(eq=False)
class SequenceState:
    """One sequence known to the worker."""

    token_ids: list[int]
    """Prompt and output, as far as known."""
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    """Signed 64 bits, as tensors hold them."""
    end_token_ids: Sequence[int]
    failure: str | None
    """Why this sequence cannot be computed."""
    block_ids: NDArray[np.int32] = attrs.field(factory=lambda: np.empty(0, np.int32))

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def add_blocks(self, block_ids: Sequence[int]) -> None:
        """Append to the block table."""
        if block_ids:
            self.block_ids = np.concatenate((self.block_ids, np.asarray(block_ids, np.int32)))


def sequence_state(new: NewSequence, vocab_size: int) -> SequenceState:
    """Begin to remember a sequence. What it asks for is checked here, once."""
    seed = new.seed % _UINT64
    return SequenceState(
        token_ids=list(new.token_ids),
        num_prompt_tokens=new.num_prompt_tokens,
        sampling=new.sampling,
        seed=seed - _UINT64 if seed >= _UINT64 // 2 else seed,
        end_token_ids=new.end_token_ids,
        failure=_failure(new, vocab_size),
    )


def _failure(new: NewSequence, vocab_size: int) -> str | None:
    if not new.token_ids:
        return "The sequence has no tokens."
    for name, token_ids in (
        ("prompt", new.token_ids),
        ("stop_token_ids", new.end_token_ids),
        ("logit_bias", tuple(new.sampling.logit_bias or ())),
    ):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            return f"Token {wrong} in {name} is not in the vocabulary of {vocab_size} tokens."
    return None
