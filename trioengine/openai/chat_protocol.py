"""The body of `POST /v1/chat/completions`."""

import enum
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import attrs
from cattrs import Converter, override

from trioengine.errors import RequestError
from trioengine.openai.protocol import (
    NEUTRAL,
    Neutral,
    TokenTellingBody,
    check_stream_options,
    make_request_converter,
    parse_fields,
    register_object,
    structure_request,
)
from trioengine.openai.structured_fields import structured_outputs_of

MAX_TOOLS = 256
"""As many as there may be structural tags."""
_FUNCTION_NAME = re.compile(r"[\w.\-/:]{1,128}")


class Role(enum.StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    """What newer clients call `system`."""
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class PartType(enum.StrEnum):
    """What a part of a message's content is."""

    TEXT = "text"
    REFUSAL = "refusal"
    """What the assistant said in place of an answer, as a client sends it back."""


class ToolType(enum.StrEnum):
    """What a tool is."""

    FUNCTION = "function"


class ToolChoice(enum.StrEnum):
    """Whether the answer may, or must, call tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@attrs.frozen
class NamedToolChoice:
    """The answer is a call of this function."""

    name: str


@attrs.frozen
class AllowedTools:
    """Only these functions may be called, and the model is told of no others."""

    names: tuple[str, ...]
    must_call: bool


@attrs.frozen
class TextPart:
    """One part of a message's content."""

    type: PartType
    text: str


@attrs.frozen
class RefusalPart:
    """The same, of type `refusal`."""

    type: PartType
    refusal: str

    @property
    def text(self) -> str:
        """For a chat template it is what the assistant said."""
        return self.refusal


ContentPart: TypeAlias = TextPart | RefusalPart


@attrs.frozen
class FunctionCall:
    """A call that the assistant made, as a client sends it back."""

    name: str
    arguments: object = "{}"
    """The JSON of an object, or the object itself."""


@attrs.frozen
class ToolCall:
    """One of the calls of an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: ToolType = ToolType.FUNCTION


@attrs.frozen
class Message:
    """One message of a conversation."""

    role: Role
    content: str | None = None
    """The texts of its parts, joined. None where there was none."""
    name: str | None = None
    tool_call_id: str | None = None
    """Of the call that a tool's message answers."""
    tool_calls: tuple[ToolCall, ...] | None = None
    reasoning_content: str | None = None
    """What the assistant thought, for templates that show it again."""
    reasoning: str | None = None
    """Another name of it."""
    function_call: object = None
    audio: object = None


@attrs.frozen
class FunctionDefinition:
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    """The JSON schema of its arguments. None is none."""
    strict: bool | None = None
    """True: the arguments always fit the schema."""


@attrs.frozen
class Tool:
    """Something that the model may call."""

    function: FunctionDefinition
    type: ToolType = ToolType.FUNCTION


AnyToolChoice: TypeAlias = ToolChoice | NamedToolChoice | AllowedTools


@attrs.frozen(kw_only=True)
class ChatCompletionRequest(TokenTellingBody):
    """The body of `POST /v1/chat/completions`."""

    messages: tuple[Message, ...]
    max_tokens: int | None = None
    """None is what the context leaves: not `sampling`'s default, which is for completions."""
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`; counts when both are given."""
    logprobs: bool = False
    top_logprobs: int | None = None
    """For each token, those of so many most likely ones."""
    tools: tuple[Tool, ...] = ()
    tool_choice: AnyToolChoice | None = attrs.field(
        default=None,
        metadata={"schema": {"anyOf": [{"enum": [choice.value for choice in ToolChoice]}, {"type": "object"}]}},
    )
    """None is `auto` where there are tools."""
    parallel_tool_calls: bool = True
    """Whether one answer may have several calls."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answer goes on with the last message's text; needs `add_generation_prompt` to be false."""
    chat_template: str | None = None
    """In place of the model's own, where the server allows that."""
    chat_template_kwargs: Mapping[str, object] = attrs.field(factory=dict[str, object])
    documents: tuple[Mapping[str, object], ...] = ()
    """For templates that show documents to answer from."""
    reasoning_effort: str | None = None
    """For templates that know it; `none` is `enable_thinking: false` too."""
    include_reasoning: bool = True
    """False leaves the reasoning out of the reply."""

    @property
    def effective_tool_choice(self) -> AnyToolChoice:
        """What is to be done about tools."""
        if not self.tools:
            return ToolChoice.NONE
        return ToolChoice.AUTO if self.tool_choice is None else self.tool_choice

    @property
    def shown_tools(self) -> Sequence[tuple[int, Tool]]:
        """Those that the model is told of, with their places in `tools`."""
        match self.effective_tool_choice:
            case ToolChoice.NONE:
                return ()
            case AllowedTools(names):
                return [(place, tool) for place, tool in enumerate(self.tools) if tool.function.name in names]
            case _:
                return list(enumerate(self.tools))


_NEUTRAL: Neutral = {
    **NEUTRAL,
    "add_special_tokens": (False,),
    "audio": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
}


def parse_chat_request(body: bytes) -> ChatCompletionRequest:
    """The chat request that the body of an HTTP request holds.

    Raises:
        RequestError: it holds none, or asks for what cannot be honoured. `param` is the path of the field at fault.
    """
    fields = parse_fields(body, _NEUTRAL)
    # What is a number for `SamplingParams` is a switch here, and has a second field.
    sampling_fields = {name: value for name, value in fields.items() if name != "logprobs"}
    request = structure_request(_CONVERTER, fields, sampling_fields, ChatCompletionRequest)
    check_stream_options(request)
    check_tools(request)
    form = structured_outputs_of(fields)
    logprobs = _num_logprobs(request)
    if form is None and logprobs is None:
        return request
    return attrs.evolve(request, sampling=attrs.evolve(request.sampling, structured_outputs=form, logprobs=logprobs))


def _num_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs and request.top_logprobs != 0:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if request.top_logprobs is not None and request.top_logprobs < 0:
        raise RequestError("top_logprobs must be at least 0.", param="top_logprobs")
    if request.sampling.logprob_token_ids is not None and not request.logprobs:
        raise RequestError("logprob_token_ids needs logprobs to be true.", param="logprob_token_ids")
    return (request.top_logprobs or 0) if request.logprobs else None


def check_tools(request: ChatCompletionRequest) -> None:
    """Return when the tools of a request, and its choice of them, make sense.

    Raises:
        RequestError: they do not. `param` is the path of the field at fault.
    """
    names: set[str] = set()
    if len(request.tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(request.tools)}; the limit is {MAX_TOOLS}.", param="tools")
    for position, tool in enumerate(request.tools):
        name, path = tool.function.name, f"tools[{position}].function.name"
        if not _FUNCTION_NAME.fullmatch(name):
            raise RequestError(
                f"{path} must be 1 to 128 letters, digits, underscores, dashes, dots, slashes and colons.", param=path
            )
        if name in names:
            raise RequestError(f"{path}: there are two functions called {name}.", param=path)
        names.add(name)
    choice = request.tool_choice
    if choice is ToolChoice.REQUIRED and not names:
        raise RequestError("tool_choice is required, but there are no tools.", param="tool_choice")
    match choice:
        case NamedToolChoice(name):
            chosen: tuple[str, ...] = (name,)
        case AllowedTools(chosen):
            if not chosen:
                raise RequestError("tool_choice: it allows no tool.", param="tool_choice")
        case _:
            chosen = ()
    for name in chosen:
        if name not in names:
            raise RequestError(f"tool_choice: there is no tool called {name[:100]}.", param="tool_choice")


def _structure_tool_choice(value: object, _: object) -> AnyToolChoice:
    if isinstance(value, str):
        if value not in [choice.value for choice in ToolChoice]:
            raise ValueError("expected 'none', 'auto', 'required' or an object with a function")
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise TypeError("expected 'none', 'auto', 'required' or an object with a function")
    match cast(dict[str, object], value):
        case {"type": "function", "function": {"name": str(name)}}:
            return NamedToolChoice(name)
        case {"type": "auto" | "none" | "required" as kind}:
            return ToolChoice(kind)
        case {"type": "allowed_tools", "allowed_tools": allowed}:
            return _allowed_tools(allowed)
        case _:
            raise ValueError('expected {"type": "function", "function": {"name": "..."}}, or allowed_tools')


def _allowed_tools(value: object) -> AllowedTools:
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    mode, tools = fields.get("mode"), fields.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise ValueError("expected allowed_tools to have the mode 'auto' or 'required', and a list of tools")
    return AllowedTools(tuple(map(_allowed_name, cast("list[object]", tools))), mode == "required")


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            raise ValueError('expected allowed tools as {"type": "function", "function": {"name": "..."}}')


def _make_converter() -> Converter:
    converter = make_request_converter()

    def structure_content(value: object, _: object) -> str | None:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise TypeError("expected a string or a list of parts")
        parts = converter.structure(cast(object, value), tuple[ContentPart, ...])
        return "".join(part.text for part in parts)

    def structure_part(value: object, _: object) -> ContentPart:
        kind = cast("dict[str, object]", value).get("type") if isinstance(value, dict) else None
        return converter.structure(value, RefusalPart if kind == PartType.REFUSAL else TextPart)

    register_object(converter, TextPart)
    register_object(converter, RefusalPart)
    converter.register_structure_hook_func(lambda type_: type_ == ContentPart, structure_part)
    register_object(converter, FunctionCall)
    register_object(converter, ToolCall)
    register_object(converter, Message, content=override(struct_hook=structure_content))
    register_object(converter, FunctionDefinition)
    register_object(converter, Tool)
    register_object(converter, ChatCompletionRequest, tool_choice=override(struct_hook=_structure_tool_choice))
    return converter


_CONVERTER = _make_converter()
