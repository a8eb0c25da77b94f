"""Builds a tokenizer from a model folder: tokenizer.json and the small files beside it.

Read are tokenizer_config.json (special tokens, chat template), chat_template.jinja, generation_config.json and
config.json (end tokens). The vocabulary and its rules are tokenizer.json's own.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import tokenizers
from tokenizers import processors

from trioengine.errors import CheckpointError
from trioengine.tokenizer.parts import TokenizerFacts, TokenizerParts, library_errors_as_checkpoint_errors, set_affixes

MAX_FILE_BYTES = 256 << 20


def read_folder_tokenizer(folder: Path) -> TokenizerParts:
    """Return the tokenizer in a model folder.

    Raises:
        CheckpointError: tokenizer.json is missing, or a file is damaged or of a kind that is not supported.
    """
    path = folder / "tokenizer.json"
    text = _read_text(path)
    if text is None:
        raise CheckpointError(f"{path} is missing.", path=str(path))
    with library_errors_as_checkpoint_errors(f"{path} cannot be read", str(path)):
        backend = tokenizers.Tokenizer.from_str(text)
    # Settings for training batches, which would cut prompts silently.
    backend.no_truncation()
    backend.no_padding()
    config = _read_object(folder / "tokenizer_config.json")
    facts = _facts(folder, backend, config)
    _apply_add_bos(backend, config.get("add_bos_token"), facts.bos_token_id)
    return TokenizerParts(backend, facts)


def _apply_add_bos(backend: tokenizers.Tokenizer, add_bos: object, bos_token_id: int | None) -> None:
    """tokenizer_config.json overrules tokenizer.json, where it says anything."""
    added = backend.encode("").ids
    if add_bos is True and bos_token_id is not None and bos_token_id not in added:
        set_affixes(backend, bos_token_id, None)
    elif add_bos is False and added == [bos_token_id]:
        backend.post_processor = processors.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]


def _facts(folder: Path, backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> TokenizerFacts:
    model_config = _read_object(folder / "config.json")
    generation_config = _read_object(folder / "generation_config.json")

    def token_id(name: str) -> int | None:
        token = config.get(f"{name}_token")
        if isinstance(token, dict):
            token = cast(dict[str, object], token).get("content")
        if isinstance(token, str) and (found := backend.token_to_id(token)) is not None:
            return found
        ids = _ids(model_config.get(f"{name}_token_id"))
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
        chat_templates=_chat_templates(folder, config.get("chat_template")),
    )


def _ids(value: object) -> list[int]:
    values = cast(list[object], value) if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def _chat_templates(folder: Path, value: object) -> dict[str, str]:
    """A string, a list of named ones, or a file of its own, which wins."""
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for entry in cast(list[object], value):
            match entry:
                case {"name": str(name), "template": str(template)}:
                    templates[name] = template
                case _:
                    path = folder / "tokenizer_config.json"
                    raise CheckpointError(
                        f"{path}: an entry of chat_template has no name and template.", path=str(path)
                    )
    if (text := _read_text(folder / "chat_template.jinja")) is not None:
        templates["default"] = text
    return templates


def _read_text(path: Path) -> str | None:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_FILE_BYTES} bytes.", path=str(path))
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", path=str(path)) from error


def _read_object(path: Path) -> Mapping[str, object]:
    """The JSON object in a file; empty when there is no such file."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.", path=str(path)) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} is not a JSON object.", path=str(path))
    return cast(dict[str, object], parsed)
