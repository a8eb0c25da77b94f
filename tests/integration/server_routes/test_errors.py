"""Errors on every route: OpenAI's object, the right status, before any byte of a stream."""

import json
from typing import Any

import pytest
from quart import Response
from quart_trio import QuartTrio

from trioengine.errors import (
    EngineDeadError,
    EngineGenerateError,
    PromptTooLongError,
    RequestError,
    TrioEngineError,
    UnavailableError,
)
from trioengine.server.app import create_app
from trioengine.server.blueprint import openai_blueprint
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
JSON = {"Content-Type": "application/json"}


async def post(engine: FakeEngine, body: object, path: str = "/v1/chat/completions") -> Response:
    data = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return await create_app(engine).test_client().post(path, data=data, headers=JSON)


async def error_of(response: Response) -> dict[str, Any]:
    body = await response.get_data(as_text=False)
    assert len(body) < 16 * 1024
    assert response.content_type == "application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
        rb'{"messages": [{"role": "user", "content": "\u0000"}]}',
        b"\xff",
        {**CHAT, "stream": "false"},
        {**CHAT, "stream": True, "n": 0},
        {**CHAT, "stream": True, "temperature": -1},
        {**CHAT, "stop": ""},
        {"messages": []},
        {"messages": [5] * 3000},
        {**CHAT, "x" * 100_000: 1, "stop": 5},
    ],
    ids=lambda body: repr(body)[:40],
)
async def test_a_wrong_body_is_a_400_and_the_server_lives(body: object) -> None:
    """Cases 21, 37 (mistral.rs 1874) and 42 (OpenViking 4238): also for a stream; nothing reached the engine."""
    engine = FakeEngine()
    app = create_app(engine)
    data = body if isinstance(body, bytes) else json.dumps(body)
    response = await app.test_client().post("/v1/chat/completions", data=data, headers=JSON)
    assert response.status_code == 400
    assert (await error_of(response))["type"] == "invalid_request_error"
    assert not engine.requests
    assert (await app.test_client().post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"Content-Type": "text/plain"}, {}, {**JSON, "Content-Encoding": "gzip"}],
    ids=["type", "no type", "compressed"],
)
async def test_a_body_that_is_not_declared_as_plain_json_is_a_415(headers: dict[str, str]) -> None:
    """Whatever is in it."""
    engine = FakeEngine()
    data = json.dumps(CHAT)
    response = await create_app(engine).test_client().post("/v1/chat/completions", data=data, headers=headers)
    assert response.status_code == 415
    assert (await error_of(response))["code"] == "unsupported_media_type"
    assert not engine.requests


async def test_a_list_of_an_empty_prompt_is_a_400() -> None:
    """Case 42 (OpenViking 4238)."""
    response = await post(FakeEngine(), {"prompt": [""]}, "/v1/completions")
    assert response.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("The chat template refuses: roles must alternate.", param="messages"), 400),
        (PromptTooLongError(num_prompt_tokens=5000, max_model_len=2048), 400),
        (UnavailableError("The queue is full.", retry_after_s=2.0), 503),
        (EngineDeadError("dead", cause="secret"), 503),
    ],
)
async def test_what_the_engine_refuses_has_no_stream(error: TrioEngineError, status: int, stream: bool) -> None:
    """Cases 20, 40 and 41 (ollama 4967): a status instead of a 200 with an error in it."""
    response = await post(FakeEngine(enter_error=error), {**CHAT, "stream": stream})
    assert response.status_code == status
    assert (await error_of(response))["code"] == error.code
    assert ("Retry-After" in response.headers) == isinstance(error, UnavailableError)


async def test_a_template_that_refuses_says_why() -> None:
    """Case 40 (mistral.rs 506)."""
    engine = FakeEngine(enter_error=RequestError("Roles must alternate.", param="messages"))
    error = await error_of(await post(engine, CHAT))
    assert error["message"] == "Roles must alternate."
    assert error["param"] == "messages"


