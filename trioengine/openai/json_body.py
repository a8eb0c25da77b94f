"""The JSON object in the body of a request, with everything refused that would break something later.

It knows JSON and text, not what the fields mean.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import NoReturn, cast

from trioengine.errors import RequestError

_SUSPECT_ESCAPE = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
_UNUSABLE_CHARACTER = re.compile("[\x00\ud800-\udfff]")
_MAX_KEY_CHARS = 64


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object that `body` holds.

    Every string in it is real Unicode text without null characters, and every number is finite.

    Raises:
        RequestError: `body` is not such an object. `param` is the path of an unusable string.
    """
    if not body or body.isspace():
        raise RequestError("The body of the request is empty; expected a JSON object.")
    try:
        value = cast(object, _DECODER.decode(body.decode()))
    except UnicodeDecodeError as error:
        raise RequestError(f"The body of the request is not UTF-8: byte {error.start} is invalid.") from None
    except json.JSONDecodeError as error:
        raise RequestError(
            f"The body of the request is not JSON: {error.msg} (line {error.lineno}, column {error.colno})."
        ) from None
    except RecursionError:
        raise RequestError("The body of the request is nested too deeply.") from None
    except _NumberError as error:
        raise RequestError(f"The body of the request has an unusable number: {error}.") from None
    except ValueError:  # Python reads no integer of thousands of digits.
        raise RequestError("The body of the request has an unusable number: it has too many digits.") from None
    if not isinstance(value, dict):
        raise RequestError("The body of the request must be a JSON object.")
    # Raw control characters are no JSON and raw surrogates no UTF-8, so both come from escapes only.
    if _SUSPECT_ESCAPE.search(body):
        _check_strings(cast(object, value))
    return cast(dict[str, object], value)


def field_path(parent: str, key: str | int) -> str:
    """The path of a field or item inside `parent`, as OpenAI writes it: `messages[0].content`. Long keys are cut."""
    if isinstance(key, int):
        return f"{parent}[{key}]"
    name = key if len(key) <= _MAX_KEY_CHARS else key[: _MAX_KEY_CHARS - 3] + "..."
    return f"{parent}.{name}" if parent else name


def _check_strings(root: object) -> None:
    # A stack instead of recursion: whatever depth the JSON decoder took is fine here.
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            _check_string(path, value)
        elif isinstance(value, (dict, list)):
            waiting.extend(_children(path, cast("dict[str, object] | list[object]", value)))


def _children(path: str, value: dict[str, object] | list[object]) -> Iterator[tuple[str, object]]:
    if isinstance(value, list):
        yield from ((field_path(path, position), item) for position, item in enumerate(value))
        return
    for key, item in value.items():
        _check_string(path, key)
        yield field_path(path, key), item


def _check_string(path: str, text: str) -> None:
    found = _UNUSABLE_CHARACTER.search(text)
    if found is None:
        return
    what = "a null character" if found[0] == "\x00" else "half of a surrogate pair"
    place = f"{path}: the text" if path else "The body of the request"
    raise RequestError(f"{place} has {what}, which is not text.", param=path or None)


class _NumberError(ValueError):
    """Says why."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NumberError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _NumberError("it is too large")
    return number


def _same(value: dict[str, object]) -> dict[str, object]:
    return value


# `_same` lets other threads run: the C decoder holds the interpreter lock until it meets Python code.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float, object_hook=_same)
