"""The chat route over a scripted engine: calls, reasoning, forms and log probabilities, streamed and whole."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from quart import Response

from trioengine.checkpoint.generation import GenerationDefaults
from trioengine.config.engine import EngineConfig
from trioengine.config.server import ServerConfig
from trioengine.errors import ConfigError, RequestError
from trioengine.server.app import create_app
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.types.output import FinishReason
from trioengine.types.request import ChatPrompt

CHAT: Mapping[str, object] = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
HERMES = ServerConfig(tool_call_parser="hermes")  # pyright: ignore[reportArgumentType]
CALL = ("Let me ", "add.\n<tool", '_call>{"name": "add", "argu', 'ments": {"a"', ": 1}}</tool_call>")


async def post(engine: FakeEngine, config: ServerConfig | None = None, **fields: Any) -> Response:
    client = create_app(engine, config).test_client()
    return await client.post("/v1/chat/completions", json={**CHAT, **fields})


async def chunks_of(response: Response) -> list[Any]:
    events = (await response.get_data(as_text=False)).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]


async def test_a_call_is_told_apart_from_text() -> None:
    """With its id, and the reason "tool_calls"."""
    reply = await (await post(FakeEngine(ScriptedReply(deltas=CALL)), HERMES, tools=[TOOL])).get_json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me add."
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}


async def test_a_streamed_call_has_its_name_first() -> None:
    """Case 28 (vllm 51697): the index in every delta, id and name in the first only."""
    response = await post(FakeEngine(ScriptedReply(deltas=CALL)), HERMES, tools=[TOOL], stream=True)
    choices = [chunk["choices"][0] for chunk in await chunks_of(response)]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Let me add."
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0] * len(calls)
    assert ["id" in call for call in calls] == [True] + [False] * (len(calls) - 1)
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_a_call_that_is_cut_ends_with_length() -> None:
    """Case 28: and its arguments are not completed by anybody."""
    scripted = ScriptedReply(deltas=CALL[:-1], finish_reason=FinishReason.LENGTH)
    reply = await (await post(FakeEngine(scripted), HERMES, tools=[TOOL])).get_json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a"'


async def test_without_tools_markup_is_text() -> None:
    """Nobody asked for calls."""
    reply = await (await post(FakeEngine(ScriptedReply(deltas=CALL)), HERMES)).get_json()
    assert reply["choices"][0]["message"]["content"] == "".join(CALL)
    assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
async def test_reasoning_is_told_apart_from_the_answer(name: str) -> None:
    """And its tokens are counted; calls behind it are found."""
    deltas = ("<think>", "2 + 2", "</think>", "\n\n", *CALL)
    config = EngineConfig(reasoning_parser=name)  # pyright: ignore[reportArgumentType]
    engine = FakeEngine(ScriptedReply(deltas=deltas), config=config)
    reply = await (await post(engine, HERMES, tools=[TOOL])).get_json()
    message = reply["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "2 + 2"
    assert message["content"] == "Let me add."
    assert len(message["tool_calls"]) == 1
    assert "reasoning_tokens" in reply["usage"]["completion_tokens_details"]
    hidden = await (await post(engine, HERMES, include_reasoning=False)).get_json()
    assert "reasoning_content" not in hidden["choices"][0]["message"]


async def test_log_probabilities_are_openais() -> None:
    """The token's own, its bytes, and those of the most likely ones; streamed and whole."""
    whole = await (await post(FakeEngine(), logprobs=True, top_logprobs=2)).get_json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert content[0] == {
        "token": "x",
        "logprob": -1.0,
        "bytes": [120],
        "top_logprobs": [
            {"token": "x", "logprob": -1.0, "bytes": [120]},
            {"token": "x", "logprob": -2.0, "bytes": [120]},
        ],
    }
    chunks = await chunks_of(await post(FakeEngine(), logprobs=True, top_logprobs=2, stream=True))
    streamed: list[Any] = []
    for chunk in chunks:
        logprobs: Any = chunk["choices"][0]["logprobs"]
        if logprobs is not None:
            streamed += logprobs["content"]
    assert streamed == content


async def test_log_probabilities_may_name_tokens_by_id() -> None:
    """Names change; the bytes are the token's. Nothing of it is an unknown field."""
    response = await post(FakeEngine(), logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    assert "X-TrioEngine-Warning" not in response.headers
    content = (await response.get_json())["choices"][0]["logprobs"]["content"]
    for entry in content:
        for token in (entry, *entry["top_logprobs"]):
            assert re.fullmatch("token_id:[0-9]+", token["token"])
            assert token["bytes"] == [120]
    chunks = await chunks_of(
        await post(FakeEngine(), logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, stream=True)
    )
    told: list[Any] = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for logprobs in told if logprobs is not None for entry in logprobs["content"]] == content


