"""Builds a tokenizer from the metadata of a GGUF file.

Four kinds exist: "gpt2", byte-level BPE with one of several ways to cut text into words; "llama", SentencePiece BPE;
"t5", SentencePiece Unigram; and "bert", WordPiece. The result encodes as the tokenizer.json that the model was
published with does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, cast

import tokenizers
from tokenizers import decoders, models

from trioengine.checkpoint.gguf import GGUFValue, open_gguf
from trioengine.errors import CheckpointError
from trioengine.tokenizer.parts import TokenizerFacts, TokenizerParts, library_errors_as_checkpoint_errors, set_affixes
from trioengine.tokenizer.sentencepiece import (
    SPACE,
    Algorithm,
    SentencePieceModel,
    TokenType,
    add_special_pieces,
    build_sentencepiece,
)
from trioengine.tokenizer.word_splitting import WORD_SPLITTINGS
from trioengine.tokenizer.wordpiece import CONTINUATION, CONTROL_TOKENS, WordPieceOptions, build_wordpiece

Metadata: TypeAlias = Mapping[str, GGUFValue]

END_OF_ANSWER_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
)
"""Control tokens of these names end an answer too. GGUF has no list like that of generation_config.json."""


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Return the tokenizer in a GGUF file.

    Raises:
        CheckpointError: the file is damaged, has no tokenizer, or one of a kind that is not supported.
    """
    metadata = open_gguf(path).metadata
    try:
        return _build(metadata)
    except CheckpointError as error:
        if error.path is not None:
            raise
        raise CheckpointError(f"{path}: {error.message}", path=str(path)) from error


def _build(metadata: Metadata) -> TokenizerParts:
    tokens = _tokens(metadata)
    types = _token_types(metadata, len(tokens))
    facts = _facts(metadata, tokens, types)
    first, last = facts.bos_token_id, facts.eos_token_ids[0] if facts.eos_token_ids else None
    adds_first, adds_last = False, False
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            backend = _byte_level_backend(metadata, tokens)
            add_special_pieces(backend, tokens, types)
            adds_first = WORD_SPLITTINGS[str(metadata.get("tokenizer.ggml.pre"))].adds_bos
        case "llama":
            backend = build_sentencepiece(_sentencepiece(metadata, tokens, types, Algorithm.BPE))
            adds_first = True
        case "t5":
            backend = build_sentencepiece(_sentencepiece(metadata, tokens, types, Algorithm.UNIGRAM))
            adds_last = True
        case "bert":
            backend = _wordpiece_backend(metadata, tokens, types)
            first, last = _token_id(metadata, tokens, "cls", "bos"), _token_id(metadata, tokens, "seperator", "eos")
            # llama.cpp's numbers for files without them, which are those of BERT's own vocabulary.
            first = _index(tokens, "[CLS]") if first is None else first
            last = _index(tokens, "[SEP]") if last is None else last
            adds_first = adds_last = True
        case model:
            raise CheckpointError(f"tokenizer.ggml.model is {model!r}; supported are 'gpt2', 'llama', 't5' and 'bert'.")
    adds_first = metadata.get("tokenizer.ggml.add_bos_token", adds_first) is True
    adds_last = metadata.get("tokenizer.ggml.add_eos_token", adds_last) is True
    if adds_first or adds_last:
        set_affixes(backend, first if adds_first else None, last if adds_last else None)
    return TokenizerParts(backend, facts)


def _tokens(metadata: Metadata) -> tuple[str, ...]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple) or not tokens or not isinstance(tokens[0], str):
        raise CheckpointError("The file has no list tokenizer.ggml.tokens, so it has no tokenizer.")
    return cast(tuple[str, ...], tokens)


def _token_types(metadata: Metadata, num_tokens: int) -> tuple[int, ...]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return (TokenType.NORMAL,) * num_tokens
    if not isinstance(types, tuple) or len(types) != num_tokens:
        raise CheckpointError(f"tokenizer.ggml.token_type does not list the types of all {num_tokens} tokens.")
    return cast(tuple[int, ...], types)


