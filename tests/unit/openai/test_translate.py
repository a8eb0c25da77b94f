"""What a request on the wire means for the engine."""

import json
from typing import Any, cast

import attrs
import pytest

from trioengine.errors import ModelNotFoundError, RequestError
from trioengine.openai.chat_protocol import parse_chat_request
from trioengine.openai.chat_settings import ChatSettings
from trioengine.openai.chat_translate import ChatPlan, chat_to_generate
from trioengine.openai.completion_protocol import parse_completion_request
from trioengine.openai.translate import check_model
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.tokenizer.chat_template import render_chat
from trioengine.types.params import RequestOutputKind
from trioengine.types.request import ChatPrompt, GenerateRequest

SETTINGS = attrs.evolve(ChatSettings.of(FakeTokenizer()), chat_template="{% if tools %}...")
NOTHING: dict[str, object] = {}


def translate_chat(messages: list[object] | None = None, **fields: Any) -> GenerateRequest:
    return plan_chat(SETTINGS, messages, **fields).generate_request


def plan_chat(settings: ChatSettings, messages: list[object] | None = None, **fields: Any) -> ChatPlan:
    body = {"messages": [{"role": "user", "content": "Hi"}] if messages is None else messages, **fields}
    return chat_to_generate(parse_chat_request(json.dumps(body).encode()), "id", settings)


def translated_messages(*messages: object) -> list[object]:
    prompt = translate_chat(list(messages)).prompt
    assert isinstance(prompt, ChatPrompt)
    return list(prompt.messages)


def test_a_chat_becomes_a_chat_prompt() -> None:
    """With the template's arguments and the request's id."""
    request = translate_chat(add_generation_prompt=False, chat_template_kwargs={"x": [1]})
    assert request.prompt == ChatPrompt([{"role": "user", "content": "Hi"}], False, {"x": [1]})
    assert request.request_id == "id"


def test_developer_is_system_to_a_template_that_does_not_know_it() -> None:
    """Case 30 (sglang 40082): the template's text decides, where it is rendered."""
    messages = translated_messages({"role": "developer", "content": "Be brief."})
    assert messages == [{"role": "developer", "content": "Be brief."}]
    rendered = render_chat(FakeTokenizer(), cast("list[dict[str, object]]", messages))
    assert rendered.prompt_text.startswith("system: Be brief.")


def test_an_assistant_may_have_said_nothing() -> None:
    """Null and missing content are empty text for the template, which joins strings."""
    said = {"role": "assistant", "content": ""}
    assert translated_messages({"role": "assistant", "content": None}, {"role": "assistant"}) == [said, said]


def test_what_templates_read_besides_content_is_kept() -> None:
    """Names and the call that a tool answers."""
    message = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "c1"}
    assert translated_messages(message) == [message]


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ([], "messages"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": "system"}], "messages[1].content"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": NOTHING}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ],
)
def test_messages_that_make_no_sense_are_named(messages: list[object], path: str) -> None:
    """A part of the history that would be lost is an error too."""
    with pytest.raises(RequestError) as caught:
        translate_chat(messages)
    assert caught.value.param == path


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
    ],
)
def test_a_chat_without_limit_takes_what_the_context_leaves(fields: dict[str, Any], max_tokens: int | None) -> None:
    """And the newer name of the limit counts."""
    assert translate_chat(**fields).sampling.max_tokens == max_tokens


@pytest.mark.parametrize("n", [0, -1])
def test_there_is_at_least_one_answer(n: int) -> None:
    """Case 37 (mistral.rs 1874): before any header, streamed or not."""
    with pytest.raises(RequestError) as caught:
        translate_chat(n=n, stream=True)
    assert caught.value.param == "n"


def test_a_wrong_limit_is_named_as_the_client_wrote_it() -> None:
    """Not by the name that the engine has for it."""
    with pytest.raises(RequestError) as caught:
        translate_chat(max_completion_tokens=0)
    assert caught.value.param == "max_completion_tokens"


@pytest.mark.parametrize(("stream", "kind"), [(True, RequestOutputKind.DELTA), (False, RequestOutputKind.FINAL_ONLY)])
def test_the_output_kind_follows_from_streaming(stream: bool, kind: RequestOutputKind) -> None:
    """A whole reply costs one output."""
    assert translate_chat(stream=stream).sampling.output_kind is kind


def test_only_the_served_model_is_there() -> None:
    """No model named means it too; another is `model_not_found`, however long its name."""
    for body in (b'{"prompt": "a"}', b'{"prompt": "a", "model": "served"}'):
        check_model(parse_completion_request(body), "served")
    other = parse_completion_request(json.dumps({"prompt": "a", "model": "x" * 100_000}).encode())
    with pytest.raises(ModelNotFoundError) as caught:
        check_model(other, "served")
    assert caught.value.param == "model"
    assert len(caught.value.message) < 300
