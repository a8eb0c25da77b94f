"""Builds a tokenizer from a model folder: tokenizer.json, or the files that older models have in its place.

Beside the vocabulary are read: tokenizer_config.json and special_tokens_map.json (which tokens are special),
added_tokens.json, generation_config.json and config.json (end tokens), and the chat templates wherever they live.
Files that only transformers understands are converted by a process of its own (`convert`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import tokenizers
from tokenizers import decoders, models, normalizers

from trioengine.checkpoint.small_files import read_bytes, read_json_object, read_text
from trioengine.errors import CheckpointError
from trioengine.tokenizer.convert import convert_tokenizer
from trioengine.tokenizer.parts import TokenizerFacts, TokenizerParts, library_errors_as_checkpoint_errors, set_affixes
from trioengine.tokenizer.sentencepiece import SentencePieceModel, build_sentencepiece, parse_sentencepiece
from trioengine.tokenizer.word_splitting import GPT2, QWEN2, WordSplitting
from trioengine.tokenizer.wordpiece import CONTROL_TOKENS, WordPieceOptions, build_wordpiece

MAX_VOCABULARY_BYTES = 256 << 20
MAX_ADDED_TOKENS = 1 << 17
MAX_CHAT_TEMPLATES = 64
VOCABULARY_FILES = ("tokenizer.model", "vocab.txt", "vocab.json")
"""What is read here where tokenizer.json is missing."""

# Classes whose ids are those of the file itself. Others renumber them, which only transformers knows.
_SENTENCEPIECE_CLASSES = ("", "Llama", "CodeLlama", "Gemma", "Mistral")
_WORDPIECE_CLASSES = ("", "Bert", "DistilBert", "Electra")
_BYTE_LEVEL_CLASSES: Mapping[str, WordSplitting] = {"GPT2": GPT2, "Qwen2": QWEN2}

_UNNAMED = "additional"
"""Before special tokens without a role."""

Object = Mapping[str, object]


@attrs.frozen
class _Found:
    """A tokenizer, and what its kind takes for granted where the other files say nothing."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """By role: "bos", "eos"."""
    affixes: tuple[str | None, str | None] | None = None
    """Roles of the tokens around a text; None: what the tokenizer itself has."""


def read_folder_tokenizer(folder: Path, cache_dir: Path) -> TokenizerParts:
    """Return the tokenizer in a model folder.

    Args:
        folder: with a tokenizer.json or other files that a tokenizer can be built from.
        cache_dir: where tokenizers are kept that only transformers can build.

    Raises:
        CheckpointError: a file is missing, damaged or of a kind that is not supported.
    """
    config = read_json_object(folder / "tokenizer_config.json")
    found = _find(folder, config, cache_dir)
    backend = found.backend
    # Settings for training batches, which would cut prompts silently.
    backend.no_truncation()
    backend.no_padding()
    specials = {**found.special_tokens, **_special_tokens(folder, config)}
    _add_tokens(folder, found, config, specials)
    facts = _facts(folder, backend, config, specials)
    _apply_affixes(backend, config, found, specials)
    if read_json_object(folder / "sentence_bert_config.json").get("do_lower_case") is True:
        # As sentence-transformers, before whatever the tokenizer does.
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])  # pyright: ignore
    return TokenizerParts(backend, facts)


def _find(folder: Path, config: Object, cache_dir: Path) -> _Found:
    path = folder / "tokenizer.json"
    if path.exists():
        return _Found(_read_tokenizer_json(path))
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    if name in _SENTENCEPIECE_CLASSES and (folder / "tokenizer.model").exists():
        return _read_sentencepiece(folder / "tokenizer.model", config)
    if name in _WORDPIECE_CLASSES and (folder / "vocab.txt").exists():
        return _read_wordpiece(folder / "vocab.txt", config)
    if name in _BYTE_LEVEL_CLASSES and (folder / "vocab.json").exists():
        return _read_byte_level(folder, _BYTE_LEVEL_CLASSES[name])
    if not name and not any((folder / file).exists() for file in VOCABULARY_FILES):
        raise CheckpointError(f"{path} is missing.", path=str(path))
    return _Found(_read_tokenizer_json(convert_tokenizer(folder, cache_dir)))


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    text = read_text(path, MAX_VOCABULARY_BYTES)
    with library_errors_as_checkpoint_errors(f"{path} cannot be read", str(path)):
        return tokenizers.Tokenizer.from_str(text or "")


def _read_sentencepiece(path: Path, config: Object) -> _Found:
    try:
        model = parse_sentencepiece(read_bytes(path, MAX_VOCABULARY_BYTES) or b"")
        # Models are trained with a space behind control tokens too, unless they say that they are not "legacy".
        first = "first" if config.get("legacy") is False else "always"
        backend = build_sentencepiece(model, first if model.add_dummy_prefix else "never")
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.message}", path=str(path)) from error
    return _Found(backend, _piece_names(model), ("bos", None))


def _piece_names(model: SentencePieceModel) -> dict[str, str]:
    ids = {"bos": model.bos_id, "eos": model.eos_id, "pad": model.pad_id}
    return {name: model.pieces[token_id] for name, token_id in ids.items() if token_id >= 0}


def _read_wordpiece(path: Path, config: Object) -> _Found:
    text = read_text(path, MAX_VOCABULARY_BYTES) or ""
    vocabulary = {token: token_id for token_id, token in enumerate(text.removesuffix("\n").split("\n"))}

    def flag(name: str) -> bool | None:
        value = config.get(name)
        return value if isinstance(value, bool) else None

    options = WordPieceOptions(
        do_lower_case=flag("do_lower_case") is not False,
        strip_accents=flag("strip_accents"),
        tokenize_chinese_chars=flag("tokenize_chinese_chars") is not False,
    )
    try:
        backend = build_wordpiece(vocabulary, options)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.message}", path=str(path)) from error
    names = {token.strip("[]").lower(): token for token in CONTROL_TOKENS if token in vocabulary}
    return _Found(backend, names, ("cls", "sep"))


def _read_byte_level(folder: Path, splitting: WordSplitting) -> _Found:
    vocabulary_path, merges_path = folder / "vocab.json", folder / "merges.txt"
    for path in (vocabulary_path, merges_path):
        if read_bytes(path, MAX_VOCABULARY_BYTES) is None:
            raise CheckpointError(f"{path} is missing.", path=str(path))
    with library_errors_as_checkpoint_errors(f"{vocabulary_path} and merges.txt cannot be read", str(vocabulary_path)):
        vocabulary, merges = models.BPE.read_file(str(vocabulary_path), str(merges_path))
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    splitting.apply(backend)
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    end = "<|endoftext|>"
    return _Found(backend, {"bos": end, "eos": end} if splitting is GPT2 else {"eos": end}, (None, None))


def _special_tokens(folder: Path, config: Object) -> dict[str, str]:
    """The contents of the special tokens by role. tokenizer_config.json overrules special_tokens_map.json."""
    tokens: dict[str, str] = {}
    for source in (read_json_object(folder / "special_tokens_map.json"), config):
        named = dict(source)
        for key in ("extra_special_tokens", "model_specific_special_tokens"):
            if isinstance(value := source.get(key), Mapping):
                named.update(cast(Object, value))
        for key, value in named.items():
            role, _, rest = key.rpartition("_token")
            content = _content(value)
            if role and not rest and content is not None:
                tokens[role] = content
            elif key in ("additional_special_tokens", "extra_special_tokens") and isinstance(value, list):
                contents = map(_content, cast(list[object], value))
                tokens.update({f"{_UNNAMED} {item}": item for item in contents if item is not None})
    return tokens


def _content(token: object) -> str | None:
    match token:
        case str() if token:
            return token
        case {"content": str(content)} if content:
            return content
        case _:
            return None


def _add_tokens(folder: Path, found: _Found, config: Object, specials: Mapping[str, str]) -> None:
    """Tokens beside the vocabulary that the tokenizer does not know yet, at the ids that the files give them."""
    backend = found.backend
    known = {str(token.content) for token in cast(dict[int, Any], backend.get_added_tokens_decoder()).values()}
    wanted: dict[int, tokenizers.AddedToken] = {}
    for token_id, content, token in _listed_tokens(folder, config, set(specials.values())):
        # Where both say something, tokenizer.json is what the model was trained with.
        if content not in known and backend.token_to_id(content) in (None, token_id):
            wanted[token_id] = token
    # A tokenizer.json lists its special tokens itself.
    for content in specials.values() if found.affixes is not None else ():
        token_id = backend.token_to_id(content)
        if content not in known and token_id is not None:
            wanted.setdefault(token_id, tokenizers.AddedToken(content, special=True, normalized=False))
    if len(wanted) > MAX_ADDED_TOKENS:
        raise CheckpointError(f"{folder} adds {len(wanted)} tokens to its vocabulary, over {MAX_ADDED_TOKENS}.")
    ordered = [wanted[token_id] for token_id in sorted(wanted)]
    backend.add_tokens(ordered)  # pyright: ignore[reportUnknownMemberType]
    for token_id, token in wanted.items():
        if (given := backend.token_to_id(str(token.content))) != token_id:
            raise CheckpointError(
                f"{folder}: the added token {str(token.content)[:100]!r} should have the id {token_id}, and there is "
                f"room for it only at {given}.",
                path=str(folder),
            )


def _listed_tokens(
    folder: Path, config: Object, specials: set[str]
) -> Iterator[tuple[int, str, tokenizers.AddedToken]]:
    for content, token_id in read_json_object(folder / "added_tokens.json").items():
        if content and isinstance(token_id, int) and token_id >= 0:
            yield token_id, content, tokenizers.AddedToken(content, special=content in specials, normalized=False)
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        for number, entry in cast(Mapping[str, object], listed).items():
            content = _content(entry)
            if content is not None and isinstance(entry, Mapping) and number.isdecimal():
                flags = {
                    flag: value
                    for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
                    if isinstance(value := cast(Object, entry).get(flag), bool)
                }
                yield int(number), content, tokenizers.AddedToken(content, **{"normalized": False, **flags})


def _apply_affixes(backend: tokenizers.Tokenizer, config: Object, found: _Found, specials: Mapping[str, str]) -> None:
    """Which tokens stand around a text: tokenizer_config.json overrules tokenizer.json, where it says anything."""

    def token_id(role: str | None) -> int | None:
        return backend.token_to_id(specials[role]) if role is not None and role in specials else None

    if found.affixes is not None:
        first, last = map(token_id, found.affixes)
        set_affixes(backend, first, last)
    bos, eos = token_id("bos"), token_id("eos")
    around = cast(list[int | None], backend.encode("").ids)
    if not set(around) <= {bos, eos} - {None}:
        return  # something else, such as [CLS] and [SEP]
    has_bos = around[:1] == [bos]
    has_eos = around[has_bos:] == [eos]
    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
    wants_bos = has_bos if not isinstance(add_bos, bool) else add_bos and bos is not None
    wants_eos = has_eos if not isinstance(add_eos, bool) else add_eos and eos is not None
    if (wants_bos, wants_eos) != (has_bos, has_eos):
        set_affixes(backend, bos if wants_bos else None, eos if wants_eos else None)


def _facts(folder: Path, backend: tokenizers.Tokenizer, config: Object, specials: Mapping[str, str]) -> TokenizerFacts:
    model_config = read_json_object(folder / "config.json")
    generation_config = read_json_object(folder / "generation_config.json")

    def token_id(role: str) -> int | None:
        if role in specials and (found := backend.token_to_id(specials[role])) is not None:
            return found
        ids = _ids(model_config.get(f"{role}_token_id"))
        return ids[0] if ids else None

    eos = token_id("eos")
    ends = [] if eos is None else [eos]
    for source in (generation_config, model_config):
        ends += _ids(source.get("eos_token_id"))
    return TokenizerFacts(
        bos_token_id=token_id("bos"),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        pad_token_id=token_id("pad"),
        unk_token_id=token_id("unk"),
        special_tokens={
            f"{role}_token": content for role, content in specials.items() if not role.startswith(f"{_UNNAMED} ")
        },
        chat_templates=_chat_templates(folder, config.get("chat_template")),
    )


def _ids(value: object) -> list[int]:
    values = cast(list[object], value) if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def _chat_templates(folder: Path, listed: object) -> dict[str, str]:
    """By name. What comes later overrules: tokenizer_config.json, chat_template.json, files of their own."""
    templates: dict[str, str] = {}
    for file, value in (
        ("tokenizer_config.json", listed),
        ("chat_template.json", read_json_object(folder / "chat_template.json").get("chat_template")),
    ):
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            for entry in cast(list[object], value):
                match entry:
                    case {"name": str(name), "template": str(template)}:
                        templates[name] = template
                    case _:
                        path = folder / file
                        raise CheckpointError(
                            f"{path}: an entry of chat_template has no name and template.", path=str(path)
                        )
    if (text := read_text(folder / "chat_template.jinja")) is not None:
        templates["default"] = text
    paths = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if len(paths) > MAX_CHAT_TEMPLATES:
        raise CheckpointError(f"{folder} has {len(paths)} chat templates, over {MAX_CHAT_TEMPLATES}.", path=str(folder))
    for path in paths:
        templates[path.stem] = read_text(path) or ""
    return templates
