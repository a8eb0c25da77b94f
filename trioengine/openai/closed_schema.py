"""Which properties an object of an answer may have where the client's schema names some and says nothing of others.

JSON Schema allows any others. Clients that make schemas of classes say nothing, and mean none; a model that may go on
with properties of its own often does, until `max_tokens`. So an answer has the named ones only, which fits the schema
too.
"""

from collections.abc import Iterator, Mapping
from typing import cast

from trioengine.core.structured.json_schema import Schema

_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("additionalProperties", "additionalItems", "items")
_OTHER_WORDS_ON_PROPERTIES = ("additionalProperties", "patternProperties", "enum", "const")


def closed_schema(schema: Mapping[str, object]) -> Mapping[str, object]:
    """A schema that allows less: objects have no properties but those that it names.

    Unchanged are objects for which the schema names none, or says itself what others there may be, and schemas in which
    an object's properties come from several parts, as with `allOf`: what one part does not name, another may.

    Args:
        schema: one that `bound_schema` takes.
    """
    return schema if any(map(_shares_an_object, _nodes(schema))) else _closed_object(schema)


def _closed(schema: Schema) -> Schema:
    return schema if isinstance(schema, bool) else _closed_object(schema)


def _closed_object(schema: Mapping[str, object]) -> Mapping[str, object]:
    result: dict[str, object] = {}
    for name, value in schema.items():
        if name in _MAPS:
            result[name] = {key: _closed(part) for key, part in cast(Mapping[str, Schema], value).items()}
        elif name in _LISTS and isinstance(value, list):
            result[name] = [_closed(part) for part in cast(list[Schema], value)]
        else:
            result[name] = _closed(cast(Schema, value)) if name in _SINGLE else value
    if _says_nothing_of_others(schema):
        result["additionalProperties"] = False
    return result


def _says_nothing_of_others(node: Mapping[str, object]) -> bool:
    if "properties" not in node or any(name in node for name in _OTHER_WORDS_ON_PROPERTIES):
        return False
    named = cast(Mapping[str, object], node["properties"])
    required = cast(list[str], node.get("required", []))
    return named.keys() >= set(required) and cast(int, node.get("minProperties", 0)) <= len(named)


def _shares_an_object(node: Mapping[str, object]) -> bool:
    """Whether several schemas may speak of the same object, or a value that fits one must not fit another."""
    if len(cast(list[object], node.get("allOf", []))) > 1 or ("oneOf" in node and "discriminator" not in node):
        return True
    applied = sum(name in node for name in ("properties", "$ref", "allOf", "anyOf", "oneOf"))
    return applied > 1


def _nodes(schema: Schema) -> Iterator[Mapping[str, object]]:
    if isinstance(schema, bool):
        return
    yield schema
    for name, value in schema.items():
        parts: list[Schema] = []
        if name in _MAPS:
            parts = list(cast(Mapping[str, Schema], value).values())
        elif name in _LISTS and isinstance(value, list):
            parts = cast(list[Schema], value)
        elif name in _SINGLE:
            parts = [cast(Schema, value)]
        for part in parts:
            yield from _nodes(part)
