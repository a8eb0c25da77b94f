"""Checks a JSON schema before it becomes a grammar: every keyword in it is honoured, or the schema is refused.

The compiler of grammars refuses keywords that it knows and does not implement, but ignores those it does not know, and
says of an error not where it is. So keywords are checked here first, against one table, `KEYWORDS`; and `find_fault`
looks for the place of what only the compiler can find. docs/structured-outputs.md is the table for users.
"""

import enum
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn, cast
from urllib.parse import unquote

import attrs

from trioengine.core.structured.json_pattern import FORMAT_PATTERNS, is_lost, pattern_fault, pattern_for_compiler
from trioengine.errors import RequestError

MAX_DEPTH = 64
MAX_REFERENCES = 2000
"""References may form a chain, which is followed recursively."""
MAX_EXACT = 2**53
"""Beyond it the compiler of grammars rounds numbers."""
MAX_VISITS = 100_000
"""Steps along references to see whether a value can be finite."""
MAX_TRIALS = 300
"""Parts of a schema that are compiled to find the one at fault."""

WHITESPACE = r"(\x20|\r?\n[ \t]{0,20})"
"""Between the tokens of JSON: a space, or a new line and its indentation. Small models would go on for ever."""
ESCAPES = 'nrbtf\\"'
"""What may follow a backslash in JSON. Without `u` each string is written in one way, so that an additional property
cannot be a named one in disguise."""

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Values of `format` that bind."""

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_OLD_DRAFTS = ("draft-04", "draft-06", "draft-07")
_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/(?:2019-09|2020-12))/schema#?")


Schema = Mapping[str, object] | bool


class Support(enum.Enum):
    """What becomes of a keyword."""

    HOLDS = enum.auto()
    """It binds the answer."""
    ANNOTATION = enum.auto()
    """It binds nothing, as the specification has it."""


def _is_string(value: object) -> str | None:
    return None if isinstance(value, str) else "must be a string"


def _is_count(value: object) -> str | None:
    if type(value) is int and 0 <= value <= MAX_EXACT:
        return None
    return "must be an integer that is not negative"


def _is_number(value: object) -> str | None:
    if type(value) not in (int, float):
        return "must be a number"
    return None if abs(cast(float, value)) <= MAX_EXACT else "is beyond 2^53, where numbers are not exact"


def _is_positive(value: object) -> str | None:
    return _is_number(value) or (None if cast(float, value) > 0 else "must be positive")


def _is_type(value: object) -> str | None:
    names = cast(list[object], value) if isinstance(value, list) else [value]
    if names and all(isinstance(name, str) and name in _TYPES for name in names):
        return None
    return f"must be of {', '.join(sorted(_TYPES))}, or a list of these"


def _is_enum(value: object) -> str | None:
    if not isinstance(value, list) or not value:
        return "must be a list that is not empty"
    return next((fault for item in cast(list[object], value) if (fault := _is_exact(item))), None)


def _is_exact(value: object) -> str | None:
    """Whether a value's numbers and strings are kept as they are."""
    match value:
        case dict():
            return next((fault for item in cast(dict[str, object], value).values() if (fault := _is_exact(item))), None)
        case list():
            return next((fault for item in cast(list[object], value) if (fault := _is_exact(item))), None)
        case int() | float() if not isinstance(value, bool):
            return _is_number(value)
        case str() if any(map(is_lost, value)):
            return "has a control character in a string, which is not supported"
        case _:
            return None


def _is_strings(value: object) -> str | None:
    if isinstance(value, list) and all(isinstance(item, str) for item in cast(list[object], value)):
        return None
    return "must be a list of strings"


def _is_format(value: object) -> str | None:
    return None if isinstance(value, str) and value in FORMATS else f"must be one of {', '.join(sorted(FORMATS))}"


def _is_draft(value: object) -> str | None:
    if isinstance(value, str) and _DRAFT.fullmatch(value):
        return None
    return "must be draft 4, 6, 7, 2019-09 or 2020-12 of json-schema.org"


def _is_schema(value: object) -> str | None:
    return None if isinstance(value, (dict, bool)) else "must be an object, true or false"


def _is_schema_list(value: object) -> str | None:
    if isinstance(value, list) and value and not any(map(_is_schema, cast(list[object], value))):
        return None
    return "must be a list of schemas that is not empty"


def _is_schema_map(value: object) -> str | None:
    if isinstance(value, dict) and not any(map(_is_schema, cast(dict[str, object], value).values())):
        return None
    return "must be an object whose values are schemas"


