"""The OpenAPI document (3.1) of the server's routes, made from the classes that bodies become and replies are of.

A schema of a request says what is taken: null is the same as leaving a field out, and unknown fields are allowed. One
of a reply says all that may be in it. Descriptions are the docstrings of the classes and their fields.
"""

import ast
import enum
import functools
import inspect
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import attrs

from trioengine.frontend.request_checks import MAX_CACHE_SALT_CHARS
from trioengine.openai.chat_protocol import ChatCompletionRequest, Message, PartType
from trioengine.openai.protocol import RequestBody
from trioengine.openai.reply_schema import ErrorReplyBody
from trioengine.openai.sse import CONTENT_TYPE
from trioengine.openai.structured_fields import STRUCTURED_FIELDS
from trioengine.types.params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_K,
    UNSUPPORTED_FIELDS,
    SamplingParams,
)

JSON = "application/json"

Schema = dict[str, Any]


@attrs.frozen(kw_only=True)
class Operation:
    """One method of one address, as the document describes it."""

    method: str
    """"get" or "post"."""
    path: str
    """With `{name}` for what stands there."""
    tag: str
    summary: str
    request: Sequence[type[Any]] = ()
    """The classes that its body may become; none is no body."""
    query: type[Any] | None = None
    """The class that its query becomes."""
    reply: type[Any] | None = None
    """The class of its JSON reply; None where it has none."""
    stream: type[Any] | None = None
    """The class of the events of its stream."""
    text_reply: str | None = None
    """The content type of a reply that is not JSON."""
    needs_key: bool = True
    """Whether it needs an API key, where there are any."""
    errors: Collection[int] = ()
    """Statuses besides 400 and 500 that its errors may have."""


def openapi_document(operations: Sequence[Operation], *, version: str, has_keys: bool) -> Schema:
    """The document of these operations, as JSON values. `has_keys`: all but those that tell of health need one."""
    schemas = _Schemas()
    paths: dict[str, dict[str, Schema]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    components: Schema = {"schemas": schemas.components}
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "TrioEngine",
            "version": version,
            "description": "OpenAI's API, and vLLM's where OpenAI has none. Fields that are null are as if left out.",
        },
        "paths": paths,
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(operation: Operation, schemas: "_Schemas") -> Schema:
    described: Schema = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        "responses": _responses(operation, schemas),
    }
    parameters = [*_path_parameters(operation), *_query_parameters(operation, schemas)]
    if parameters:
        described["parameters"] = parameters
    if not operation.needs_key:
        described["security"] = []
    if operation.request:
        bodies = [schemas.reference(class_, is_request=True) for class_ in operation.request]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _operation_id(operation: Operation) -> str:
    words = [word for word in operation.path.replace("{", "").replace("}", "").split("/") if word]
    return "_".join([operation.method, *words]).replace(".", "_").replace("-", "_")


def _responses(operation: Operation, schemas: "_Schemas") -> Schema:
    content: Schema = {}
    if operation.reply is not None:
        content[JSON] = {"schema": schemas.reference(operation.reply, is_request=False)}
    if operation.text_reply is not None:
        content[operation.text_reply] = {"schema": {"type": "string"}}
    if operation.stream is not None:
        event = schemas.reference(operation.stream, is_request=False)
        error = schemas.reference(ErrorReplyBody, is_request=False)
        content[CONTENT_TYPE.partition(";")[0]] = {
            "schema": {
                "type": "string",
                "description": "With `stream`: server-sent events, each `data:` and the JSON of `x-event`; then "
                "`data: [DONE]`. An error after the first event comes as an event too, and is the last.",
                "x-event": {"anyOf": [event, error]},
            }
        }
    responses: Schema = {"200": {"description": "The reply.", "content": content}}
    error_content = {JSON: {"schema": schemas.reference(ErrorReplyBody, is_request=False)}}
    statuses = {400, 500, *operation.errors, *((413, 415) if operation.request else ())}
    for status in sorted(statuses):
        responses[str(status)] = {"description": _STATUS_WORDS[status], "content": error_content}
        if status == 503:
            responses["503"]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return responses


_STATUS_WORDS: Mapping[int, str] = {
    400: "The request cannot be honoured as it is.",
    401: "An API key is needed.",
    403: "Not for web pages of this origin, or not by this name of the server.",
    404: "There is no model of this name.",
    408: "The body took too long to arrive.",
    413: "The body is larger than this server takes.",
    415: "The body is not declared as JSON.",
    500: "The server failed.",
    503: "The engine is full, shutting down or dead. `Retry-After` says when to come again, where that helps.",
    504: "The request took longer than its `timeout`.",
}


