"""SentencePiece models: read from a `tokenizer.model`, or described by a GGUF file, and built with `tokenizers`.

The file is a protocol buffer of which a few fields matter, so it is read by hand:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto and
https://protobuf.dev/programming-guides/encoding/. This module does not know which tokens a model puts around a text.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Literal, TypeAlias

import attrs
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from trioengine.errors import CheckpointError
from trioengine.tokenizer.parts import library_errors_as_checkpoint_errors

MAX_PIECES = 1 << 21
"""The largest vocabularies in use have 300,000."""
MAX_JOINED_CHARS = 256
"""Longer pieces cannot be joined from text: real ones have 16 characters, and every cut of a piece is tried."""
MAX_CUTS = 1 << 24
"""Of all pieces together, which takes some seconds; the largest vocabularies in use have two million."""
MAX_MERGES = 1 << 22
"""A vocabulary of 262,144 pieces has 514,906."""
SPACE = "▁"

WhenPrefixed: TypeAlias = Literal["always", "first", "never"]
"""Which stretches between added tokens begin with a space that is not in the text: all, that of the start, none."""


class TokenType(IntEnum):
    """What a piece is for. GGUF's `tokenizer.ggml.token_type` has the same values."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Algorithm(IntEnum):
    """How text becomes pieces. Values of `TrainerSpec.ModelType`."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@attrs.frozen
class SentencePieceModel:
    """A vocabulary and what is done to text before it is cut into pieces."""

    pieces: tuple[str, ...] = attrs.field(repr=False)
    scores: tuple[float, ...] = attrs.field(repr=False)
    types: tuple[int, ...] = attrs.field(repr=False)
    algorithm: Algorithm
    precompiled_charsmap: bytes = attrs.field(default=b"", repr=False)
    """The normalization of characters as SentencePiece compiles it; none when empty."""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    bos_id: int = 1
    """-1 where the model has none, as for the other two."""
    eos_id: int = 2
    pad_id: int = -1


def parse_sentencepiece(data: bytes) -> SentencePieceModel:
    """Return the model in a `tokenizer.model` file.

    Raises:
        CheckpointError: it is no such file, damaged, or uses what is not supported.
    """
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int] = {}
    normalizer: dict[int, int] = {}
    charsmap = b""
    try:
        for field, value in _fields(data):
            if field == _PIECES and isinstance(value, bytes):
                piece, score, kind = _piece(value)
                pieces.append(piece)
                scores.append(score)
                types.append(kind)
                if len(pieces) > MAX_PIECES:
                    raise CheckpointError(f"It has more than {MAX_PIECES} pieces.")
            elif field == _TRAINER_SPEC and isinstance(value, bytes):
                trainer = {number: item for number, item in _fields(value) if isinstance(item, int)}
            elif field == _NORMALIZER_SPEC and isinstance(value, bytes):
                for number, item in _fields(value):
                    if isinstance(item, int):
                        normalizer[number] = item
                    elif number == _CHARSMAP:
                        charsmap = item
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CheckpointError("It is no SentencePiece model, or a damaged one.") from error
    if not pieces:
        raise CheckpointError("It is no SentencePiece model: it has no pieces.")
    if len(set(pieces)) != len(pieces):
        raise CheckpointError("It is no SentencePiece model: it has a piece twice.")
    if trainer.get(_TREAT_WHITESPACE_AS_SUFFIX) or not normalizer.get(_ESCAPE_WHITESPACES, True):
        raise CheckpointError("It puts spaces behind words or does not mark them, which is not supported.")
    algorithm = trainer.get(_MODEL_TYPE, Algorithm.UNIGRAM)
    if algorithm not in (Algorithm.UNIGRAM, Algorithm.BPE, Algorithm.CHAR):
        raise CheckpointError(f"It is of model type {algorithm}; Unigram, BPE and character models are supported.")
    return SentencePieceModel(
        tuple(pieces),
        tuple(scores),
        tuple(types),
        Algorithm(algorithm),
        charsmap,
        add_dummy_prefix=bool(normalizer.get(_ADD_DUMMY_PREFIX, True)),
        remove_extra_whitespaces=bool(normalizer.get(_REMOVE_EXTRA_WHITESPACES, True)),
        bos_id=_token_id(trainer.get(_BOS_ID, 1), pieces),
        eos_id=_token_id(trainer.get(_EOS_ID, 2), pieces),
        pad_id=_token_id(trainer.get(_PAD_ID, -1), pieces),
    )


def build_sentencepiece(model: SentencePieceModel, when_prefixed: WhenPrefixed | None = None) -> tokenizers.Tokenizer:
    """Return a tokenizer that cuts text as the model does, its control and user-defined pieces being added tokens.

    Args:
        model: of one of the three algorithms that are supported.
        when_prefixed: the default is "always" where the model has a dummy prefix, else "never".

    Raises:
        CheckpointError: pieces, scores and types do not fit together.
    """
    if when_prefixed is None:
        when_prefixed = "always" if model.add_dummy_prefix else "never"
    with library_errors_as_checkpoint_errors("The vocabulary and its scores do not fit together"):
        backend = tokenizers.Tokenizer(_unigram(model) if model.algorithm is Algorithm.UNIGRAM else _bpe(model))
        steps = _normalizers(model, when_prefixed)
    backend.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    if when_prefixed == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)  # pyright: ignore[reportAttributeAccessIssue]
    shown: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if when_prefixed != "never":
        shown.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(shown)  # pyright: ignore[reportAttributeAccessIssue]
    add_special_pieces(backend, model.pieces, model.types)
    return backend


def add_special_pieces(backend: tokenizers.Tokenizer, pieces: tuple[str, ...], types: tuple[int, ...]) -> None:
    """Make control tokens, and tokens that are never cut, known to a tokenizer that has them in its vocabulary."""
    added: list[Any] = []
    for piece, kind in zip(pieces, types, strict=True):
        if piece and kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
            is_special = kind != TokenType.USER_DEFINED
            added.append(tokenizers.AddedToken(piece, special=is_special, normalized=False))
    backend.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]


def _unigram(model: SentencePieceModel) -> models.Unigram:
    unknown = _first(model, TokenType.UNKNOWN)
    if unknown is None:
        raise CheckpointError("It has no piece for what is unknown to it.")
    has_bytes = TokenType.BYTE in model.types
    return models.Unigram(list(zip(model.pieces, model.scores, strict=True)), unknown, has_bytes)


def _bpe(model: SentencePieceModel) -> models.BPE:
    """SentencePiece joins the neighbours whose union has the best score; BPE takes merges in that order."""
    unknown = _first(model, TokenType.UNKNOWN)
    return models.BPE(
        {piece: token_id for token_id, piece in enumerate(model.pieces)},
        _merges(model) if model.algorithm is Algorithm.BPE else [],
        unk_token=None if unknown is None else model.pieces[unknown],
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in model.types,
    )


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    # Control and byte tokens are never joined from text.
    joinable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    ids = {piece: token_id for token_id, piece in enumerate(model.pieces) if model.types[token_id] in joinable}
    if sum(map(len, ids)) > MAX_CUTS:
        raise CheckpointError(f"Its pieces have more than {MAX_CUTS} characters.")
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in ids.items():
        for cut in range(1, len(piece) if len(piece) <= MAX_JOINED_CHARS else 1):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((-model.scores[token_id], left, right, piece[:cut], piece[cut:]))
        if len(merges) > MAX_MERGES:
            raise CheckpointError(f"Its pieces can be joined in more than {MAX_MERGES} ways.")
    merges.sort()
    return [merge[3:] for merge in merges]


def _normalizers(model: SentencePieceModel, when_prefixed: WhenPrefixed) -> list[Any]:
    steps: list[Any] = []
    if model.precompiled_charsmap:
        steps.append(normalizers.Precompiled(model.precompiled_charsmap))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if when_prefixed == "always":
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return steps


def _first(model: SentencePieceModel, kind: TokenType) -> int | None:
    return next((token_id for token_id, found in enumerate(model.types) if found == kind), None)


# Numbers of the fields.
_PIECES, _TRAINER_SPEC, _NORMALIZER_SPEC = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _TREAT_WHITESPACE_AS_SUFFIX, _BOS_ID, _EOS_ID, _PAD_ID = 3, 24, 41, 42, 43
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 2, 3, 4, 5

_FLOAT = struct.Struct("<f")


def _piece(data: bytes) -> tuple[str, float, int]:
    piece, score, kind = "", 0.0, int(TokenType.NORMAL)
    for field, value in _fields(data):
        if field == _PIECE and isinstance(value, bytes):
            piece = value.decode()
        elif field == _SCORE and isinstance(value, bytes):
            (score,) = _FLOAT.unpack(value)
        elif field == _TYPE and isinstance(value, int):
            kind = value
    return piece, score, kind


def _token_id(value: int, pieces: list[str]) -> int:
    """Negative numbers are written as those of 64 bits."""
    return value if value < len(pieces) else -1


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in their order: numbers as int, all else as bytes."""
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        field, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            yield field, value
            continue
        if wire_type == 2:
            length, position = _varint(data, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise IndexError(f"wire type {wire_type}")
        if length > end - position:
            raise IndexError("the message ends inside a field")
        yield field, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = data[position]
    position += 1
    if value < 0x80:
        return value, position
    value &= 0x7F
    for shift in range(7, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError("a number has more than 64 bits")