async def test_a_failure_after_the_headers_is_an_event() -> None:
    """Behind the tokens that came before it; then the stream ends without [DONE]."""
    engine = FakeEngine(ScriptedReply(deltas=["Hel", "lo"], error=EngineGenerateError("secret")))
    response = await post(engine, {**CHAT, "stream": True})
    events = (await response.get_data(as_text=True)).split("\n\n")
    assert response.status_code == 200
    assert ['"content":"Hel"' in events[0], '"content":"lo"' in events[1]] == [True, True]
    assert json.loads(events[2].removeprefix("data: "))["error"]["code"] == "generation_failed"
    assert events[3:] == [""]
    assert "secret" not in "".join(events)
    assert not engine.live


async def test_a_failure_of_a_whole_reply_is_a_500() -> None:
    """Half an answer is none."""
    engine = FakeEngine(ScriptedReply(error=EngineGenerateError("secret")))
    response = await post(engine, CHAT)
    assert response.status_code == 500
    assert "secret" not in (await error_of(response))["message"]
    assert not engine.live


async def test_an_unknown_model_is_a_404() -> None:
    """With the code that clients look for."""
    response = await post(FakeEngine(), {**CHAT, "model": "gpt-4"})
    assert response.status_code == 404
    assert (await error_of(response))["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/static/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
    ],
)
async def test_errors_of_the_address_have_the_shape_too(method: str, path: str, status: int) -> None:
    """Wherever a client looks."""
    response = await create_app(FakeEngine()).test_client().open(path, method=method)
    assert response.status_code == status
    await error_of(response)
    assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_a_body_that_is_not_declared_as_json_is_refused(content_type: str | None) -> None:
    """A web page may send these anywhere without asking."""
    headers = {"Content-Type": content_type} if content_type else {}
    client = create_app(FakeEngine()).test_client()
    response = await client.post("/v1/chat/completions", data=json.dumps(CHAT), headers=headers)
    assert response.status_code == 415
    await error_of(response)


async def test_json_with_a_charset_is_fine() -> None:
    """As many clients declare it."""
    headers = {"Content-Type": "application/json; charset=utf-8"}
    client = create_app(FakeEngine()).test_client()
    response = await client.post("/v1/chat/completions", data=json.dumps(CHAT), headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/load"])
async def test_health_and_load_fail_when_the_engine_is_dead(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Case 9 (vllm 19881): at once, without asking the core. The cause stays in the log, in one line."""
    engine = FakeEngine(health_error=EngineDeadError("dead", cause="secret"))
    response = await create_app(engine).test_client().get(path)
    assert response.status_code == 503
    assert (await error_of(response))["code"] == "engine_dead"
    assert [record.exc_info for record in caplog.records if record.name.startswith("trioengine")] == [None]


async def test_a_bug_in_a_route_is_a_500_with_the_shape() -> None:
    """And its message is for the log only."""

    class Broken(FakeEngine):
        def check_health(self) -> None:
            raise ValueError("secret")

    response = await create_app(Broken()).test_client().get("/health")
    assert response.status_code == 500
    assert "secret" not in (await error_of(response))["message"]


async def test_the_blueprint_brings_its_errors_along() -> None:
    """Also into an application with handlers and a body limit of its own, which keeps them for its own routes."""
    app = QuartTrio("somebody")
    app.config["MAX_CONTENT_LENGTH"] = 100
    app.register_blueprint(openai_blueprint(FakeEngine()), url_prefix="/llm")
    client = app.test_client()
    ok = await client.post("/llm/v1/chat/completions", json=CHAT)
    large = await client.post("/llm/v1/chat/completions", json={**CHAT, "user": "x" * 200})
    assert ok.status_code == 200
    assert large.status_code == 413
    assert (await error_of(large))["code"] == "request_too_large"
    assert (await client.get("/elsewhere")).content_type != "application/json"
