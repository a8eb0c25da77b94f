"""A model's reasoning: where it ends in the bytes of its tokens (any may spell the marker), and how long it may be."""

import copy
from collections.abc import Iterable, Mapping, Sequence

import attrs

from trioengine.config.engine import ReasoningParser
from trioengine.tokenizer.tokenizer import Tokenizer

MAX_TAIL_TOKENS = 256
"""How much of a prompt's end is looked at."""
MAX_BYTES_BEFORE_START = 8
"""White space behind which a start marker still begins the answer."""


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


class Reasoning:
    """A model's reasoning while it lasts: any tokens, and when its budget is spent, those of its end marker."""

    __slots__ = ("_beginning", "_bytes_of", "_end", "_end_token_ids", "_num_forced", "_num_left", "_start_marker")

    def __init__(self, markers: ReasoningMarkers, tokenizer: Tokenizer, max_tokens: int | None = None) -> None:
        """Start with no token read.

        Args:
            markers: around the reasoning.
            tokenizer: of the model.
            max_tokens: the budget; None is no limit. A start marker at the beginning of the answer is not counted,
                nor a little white space before it.
        """
        self._end = EndFinder(markers.end, tokenizer)
        self._bytes_of = tokenizer.token_bytes
        self._start_marker = markers.start
        self._num_left = max_tokens
        self._end_token_ids: Sequence[int] = ()
        self._num_forced = 0
        self._beginning: bytes | None = None
        """What there is of the answer while that may be the start marker."""
        if max_tokens is not None:
            self._beginning = b""
            end = markers.end.decode()
            self._end_token_ids = tokenizer.encode(end, add_special_tokens=False, allow_special=True)

    def must(self) -> int | None:
        """The token that must come next; None where any may. A model whose tokens cannot spell the end goes on."""
        return next(iter(self.forced()), None)

    def forced(self) -> list[int]:
        """All tokens that must come next, of the reasoning."""
        return list(self._end_token_ids[self._num_forced :]) if self._num_left == 0 else []

    def feed(self, token_id: int) -> bool:
        """Whether this token, which is the one that must come if one must, ends the reasoning."""
        if self._end.feed(token_id):
            return True
        if self._num_left == 0:
            self._num_forced += 1
        elif self._num_left is not None and not self._is_of_start(token_id):
            self._num_left -= 1
        return False

    def musts(self, token_ids: Iterable[int]) -> list[int | None]:
        """`must` for the next token and for those that follow each of these, as long as the reasoning lasts and they
        are what must come. They are not read in."""
        musts = [self.must()]
        reasoning = None
        for token_id in token_ids:
            reasoning = reasoning or self._copy()
            if musts[-1] not in (None, token_id) or reasoning.feed(token_id):
                break
            musts.append(reasoning.must())
        return musts

    def _is_of_start(self, token_id: int) -> bool:
        if self._beginning is None:
            return False
        self._beginning += self._bytes_of(token_id)
        beginning = self._beginning.lstrip()
        is_of_start = self._start_marker.startswith(beginning) or beginning.startswith(self._start_marker)
        # Nor is white space without an end: a model that writes nothing else is to stop some time.
        num_spaces = len(self._beginning) - len(beginning)
        if not is_of_start or len(beginning) >= len(self._start_marker) or num_spaces > MAX_BYTES_BEFORE_START:
            self._beginning = None
        return is_of_start

    def _copy(self) -> "Reasoning":
        copied = copy.copy(self)
        copied._end = copy.copy(self._end)
        return copied
