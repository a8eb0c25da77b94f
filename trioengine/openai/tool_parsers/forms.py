"""Forms of an answer that make a model write calls of certain functions, in its own markup, with arguments that fit.

They are values of `StructuredOutputsParams`; the core keeps them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import attrs

from trioengine.core.structured.json_schema import Schema, bound_schema, json_for_grammar
from trioengine.errors import RequestError
from trioengine.types.structured import StructuredOutputsParams

ANY_ARGUMENTS: Mapping[str, object] = {"type": "object"}
"""The schema of arguments that only have to be a JSON object."""


@attrs.frozen
class BoundFunction:
    """A function that may be called, and what its arguments must be."""

    name: str
    schema: Mapping[str, object]
    """A JSON schema that the core can keep; of an object."""
    is_strict: bool
    path: str
    """Of its parameters in the request, for errors."""


@attrs.frozen
class CallRules:
    """How many calls an answer may have."""

    must_call: bool
    """The answer is calls. False: it may also be text."""
    is_parallel: bool
    """Whether there may be several."""
    otherwise: Schema | None = None
    """The JSON schema of an answer that is no call, where it may be one; None is free text."""


@attrs.frozen
class WrittenCall:
    """A call as a conversation has it."""

    name: str
    arguments: Mapping[str, object]


class Form(Protocol):
    """One way to write calls."""

    def __call__(self, functions: Sequence[BoundFunction], rules: CallRules, /) -> StructuredOutputsParams:
        """The form of an answer that has calls of these functions.

        Raises:
            RequestError: a strict schema is of a kind that this way has no words for.
        """
        ...

    def write(self, calls: Sequence[WrittenCall], /) -> str:
        """These calls as the model would write them."""
        ...


@attrs.frozen
class TaggedForm:
    """Calls between markers, with text around them."""

    trigger: str
    begin: str
    """With `{name}` for the function's name as JSON writes it inside quotes."""
    end: str

    def __call__(self, functions: Sequence[BoundFunction], rules: CallRules) -> StructuredOutputsParams:
        """Structural tags, one for each function."""
        tag: dict[str, object] = {
            "structures": [
                {
                    "begin": self._begin(function.name),
                    "schema": function.schema,
                    "end": self.end,
                }
                for function in functions
            ],
            "triggers": [self.trigger],
            "at_least_one": rules.must_call,
            "stop_after_first": not rules.is_parallel,
        }
        if rules.otherwise is not None:
            tag["otherwise"] = rules.otherwise
        return StructuredOutputsParams(structural_tag=tag)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """One behind the other."""
        return "\n".join(self._begin(call.name) + _text(call.arguments) + self.end for call in calls)

    def _begin(self, name: str) -> str:
        return self.begin.replace("{name}", json.dumps(name)[1:-1])


@attrs.frozen
class ObjectForm:
    """Calls as JSON objects that are the whole answer."""

    arguments_key: str
    has_list: bool
    """Whether several calls are a list of objects; where they are not, there is one call in an answer."""

    def __call__(self, functions: Sequence[BoundFunction], rules: CallRules) -> StructuredOutputsParams:
        """JSON where all of the answer is JSON, else a grammar."""
        definitions: dict[str, object] = {}
        calls: list[Mapping[str, object]] = []
        for index, function in enumerate(functions):
            definitions[f"f{index}"] = _with_moved_references(function.schema, f"#/$defs/f{index}")
            properties = {"name": {"const": function.name}, self.arguments_key: {"$ref": f"#/$defs/f{index}"}}
            calls.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": ["name", self.arguments_key],
                    "additionalProperties": False,
                }
            )
        answer: Mapping[str, object] = {"anyOf": calls}
        if rules.is_parallel and self.has_list:
            answer = {"type": "array", "items": answer, "minItems": 1}
        if rules.otherwise is not None:
            definitions["answer"] = _with_moved_references(rules.otherwise, "#/$defs/answer")
            answer = {"anyOf": [answer, {"$ref": "#/$defs/answer"}]}
        schema = {**answer, "$defs": definitions}
        if rules.must_call or rules.otherwise is not None:
            return StructuredOutputsParams(json=schema)
        return _grammar([f"calls: %json {_json(schema)}"])

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """A list, or objects behind each other."""
        objects = [_text({"name": call.name, self.arguments_key: call.arguments}) for call in calls]
        return f"[{', '.join(objects)}]" if self.has_list else "; ".join(objects)