async def test_every_token_of_an_answer_is_told_whatever_is_read_in_it() -> None:
    """Also those of calls whose text is held back. The prompt's come once, at the beginning."""
    engine = FakeEngine(ScriptedReply(deltas=CALL))
    asked: dict[str, Any] = {"tools": [TOOL], "return_token_ids": True}
    whole = await (await post(engine, HERMES, **asked)).get_json()
    assert len(whole["choices"][0]["token_ids"]) == len(CALL)
    chunks = await chunks_of(await post(engine, HERMES, **asked, stream=True))
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    told = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert told == whole["choices"][0]["token_ids"]


async def test_a_server_may_have_a_chat_template_of_its_own(tmp_path: Path) -> None:
    """A file or the text itself, for chats and for whoever counts their tokens; a request's own comes first."""
    text = "{{ messages[0].content }}!"
    (tmp_path / "chat.jinja").write_text(text)
    for value in (text, str(tmp_path / "chat.jinja")):
        config = ServerConfig(chat_template=value, trust_request_chat_template=True)
        engine = FakeEngine()
        await post(engine, config)
        await post(engine, config, chat_template="{{ 1 }}")
        prompts = [request.prompt for request in engine.requests]
        assert [prompt.chat_template for prompt in prompts if isinstance(prompt, ChatPrompt)] == [text, "{{ 1 }}"]
        app = create_app(engine, config)
        response = await app.test_client().post("/tokenize", json={**CHAT, "return_token_strs": True})
        assert "".join((await response.get_json())["token_strs"]) == "Hi!"


@pytest.mark.parametrize(
    ("value", "problem"), [("/nowhere/chat.jinja", "No such file"), ("{% if %}", "not valid")], ids=["file", "jinja"]
)
def test_a_chat_template_that_cannot_work_is_told_at_the_start(value: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        create_app(FakeEngine(), ServerConfig(chat_template=value))
    assert caught.value.option == "chat_template"


async def test_too_many_alternatives_are_an_error_of_the_field_that_asked_for_them() -> None:
    """The engine knows `logprobs` only."""
    error = RequestError("Requested logprobs of 99, which is greater than max allowed: 20.", param="logprobs")
    response = await post(FakeEngine(enter_error=error), logprobs=True, top_logprobs=99)
    told = (await response.get_json())["error"]
    assert told["param"] == "top_logprobs"
    assert told["message"].startswith("Requested top_logprobs of 99")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_that_cannot_be_kept_is_a_400_with_its_path(stream: bool) -> None:
    """Case 31 (llama.cpp 19051): for answers and for strict functions, before any header."""
    schema = {"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    function = {"name": "f", "parameters": schema, "strict": True}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"response_format": response_format}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "function", "function": function}]}, "tools[0].function.parameters"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
    ]
    for fields, param in cases:
        engine = FakeEngine()
        response = await post(engine, stream=stream, **fields)
        error = (await response.get_json())["error"]
        assert response.status_code == 400
        assert error["param"] == param
        assert "/properties/a/pattern" in error["message"] or "/not" in error["message"]
        assert not engine.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_what_only_the_core_finds_wrong_with_a_form_is_a_400_too(stream: bool) -> None:
    """Cases 31 (llama.cpp 19051) and 33 (vllm 17313): a stream's headers wait for its first output."""
    error = RequestError("structured_outputs.regex: unclosed group.", param="structured_outputs.regex")
    engine = FakeEngine(ScriptedReply(deltas=(), error=error))
    response = await post(engine, stream=stream, structured_outputs={"regex": "("})
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == "structured_outputs.regex"
    assert not engine.live


async def test_a_stream_with_a_form_has_all_of_its_text() -> None:
    """Also what came before the headers."""
    response = await post(FakeEngine(), stream=True, response_format={"type": "json_object"})
    chunks = await chunks_of(response)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Hello, world!"


async def test_history_with_arguments_that_are_no_object_is_a_400() -> None:
    """Case 29 (sglang 28035): naming the message."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    response = await post(FakeEngine(), messages=messages)
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_unknown_fields_are_named_in_a_header_or_refused() -> None:
    """As the server is told."""
    response = await post(FakeEngine(), temprature=1)
    assert response.headers["X-TrioEngine-Warning"] == "fields without effect: temprature"
    refused = await post(FakeEngine(), ServerConfig(strict=True), temprature=1)
    assert refused.status_code == 400
    assert (await refused.get_json())["error"]["param"] == "temprature"


async def test_the_authors_defaults_are_the_servers_choice() -> None:
    """`--generation-config vllm` leaves them out; completions take them too, but not their limit."""
    defaults = GenerationDefaults(temperature=0.5, max_tokens=9)
    engine = FakeEngine(generation_defaults=defaults)
    await post(engine)
    await post(engine, ServerConfig(generation_config="vllm"))  # pyright: ignore[reportArgumentType]
    await create_app(engine).test_client().post("/v1/completions", json={"prompt": "a"})
    sampling = [request.sampling for request in engine.requests]
    assert [params.temperature for params in sampling] == [0.5, 1.0, 0.5]
    assert [params.max_tokens for params in sampling] == [9, None, 16]


async def test_the_prompt_may_end_with_the_start_of_the_answer() -> None:
    """`continue_final_message`."""
    engine = FakeEngine()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The an"}]
    await post(engine, messages=messages, continue_final_message=True)
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.continue_final_message
