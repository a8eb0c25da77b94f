"""Reads the small files of a model folder: bounded, and with errors that name the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from trioengine.errors import CheckpointError

MAX_FILE_BYTES = 16 << 20
"""Unless the caller says otherwise. The largest configurations in use have one megabyte."""


def read_bytes(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes | None:
    """Return a file's content; None when there is no such file.

    Raises:
        CheckpointError: it is no regular file, larger than `max_bytes`, or cannot be read.
    """
    try:
        # A named pipe would block, and a device might never end.
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is no regular file.", path=str(path))
        if path.stat().st_size > max_bytes:
            raise CheckpointError(f"{path} is larger than {max_bytes} bytes.", path=str(path))
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", path=str(path)) from error


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str | None:
    """Return a file's text, which is UTF-8; None when there is no such file.

    Raises:
        CheckpointError: as `read_bytes`, or it is not UTF-8.
    """
    data = read_bytes(path, max_bytes)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", path=str(path)) from error


def read_json_object(path: Path) -> Mapping[str, object]:
    """Return the JSON object in a file; empty when there is no such file.

    Raises:
        CheckpointError: as `read_text`, or it holds no JSON object.
    """
    text = read_text(path)
    if text is None:
        return {}
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.", path=str(path)) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} is not a JSON object.", path=str(path))
    return cast(dict[str, object], parsed)
