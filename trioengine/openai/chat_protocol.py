"""The body of `POST /v1/chat/completions`."""

import enum
from collections.abc import Mapping
from typing import cast

import attrs
from cattrs import Converter, override

from trioengine.openai.protocol import (
    NEUTRAL,
    Neutral,
    RequestBody,
    make_request_converter,
    parse_fields,
    register_object,
    structure_request,
)
from trioengine.openai.structured_fields import structured_outputs_of


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


@attrs.frozen
class TextPart:
    """One part of a message's content."""

    type: PartType
    text: str


@attrs.frozen
class Message:
    """One message of a conversation."""

    role: Role
    content: str | None = None
    """The texts of its parts, joined. None where there was none."""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: object = None
    function_call: object = None
    audio: object = None


@attrs.frozen(kw_only=True)
class ChatCompletionRequest(RequestBody):
    """The body of `POST /v1/chat/completions`."""

    messages: tuple[Message, ...]
    max_tokens: int | None = None
    """None is what the context leaves: not `sampling`'s default, which is for completions."""
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`; counts when both are given."""
    add_generation_prompt: bool = True
    chat_template_kwargs: Mapping[str, object] = attrs.field(factory=dict[str, object])


_NEUTRAL: Neutral = {
    **NEUTRAL,
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}


def parse_chat_request(body: bytes) -> ChatCompletionRequest:
    """The chat request that the body of an HTTP request holds.

    Raises:
        RequestError: it holds none, or asks for what cannot be honoured. `param` is the path of the field at fault.
    """
    fields = parse_fields(body, _NEUTRAL)
    request = structure_request(_CONVERTER, fields, fields, ChatCompletionRequest)
    form = structured_outputs_of(fields)
    return (
        request
        if form is None
        else attrs.evolve(request, sampling=attrs.evolve(request.sampling, structured_outputs=form))
    )


def _make_converter() -> Converter:
    converter = make_request_converter()

    def structure_content(value: object, _: object) -> str | None:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise TypeError("expected a string or a list of parts")
        return "".join(part.text for part in converter.structure(cast(object, value), tuple[TextPart, ...]))

    register_object(converter, TextPart)
    register_object(converter, Message, content=override(struct_hook=structure_content))
    register_object(converter, ChatCompletionRequest)
    return converter


_CONVERTER = _make_converter()
