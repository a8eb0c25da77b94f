"""The body of `POST /v1/responses`, and the queries of its other addresses."""

import enum
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import attrs
from cattrs import Converter, override

from trioengine.errors import PromptTooLongError, RequestError
from trioengine.openai.chat_protocol import ToolChoice
from trioengine.openai.json_body import parse_object
from trioengine.openai.protocol import (
    NEUTRAL,
    Neutral,
    RequestBody,
    make_request_converter,
    register_object,
    structure_request,
    without_neutral,
)
from trioengine.openai.responses.items import InputItem, ItemRole, MessageItem, register_items
from trioengine.openai.structured_fields import structured_outputs_of

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_TOP_LOGPROBS = 20


class ToolType(enum.StrEnum):
    """What a tool is: what runs on the client's side."""

    FUNCTION = "function"


class FormatType(enum.StrEnum):
    """The form of the answer's text."""

    TEXT = "text"
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"


class Truncation(enum.StrEnum):
    """What becomes of a conversation that is too long."""

    AUTO = "auto"
    """It loses its beginning."""
    DISABLED = "disabled"
    """It is an error."""


class Verbosity(enum.StrEnum):
    """How much is to be said. Without effect here."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class Summary(enum.StrEnum):
    """How a summary of the reasoning should be."""

    AUTO = "auto"
    CONCISE = "concise"
    DETAILED = "detailed"


class ServiceTier(enum.StrEnum):
    """With which priority other servers answer. Here all are one."""

    AUTO = "auto"
    DEFAULT = "default"
    FLEX = "flex"
    SCALE = "scale"
    PRIORITY = "priority"
    FAST = "fast"


class Includable(enum.StrEnum):
    """What a response may have besides. All but log probabilities is about what this server does not have."""

    LOGPROBS = "message.output_text.logprobs"
    ENCRYPTED_REASONING = "reasoning.encrypted_content"
    FILE_SEARCH_RESULTS = "file_search_call.results"
    WEB_SEARCH_RESULTS = "web_search_call.results"
    WEB_SEARCH_SOURCES = "web_search_call.action.sources"
    INPUT_IMAGES = "message.input_image.image_url"
    COMPUTER_IMAGES = "computer_call_output.output.image_url"
    CODE_OUTPUTS = "code_interpreter_call.outputs"


@attrs.frozen
class FunctionTool:
    """A function that may be called."""

    type: ToolType
    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    """The JSON schema of its arguments. None is none."""
    strict: bool | None = None
    """True: the arguments always fit the schema."""


@attrs.frozen
class FunctionChoice:
    """The answer is a call of this function."""

    name: str


@attrs.frozen
class AllowedTools:
    """Only these tools may be called."""

    is_required: bool
    """Whether one must be."""
    names: tuple[str, ...]


AnyToolChoice: TypeAlias = ToolChoice | FunctionChoice | AllowedTools


@attrs.frozen
class TextFormat:
    """The form of the answer's text."""

    type: FormatType
    name: str | None = None
    schema: Mapping[str, object] | None = None
    """With `json_schema`: what the text fits."""
    description: str | None = None
    strict: bool | None = None
    """The text fits the schema always."""


@attrs.frozen
class TextOptions:
    """How the answer is written."""

    format: TextFormat = attrs.field(factory=lambda: TextFormat(FormatType.TEXT))
    verbosity: Verbosity | None = None


@attrs.frozen
class Reasoning:
    """How the model reasons, and what of it is told."""

    effort: str | None = None
    """For templates that know it; `none` switches reasoning off."""
    summary: Summary | None = None
    """The reasoning is told as its own summary; without, as text."""
    generate_summary: Summary | None = None
    """An older name of `summary`."""

    @property
    def effective_summary(self) -> Summary | None:
        """By either name."""
        return self.summary or self.generate_summary


