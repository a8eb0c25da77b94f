"""Builds a tokenizer from the metadata of a GGUF file.

Two kinds exist: "gpt2", byte-level BPE with one of several ways to cut text into words, and "llama", SentencePiece
BPE. The result encodes as the tokenizer.json that the model was published with does.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias, cast

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from trioengine.checkpoint.gguf import GGUFValue, open_gguf
from trioengine.errors import CheckpointError
from trioengine.tokenizer.parts import TokenizerFacts, TokenizerParts, library_errors_as_checkpoint_errors

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

MAX_JOINED_CHARS = 256
"""Longer SentencePiece tokens cannot be joined from text: real ones have 16, and every cut of a token is tried."""

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


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
    model = metadata.get("tokenizer.ggml.model")
    tokens = _tokens(metadata)
    types = _token_types(metadata, len(tokens))
    match model:
        case "gpt2":
            backend = _byte_level_backend(metadata, tokens)
        case "llama":
            backend = _sentencepiece_backend(metadata, tokens, types)
        case _:
            raise CheckpointError(f"tokenizer.ggml.model is {model!r}; supported are 'gpt2' and 'llama'.")
    added: list[Any] = []
    for token, token_type in zip(tokens, types, strict=True):
        if token and token_type in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
            is_special = token_type != TokenType.USER_DEFINED
            added.append(tokenizers.AddedToken(token, special=is_special, normalized=False))
    backend.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]
    facts = _facts(metadata, tokens, types)
    # Files that leave it out are SentencePiece's, and Llama 3's, whose own tokenizer.json adds BOS.
    adds_bos = metadata.get(
        "tokenizer.ggml.add_bos_token", model == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    if adds_bos is True and facts.bos_token_id is not None:
        set_bos(backend, tokens[facts.bos_token_id], facts.bos_token_id)
    return TokenizerParts(backend, facts)


def set_bos(backend: tokenizers.Tokenizer, token: str, token_id: int) -> None:
    """Let the tokenizer put this token in front of every text."""
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=["BOS", "$A"],
        pair=["BOS", "$A", "$B"],
        special_tokens=[{"id": "BOS", "ids": [token_id], "tokens": [token]}],
    )


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
    prepare = _WORD_SPLITTERS.get(name) if isinstance(name, str) else None
    if prepare is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre, which says how text is cut into words, is {name!r}; supported are "
            f"{', '.join(sorted(_WORD_SPLITTERS))}."
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, tuple):
        raise CheckpointError("The file has no list tokenizer.ggml.merges.")
    # A space inside a token is written "Ġ", so the first one after the first character parts the two.
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = str(merge).partition(" ")
        pairs.append((left, right))
    backend = _make_backend(tokens, pairs, ignore_merges=name == "llama-bpe")
    prepare(backend)
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _make_backend(tokens: tuple[str, ...], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    for left, right in merges:
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise CheckpointError(f"tokenizer.ggml.merges joins {left[:50]!r} and {right[:50]!r}, which are no tokens.")
    with library_errors_as_checkpoint_errors("The vocabulary and its merges do not fit together"):
        return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **options))


def _gpt2(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]


def _smollm(backend: tokenizers.Tokenizer) -> None:
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]


def _by_pattern(backend: tokenizers.Tokenizer, pattern: str) -> None:
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    steps = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]


def _llama3(backend: tokenizers.Tokenizer) -> None:
    _by_pattern(backend, LLAMA3_WORDS)


def _qwen2(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    _by_pattern(backend, QWEN2_WORDS)


_WORD_SPLITTERS: Mapping[str, Callable[[tokenizers.Tokenizer], None]] = {
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "qwen2": _qwen2,
    "smollm": _smollm,
}


def _sentencepiece_backend(metadata: Metadata, tokens: tuple[str, ...], types: tuple[int, ...]) -> tokenizers.Tokenizer:
    """SentencePiece joins the pair whose union has the best score; BPE takes merges in that order."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, tuple) or len(scores) != len(tokens):
        raise CheckpointError("tokenizer.ggml.scores does not list the scores of all tokens.")
    numbers = cast(tuple[float, ...], scores)
    # Control and byte tokens are never joined from text.
    joinable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    ids = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] in joinable}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, token_id in ids.items():
        for cut in range(1, len(token) if len(token) <= MAX_JOINED_CHARS else 1):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-numbers[token_id], left, right, token[:cut], token[cut:]))
    merges.sort()
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    backend = _make_backend(
        tokens, [merge[3:] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    steps: list[Any] = [normalizers.Prepend("▁")] if adds_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])  # pyright: ignore[reportAttributeAccessIssue]
    shown: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        shown.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(shown)  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _facts(metadata: Metadata, tokens: tuple[str, ...], types: tuple[int, ...]) -> TokenizerFacts:
    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(tokens):
            raise CheckpointError(f"tokenizer.ggml.{name}_token_id is {value!r}, which is no token.")
        return value

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
