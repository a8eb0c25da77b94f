"""Two texts as one input, and texts cut to a length, with what the tokenizer puts around them left whole."""

from collections.abc import Sequence

import attrs

from trioengine.tokenizer.tokenizer import Tokenizer


@attrs.frozen
class PairTokens:
    """The tokens of one input."""

    token_ids: Sequence[int]
    second_text_start: int | None = None
    """The first token that counts to the second text, where the tokenizer tells the two apart."""


def encode_pair(tokenizer: Tokenizer, first: str, second: str, max_len: int | None = None) -> PairTokens:
    """The tokens of two texts as the tokenizer joins them.

    With `max_len`, the longer of the two loses tokens at its end until it fits.

    Raises:
        RequestError: as `Tokenizer.encode` says.
    """
    template = tokenizer.pair_template
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in (first, second)]
    if max_len is not None:
        num_added = len(template.before) + len(template.between) + len(template.after)
        texts = _cut_longer(texts[0], texts[1], max(0, max_len - num_added))
    token_ids = [*template.before, *texts[0], *template.between, *texts[1], *template.after]
    if template.num_between_first is None:
        return PairTokens(token_ids)
    return PairTokens(token_ids, len(template.before) + len(texts[0]) + template.num_between_first)


def encode_cut(tokenizer: Tokenizer, text: str, max_len: int) -> Sequence[int]:
    """The tokens of a text, which loses some at its end, but none of those that the tokenizer puts behind it, until it
    has `max_len`.

    Raises:
        RequestError: as `Tokenizer.encode` says.
    """
    token_ids = tokenizer.encode(text)
    if len(token_ids) <= max_len:
        return token_ids
    num_after = len(tokenizer.text_suffix)
    if num_after >= max_len:
        return token_ids[:max_len]
    return [*token_ids[: max_len - num_after], *token_ids[len(token_ids) - num_after :]]


def _cut_longer(first: list[int], second: list[int], room: int) -> list[list[int]]:
    """The shorter text stays whole where it has at most half of the room; else both have half."""
    if len(first) + len(second) <= room:
        return [first, second]
    if len(first) > len(second):
        return _cut_longer(second, first, room)[::-1]
    num_shorter = min(len(first), room // 2)
    return [first[:num_shorter], second[: room - num_shorter]]