def _path_parameters(operation: Operation) -> Iterator[Schema]:
    for part in operation.path.split("/"):
        if part.startswith("{"):
            yield {"name": part.strip("{}"), "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(operation: Operation, schemas: "_Schemas") -> Iterator[Schema]:
    if operation.query is None:
        return
    for name, schema in schemas.properties(operation.query, is_request=False).items():
        description = schema.pop("description", None)
        parameter: Schema = {"name": name, "in": "query", "required": False, "schema": schema}
        yield parameter if description is None else {**parameter, "description": description}


class _Schemas:
    """JSON schemas of classes, each once."""

    def __init__(self) -> None:
        self.components: dict[str, Schema] = {}
        self._classes: dict[str, type[Any]] = {}

    def reference(self, class_: type[Any], *, is_request: bool) -> Schema:
        """Where the schema of this class is found. A class is used in requests or in replies, not in both."""
        name = class_.__name__
        if self._classes.setdefault(name, class_) is not class_:
            raise ValueError(f"two classes are called {name}: {class_} and {self._classes[name]}")
        if name not in self.components:
            self.components[name] = {}  # Classes may refer to themselves.
            self.components[name] = self._object(class_, is_request=is_request)
        return {"$ref": f"#/components/schemas/{name}"}

    def properties(self, class_: type[Any], *, is_request: bool) -> dict[str, Schema]:
        """The schemas of a class's fields, by name."""
        types_ = get_type_hints(class_)
        return {
            field.name: self._field(class_, field, types_[field.name], is_request=is_request)
            for field in attrs.fields(class_)
            if not is_request or field.name not in _NOT_OF_BODIES
        }

    def _object(self, class_: type[Any], *, is_request: bool) -> Schema:
        properties = self.properties(class_, is_request=is_request)
        required = [
            field.name for field in attrs.fields(class_) if field.name in properties and _is_required(field, is_request)
        ]
        if issubclass(class_, RequestBody):
            sampling = self.properties(SamplingParams, is_request=True)
            structured: dict[str, Schema] = {name: {} for name in sorted(STRUCTURED_FIELDS)}
            properties = {**structured, **sampling, **properties}
            hidden = _NOT_OFFERED | class_.refused_fields
            properties = {name: schema for name, schema in properties.items() if name not in hidden}
        schema: Schema = {"type": "object", "properties": properties}
        description = inspect.getdoc(class_)
        if description:
            schema["description"] = description
        if required:
            schema["required"] = required
        schema["additionalProperties"] = is_request
        return schema

    def _field(self, class_: type[Any], field: "attrs.Attribute[Any]", type_: Any, *, is_request: bool) -> Schema:
        given = cast("Schema | None", field.metadata.get("schema"))
        if given is None:
            given = next((_SCHEMAS[key] for each in class_.__mro__ if (key := (each, field.name)) in _SCHEMAS), None)
        if given is None:
            schema = self._type(type_, is_request=is_request)
        elif given and not given.keys() & {"type", "anyOf", "enum"}:
            schema = _narrowed(self._type(type_, is_request=is_request), given)
        else:
            schema = _nullable(given) if _is_optional(type_) else given
        if is_request and field.default is not attrs.NOTHING:
            schema = _nullable(schema)
        description = field_description(class_, field.name)
        return {**schema, "description": description} if description else schema

    def _type(self, type_: Any, *, is_request: bool) -> Schema:
        origin, arguments = get_origin(type_), get_args(type_)
        if type_ in _SCALARS:
            return {"type": _SCALARS[type_]}
        if type_ is object or type_ is Any:
            return {}
        if isinstance(type_, type) and issubclass(type_, enum.Enum):
            return {"enum": [member.value for member in type_]}
        if isinstance(type_, type) and attrs.has(type_):
            return self.reference(type_, is_request=is_request)
        if origin in (Union, types.UnionType):
            return _any_of([self._type(argument, is_request=is_request) for argument in arguments])
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self._type(arguments[1], is_request=is_request)}
        if isinstance(origin, type) and issubclass(origin, Collection):
            return {"type": "array", "items": self._type(arguments[0], is_request=is_request)}
        raise TypeError(f"no JSON schema is known for {type_}")


_SCALARS: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    types.NoneType: "null",
}

