"""Bodies of `/v1/responses`: what is taken, what is refused and by which path, and the chat that it means."""

import json
from collections.abc import Mapping
from typing import Any, cast

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.config.engine import ReasoningParser
from trioengine.config.server import ToolCallParser
from trioengine.errors import NotFoundError, PromptTooLongError, RequestError
from trioengine.openai.chat_settings import ChatSettings
from trioengine.openai.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    ItemRole,
    MessageItem,
    ReasoningItem,
    item_fields,
)
from trioengine.openai.responses.protocol import ResponseRequest, parse_response_request
from trioengine.openai.responses.translate import ResponsePlan, response_to_generate
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.request import ChatPrompt

SETTINGS = attrs.evolve(
    ChatSettings.of(FakeTokenizer(), tool_call_parser=ToolCallParser.HERMES),
    chat_template="{{ tools }}",  # One that shows tools, so that they need not become text.
)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
UNKEEPABLE = {"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}


def parse(**fields: object) -> ResponseRequest:
    return parse_response_request(json.dumps({"input": "Hi", **fields}).encode())


def plan(earlier: tuple[Item, ...] = (), known: Mapping[str, Item] | None = None, **fields: object) -> ResponsePlan:
    return response_to_generate(parse(**fields), "id", SETTINGS, earlier, known)


def messages_of(found: ResponsePlan) -> Any:
    prompt = found.generate_request.prompt
    assert isinstance(prompt, ChatPrompt)
    return list(prompt.messages)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}]}, "input[0].content[0].refusal"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
        "input[0].output[0].type",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": UNKEEPABLE}}}, "text.format.schema"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"reasoning": {"summary": "poem"}}, "reasoning.summary"),
    ({"include": ["everything"]}, "include[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "9"}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "middle"}, "truncation"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"background": True, "store": False}, "store"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"metadata": {"a" * 65: "x"}}, "metadata"),
    ({"metadata": {str(key): "x" for key in range(17)}}, "metadata"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"n": 2}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"stream_options": 5}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_honoured_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    """Nothing is left out silently that would change the answer."""
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert caught.value.message


REFUSED_WITH_THE_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "strict": True, "parameters": UNKEEPABLE}]}, "tools[0].parameters"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
        },
        "tool_choice",
    ),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}, "input[0].call_id"),
    (
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"},
            ]
        },
        "input[1].arguments",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED_WITH_THE_CHAT, ids=lambda value: str(value)[:60])
def test_what_makes_no_chat_is_refused_by_the_clients_path(fields: dict[str, Any], param: str) -> None:
    """The rules are the chat's, the words the client's."""
    with pytest.raises(RequestError) as caught:
        plan(**fields)
    assert caught.value.param == param
    assert "messages[" not in caught.value.message
    assert "response_format" not in caught.value.message


def test_fields_of_other_servers_are_taken() -> None:
    """They have no effect, or are told back."""
    request = parse(
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_options={"mode": "implicit"},
        service_tier="flex",
        stream_options={"include_obfuscation": False},
        include=["reasoning.encrypted_content"],
        max_tool_calls=3,
        conversation=None,
        n=1,
    )
    assert request.unknown_fields == ()
    assert request.user == "u"


def test_a_text_is_a_message_of_the_users() -> None:
    """And instructions come before it."""
    assert messages_of(plan(instructions="Be brief.")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_a_turn_of_the_assistants_is_one_message() -> None:
    """Reasoning, text and calls of one turn, as chat templates want them; results are messages of the tool."""
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I call.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "short"}]},
        {"role": "assistant", "content": "Done."},
    ]
    assert messages_of(plan(input=items, tools=[TOOL])) == _expected_turns()


