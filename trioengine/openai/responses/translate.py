"""From a request for a response to a chat: items become messages, and what goes wrong keeps the client's paths."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trioengine.errors import NotFoundError, RequestError
from trioengine.openai import chat_protocol as chat
from trioengine.openai.chat_answer import ChatForm, chat_form
from trioengine.openai.chat_settings import ChatSettings
from trioengine.openai.chat_translate import ChatPlan, chat_to_generate
from trioengine.openai.json_body import field_path
from trioengine.openai.protocol import RequestBody
from trioengine.openai.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    ItemReference,
    ItemRole,
    MessageItem,
    ReasoningItem,
)
from trioengine.openai.responses.protocol import AllowedTools, FunctionChoice, ResponseRequest, with_path
from trioengine.types.request import GenerateRequest


@attrs.frozen(kw_only=True)
class ResponsePlan:
    """A request as the engine gets it, the conversation that it is about, and how its answer is read."""

    generate_request: GenerateRequest
    form: ChatForm
    conversation: tuple[Item, ...]
    """What the answer follows: what is kept of earlier responses, and the request's own items."""
    chat: ChatPlan
    paths: Mapping[str, str]
    """Paths of the chat -> those of the request."""

    def as_written(self, error: RequestError) -> RequestError:
        """An error of the engine, with the path that the client wrote."""
        return with_path(self.chat.as_written(error), self.paths)


def response_to_generate(
    request: ResponseRequest,
    request_id: str,
    settings: ChatSettings,
    earlier: Sequence[Item] = (),
    known_items: Mapping[str, Item] | None = None,
) -> ResponsePlan:
    """What this request means for the engine.

    Args:
        request: of the client.
        request_id: the engine knows the request by it.
        settings: of the model and the server.
        earlier: the conversation that `previous_response_id` stands for.
        known_items: what may be referred to, by id.

    Raises:
        RequestError: the items, tools or limits make no sense. `param` is the client's path.
    """
    items = _resolved(request, known_items or {})
    _check_call_ids(request, [*earlier, *items], len(earlier))
    messages = _Messages(request.instructions)
    for item in earlier:
        messages.add(item, "previous_response_id")
    for position, item in enumerate(items):
        messages.add(item, field_path("input", position))
    paths = {**_PATHS, **messages.paths}
    try:
        tools, paths_of_tools = _tools(request)
        paths |= paths_of_tools
        chat_request = _chat_request(request, messages.finish(), tools)
        chat.check_tools(chat_request)
        plan = chat_to_generate(chat_request, request_id, settings)
    except RequestError as error:
        raise with_path(error, paths) from None
    return ResponsePlan(
        generate_request=plan.generate_request,
        form=chat_form(chat_request, plan, settings),
        conversation=(*earlier, *items),
        chat=plan,
        paths=paths,
    )


_PATHS: Mapping[str, str] = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "structured_outputs.json": "text.format.schema",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "prompt": "input",
}


def _resolved(request: ResponseRequest, known_items: Mapping[str, Item]) -> Sequence[Item]:
    items: list[Item] = []
    for position, item in enumerate(request.input):
        if isinstance(item, ItemReference):
            found = known_items.get(item.id)
            if found is None:
                path = field_path(field_path("input", position), "id")
                raise NotFoundError(f"{path}: there is no stored item {item.id[:100]}.", param=path)
            items.append(found)
        else:
            items.append(item)
    return items


def _check_call_ids(request: ResponseRequest, items: Sequence[Item], num_earlier: int) -> None:
    call_ids: set[str] = set()
    for position, item in enumerate(items):
        if isinstance(item, FunctionCallItem):
            call_ids.add(item.call_id)
        elif isinstance(item, FunctionCallOutputItem) and item.call_id not in call_ids and position >= num_earlier:
            path = field_path(field_path("input", position - num_earlier), "call_id")
            raise RequestError(f"{path}: no call {item.call_id[:100]} was made before it.", param=path)


