"""The form of an answer, from the fields that ask for one: OpenAI's `response_format` and vLLM's `structured_outputs`.

JSON schemas are checked here as far as can be seen without compiling them, so that the error names the field that the
client wrote, and comes before anything is sent.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NoReturn, cast

from trioengine.core.structured.json_schema import bound_schema
from trioengine.errors import RequestError
from trioengine.openai.closed_schema import closed_schema
from trioengine.types.structured import StructuredOutputsParams

_FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
)
STRUCTURED_FIELDS = frozenset({*_FORM_FIELDS, "guided_decoding_backend", "guided_whitespace_pattern"})
"""Fields that this module reads, for the list of known ones."""

_STRUCTURED_OUTPUTS_FIELDS = frozenset(
    {"json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern"}
)
_IGNORED_HINTS = frozenset({"disable_any_whitespace", "disable_additional_properties", "disable_fallback"})
"""Fields of vLLM's `structured_outputs` for its compilers of grammars; ours has no such choices."""


def structured_outputs_of(fields: Mapping[str, object]) -> StructuredOutputsParams | None:
    """The form that a request's fields ask for; None where the answer is free.

    Raises:
        RequestError: naming the field at fault and, for a schema, in its words the path of the keyword; also where two
            fields ask for a form.
    """
    given = {
        name: fields[name]
        for name in _FORM_FIELDS
        if name in fields and not (name == "response_format" and _is_plain_text(fields[name]))
    }
    if not given:
        return None
    if len(given) > 1:
        first, second = list(given)[:2]
        raise RequestError(f"{first} and {second} both give the answer a form; only one can be kept.", param=second)
    ((name, value),) = given.items()
    params = _READERS[name](value, fields)
    try:
        params.validate()
    except RequestError as error:
        raise RequestError(f"{name}: {error.message}", param=name) from None
    return params


def form_field(given_fields: Collection[str]) -> str | None:
    """The field, of those that a body has, that asks for a form; None where there is none."""
    return next((name for name in _FORM_FIELDS if name in given_fields), None)


def check_schema(schema: object, field: str) -> None:
    """Return when a JSON schema can be kept, as far as can be seen without compiling it.

    Raises:
        RequestError: naming the field, and in its words the path of the keyword at fault.
    """
    bound_schema(schema, field)


def _is_plain_text(response_format: object) -> bool:
    return isinstance(response_format, dict) and cast(dict[str, object], response_format).get("type") == "text"


def _response_format(value: object, _: Mapping[str, object]) -> StructuredOutputsParams:
    if not isinstance(value, dict):
        _refuse("response_format", "expected an object")
    response_format = cast(dict[str, object], value)
    match response_format.get("type"):
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return _json_schema(response_format)
        case "structural_tag":
            tag = {name: item for name, item in response_format.items() if item is not None}
            return StructuredOutputsParams(structural_tag=tag)
        case None:
            _refuse("response_format.type", "is required")
        case _:
            _refuse("response_format.type", "expected one of 'text', 'json_object', 'json_schema', 'structural_tag'")


def _json_schema(response_format: Mapping[str, object]) -> StructuredOutputsParams:
    path = "response_format.json_schema"
    content = response_format.get("json_schema")
    if not isinstance(content, dict):
        _refuse(path, "expected an object with name and schema")
    schema = cast(dict[str, object], content).get("schema")
    if schema is None:
        _refuse(f"{path}.schema", "is required")
    if not isinstance(schema, (dict, bool)):
        _refuse(f"{path}.schema", "expected an object, true or false")
    check_schema(cast(object, schema), f"{path}.schema")
    if isinstance(schema, bool):
        return StructuredOutputsParams(json=schema)
    return StructuredOutputsParams(json=closed_schema(cast(dict[str, object], schema)))


def _structured_outputs(value: object, _: Mapping[str, object]) -> StructuredOutputsParams:
    if not isinstance(value, dict):
        _refuse("structured_outputs", "expected an object")
    content = {name: item for name, item in cast(dict[str, object], value).items() if item is not None}
    if unknown := content.keys() - _STRUCTURED_OUTPUTS_FIELDS - _IGNORED_HINTS:
        _refuse(f"structured_outputs.{min(unknown)[:64]}", "is not known")
    kept = {name: item for name, item in content.items() if name in _STRUCTURED_OUTPUTS_FIELDS}
    if isinstance(kept.get("json"), (dict, bool)):
        check_schema(kept["json"], "structured_outputs.json")
    return _params("structured_outputs", kept)


def _guided(kind: str) -> Callable[[object, Mapping[str, object]], StructuredOutputsParams]:
    def read(value: object, fields: Mapping[str, object]) -> StructuredOutputsParams:
        name = f"guided_{kind}"
        if kind == "json" and isinstance(value, (dict, bool)):
            check_schema(cast(object, value), name)
        content: dict[str, object] = {kind: value}
        if "guided_whitespace_pattern" in fields:
            content["whitespace_pattern"] = fields["guided_whitespace_pattern"]
        return _params(name, content)

    return read


def _structural_tag(value: object, _: Mapping[str, object]) -> StructuredOutputsParams:
    return _params("structural_tag", {"structural_tag": value})


def _params(field: str, content: Mapping[str, object]) -> StructuredOutputsParams:
    """`StructuredOutputsParams` of these fields, each of the type that it wants."""
    for name, value in content.items():
        is_right = {
            "json": isinstance(value, (dict, bool, str)),
            "structural_tag": isinstance(value, (dict, str)),
            "json_object": isinstance(value, bool),
            "choice": isinstance(value, list) and all(isinstance(item, str) for item in cast(list[object], value)),
        }.get(name, isinstance(value, str))
        if not is_right:
            path = f"{field}.{name}" if field == "structured_outputs" else field
            _refuse(path, f"is not of the type that {name} has")
    return StructuredOutputsParams(**content)  # pyright: ignore[reportArgumentType]


_READERS: Mapping[str, Callable[[object, Mapping[str, object]], StructuredOutputsParams]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "structural_tag": _structural_tag,
    **{f"guided_{kind}": _guided(kind) for kind in ("json", "regex", "choice", "grammar")},
}


def _refuse(path: str, words: str) -> NoReturn:
    raise RequestError(f"{path}: {words}.", param=path)