@attrs.frozen(kw_only=True)
class ResponseRequest(RequestBody):
    """The body of `POST /v1/responses`."""

    refused_fields = frozenset({"logprob_token_ids", "logprobs", "max_tokens", "n", "response_format"})

    input: tuple[InputItem, ...] = attrs.field(
        default=(),
        metadata={"schema": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}},
    )
    """A text of the user's, or items."""
    instructions: str | None = None
    """A system message before the conversation. That of the previous response is not taken over."""
    previous_response_id: str | None = None
    """The conversation goes on from this stored response."""
    tools: tuple[FunctionTool, ...] = ()
    tool_choice: AnyToolChoice | None = attrs.field(
        default=None,
        metadata={"schema": {"anyOf": [{"enum": [choice.value for choice in ToolChoice]}, {"type": "object"}]}},
    )
    """None is `auto` where there are tools."""
    parallel_tool_calls: bool = True
    """Whether one answer may have several calls."""
    text: TextOptions = attrs.field(factory=TextOptions)
    reasoning: Reasoning = attrs.field(factory=Reasoning)
    max_output_tokens: int | None = attrs.field(default=None, metadata={"schema": {"minimum": 1}})
    """None is what the context leaves."""
    max_tool_calls: int | None = None
    """Of tools that a server runs itself: there are none here."""
    top_logprobs: int | None = attrs.field(
        default=None, metadata={"schema": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}}
    )
    """For each token, those of so many most likely ones."""
    include: tuple[Includable, ...] = ()
    background: bool = False
    """The response is made while nobody waits for it: retrieve it."""
    store: bool = True
    """Keep it for a while, to be retrieved and gone on from."""
    truncation: Truncation = Truncation.DISABLED
    metadata: Mapping[str, str] = attrs.field(factory=dict[str, str])
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: ServiceTier = ServiceTier.AUTO

    @property
    def has_logprobs(self) -> bool:
        """Whether log probabilities are told."""
        return Includable.LOGPROBS in self.include


_NEUTRAL: Neutral = {
    **NEUTRAL,
    "access_programs": ({},),
    "background_options": ({},),
    "context_management": ([],),
    "conversation": (),
    "echo": (False,),
    "logprob_token_ids": ([],),
    "logprobs": (False, 0),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_logprobs": (),
    "response_format": (),
}
"""Fields of other routes are refused by name: left out silently, the answer would not be what was asked for."""

_HARMLESS = frozenset({"image", "prompt_cache_options"})


def parse_response_request(body: bytes) -> ResponseRequest:
    """The request that the body of an HTTP request holds.

    Raises:
        RequestError: it holds none, or asks for what cannot be honoured. `param` is the path of the field at fault.
    """
    return response_request(parse_object(body))


def response_request(body: Mapping[str, object]) -> ResponseRequest:
    """The request of these fields, which may also have come in a message of a WebSocket.

    Raises:
        RequestError: as `parse_response_request` raises.
    """
    fields = without_neutral(body, _NEUTRAL)
    fields = {name: value for name, value in fields.items() if name not in _HARMLESS}
    sampling_fields = {name: value for name, value in fields.items() if name != "logprobs"}
    request = structure_request(_CONVERTER, fields, sampling_fields, ResponseRequest)
    if not request.input and request.previous_response_id is None:
        raise RequestError("input is required.", param="input")
    _check_metadata(request.metadata)
    if request.background and not request.store:
        raise RequestError("A response in the background is stored: store must not be false.", param="store")
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise RequestError("max_output_tokens must be at least 1.", param="max_output_tokens")
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}.", param="top_logprobs")
    truncate = -1 if request.truncation is Truncation.AUTO else request.truncate_prompt_tokens
    try:
        form = structured_outputs_of({**fields, **_response_format(request.text.format)})
    except RequestError as error:
        raise with_path(error, _FORM_PATHS) from None
    sampling = attrs.evolve(
        request.sampling,
        structured_outputs=form,
        logprobs=(request.top_logprobs or 0) if request.has_logprobs else None,
    )
    return attrs.evolve(request, sampling=sampling, truncate_prompt_tokens=truncate)


def with_path(error: RequestError, paths: Mapping[str, str]) -> RequestError:
    """The same error, with the client's path of the field at fault.

    Args:
        error: of whoever knows the field by a chat's path.
        paths: beginnings of chats' paths -> the client's.
    """
    param = error.param or ""
    for path in sorted(paths, key=len, reverse=True):
        if param == path or (param.startswith(path) and param[len(path)] in ".["):
            new = paths[path] + param.removeprefix(path)
            if isinstance(error, PromptTooLongError):
                return attrs.evolve(error, param=new)
            message = error.message.replace(param, new) if param in error.message else f"{new}: {error.message}"
            return attrs.evolve(error, message=message, param=new)
    return error