class _Messages:
    """Messages of a chat, from items. What the assistant thought, said and called in one turn is one message."""

    def __init__(self, instructions: str | None) -> None:
        self.paths: dict[str, str] = {}
        self._messages: list[chat.Message] = []
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[chat.ToolCall] = []
        if instructions:
            self.paths["messages[0]"] = "instructions"
            self._messages.append(chat.Message(chat.Role.SYSTEM, instructions))

    def add(self, item: Item, path: str) -> None:
        """The next item. `path` is its place in the request."""
        match item:
            case ReasoningItem():
                if self._texts or self._calls:
                    self._end_turn()
                self._reasoning.append(item.text)
            case MessageItem(role=ItemRole.ASSISTANT):
                self._texts.append("".join(item.content))
            case FunctionCallItem():
                index = f"messages[{len(self._messages)}].tool_calls[{len(self._calls)}]"
                self.paths[f"{index}.function"] = path
                self._calls.append(chat.ToolCall(chat.FunctionCall(item.name, item.arguments), item.call_id))
            case MessageItem():
                self._end_turn()
                self._append(chat.Message(chat.Role(item.role.value), "".join(item.content)), path)
            case FunctionCallOutputItem():
                self._end_turn()
                self._append(chat.Message(chat.Role.TOOL, item.output, tool_call_id=item.call_id), path)

    def finish(self) -> tuple[chat.Message, ...]:
        """All of them."""
        self._end_turn()
        return tuple(self._messages)

    def _append(self, message: chat.Message, path: str) -> None:
        self.paths[f"messages[{len(self._messages)}]"] = path
        self._messages.append(message)

    def _end_turn(self) -> None:
        if not (self._texts or self._reasoning or self._calls):
            return
        self._messages.append(
            chat.Message(
                chat.Role.ASSISTANT,
                "\n".join(self._texts) if self._texts else None,
                tool_calls=tuple(self._calls) or None,
                reasoning_content="\n".join(self._reasoning) or None,
            )
        )
        self._texts, self._reasoning, self._calls = [], [], []


def _tools(request: ResponseRequest) -> tuple[tuple[chat.Tool, ...], Mapping[str, str]]:
    """The tools that may be called, and where in the request they stand."""
    choice = request.tool_choice
    allowed = None
    if isinstance(choice, AllowedTools):
        names = {tool.name for tool in request.tools}
        missing = [name for name in choice.names if name not in names]
        if missing or not choice.names:
            words = f"there is no tool called {missing[0][:100]}" if missing else "it allows no tool"
            raise RequestError(f"tool_choice: {words}.", param="tool_choice")
        allowed = frozenset(choice.names)
    tools: list[chat.Tool] = []
    paths: dict[str, str] = {}
    for position, tool in enumerate(request.tools):
        if allowed is not None and tool.name not in allowed:
            continue
        paths[f"tools[{len(tools)}].function"] = f"tools[{position}]"
        function = chat.FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict)
        tools.append(chat.Tool(function))
    return tuple(tools), paths


def _chat_request(
    request: ResponseRequest, messages: tuple[chat.Message, ...], tools: tuple[chat.Tool, ...]
) -> chat.ChatCompletionRequest:
    shared: dict[str, Any] = {field.name: getattr(request, field.name) for field in attrs.fields(RequestBody)}
    # What is in the background is read as it comes, for whoever looks at it meanwhile.
    shared["stream"] = request.stream or request.background
    if "text" in request.given_fields:
        shared["given_fields"] = request.given_fields | {"response_format"}
    match request.tool_choice:
        case FunctionChoice(name):
            choice: chat.AnyToolChoice | None = chat.NamedToolChoice(name)
        case AllowedTools(is_required):
            choice = chat.ToolChoice.REQUIRED if is_required else chat.ToolChoice.AUTO
        case other:
            choice = other
    return chat.ChatCompletionRequest(
        **shared,
        messages=messages,
        max_tokens=request.max_output_tokens,
        logprobs=request.has_logprobs,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=request.reasoning.effort,
    )
