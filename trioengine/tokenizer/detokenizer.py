"""Turns token ids into text as they come; the joined pieces equal the whole.

UTF-8 splits characters over tokens, so what is incomplete waits for its next byte. Invalid bytes become U+FFFD, one
for each maximal subpart (Unicode 3.9, as Python's "replace" does), and the text goes on. The decoder works on bytes,
so it depends on no earlier text. This module does not know stop strings.
"""

import codecs
from collections.abc import Sequence

from trioengine.tokenizer.tokenizer import Tokenizer

_PROMPT_TAIL_BYTES = 4
"""The decoder's state depends on three bytes at most: an incomplete character has no more."""


class IncrementalDetokenizer:
    """Text of one sequence of tokens, piece by piece.

    Without prompt ids the pieces join to `tokenizer.decode(ids)`. With them, the pieces join to what the ids add to the
    text of the prompt: an incomplete character at the prompt's end is completed, never repeated or shown as U+FFFD.
    """

    __slots__ = ("_bytes_of", "_decoder", "_drops_space", "_is_plain", "_pending_prompt_bytes", "_texts")

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """Start after the prompt, whose text is never shown."""
        self._texts = tokenizer.token_texts(skip_special_tokens)
        self._bytes_of = tokenizer.token_byte_table(skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._tail_bytes(prompt_ids)
        self._drops_space = tokenizer.drops_leading_space and not tail
        if tail:
            self._decoder.decode(tail)
        self._pending_prompt_bytes = self._num_pending_bytes()
        self._is_plain = not self._drops_space and self._pending_prompt_bytes == 0
        """Whether a token that is whole characters can be shown as it is."""

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes, which may be none. An id without a token has no text."""
        try:
            text = self._texts[token_id]
        except IndexError:
            return ""
        if text is not None and self._is_plain:
            return text
        return self._decode(self._bytes_of[token_id])

    def feed_many(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        return "".join([self.feed(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return an incomplete character at the end as U+FFFD, or nothing. No token may follow."""
        only_prompt = self._pending_prompt_bytes > 0
        text = self._decoder.decode(b"", final=True)
        self._pending_prompt_bytes = 0
        self._is_plain = not self._drops_space
        return "" if only_prompt else text

    def _decode(self, data: bytes) -> str:
        if not data:
            return ""
        if self._pending_prompt_bytes:
            self._leave_prompt(data[0])
        text = self._decoder.decode(data)
        if self._drops_space:
            if not text:
                return ""
            self._drops_space = False
            text = text.removeprefix(" ")
        self._is_plain = self._num_pending_bytes() == 0
        return text

    def _leave_prompt(self, next_byte: int) -> None:
        """Forget the prompt's incomplete character unless the next byte goes on with it."""
        num_pending, self._pending_prompt_bytes = self._pending_prompt_bytes, 0
        candidate = self._decoder.getstate()[0] + bytes([next_byte])
        probe = codecs.getincrementaldecoder("utf-8")("replace")
        text = probe.decode(candidate)
        is_whole = text.encode() == candidate
        is_longer = len(probe.getstate()[0]) == num_pending + 1
        if not is_whole and not is_longer:
            self._decoder.reset()

    def _num_pending_bytes(self) -> int:
        return len(self._decoder.getstate()[0])

    def _tail_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prompt_ids):
            if 0 <= token_id < len(self._bytes_of):
                tail = self._bytes_of[token_id] + tail
            if len(tail) >= _PROMPT_TAIL_BYTES:
                break
        return tail[-_PROMPT_TAIL_BYTES:]
