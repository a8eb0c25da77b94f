"""What the worker remembers of each sequence between steps: its tokens, its blocks and how to sample.

A sequence that cannot be computed is remembered with the reason, so that it fails alone. Nothing here computes.
"""

from array import array
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.core.executor import NewSequence
from trioengine.types.params import SamplingParams
from trioengine.worker.logits_processors import BoundProcessor


@attrs.frozen(eq=False)
class TokenRules:
    """A sequence's rules about single tokens, ready to be copied into a step's arrays. Empty arrays are no rule."""

    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    allowed_ids: NDArray[np.int32]
    end_ids: NDArray[np.int32]
    """Forbidden until there are `min_tokens`."""
    min_tokens: int
    bad_ids: NDArray[np.int32]
    """Bad words of one token: always forbidden."""
    bad_endings: Mapping[int, Sequence[tuple[tuple[int, ...], int]]]
    """Longer bad words, by the token before the last one: all but the last, and the last, which is forbidden then."""
    has_penalties: bool

    @property
    def is_empty(self) -> bool:
        """Whether there is no rule."""
        ids = (self.bias_ids, self.allowed_ids, self.bad_ids, self.bad_endings)
        return not (any(map(len, ids)) or self.has_penalties or (self.min_tokens and len(self.end_ids)))

    def forbidden(self, token_ids: "array[int]", place: int, num_prompt_tokens: int) -> NDArray[np.int32]:
        """Tokens that must not stand in this place, after those of `token_ids` before it."""
        forbidden = self.bad_ids
        if place - num_prompt_tokens < self.min_tokens and len(self.end_ids):
            forbidden = np.concatenate((forbidden, self.end_ids))
        matching = [
            last
            for others, last in self.bad_endings.get(token_ids[place - 1], ())
            if tuple(token_ids[max(0, place - len(others)) : place]) == others
        ]
        return np.concatenate((forbidden, np.array(matching, np.int32))) if matching else forbidden


@attrs.define(eq=False)
class SequenceState:
    """One sequence known to the worker."""

    token_ids: "array[int]"
    """Prompt and output, as far as known; during a step its drafts behind them."""
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    """Unsigned 64 bits."""
    rules: TokenRules
    failure: str | None = None
    """Why this sequence cannot be computed."""
    processors: Sequence[BoundProcessor] = ()
    """Custom ones."""
    row: int = -1
    """Its row in the `SamplingTable`."""
    block_ids: NDArray[np.int32] = attrs.field(factory=lambda: np.empty(0, np.int32))

    def add_blocks(self, block_ids: Sequence[int]) -> None:
        """Append to the block table."""
        if block_ids:
            self.block_ids = np.concatenate((self.block_ids, np.asarray(block_ids, np.int32)))


def sequence_state(new: NewSequence, vocab_size: int) -> SequenceState:
    """Begin to remember a sequence. What it asks for is checked here, once."""
    failure = _failure(new, vocab_size)
    is_wrong = failure is not None
    return SequenceState(
        # What is wrong may not even be a number that an array takes.
        token_ids=array("i", () if is_wrong else new.token_ids),
        num_prompt_tokens=new.num_prompt_tokens,
        sampling=new.sampling,
        seed=new.seed % 2**64,
        rules=_NO_RULES if is_wrong else _token_rules(new),
        failure=failure,
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
        ("bad_words", [token_id for word in new.bad_words_token_ids for token_id in word]),
    ):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            return f"Token {wrong} in {name} is not in the vocabulary of {vocab_size} tokens."
    return None


def _token_rules(new: NewSequence) -> TokenRules:
    sampling = new.sampling
    bias = sampling.logit_bias or {}
    endings: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for *others, last in new.bad_words_token_ids:
        if others:
            endings.setdefault(others[-1], []).append((tuple(others), last))
    return TokenRules(
        bias_ids=np.array(list(bias), np.int32),
        bias_values=np.array(list(bias.values()), np.float32),
        allowed_ids=np.array(sampling.allowed_token_ids or (), np.int32),
        end_ids=np.array(new.end_token_ids, np.int32),
        min_tokens=sampling.min_tokens,
        bad_ids=np.array([word[0] for word in new.bad_words_token_ids if len(word) == 1], np.int32),
        bad_endings=endings,
        has_penalties=sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0,
    )


_NO_IDS = np.empty(0, np.int32)
_NO_RULES = TokenRules(_NO_IDS, np.empty(0, np.float32), _NO_IDS, _NO_IDS, 0, _NO_IDS, {}, has_penalties=False)
