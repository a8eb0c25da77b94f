"""What the worker remembers of each sequence between steps: its tokens, its blocks and how to sample.

A sequence that cannot be computed is remembered with the reason, so that it fails alone. Nothing here computes.
"""

from array import array
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.core.executor import NewSequence
from trioengine.tokenizer.bad_words import BadWords
from trioengine.types.params import SamplingParams
from trioengine.worker.logits_processors import BoundProcessor
from trioengine.worker.pooling import Labels, Pooler

UNKNOWN_TOKEN = -1
"""In `SequenceState.token_ids`: what stands here is being sampled."""


@attrs.frozen(eq=False)
class TokenRules:
    """A sequence's rules about single tokens, ready to be copied into a step's arrays. Empty arrays are no rule."""

    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    allowed_ids: NDArray[np.int32]
    end_ids: NDArray[np.int32]
    """Forbidden until there are `min_tokens`."""
    min_tokens: int
    bad_words: BadWords | None
    has_penalties: bool

    @property
    def is_empty(self) -> bool:
        """Whether there is no rule."""
        has_ids = len(self.bias_ids) or len(self.allowed_ids) or (self.min_tokens and len(self.end_ids))
        return not (has_ids or self.has_penalties or self.bad_words is not None)

    def forbidden(self, token_ids: "array[int]", place: int, num_prompt_tokens: int) -> NDArray[np.int32]:
        """Tokens that must not stand in this place, after those of `token_ids` before it."""
        is_too_short = place - num_prompt_tokens < self.min_tokens
        forbidden = self.end_ids if is_too_short else _NO_IDS
        if self.bad_words is None:
            return forbidden
        return np.union1d(forbidden, self.bad_words.forbidden_token_ids(token_ids, num_prompt_tokens, place))


@attrs.define(eq=False)
class SequenceState:
    """One sequence known to the worker."""

    token_ids: "array[int]"
    """Prompt and output; during a step its drafts behind them."""
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    """Unsigned 64 bits."""
    rules: TokenRules
    failure: str | None = None
    """Why this sequence cannot be computed."""
    pooler: Pooler | None = None
    """Makes its vectors, where these are wanted of it."""
    processors: Sequence[BoundProcessor] = ()
    """Custom ones."""
    lora_slot: int = 0
    """Of its adapter; 0 is none."""
    row: int = -1
    """Its row in the `SamplingTable`."""
    num_unknown: int = 0
    """Of its tokens, the last ones, how many are `UNKNOWN_TOKEN`."""
    block_ids: NDArray[np.int32] = attrs.field(factory=lambda: np.empty(0, np.int32))

    def add_blocks(self, block_ids: Sequence[int]) -> None:
        """Append to the block table."""
        if block_ids:
            self.block_ids = np.concatenate((self.block_ids, np.asarray(block_ids, np.int32)))


def sequence_state(
    new: NewSequence, vocab_size: int, bad_words: BadWords | None = None, labels: Labels | None = None
) -> SequenceState:
    """Begin to remember a sequence. What it asks for is checked here, once.

    Args:
        new: the sequence.
        vocab_size: tokens of the model.
        bad_words: the rules that its `sampling.bad_words` make.
        labels: the model's classification head.
    """
    failure = _failure(new, vocab_size)
    is_wrong = failure is not None
    return SequenceState(
        # What is wrong may not even be a number that an array takes.
        token_ids=array("i", () if is_wrong else new.token_ids),
        num_prompt_tokens=new.num_prompt_tokens,
        sampling=new.sampling,
        seed=new.seed % 2**64,
        rules=_NO_RULES if is_wrong else _token_rules(new, bad_words),
        failure=failure,
        lora_slot=new.lora_slot,
        pooler=None if new.pooling is None else Pooler(new.pooling, len(new.token_ids), labels),
    )


def _failure(new: NewSequence, vocab_size: int) -> str | None:
    if not new.token_ids:
        return "The sequence has no tokens."
    sampling = new.sampling
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        return "allowed_token_ids allows no token."
    for name, token_ids in (
        ("prompt", new.token_ids),
        ("stop_token_ids", new.end_token_ids),
        ("logit_bias", tuple(sampling.logit_bias or ())),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("logprob_token_ids", sampling.logprob_token_ids or ()),
    ):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            return f"Token {wrong} in {name} is not in the vocabulary of {vocab_size} tokens."
    return None


def _token_rules(new: NewSequence, bad_words: BadWords | None) -> TokenRules:
    sampling = new.sampling
    bias = sampling.logit_bias or {}
    return TokenRules(
        bias_ids=np.array(list(bias), np.int32),
        bias_values=np.array(list(bias.values()), np.float32),
        allowed_ids=np.array(sampling.allowed_token_ids or (), np.int32),
        end_ids=np.array(new.end_token_ids, np.int32),
        min_tokens=sampling.min_tokens,
        bad_words=bad_words,
        has_penalties=sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0,
    )


_NO_IDS = np.empty(0, np.int32)
_NO_RULES = TokenRules(_NO_IDS, np.empty(0, np.float32), _NO_IDS, _NO_IDS, 0, None, has_penalties=False)