def _is_pattern_map(value: object) -> str | None:
    return _is_schema_map(value) or next(filter(None, map(pattern_fault, cast(dict[str, object], value))), None)


def _is_items(value: object) -> str | None:
    return None if _is_schema_list(value) is None else _is_schema(value)


def _is_anything(_: object) -> str | None:
    return None


@attrs.frozen
class Keyword:
    """What is known of a keyword."""

    support: Support
    fault: Callable[[object], str | None]
    """What is wrong with its value; None when nothing is."""


def _holds(fault: Callable[[object], str | None]) -> Keyword:
    return Keyword(Support.HOLDS, fault)


_NOTE = Keyword(Support.ANNOTATION, _is_anything)

KEYWORDS: Mapping[str, Keyword] = {
    "$schema": _holds(_is_draft),
    "$id": _holds(_is_string),
    "$anchor": _holds(_is_string),
    "$defs": _holds(_is_schema_map),
    "definitions": _holds(_is_schema_map),
    "$ref": _holds(_is_string),
    "type": _holds(_is_type),
    "enum": _holds(_is_enum),
    "const": _holds(_is_exact),
    "allOf": _holds(_is_schema_list),
    "anyOf": _holds(_is_schema_list),
    "oneOf": _holds(_is_schema_list),
    "properties": _holds(_is_schema_map),
    "patternProperties": _holds(_is_pattern_map),
    "additionalProperties": _holds(_is_schema),
    "required": _holds(_is_strings),
    "minProperties": _holds(_is_count),
    "maxProperties": _holds(_is_count),
    "items": _holds(_is_items),
    "prefixItems": _holds(_is_schema_list),
    "additionalItems": _holds(_is_schema),
    "minItems": _holds(_is_count),
    "maxItems": _holds(_is_count),
    "minLength": _holds(_is_count),
    "maxLength": _holds(_is_count),
    "pattern": _holds(pattern_fault),
    "format": _holds(_is_format),
    "minimum": _holds(_is_number),
    "maximum": _holds(_is_number),
    "exclusiveMinimum": _holds(_is_number),
    "exclusiveMaximum": _holds(_is_number),
    "multipleOf": _holds(_is_positive),
    "$comment": _NOTE,
    "title": _NOTE,
    "description": _NOTE,
    "default": _NOTE,
    "examples": _NOTE,
    "example": _NOTE,
    "deprecated": _NOTE,
    "readOnly": _NOTE,
    "writeOnly": _NOTE,
    "contentMediaType": _NOTE,
    "contentEncoding": _NOTE,
    "contentSchema": _NOTE,
    "discriminator": _NOTE,
    "externalDocs": _NOTE,
}
"""Every keyword that a schema may have, beside those that begin with "x-", which are annotations."""

_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("additionalProperties", "additionalItems", "items")


def bound_schema(schema: object, field: str, path: str = "") -> Schema:
    """Return the schema without its annotations, if all of it can be honoured as far as can be seen here.

    Args:
        schema: what JSON says.
        field: the request's field that has it, for errors.
        path: where in the field it stands.

    Raises:
        RequestError: naming the field, and in its words the path of the keyword at fault.
    """
    return _Check(schema, field, path).bound()


def for_compiler(schema: Schema) -> Schema:
    """Return the schema as the compiler of grammars reads it rightly: patterns in Rust's notation, and their classes of
    characters without one that is never written.

    For a class with all control characters the compiler allows every escape, those of the quote and of the backslash
    too, as in `[^"]`; without one of them it goes through them one by one.
    """
    if isinstance(schema, bool):
        return schema
    result: dict[str, object] = {}
    parts: list[object] = []
    for name, value in schema.items():
        if name == "pattern":
            result[name] = pattern_for_compiler(str(value))
        elif name == "format" and value in FORMAT_PATTERNS:
            parts.append({"pattern": FORMAT_PATTERNS[value]})
        elif name in _MAPS:
            rename = pattern_for_compiler if name == "patternProperties" else str
            items = cast(dict[str, Schema], value).items()
            result[name] = {rename(key): for_compiler(part) for key, part in items}
        elif name in _LISTS and isinstance(value, list):
            result[name] = list(map(for_compiler, cast(list[Schema], value)))
        else:
            result[name] = for_compiler(cast(Schema, value)) if name in _SINGLE else value
    if parts:
        result["allOf"] = [*cast(list[object], result.get("allOf", [])), *parts]
    return result