def _byte_level_backend(metadata: Metadata, tokens: tuple[str, ...]) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    splitting = WORD_SPLITTINGS.get(name) if isinstance(name, str) else None
    if splitting is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre, which says how text is cut into words, is {str(name)[:100]!r}; supported are "
            f"{', '.join(sorted(WORD_SPLITTINGS))}. Use the folder with safetensors that the file was made from."
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, tuple):
        raise CheckpointError("The file has no list tokenizer.ggml.merges.")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        # A space inside a token is written "Ġ", so the first one after the first character parts the two.
        left, _, right = str(merge).partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise CheckpointError(f"tokenizer.ggml.merges joins {left[:50]!r} and {right[:50]!r}, which are no tokens.")
        pairs.append((left, right))
    with library_errors_as_checkpoint_errors("The vocabulary and its merges do not fit together"):
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=splitting.ignores_merges))
    splitting.apply(backend)
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _sentencepiece(
    metadata: Metadata, tokens: tuple[str, ...], types: tuple[int, ...], algorithm: Algorithm
) -> SentencePieceModel:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, tuple) or len(scores) != len(tokens) or isinstance(scores[0], str):
        raise CheckpointError("tokenizer.ggml.scores does not list the scores of all tokens.")
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap", ())
    if not isinstance(charsmap, tuple) or not all(isinstance(byte, int) and -128 <= byte < 256 for byte in charsmap):
        raise CheckpointError("tokenizer.ggml.precompiled_charsmap is no list of bytes.")
    return SentencePieceModel(
        tokens,
        cast(tuple[float, ...], scores),
        types,
        algorithm,
        bytes(int(byte) & 0xFF for byte in charsmap),
        add_dummy_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True) is not False,
        remove_extra_whitespaces=metadata.get("tokenizer.ggml.remove_extra_whitespaces", algorithm is Algorithm.UNIGRAM)
        is True,
    )


def _wordpiece_backend(metadata: Metadata, tokens: tuple[str, ...], types: tuple[int, ...]) -> tokenizers.Tokenizer:
    """The file marks what begins a word with "▁"; the published form marks what goes on inside one with "##"."""
    names: list[str] = []
    specials: list[str] = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token in CONTROL_TOKENS:
            names.append(token)
            specials.append(token)
        elif token.startswith(SPACE):
            names.append(token[1:])
        elif token.startswith("[") and token.endswith("]"):
            names.append(token)  # converters leave these as they are
        else:
            names.append(CONTINUATION + token)
    # No key says so. A vocabulary of capital letters would never be met by text in small ones.
    is_lower = all(name.lower() == name for name, token in zip(names, tokens, strict=True) if name != token)
    unknown = _token_id(metadata, tokens, "unknown")
    vocabulary = {name: token_id for token_id, name in enumerate(names)}
    backend = build_wordpiece(
        vocabulary,
        WordPieceOptions(do_lower_case=is_lower),
        unknown="[UNK]" if unknown is None else names[unknown],
    )
    backend.add_special_tokens([token for token in specials if token])  # pyright: ignore[reportUnknownMemberType]
    return backend


def _index(tokens: tuple[str, ...], token: str) -> int | None:
    return tokens.index(token) if token in tokens else None


def _token_id(metadata: Metadata, tokens: tuple[str, ...], *names: str) -> int | None:
    """The id under the first of these names that the file has."""
    for name in names:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None:
            if not isinstance(value, int) or not 0 <= value < len(tokens):
                raise CheckpointError(f"tokenizer.ggml.{name}_token_id is {value!r}, which is no token.")
            return value
    return None


def _facts(metadata: Metadata, tokens: tuple[str, ...], types: tuple[int, ...]) -> TokenizerFacts:
    def token_id(name: str) -> int | None:
        return _token_id(metadata, tokens, name)

    ends = [token_id("eos"), token_id("eot"), token_id("eom")]
    for index, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        if token_type == TokenType.CONTROL and token in END_OF_ANSWER_TOKENS:
            ends.append(index)
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(value, str)
    }
    return TokenizerFacts(
        bos_token_id=token_id("bos"),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad_token_id=token_id("padding"),
        unk_token_id=token_id("unknown"),
        chat_templates=templates,
    )
