"""The routes over a scripted engine: what is asked for is what is answered."""

import json
import threading
from typing import Any

import pytest
from quart import Response

from trioengine.config.server import ServerConfig
from trioengine.openai.chat_protocol import ChatCompletionRequest, parse_chat_request
from trioengine.openai.sse import CONTENT_TYPE
from trioengine.server.app import create_app
from trioengine.server.context import LONG_BODY_BYTES
from trioengine.server.routes import generate
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.types.messages import CoreLoad
from trioengine.types.output import FinishReason
from trioengine.types.request import ChatPrompt, TextPrompt

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"prompt": "Once"}
BOTH = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]


async def post(engine: FakeEngine, path: str, body: dict[str, Any]) -> Response:
    return await create_app(engine).test_client().post(path, json=body)


async def streamed(response: Response) -> list[Any]:
    """The data of all events but the last, which is [DONE]."""
    events = (await response.get_data(as_text=False)).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]


async def test_a_chat_is_answered_whole() -> None:
    """With the engine's text and usage, and an id that the engine knows too."""
    engine = FakeEngine(ScriptedReply(stop_reason="END", num_cached_tokens=3))
    response = await post(engine, "/v1/chat/completions", {**CHAT, "model": "fake-model"})
    reply = await response.get_json()
    assert response.status_code == 200
    assert response.content_type == "application/json"
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "fake-model"
    assert reply["choices"][0]["message"]["content"] == "Hello, world!"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["stop_reason"] == "END"
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert engine.requests[0].request_id == reply["id"]
    assert engine.requests[0].prompt == ChatPrompt([{"role": "user", "content": "Hi"}])


async def test_a_completion_is_answered_whole() -> None:
    """Likewise."""
    engine = FakeEngine(ScriptedReply(finish_reason=FinishReason.LENGTH))
    reply = await (await post(engine, "/v1/completions", COMPLETION)).get_json()
    assert reply["object"] == "text_completion"
    assert reply["choices"][0]["text"] == "Hello, world!"
    assert reply["choices"][0]["finish_reason"] == "length"
    assert engine.requests[0].prompt == TextPrompt("Once")


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_a_stream_tells_the_same_as_the_whole(path: str, body: dict[str, Any]) -> None:
    """Text, reasons and usage."""
    engine = FakeEngine(ScriptedReply(deltas=["a", "", "é", '"\n']))
    whole = await (await post(engine, path, body)).get_json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await post(engine, path, {**body, **options})
    *chunks, last = await streamed(response)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert response.status_code == 200
    assert last["usage"] == whole["usage"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    text = "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)
    assert text == 'aé"\n'
    assert text == whole["choices"][0].get("text", whole["choices"][0].get("message", {}).get("content"))
    assert not engine.live
    assert engine.num_aborted == 0


async def test_a_stream_is_not_held_back_by_proxies() -> None:
    """Nor cached by anybody."""
    response = await post(FakeEngine(), "/v1/chat/completions", {**CHAT, "stream": True})
    assert response.headers["Content-Type"] == CONTENT_TYPE
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_changed_to_fit_is_told_in_a_header(path: str, body: dict[str, Any], stream: bool) -> None:
    """Streamed or not."""
    engine = FakeEngine(ScriptedReply(warnings=("max_tokens was lowered",)))
    response = await post(engine, path, {**body, "stream": stream})
    assert response.headers["X-TrioEngine-Warning"] == "max_tokens was lowered"
    assert "X-TrioEngine-Warning" not in (await post(FakeEngine(), path, body)).headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_strict_server_refuses_what_does_not_fit(stream: bool) -> None:
    """With 400 instead of the header, and the engine is left with nothing."""
    engine = FakeEngine(ScriptedReply(warnings=("max_tokens was lowered",)))
    client = create_app(engine, ServerConfig(strict=True)).test_client()
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == "max_tokens"
    assert not engine.live


async def test_models_lists_the_served_one() -> None:
    """With its context length."""
    response = await create_app(FakeEngine()).test_client().get("/v1/models")
    reply = await response.get_json()
    assert reply["object"] == "list"
    assert [model["id"] for model in reply["data"]] == ["fake-model"]
    assert reply["data"][0]["max_model_len"] == 2048


async def test_a_model_has_as_many_names_as_it_is_given() -> None:
    """All are listed and taken; replies have its own."""
    client = create_app(FakeEngine(), ServerConfig(model_alias=("gpt-4o", "other"))).test_client()
    reply = await (await client.get("/v1/models")).get_json()
    assert [(model["id"], model["root"]) for model in reply["data"]] == [
        ("fake-model", "fake-model"),
        ("gpt-4o", "fake-model"),
        ("other", "fake-model"),
    ]
    assert (await client.get("/v1/models/other")).status_code == 200
    for name in ("gpt-4o", "other", "fake-model"):
        response = await client.post("/v1/chat/completions", json={**CHAT, "model": name})
        assert (await response.get_json())["model"] == "fake-model"
    assert (await client.post("/v1/chat/completions", json={**CHAT, "model": "gpt-4"})).status_code == 404


async def test_load_counts_requests_and_blocks() -> None:
    """As the core counts them at this moment."""
    engine = FakeEngine(load=CoreLoad(running=3, waiting=2, free_blocks=7, total_blocks=9))
    response = await create_app(engine).test_client().get("/load")
    assert await response.get_json() == {"running": 3, "waiting": 2, "free_blocks": 7, "total_blocks": 9}


async def test_version_and_health_answer() -> None:
    """While the engine lives."""
    client = create_app(FakeEngine()).test_client()
    assert "version" in await (await client.get("/version")).get_json()
    assert (await client.get("/health")).status_code == 200


async def test_a_long_body_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 18 (vllm 24910): in a thread, so that others are served; right and wrong ones are answered as usual."""
    threads: list[str] = []

    def parse(data: bytes) -> ChatCompletionRequest:
        threads.append(threading.current_thread().name)
        return parse_chat_request(data)

    monkeypatch.setattr(generate, "parse_chat_request", parse)
    client = create_app(FakeEngine()).test_client()
    for text in ("short", "x" * LONG_BODY_BYTES):
        right = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})
        wrong = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [text]}]})
        assert right.status_code == 200
        assert (await wrong.get_json())["error"]["param"] == "messages[0].content[0]"
    assert [name == threading.current_thread().name for name in threads] == [True, True, False, False]
