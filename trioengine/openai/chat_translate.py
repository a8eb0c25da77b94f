"""From a chat request to the engine's."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

import attrs

from trioengine.errors import RequestError
from trioengine.openai.chat_protocol import (
    ChatCompletionRequest,
    FunctionDefinition,
    Message,
    Role,
    ToolCall,
)
from trioengine.openai.chat_settings import ChatSettings
from trioengine.openai.reasoning import thinking_kwargs
from trioengine.openai.structured_fields import form_field
from trioengine.openai.tool_plan import ToolPlan, tool_plan
from trioengine.openai.tool_text import shows_tools, with_tools_as_text
from trioengine.openai.translate import as_written, check_prompt_logprobs, generate_request, with_generation_defaults
from trioengine.tokenizer.chat_template import parse_arguments
from trioengine.types.request import ChatMessage, ChatPrompt, GenerateRequest
from trioengine.types.structured import PARAM

_NO_EFFORT = "none"
_TOOLS = "tools"
_SCHEMA = re.compile(r"/(?:structures/(\d+)/schema|\$defs/f(\d+)\b)")
"""Where an error about the form of calls says which schema is at fault."""


@attrs.frozen
class ChatPlan:
    """A chat request as the engine gets it, and how its answer is read."""

    generate_request: GenerateRequest
    tools: ToolPlan
    form_field: str | None = None
    """The field of the request that asks for a form."""

    def as_written(self, error: RequestError) -> RequestError:
        """The engine's error about a field that the client wrote by another name, with the client's."""
        param = error.param or ""
        if param == "logprobs":
            return RequestError(error.message.replace(param, "top_logprobs", 1), param="top_logprobs")
        form_field = self.form_field
        if self.tools.schema_paths and param.startswith(PARAM):
            if found := _SCHEMA.search(error.message):
                path = self.tools.schema_paths[int(found[1] or found[2])]
                message = error.message.replace(f"{param}: {found[0]}", f"{path}: ", 1).replace(param, path, 1)
                return RequestError(message, param=path)
            form_field = form_field or _TOOLS
        return as_written(error, form_field)


def chat_to_generate(request: ChatCompletionRequest, request_id: str, settings: ChatSettings) -> ChatPlan:
    """What this chat request means for the engine.

    Raises:
        RequestError: `messages`, `tools`, the form of the answer or the limit of tokens make no sense.
    """
    check_prompt_logprobs(request)
    request = with_generation_defaults(request, settings.generation_defaults)
    plan = tool_plan(request, settings.markup)
    prompt = chat_prompt(request, settings)
    limit = request.max_tokens
    if request.max_completion_tokens is not None:
        limit = request.max_completion_tokens
        if limit < 1:
            raise RequestError("max_completion_tokens must be at least 1.", param="max_completion_tokens")
    if limit is None:
        limit = settings.generation_defaults.max_tokens
    sampling = attrs.evolve(request.sampling, structured_outputs=plan.form)
    if plan.names or settings.reasoning_parser is not None:
        # Markers may be control tokens, which are text for whoever looks for them.
        sampling = attrs.evolve(sampling, skip_special_tokens=False)
    reasoning_kwargs = request.reasoning_parser_kwargs or thinking_kwargs(prompt.template_kwargs)
    changed = attrs.evolve(request, sampling=sampling, reasoning_parser_kwargs=reasoning_kwargs)
    return ChatPlan(generate_request(changed, prompt, request_id, limit), plan, form_field(request.given_fields))


def chat_prompt(request: ChatCompletionRequest, settings: ChatSettings) -> ChatPrompt:
    """The conversation of a request, with its tools, as the chat template gets it.

    Raises:
        RequestError: naming the message or the field at fault.
    """
    if not request.messages:
        raise RequestError("messages is empty.", param="messages")
    if request.chat_template is not None and not settings.allows_chat_template:
        raise RequestError("chat_template: this server takes no template of a request.", param="chat_template")
    messages: Sequence[ChatMessage] = [
        _chat_message(position, message) for position, message in enumerate(request.messages)
    ]
    kwargs = _template_kwargs(request)
    given = request.chat_template or settings.server_template
    template = given or settings.chat_template
    if template is not None and not shows_tools(template):
        tools = cast("Sequence[Mapping[str, object]]", kwargs.pop(_TOOLS, ()))
        messages = with_tools_as_text(messages, tools, settings.markup, template)
    return ChatPrompt(
        messages=messages,
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        template_kwargs=kwargs,
        continue_final_message=request.continue_final_message,
        chat_template=given,
    )


def _template_kwargs(request: ChatCompletionRequest) -> dict[str, object]:
    kwargs: dict[str, object] = {}
    if _TOOLS in request.chat_template_kwargs:
        path = f"chat_template_kwargs.{_TOOLS}"
        raise RequestError(f"{path}: tools are a field of the request itself.", param=path)
    # Without a choice there is nothing to choose from.
    if request.shown_tools:
        kwargs[_TOOLS] = [
            {"type": tool.type.value, "function": _function(tool.function)} for _, tool in request.shown_tools
        ]
    if request.documents:
        kwargs["documents"] = list(request.documents)
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == _NO_EFFORT:
            kwargs["enable_thinking"] = False
    return {**kwargs, **request.chat_template_kwargs}


def _function(function: FunctionDefinition) -> Mapping[str, object]:
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}


def _chat_message(position: int, message: Message) -> ChatMessage:
    for name in ("function_call", "audio"):
        if getattr(message, name):
            path = f"messages[{position}].{name}"
            raise RequestError(f"{path} is not supported by this server.", param=path)
    if message.content is None and message.role is not Role.ASSISTANT:
        path = f"messages[{position}].content"
        raise RequestError(f"{path} is required in a message of role {message.role}.", param=path)
    # A template that does not know "developer" gets "system" instead; the tokenizer's side sees to that.
    fields: dict[str, object] = {"role": message.role.value, "content": message.content or ""}
    if message.tool_calls:
        if message.role is not Role.ASSISTANT:
            path = f"messages[{position}].tool_calls"
            raise RequestError(f"{path}: only the assistant calls tools.", param=path)
        fields["tool_calls"] = [
            _tool_call(call, f"messages[{position}].tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning_content or message.reasoning
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", reasoning),
    ):
        if value is not None:
            fields[name] = value
    return fields


def _tool_call(call: ToolCall, path: str) -> Mapping[str, object]:
    arguments = parse_arguments(call.function.arguments, f"{path}.function.arguments")
    fields: dict[str, object] = {
        "type": call.type.value,
        "function": {"name": call.function.name, "arguments": arguments},
    }
    return fields if call.id is None else {"id": call.id, **fields}