def json_for_grammar(schema: Schema, whitespace: str | None = None) -> str:
    """Return a schema as the text that the compiler of grammars reads, with our rules for white space and strings.

    Args:
        schema: of `bound_schema`, and not false, which nothing satisfies.
        whitespace: a regular expression for what stands between two tokens. None is `WHITESPACE`.
    """
    options = {
        "whitespace_flexible": True,
        "whitespace_pattern": WHITESPACE if whitespace is None else whitespace,
        "json_allowed_escapes": ESCAPES,
        "json_allow_general_unicode_escapes": False,
        "coerce_one_of": False,
        "lenient": False,
    }
    content = for_compiler(schema)
    assert content is not False, "refused before"
    return json.dumps({**({} if content is True else content), "x-guidance": options})


def find_fault(schema: Schema, fault: Callable[[Schema], str | None]) -> str:
    """Return the path of what is wrong with a schema that the compiler refuses: of a keyword, or of the smallest
    schema in it that is refused by itself; "" is the schema itself.

    Args:
        schema: of `bound_schema`.
        fault: what the compiler says of a schema; None when it takes it.
    """
    definitions: dict[str, object] = {}
    if isinstance(schema, dict):
        definitions = {name: value for name, value in schema.items() if name in ("$schema", "$defs", "definitions")}
    num_trials = 0

    def is_refused(part: Mapping[str, object]) -> bool:
        nonlocal num_trials
        num_trials += 1
        words = fault({**part, **definitions}) if num_trials <= MAX_TRIALS else None
        # Cut out, it may point to what is not there any more; that all is there has been checked.
        return words is not None and "does not exist" not in words

    path, current = "", schema
    while isinstance(current, dict):
        inner = next(((step, part) for step, part in _parts(current) if is_refused(part)), None)
        if inner is None:
            break
        path, current = path + inner[0], inner[1]
    if isinstance(current, dict):
        kind = {"type": current["type"]} if "type" in current else {}
        for name, value in current.items():
            if name not in definitions and is_refused({**kind, name: value}):
                return f"{path}/{_escape(name)}"
    return path