_NOT_OF_BODIES = frozenset({"sampling", "unknown_fields", "given_fields", "detokenize", "output_kind"})
_NOT_OFFERED = frozenset({"prompt_logprobs", "logits_processors", "extra_args", *UNSUPPORTED_FIELDS})


def _texts(max_items: int, max_chars: int) -> Schema:
    text: Schema = {"type": "string", "minLength": 1, "maxLength": max_chars}
    return {"anyOf": [text, {"type": "array", "items": text, "maxItems": max_items}]}


def _bounds(minimum: float, maximum: float | None = None) -> Schema:
    return {"minimum": minimum} if maximum is None else {"minimum": minimum, "maximum": maximum}


_SCHEMAS: Mapping[tuple[type[Any], str], Schema] = {
    (SamplingParams, "temperature"): _bounds(0, 100),
    (SamplingParams, "top_p"): _bounds(0, 1),
    (SamplingParams, "top_k"): _bounds(-1, MAX_TOP_K),
    (SamplingParams, "min_p"): _bounds(0, 1),
    (SamplingParams, "presence_penalty"): _bounds(-2, 2),
    (SamplingParams, "frequency_penalty"): _bounds(-2, 2),
    (SamplingParams, "repetition_penalty"): _bounds(0.01, 100),
    (SamplingParams, "logit_bias"): {
        "type": "object",
        "additionalProperties": {"type": "number", **_bounds(-100, 100)},
        "propertyNames": {"pattern": "^[0-9]{1,18}$"},
    },
    (SamplingParams, "seed"): _bounds(-(2**63), 2**64 - 1),
    (SamplingParams, "max_tokens"): _bounds(0),
    (SamplingParams, "min_tokens"): _bounds(0),
    (SamplingParams, "stop"): _texts(MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS),
    (SamplingParams, "bad_words"): _texts(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
    (SamplingParams, "logprobs"): _bounds(-1),
    (SamplingParams, "n"): _bounds(1),
    (SamplingParams, "structured_outputs"): {},
    (RequestBody, "timeout"): {"exclusiveMinimum": 0},
    (RequestBody, "priority"): _bounds(-(2**31), 2**31 - 1),
    (RequestBody, "cache_salt"): {"minLength": 1, "maxLength": MAX_CACHE_SALT_CHARS},
    (ChatCompletionRequest, "messages"): {"minItems": 1},
    (ChatCompletionRequest, "max_tokens"): _bounds(1),
    (ChatCompletionRequest, "max_completion_tokens"): _bounds(1),
    (Message, "content"): {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "items": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {"type": {"enum": [kind.value]}, kind.value: {"type": "string"}},
                            "required": ["type", kind.value],
                        }
                        for kind in PartType
                    ]
                },
            },
        ]
    },
}
"""What the type of a field does not say: its bounds, and other forms that it is taken in. A test holds the bounds to
those that are checked."""


def _narrowed(schema: Schema, bounds: Schema) -> Schema:
    options = cast("list[Schema] | None", schema.get("anyOf"))
    if options is None:
        return {**schema, **bounds}
    return {"anyOf": [option if option.get("type") == "null" else {**option, **bounds} for option in options]}


def _any_of(options: Sequence[Schema]) -> Schema:
    unique = [option for place, option in enumerate(options) if option not in options[:place]]
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _nullable(schema: Schema) -> Schema:
    if not schema:
        return schema
    options = cast("list[Schema]", schema.get("anyOf", [schema]))
    return schema if {"type": "null"} in options else {"anyOf": [*options, {"type": "null"}]}


def _is_optional(type_: Any) -> bool:
    return types.NoneType in get_args(type_)


def _is_required(field: "attrs.Attribute[Any]", is_request: bool) -> bool:
    return field.default is attrs.NOTHING if is_request else not field.metadata.get("is_sometimes", False)


def field_description(class_: type[Any], name: str) -> str | None:
    """The docstring of a field: the string behind it in the class's source, or in that of a class it is from."""
    for each in class_.__mro__:
        found = _descriptions(each.__module__).get((each.__qualname__, name))
        if found is not None:
            return found
    return None


@functools.cache
def _descriptions(module_name: str) -> Mapping[tuple[str, str], str]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module_name]))
    except (OSError, TypeError, KeyError):
        return {}  # No source, no descriptions.
    return {
        (class_.name, field.target.id): inspect.cleandoc(text.value.value)
        for class_ in tree.body
        if isinstance(class_, ast.ClassDef)
        for field, text in zip(class_.body, class_.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