def _expected_turns() -> list[Any]:
    calls: list[Any] = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "f", "arguments": {}}},
    ]
    text: Any = {"role": "assistant", "content": "I call.", "tool_calls": calls, "reasoning_content": "hm"}
    return [
        {"role": "user", "content": "ab"},
        text,
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "short"},
    ]


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
ITEMS: st.SearchStrategy[Item] = st.one_of(
    st.builds(MessageItem, role=st.sampled_from(ItemRole), content=st.lists(TEXTS, max_size=3).map(tuple)),
    st.builds(FunctionCallItem, call_id=TEXTS, name=TEXTS, arguments=TEXTS),
    st.builds(FunctionCallOutputItem, call_id=TEXTS, output=TEXTS),
    st.builds(ReasoningItem, content=st.lists(TEXTS, max_size=2).map(tuple), summary=st.lists(TEXTS).map(tuple)),
)


@given(st.lists(ITEMS, min_size=1, max_size=4))
def test_listed_items_can_be_sent_again(items: list[Item]) -> None:
    """What a server tells of its items is what it takes: clients send a conversation back."""
    assert parse(input=[item_fields(item) for item in items]).input == tuple(items)


def test_earlier_items_come_first_and_references_are_resolved() -> None:
    """Also where a result answers an earlier response's call."""
    earlier: tuple[Item, ...] = (
        MessageItem(role=ItemRole.USER, content=("a",)),
        FunctionCallItem(call_id="c", name="f", arguments="{}"),
    )
    known = {"msg_x": MessageItem(role=ItemRole.USER, content=("referred",), id="msg_x")}
    items = [{"type": "function_call_output", "call_id": "c", "output": "1"}, {"id": "msg_x"}]
    found = plan(earlier, known, input=items)
    assert [message["content"] for message in messages_of(found)] == ["a", "", "1", "referred"]
    assert [item.id for item in found.conversation][-1] == "msg_x"
    with pytest.raises(NotFoundError) as caught:
        plan(known=known, input=[{"type": "item_reference", "id": "msg_y"}])
    assert caught.value.param == "input[0].id"


def test_tools_that_are_not_allowed_are_not_shown() -> None:
    """Errors in the others keep their places."""
    other = {**TOOL, "name": "g"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    found = plan(tools=[TOOL, other], tool_choice=choice)
    assert found.form.tool_names == ("g",)
    assert found.generate_request.sampling.structured_outputs is not None
    strict = {**other, "strict": True, "parameters": UNKEEPABLE}
    with pytest.raises(RequestError) as caught:
        plan(tools=[TOOL, strict], tool_choice=choice)
    assert caught.value.param == "tools[1].parameters"


def test_forms_limits_and_log_probabilities_reach_the_engine() -> None:
    """By the names that the engine has for them."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text_format = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    found = plan(
        text={"format": text_format},
        max_output_tokens=7,
        temperature=0.5,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        truncation="auto",
    )
    sampling = found.generate_request.sampling
    assert sampling.structured_outputs is not None
    assert json.loads(cast(str, sampling.structured_outputs.json))["properties"] == schema["properties"]
    assert (sampling.max_tokens, sampling.temperature, sampling.logprobs) == (7, 0.5, 2)
    assert found.generate_request.tokenization_kwargs == {"truncate_prompt_tokens": -1}
    assert plan(top_logprobs=2).generate_request.sampling.logprobs is None


def test_no_effort_switches_reasoning_off() -> None:
    """As for chats."""
    settings = ChatSettings.of(FakeTokenizer(), reasoning_parser=ReasoningParser.QWEN3)
    found = response_to_generate(parse(reasoning={"effort": "none"}), "id", settings)
    assert found.generate_request.reasoning_parser_kwargs == {"enable_thinking": False}
    prompt = cast(ChatPrompt, found.generate_request.prompt)
    assert prompt.template_kwargs["reasoning_effort"] == "none"


def test_the_engines_errors_get_the_clients_paths() -> None:
    """With their class, which clients tell them by."""
    found = plan()
    error = found.as_written(PromptTooLongError(num_prompt_tokens=9, max_model_len=8, param="messages"))
    assert isinstance(error, PromptTooLongError)
    assert error.param == "input"
    limit = found.as_written(RequestError("logprobs must be at most 5.", param="logprobs"))
    assert (limit.param, limit.message) == ("top_logprobs", "top_logprobs must be at most 5.")