class _Check:
    """One schema's walk."""

    def __init__(self, schema: object, field: str, path: str) -> None:
        self._root = schema
        self._field = field
        self._prefix = path
        self._schemas: dict[str, Schema] = {}
        """By path, all schemas in it."""
        self._references: list[tuple[str, str]] = []
        self._is_old_draft = False
        self._takes_item_lists = False
        self._has_inner_ids = False
        self._num_visits = 0
        self._finite: set[str] = set()

    def bound(self) -> Schema:
        match self._root:
            case {"$schema": str(draft)}:
                self._is_old_draft = any(name in draft for name in _OLD_DRAFTS)
                self._takes_item_lists = self._is_old_draft or "2019-09" in draft
            case _:
                pass
        result = self._walk(self._root, "", 0)
        self._check_references()
        if not self._is_finite("", frozenset()):
            self._refuse("", "no value of finite length satisfies it")
        return result

    def _walk(self, schema: object, path: str, depth: int) -> Schema:
        if depth > MAX_DEPTH:
            self._refuse(path, f"is nested more than {MAX_DEPTH} deep")
        if isinstance(schema, bool):
            self._schemas[path] = schema
            return schema
        if fault := _is_schema(schema):
            self._refuse(path, fault)
        node = cast(dict[str, object], schema)
        self._schemas[path] = node
        bound: dict[str, object] = {}
        for name, value in node.items():
            keyword = KEYWORDS.get(name)
            if name.startswith("x-") and name != "x-guidance":
                continue
            if keyword is None:
                self._refuse(f"{path}/{_escape(name)}", "this keyword is not supported")
            if fault := keyword.fault(value):
                self._refuse(f"{path}/{_escape(name)}", fault)
            if keyword.support is Support.HOLDS:
                bound[name] = value
        self._check_together(node, path)
        for name, value in bound.items():
            bound[name] = self._walk_value(name, value, f"{path}/{_escape(name)}", depth + 1)
        return bound

    def _walk_value(self, name: str, value: object, path: str, depth: int) -> object:
        if name in _MAPS:
            items = cast(dict[str, object], value).items()
            return {key: self._walk(part, f"{path}/{_escape(key)}", depth) for key, part in items}
        if name in _LISTS and isinstance(value, list):
            parts = cast(list[object], value)
            return [self._walk(part, f"{path}/{index}", depth) for index, part in enumerate(parts)]
        return self._walk(value, path, depth) if name in _SINGLE else value

    def _check_together(self, node: Mapping[str, object], path: str) -> None:
        """Rules about several keywords of one schema."""
        if path and "$schema" in node:
            self._refuse(f"{path}/$schema", "may only stand at the root")
        if path and "$id" in node:
            self._has_inner_ids = True
            if self._is_old_draft and "$ref" in node:
                self._refuse(f"{path}/$id", "may not stand beside $ref")
        if "$ref" in node:
            self._references.append((path, str(node["$ref"])))
            if len(self._references) > MAX_REFERENCES:
                self._refuse(f"{path}/$ref", f"there are more than {MAX_REFERENCES} references")
        if not self._takes_item_lists:
            if isinstance(node.get("items"), list):
                self._refuse(f"{path}/items", "must be a schema; lists are prefixItems since draft 2020-12")
            if "additionalItems" in node:
                self._refuse(f"{path}/additionalItems", "is no keyword since draft 2020-12")
        # An object may have the same additional name twice, and then has fewer properties than it seems to.
        num_named = len(set(cast(list[str], node.get("required", []))))
        if cast(int, node.get("minProperties", 0)) > num_named + 1:
            self._refuse(f"{path}/minProperties", "may be at most one more than there are names in required")

    def _check_references(self) -> None:
        for path, reference in self._references:
            if reference.startswith("#"):
                pointer = reference[1:]
                is_pointer = pointer == "" or pointer.startswith("/")
                if is_pointer and not self._has_inner_ids and unquote(pointer) not in self._schemas:
                    self._refuse(f"{path}/$ref", "points to no schema in here")
            elif not any(isinstance(schema, dict) and "$id" in schema for schema in self._schemas.values()):
                self._refuse(f"{path}/$ref", "is not in here, and nothing is fetched")

    def _is_finite(self, path: str, open_paths: frozenset[str]) -> bool:
        """Whether values of finite length satisfy it, as far as references and required parts decide that."""
        self._num_visits += 1
        if self._num_visits > MAX_VISITS:
            self._refuse("", "its references are too many to follow")
        schema = self._schemas.get(path, True)
        if isinstance(schema, bool):
            return schema
        if path in self._finite:
            return True
        if path in open_paths:
            return False
        inside = open_paths | {path}
        if all(self._is_finite(part, inside) for part in self._needed(path, schema)) and all(
            any(self._is_finite(f"{path}/{name}/{index}", inside) for index in range(len(cast(list[object], options))))
            for name in ("anyOf", "oneOf")
            if (options := schema.get(name)) is not None
        ):
            self._finite.add(path)
            return True
        return False

    def _needed(self, path: str, schema: Mapping[str, object]) -> Iterator[str]:
        """The paths of schemas without whose values there is none of this one."""
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#") and not self._has_inner_ids:
            yield unquote(reference[1:])
        for index in range(len(cast(list[object], schema.get("allOf", [])))):
            yield f"{path}/allOf/{index}"
        if schema.get("type") == "object":
            for name in cast(list[str], schema.get("required", [])):
                if name in cast(dict[str, object], schema.get("properties", {})):
                    yield f"{path}/properties/{_escape(name)}"
        if schema.get("type") == "array":
            num_prefix = len(cast(list[object], schema.get("prefixItems", [])))
            min_items = cast(int, schema.get("minItems", 0))
            for index in range(min(num_prefix, min_items)):
                yield f"{path}/prefixItems/{index}"
            if min_items > num_prefix and isinstance(schema.get("items"), dict):
                yield f"{path}/items"

    def _refuse(self, path: str, words: str) -> NoReturn:
        raise RequestError(f"{self._field}: {self._prefix}{path or '/'}: {words}.", param=self._field)


def _parts(schema: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The schemas that are objects directly in a schema, and the steps to them; definitions first."""
    for name, value in sorted(schema.items(), key=lambda item: not item[0].startswith(("$defs", "definitions"))):
        if name in _MAPS:
            steps = {f"/{_escape(key)}": part for key, part in cast(dict[str, object], value).items()}
        elif name in _LISTS and isinstance(value, list):
            steps = {f"/{index}": part for index, part in enumerate(cast(list[object], value))}
        else:
            steps = {"": value} if name in _SINGLE else {}
        for step, part in steps.items():
            if isinstance(part, dict):
                yield f"/{_escape(name)}{step}", cast(dict[str, object], part)


def _escape(name: str) -> str:
    """A step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