def _with_moved_references(schema: object, place: str) -> object:
    """A schema whose references into itself are right where it stands at `place` of another."""
    if isinstance(schema, dict):
        fields = cast(dict[str, object], schema)
        moved = {name: _with_moved_references(value, place) for name, value in fields.items() if name != "$schema"}
        reference = fields.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            moved["$ref"] = place + reference[1:]
        return moved
    if isinstance(schema, list):
        return [_with_moved_references(item, place) for item in cast(list[object], schema)]
    return schema


_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_PYTHONIC_KEYS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
)


@attrs.frozen
class PythonicForm:
    """`[f(a=1, b=2), g()]`, whose values are JSON."""

    def __call__(self, functions: Sequence[BoundFunction], rules: CallRules) -> StructuredOutputsParams:
        """A grammar. Arguments come in the order of the schema.

        Raises:
            RequestError: a strict schema is of another kind than an object with named properties.
        """
        more = '(", " call)* ' if rules.is_parallel else ""
        lines = [f'calls: "[" call {more}"]"']
        lines.append(f"call: {' | '.join(f'f{index}' for index in range(len(functions)))}")
        for index, function in enumerate(functions):
            lines += _pythonic_rules(f"f{index}", function)
        if rules.must_call:
            return StructuredOutputsParams(grammar="\n".join(["%llguidance {}", "start: calls", *lines]))
        return _grammar(lines, rules.otherwise)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """A list of calls."""
        texts = (
            f"{call.name}({', '.join(f'{name}={_text(value)}' for name, value in call.arguments.items())})"
            for call in calls
        )
        return f"[{', '.join(texts)}]"


def _pythonic_rules(rule: str, function: BoundFunction) -> list[str]:
    schema = bound_schema(function.schema, function.path)
    assert isinstance(schema, dict), "it is an object's"
    properties = cast(dict[str, object], schema.get("properties", {}))
    required = set(cast(list[str], schema.get("required", [])))
    is_simple = (
        schema.keys() <= _PYTHONIC_KEYS
        and schema.get("type") == "object"
        and all(map(_IDENTIFIER.fullmatch, properties))
        and required <= properties.keys()
        and not _refers_to_itself(schema)
    )
    head = f"{rule}: {json.dumps(function.name + '(')}"
    if not is_simple:
        if function.is_strict:
            raise RequestError(
                f"{function.path}: in this model's way to write calls, a strict schema must be an object with named"
                " properties.",
                param=function.path,
            )
        properties, required, schema = {}, set[str](), {}
        value = f'{rule}_any: /[a-zA-Z_]\\w*/ "=" %json {_json({})}'
        return [f'{head} ({rule}_any (", " {rule}_any)*)? ")"', value]
    if not properties:
        return [f'{head} ")"']
    shared = {name: schema[name] for name in ("$defs", "definitions", "$schema") if name in schema}
    lines = [f'{head} {rule}_0 ")"']
    for place, (name, value) in enumerate(properties.items()):
        content = {**(cast(dict[str, object], value) if isinstance(value, dict) else {}), **shared}
        key, rest = f"{rule}_v{place}", f"{rule}_r{place + 1}"
        lines.append(f"{key}: {json.dumps(name + '=')} %json {_json(content)}")
        if name in required:
            lines += [f"{rule}_{place}: {key} {rest}", f'{rule}_r{place}: ", " {key} {rest}']
        else:
            lines += [f"{rule}_{place}: {key} {rest} | {rule}_{place + 1}", f'{rule}_r{place}: (", " {key})? {rest}']
    return [*lines, f'{rule}_{len(properties)}: ""', f'{rule}_r{len(properties)}: ""']


def _refers_to_itself(schema: object) -> bool:
    """Whether a reference leads to anything but a definition."""
    if isinstance(schema, dict):
        fields = cast(dict[str, object], schema)
        reference = fields.get("$ref")
        if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
            return True
        return any(map(_refers_to_itself, fields.values()))
    return isinstance(schema, list) and any(map(_refers_to_itself, cast(list[object], schema)))


def _grammar(lines: Sequence[str], otherwise: Schema | None = None) -> StructuredOutputsParams:
    """`calls` of these lines, or else JSON of a schema, or else text that could not be taken for the start of calls."""
    other = "other: /[^\\[{<\\s](.|\\n)*/" if otherwise is None else f"other: %json {_json(otherwise)}"
    return StructuredOutputsParams(grammar="\n".join(["%llguidance {}", "start: calls | other", other, *lines]))


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json(schema: object) -> str:
    return json_for_grammar(bound_schema(schema, "tools"))