_FORM_PATHS: Mapping[str, str] = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}


def _response_format(text_format: TextFormat) -> Mapping[str, object]:
    """The chat's field for this form."""
    match text_format.type:
        case FormatType.TEXT:
            return {}
        case FormatType.JSON_OBJECT:
            return {"response_format": {"type": "json_object"}}
        case FormatType.JSON_SCHEMA:
            if text_format.name is None:
                raise RequestError("text.format.name is required.", param="text.format.name")
            if text_format.schema is None:
                raise RequestError("text.format.schema is required.", param="text.format.schema")
            schema = {"name": text_format.name, "schema": text_format.schema}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise RequestError(f"metadata may have {MAX_METADATA} keys, not {len(metadata)}.", param="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise RequestError(f"metadata: a key may have {MAX_METADATA_KEY_CHARS} characters.", param="metadata")
        if len(value) > MAX_METADATA_VALUE_CHARS:
            path = f"metadata.{key}"
            raise RequestError(f"{path}: a value may have {MAX_METADATA_VALUE_CHARS} characters.", param=path)


def _structure_tool_choice(value: object, _: object) -> AnyToolChoice:
    words = "expected 'none', 'auto', 'required', a function or allowed_tools"
    if isinstance(value, str):
        if value not in tuple(ToolChoice):
            raise ValueError(words)
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise TypeError(words)
    fields = cast(dict[str, object], value)
    match fields:
        case {"type": "function", "name": str(name)}:
            return FunctionChoice(name)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode} if isinstance(fields.get("tools"), list):
            tools = cast(list[object], fields["tools"])
            return AllowedTools(mode == "required", tuple(map(_allowed_name, tools)))
        case _:
            raise ValueError(words)


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "name": str(name)}:
            return name
        case _:
            raise ValueError('expected tools as {"type": "function", "name": "..."}')


def _make_converter() -> Converter:
    converter = make_request_converter()
    register_items(converter)

    def structure_input(value: object, _: object) -> tuple[InputItem, ...]:
        if isinstance(value, str):
            return (MessageItem(role=ItemRole.USER, content=(value,)),)
        if not isinstance(value, list):
            raise TypeError("expected a string or a list of items")
        return converter.structure(cast("Sequence[object]", value), tuple[InputItem, ...])

    for class_ in (FunctionTool, TextFormat):
        register_object(converter, class_)
    for class_ in (TextOptions, Reasoning):
        _register_with_nulls(converter, class_)
    register_object(
        converter,
        ResponseRequest,
        input=override(struct_hook=structure_input),
        tool_choice=override(struct_hook=_structure_tool_choice),
    )
    return converter


def _register_with_nulls(converter: Converter, class_: type) -> None:
    """As `register_object`, with null as if left out."""
    register_object(converter, class_)
    structure = converter.get_structure_hook(class_)

    def without_nulls(value: object, type_: type) -> object:
        if isinstance(value, dict):
            value = {name: item for name, item in cast(dict[str, object], value).items() if item is not None}
        return structure(value, type_)

    converter.register_structure_hook(class_, without_nulls)


_CONVERTER = _make_converter()


@attrs.frozen
class RetrieveQuery:
    """The query of `GET /v1/responses/{response_id}`."""

    stream: bool = False
    """The events, from the first or from behind `starting_after`, also those to come."""
    starting_after: int | None = None
    """The sequence number of an event."""
    include: tuple[str, ...] = ()
    """Without effect: a response has what it was made with."""
    include_obfuscation: bool = True
    """Without effect: nothing is obfuscated."""


class Order(enum.StrEnum):
    """In which order items are listed."""

    ASCENDING = "asc"
    DESCENDING = "desc"


@attrs.frozen
class InputItemsQuery:
    """The query of `GET /v1/responses/{response_id}/input_items`."""

    limit: int = attrs.field(default=20, metadata={"schema": {"minimum": 1, "maximum": 100}})
    order: str = attrs.field(
        default=Order.DESCENDING.value, metadata={"schema": {"enum": [order.value for order in Order]}}
    )
    after: str | None = None
    """The id of the item behind which the list begins."""
    include: tuple[str, ...] = ()
    """Without effect, as for responses."""
