"""Finds where a model's reasoning ends, in the bytes of its tokens: a marker may be spelled by any tokens."""

from collections.abc import Iterable, Mapping, Sequence

import attrs

from trioengine.config.engine import ReasoningParser
from trioengine.tokenizer.tokenizer import Tokenizer

MAX_TAIL_TOKENS = 256
"""How much of a prompt's end is looked at."""


@attrs.frozen
class ReasoningMarkers:
    """What stands around a model's reasoning."""

    start: bytes
    end: bytes


MARKERS: Mapping[ReasoningParser, ReasoningMarkers] = {
    ReasoningParser.DEEPSEEK_R1: ReasoningMarkers(b"<think>", b"</think>"),
    ReasoningParser.QWEN3: ReasoningMarkers(b"<think>", b"</think>"),
}


def reasoning_ended_in_prompt(markers: ReasoningMarkers, prompt_tail: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a prompt ends behind the model's reasoning, as templates write it that switch reasoning off.

    Only what follows the last control token counts, which is the start of the model's own turn: a marker that a user
    typed stands before it.
    """
    turn = b""
    for token_id in reversed(prompt_tail):
        data = tokenizer.token_bytes(token_id)
        if tokenizer.is_special(token_id) and data not in (markers.start, markers.end):
            break
        turn = data + turn
    return turn.rfind(markers.end) > turn.rfind(markers.start)


class EndFinder:
    """Looks for a marker in tokens as they come."""

    __slots__ = ("_bytes_of", "_marker", "_tail")

    def __init__(self, marker: bytes, tokenizer: Tokenizer) -> None:
        """Start with no token read."""
        self._marker = marker
        self._bytes_of = tokenizer.token_bytes
        self._tail = b""

    def feed(self, token_id: int) -> bool:
        """Whether this token completes the marker. Whatever the token has behind it belongs to the marker."""
        text = self._tail + self._bytes_of(token_id)
        if self._marker in text:
            return True
        keep = len(self._marker) - 1
        self._tail = text[-keep:] if keep else b""
        return False

    def num_until_end(self, token_ids: Iterable[int]) -> int | None:
        """How many of these tokens it takes to complete the marker; None when it is not complete after them. They are
        not read in."""
        tail = self._tail
        try:
            for index, token_id in enumerate(token_ids):
                if self.feed(token_id):
                    return index + 1
        finally:
            self._tail = tail
        return None
