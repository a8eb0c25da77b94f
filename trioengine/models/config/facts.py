"""Typed look-ups in what an untrusted file says."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from trioengine.errors import CheckpointError

MAX_SIZE = 1 << 24
"""No dimension of a real model comes near it; it keeps products of two far below any overflow."""


class Facts:
    """Typed look-ups in a mapping from an untrusted file. None counts as missing."""

    def __init__(self, values: Mapping[str, object], path: str, prefix: str = "") -> None:
        """`prefix`: what stands before the keys in the file, for messages."""
        self._values = values
        self._path = path
        self._prefix = prefix

    def error(self, why: str) -> CheckpointError:
        """An error that names the file."""
        return CheckpointError(f"{self._path}: {why}.", path=self._path)

    def unsupported_architecture(self, name: str, supported: Iterable[str]) -> CheckpointError:
        """An error for an architecture that is none of the supported ones."""
        return self.error(f"the architecture {name[:100]!r} is not supported; supported are {', '.join(supported)}")

    def with_defaults(self, defaults: Mapping[str, object]) -> "Facts":
        """The same, and for keys that are not there at all these values."""
        return Facts({**defaults, **self._values}, self._path, self._prefix)

    def refuse_unless(self, key: str, *neutral: object) -> None:
        """Refuse a value that would change results, where nothing here computes what it asks for."""
        value = self._values.get(key)
        if value is not None and value not in neutral:
            raise self.error(f"{self._prefix}{key} is {_short(value)}, which is not supported for this architecture")

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self._values.get(key) is not None

    def is_one_of(self, key: str, *values: object) -> bool:
        """Whether the key has one of these values."""
        return self._values.get(key) in values

    def nothing(self) -> "Facts":
        """Of the same file, with no key at all."""
        return Facts({}, self._path, self._prefix)

    def inner(self, key: str) -> "Facts | None":
        """The object under a key. CheckpointError: it is something else."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{self._prefix}{key} is not an object")
        return Facts(cast(Mapping[str, object], value), self._path, f"{self._prefix}{key}.")

    def text(self, key: str, default: str | None = None) -> str:
        """A string. CheckpointError: it is something else, or missing without a default."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(f"{self._prefix}{key} is not a string")
        return value

    def texts(self, key: str) -> Sequence[str]:
        """At least one."""
        items = self._list(key)
        texts = [item for item in items if isinstance(item, str)]
        if not texts or len(texts) < len(items):
            raise self.error(f"{self._prefix}{key} is not a list of strings")
        return texts

    def flag(self, key: str, default: bool) -> bool:
        """True or False. CheckpointError: as `text` says."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{self._prefix}{key} is not true or false")
        return value

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """An integer in this range. CheckpointError: as `text` says."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f"{self._prefix}{key} must be an integer from {least} to {most}, not {_short(value)}")
        return value

    def optional_size(self, key: str) -> int | None:
        """As `size`; None where it is missing."""
        return self.size(key) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0. CheckpointError: as `text` says."""
        value = self._get(key, default)
        if not _is_number(value):
            raise self.error(f"{self._prefix}{key} must be a number above 0, not {_short(value)}")
        return float(cast(float, value))

    def optional_number(self, key: str) -> float | None:
        """As `number`; None where it is missing."""
        return self.number(key) if self.has(key) else None

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """So many."""
        values = self._list(key)
        if len(values) != count or not all(map(_is_number, values)):
            raise self.error(f"{self._prefix}{key} must be {count} numbers above 0")
        return tuple(float(cast(float, value)) for value in values)

    def flags(self, key: str, count: int) -> tuple[bool, ...]:
        """So many, of true, false, 1 and 0."""
        values = self._list(key)
        if len(values) != count or not all(isinstance(value, int) and value in (0, 1) for value in values):
            raise self.error(f"{self._prefix}{key} must be true or false for each of {count} layers")
        return tuple(map(bool, values))

    def is_list(self, key: str) -> bool:
        """Whether the value is a list."""
        return isinstance(self._values.get(key), (list, tuple))

    def optional_token_id(self, key: str) -> int | None:
        """As `token_ids`, the first; None where there is none."""
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def token_ids(self, *keys: str) -> tuple[int, ...]:
        """The ids under these keys, each a number or a list, without repetitions."""
        found: dict[int, None] = {}
        for key in keys:
            value = self._values.get(key)
            ids = cast(list[object], value if isinstance(value, list) else [] if value is None else [value])
            for token_id in ids:
                if not isinstance(token_id, int) or isinstance(token_id, bool):
                    raise self.error(f"{self._prefix}{key} is not a token id or a list of them")
                found[token_id] = None
        return tuple(found)

    def _list(self, key: str) -> Sequence[object]:
        values = self._get(key, None)
        return cast(Sequence[object], values) if isinstance(values, (list, tuple)) else ()

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{self._prefix}{key} is missing")
        return value


def read_json(path: Path) -> Mapping[str, object]:
    """A file that is one JSON object.

    Raises:
        CheckpointError: it cannot be read, or is something else.
    """
    try:
        value: object = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", path=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {str(error)[:200]}.", path=str(path)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object.", path=str(path))
    return cast(Mapping[str, object], value)


def _is_number(value: object) -> bool:
    """Above 0, and one that float32 can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-37 < value < 1e37


def _short(value: object) -> str:
    return repr(value)[:50]
