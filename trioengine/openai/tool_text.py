"""Tools in a conversation whose chat template does not know them: they become text that every template shows.

The functions are described in the system message, calls are written as the model is told to write them, and results are
messages of the user. A model that was not trained for it calls less well, but `tool_choice` and schemas bind it alike.
"""

import json
from collections.abc import Mapping, Sequence
from typing import cast

from trioengine.openai.tool_parsers import ToolMarkup
from trioengine.openai.tool_parsers.forms import WrittenCall
from trioengine.types.request import ChatMessage

_NO_SYSTEM = ("System role not supported", "system role is not supported")


def shows_tools(template: str) -> bool:
    """Whether a chat template shows the tools that it gets."""
    return "tools" in template


def with_tools_as_text(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, object]], markup: ToolMarkup, template: str
) -> Sequence[ChatMessage]:
    """The conversation with tools, calls and results as text; itself where there are none.

    Args:
        messages: with calls whose arguments are mappings.
        tools: as OpenAI's API has them.
        markup: how the model is to write calls.
        template: in which the conversation is shown.
    """
    result: list[ChatMessage] = []
    names: dict[object, str] = {}
    for message in messages:
        if calls := cast("Sequence[Mapping[str, object]]", message.get("tool_calls", ())):
            written = [_written_call(call) for call in calls]
            names.update((call.get("id"), named.name) for call, named in zip(calls, written, strict=True))
            result.append(_joined(_without(message, "tool_calls"), markup.form.write(written)))
        elif message["role"] == "tool":
            name = names.get(message.get("tool_call_id"), message.get("name", "the function"))
            text = f"Result of {name}: {message['content']}"
            if result and result[-1].get("is_result"):
                result[-1] = _joined(result[-1], text)
            else:
                result.append({"role": "user", "content": text, "is_result": True})
        else:
            result.append(message)
    result = [_without(message, "is_result") for message in result]
    return _with_description(result, _description(tools, markup), template) if tools else result


def _written_call(call: Mapping[str, object]) -> WrittenCall:
    function = cast("Mapping[str, object]", call["function"])
    return WrittenCall(str(function["name"]), cast("Mapping[str, object]", function["arguments"]))


def _description(tools: Sequence[Mapping[str, object]], markup: ToolMarkup) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = markup.form.write([WrittenCall("function_name", {"argument": "value"})])
    return f"You can call these functions:\n{functions}\nTo call a function, answer with nothing but:\n{example}"


def _with_description(messages: list[ChatMessage], description: str, template: str) -> Sequence[ChatMessage]:
    """With the description in the first system message, or, where the template takes none, before the user's first."""
    takes_system = "system" in template and not any(words in template for words in _NO_SYSTEM)
    role = ("system", "developer") if takes_system else ("user",)
    if messages and messages[0]["role"] in role:
        first, rest = messages[0], messages[1:]
        content = str(first["content"])
        text = f"{content}\n\n{description}" if takes_system else f"{description}\n\n{content}"
        return [{**first, "content": text}, *rest]
    return [{"role": role[0], "content": description}, *messages]


def _joined(message: ChatMessage, text: str) -> ChatMessage:
    content = str(message["content"])
    return {**message, "content": f"{content}\n{text}" if content else text}


def _without(message: ChatMessage, name: str) -> ChatMessage:
    return {key: value for key, value in message.items() if key != name}
