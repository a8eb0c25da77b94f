"""The bytes that each token of a vocabulary stands for, worked out from the decoder that comes with it.

Three kinds of vocabulary are known: byte-level BPE (GPT-2's printable stand-ins for bytes), SentencePiece ("▁" for a
space, "<0x0A>" for a byte) and WordPiece ("##" inside a word). This module does not know special tokens.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import cast

import attrs
import tokenizers
from tokenizers import decoders

from trioengine.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@attrs.frozen
class TokenBytes:
    """What tokens stand for."""

    by_id: list[bytes] = attrs.field(repr=False)
    """Bytes of each id; empty where an id has no token."""
    drops_leading_space: bool
    """Whether a space at the very start of a text is an artefact of the tokenizer and not shown."""


def read_token_bytes(backend: tokenizers.Tokenizer) -> TokenBytes:
    """Work out the bytes of every token.

    Raises:
        CheckpointError: the vocabulary's decoder is of no such kind.
    """
    steps = list(_flatten(_state(backend.decoder)))
    kinds = {str(step.get("type")) for step in steps}
    if kinds == {"ByteLevel"}:
        return TokenBytes(_table(backend, byte_level=True, has_byte_tokens=False), drops_leading_space=False)
    if kinds == {"WordPiece"}:
        return TokenBytes(_word_table(backend, steps[0]), drops_leading_space=True)
    if not kinds or not all(_is_sentencepiece(step) for step in steps):
        raise CheckpointError(
            f"The tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is of no supported kind."
        )
    drops = any(step.get("type") == "Strip" and step.get("start") == 1 for step in steps) or any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in steps
    )
    has_byte_tokens = "ByteFallback" in kinds
    return TokenBytes(_table(backend, byte_level=False, has_byte_tokens=has_byte_tokens), drops_leading_space=drops)


def _table(backend: tokenizers.Tokenizer, *, byte_level: bool, has_byte_tokens: bool) -> list[bytes]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    stand_ins = _StandIns(byte_stand_ins())
    for token, token_id in vocabulary.items():
        if byte_level:
            try:
                data = token.translate(stand_ins).encode("latin-1")
            except UnicodeEncodeError:
                data = token.encode()  # a token with other characters, such as a space, stands for itself
        elif has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            data = bytes([int(match[1], 16)])
        else:
            data = token.replace("▁", " ").encode()
        table[token_id] = data
    return table


def _word_table(backend: tokenizers.Tokenizer, step: Mapping[str, object]) -> list[bytes]:
    """A word brings the space in front of it, which its decoder leaves out before some marks."""
    decoder = decoders.WordPiece(prefix=str(step.get("prefix", "##")), cleanup=step.get("cleanup") is not False)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = decoder.decode(["x", token])[1:].encode()
    return table


def byte_stand_ins() -> dict[int, int]:
    """Map the characters by which GPT-2's vocabulary writes bytes to those bytes.

    Printable characters of Latin-1 stand for themselves; the other bytes, in order, for U+0100 and those after it.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(others)}


class _StandIns(dict[int, int]):
    def __missing__(self, character: int) -> int:
        return 0xFFFF  # not in Latin-1, so encoding fails and tells


def _state(decoder: object) -> Mapping[str, object]:
    # The library's objects describe themselves as the JSON of tokenizer.json.
    return {} if decoder is None else cast(dict[str, object], json.loads(decoder.__getstate__()))  # pyright: ignore


def _flatten(step: Mapping[str, object]) -> Iterable[Mapping[str, object]]:
    if step.get("type") == "Sequence":
        for inner in cast(list[dict[str, object]], step.get("decoders", [])):
            yield from _flatten(inner)
    elif step:
        yield step


def _is_sentencepiece(step: Mapping[str, object]) -> bool:
    match step:
        case {"type": "ByteFallback" | "Fuse"}:
            return True
        case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
            return True
        case {"type": "Metaspace", "replacement": "▁"}:
            return True
        case {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
            return True
        case _:
            return False
