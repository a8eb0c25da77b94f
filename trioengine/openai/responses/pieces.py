"""Cuts an answer's text token by token, so that what is known of a token stays with its text however outputs come.

A stream may hold text back (a stop string may begin in it), and a whole reply has everything at once. Here the pieces
are the same for both: a token's piece is what its bytes add to the text.
"""

import codecs
from collections import deque
from collections.abc import Iterator, Sequence

import attrs

from trioengine.types.output import CompletionOutput, PositionLogprobs


@attrs.frozen
class Piece:
    """Some text, its tokens and their log probabilities."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs]


@attrs.frozen
class _Token:
    id: int
    logprobs: PositionLogprobs
    end: int
    """How many characters there are with it."""


class TokenPieces:
    """The pieces of one choice."""

    def __init__(self) -> None:
        """Start before the answer."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: deque[_Token] = deque()
        self._text = ""
        self._start = 0
        """How many characters were given out."""
        self._num_decoded = 0

    def feed(self, choice: CompletionOutput, *, is_last: bool) -> Iterator[Piece]:
        """The pieces that are whole now; at the end all. One for each token, in their order."""
        for token_id, logprobs in zip(choice.token_ids, choice.logprobs or (), strict=True):
            self._num_decoded += len(self._decoder.decode(logprobs.chosen.token_bytes))
            self._waiting.append(_Token(token_id, logprobs, self._num_decoded))
        self._text += choice.text
        num_received = self._start + len(self._text)
        while self._waiting and (is_last or self._waiting[0].end <= num_received):
            token = self._waiting.popleft()
            num_chars = max(0, token.end - self._start)
            text, self._text = self._text[:num_chars], self._text[num_chars:]
            self._start += len(text)
            yield Piece(text, (token.id,), (token.logprobs,))
        if is_last and self._text:
            text, self._text = self._text, ""
            yield Piece(text, (), ())
