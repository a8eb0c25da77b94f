"""Which tokens would complete a word that an answer must not have, whatever tokens it is spelled with.

A word is looked for in the bytes of the answer, as Knuth, Morris and Pratt do it ("Fast Pattern Matching in Strings",
1977): all that matters of the text so far is how much of the word its end has already. For each such length the tokens
that would complete the word are a fixed set, found in the sorted vocabulary the first time they are asked for. So no
tokenization of the word has to be listed, nor those that begin or end inside other tokens.

Characters are whole bytes of UTF-8, so a text has a word exactly where its bytes have the word's.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from trioengine.types.params import SamplingParams


class BadWordsRules:
    """Makes the rules of an engine's requests. Nothing is read before the first that has bad words."""

    def __init__(self, token_byte_table: Callable[[bool], Sequence[bytes]], vocab_size: int) -> None:
        """Prepare nothing yet.

        Args:
            token_byte_table: as `Tokenizer.token_byte_table`; called at most twice.
            vocab_size: tokens of the model, which may be fewer than its tokenizer has.
        """
        self._token_byte_table = token_byte_table
        self._vocab_size = vocab_size
        self._indexes: dict[bool, TokenIndex] = {}

    def of(self, sampling: SamplingParams) -> "BadWords | None":
        """The rules of a request; None where it has none."""
        if not sampling.bad_words:
            return None
        # Control tokens count as they are shown.
        index = self._indexes.get(sampling.skip_special_tokens)
        if index is None:
            index = TokenIndex(self._token_byte_table(sampling.skip_special_tokens)[: self._vocab_size])
            self._indexes[sampling.skip_special_tokens] = index
        return BadWords(sampling.bad_words, index)


class TokenIndex:
    """Finds tokens by their bytes. One for a vocabulary."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """Keep the vocabulary.

        Args:
            token_bytes: by token id, as `Tokenizer.token_byte_table` has them. Tokens without bytes show nothing.
        """
        self.token_bytes = token_bytes

    def starting_with(self, prefix: bytes) -> list[int]:
        """The tokens whose bytes begin with these; one at least."""
        sorted_bytes, ids = self._sorted
        start = bisect_left(sorted_bytes, prefix)
        end = start
        while end < len(sorted_bytes) and sorted_bytes[end].startswith(prefix):
            end += 1
        return ids[start:end]

    def containing(self, part: bytes) -> list[int]:
        """The tokens whose bytes have these somewhere; one at least."""
        joined, starts = self._joined
        ids: list[int] = []
        place = joined.find(part)
        while place >= 0:
            token_id = bisect_left(starts, place + 1) - 1
            if place + len(part) <= starts[token_id + 1]:
                ids.append(token_id)
                place = joined.find(part, starts[token_id + 1])
            else:
                place = joined.find(part, place + 1)
        return ids

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        pairs = sorted((data, token_id) for token_id, data in enumerate(self.token_bytes) if data)
        return [data for data, _ in pairs], [token_id for _, token_id in pairs]

    @cached_property
    def _joined(self) -> tuple[bytes, list[int]]:
        """All tokens' bytes, and where each begins; one more place is the end."""
        starts = [0]
        for data in self.token_bytes:
            starts.append(starts[-1] + len(data))
        return b"".join(self.token_bytes), starts


class BadWords:
    """The words that one request's answer must not have. Immutable, but for what it remembers."""

    def __init__(self, words: Sequence[str], index: TokenIndex) -> None:
        """Look for these words, at least one and none of them empty, in tokens of this vocabulary."""
        self._words = [_BadWord(word.encode(), index) for word in dict.fromkeys(words)]
        self._token_bytes = index.token_bytes
        self._num_needed_bytes = max(len(word.encode()) for word in words) - 1

    def forbidden_token_ids(self, token_ids: Sequence[int], start: int, end: int) -> NDArray[np.int32]:
        """The tokens that would complete a word, sorted, where `token_ids[start:end]` is the answer so far.

        Takes time for as many bytes as the longest word has, however long the answer is. The prompt takes no part.
        """
        tail, place = b"", end
        while place > start and len(tail) < self._num_needed_bytes:
            place -= 1
            if token_ids[place] < len(self._token_bytes):
                tail = self._token_bytes[token_ids[place]] + tail
        return reduce(np.union1d, [word.forbidden_token_ids(word.num_matched(tail)) for word in self._words])


class _BadWord:
    def __init__(self, word: bytes, index: TokenIndex) -> None:
        self._word = word
        self._index = index
        self._borders = _borders(word)
        self._forbidden: dict[int, NDArray[np.int32]] = {}

    def num_matched(self, data: bytes) -> int:
        """How many bytes of the word these end with: the most, and never the whole word."""
        word, borders = self._word, self._borders
        matched = 0
        for byte in data:
            while matched and word[matched] != byte:
                matched = borders[matched]
            matched += word[matched] == byte
            if matched == len(word):
                # Only where the rule was not kept, as with words that leave no token at all: the text has it then.
                matched = borders[matched]
        return matched

    def forbidden_token_ids(self, matched: int) -> NDArray[np.int32]:
        known = self._forbidden.get(matched)
        if known is None:
            # A token completes the word when it has all of it, or begins with the rest behind one of the beginnings
            # that the text ends with: the longest, its longest border, and so on.
            ids = set(self._index.containing(self._word))
            length = matched
            while length:
                ids.update(self._index.starting_with(self._word[length:]))
                length = self._borders[length]
            known = np.array(sorted(ids), dtype=np.int32)
            self._forbidden[matched] = known
        return known


def _borders(word: bytes) -> list[int]:
    """For each length of a beginning of the word: the length of the longest shorter beginning that it ends with."""
    borders = [0] * (len(word) + 1)
    matched = 0
    for end in range(1, len(word)):
        while matched and word[matched] != word[end]:
            matched = borders[matched]
        matched += word[matched] == word[end]
        borders[end + 1] = matched
    return borders
