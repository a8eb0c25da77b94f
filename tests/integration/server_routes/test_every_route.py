"""What holds on every route: keys, bodies that are none, prompts of any length beside others, deadlines."""

import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import trio
from quart import Response
from trio.testing import MockClock

from trioengine.config.server import ServerConfig
from trioengine.server.app import create_app
from trioengine.server.blueprint import offered_routes
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.testing.fake_vectors import FakeVectorEngine
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import open_raw_http
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import open_scripted_engine

ROUTES = [
    (
        route.operation.method.upper(),
        route.operation.path.replace("{model_id}", "fake-model").replace("{response_id}", "resp_0"),
    )
    for route in offered_routes(enable_admin=True, has_metrics=False)
]
OPEN = {"/health", "/ready", "/ping"}
BODY_PATHS = [
    route.operation.path for route in offered_routes(enable_admin=True, has_metrics=False) if route.operation.request
]
ORIGIN = "https://page.example"


async def error_of(response: Response) -> Any:
    body = await response.get_data(as_text=False)
    assert len(body) < 16 * 1024
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_every_route_needs_the_key() -> None:
    """Case 43 (vllm 58144): but those that tell of health; with error object, and CORS headers for allowed pages."""
    config = ServerConfig(port=0, api_key=("k",), enable_admin=True, allowed_origins=(ORIGIN,), access_log=False)
    engine = FakeEngine()
    async with open_server(create_app(engine, config), config) as server:
        for method, path in [*ROUTES, ("GET", "/openapi.json"), ("GET", "/nothing"), ("POST", "/v1/nothing")]:
            async with open_raw_http(server.url) as client:
                headers = [("content-length", "0"), ("origin", ORIGIN)]
                response = await client.request(method, path, headers=headers)
            assert response.status == (200 if path in OPEN else 401), path
            assert response.head.header("access-control-allow-origin") == ORIGIN
            if path not in OPEN:
                assert json.loads(response.body)["error"]["code"]
    assert not engine.requests
    assert not engine.calls


@pytest.mark.parametrize("path", BODY_PATHS)
async def test_what_is_no_body_is_a_400_everywhere(path: str) -> None:
    """Case 42 (OpenViking 4238): and nothing reaches the engine."""
    engine = FakeVectorEngine()
    client = create_app(engine, ServerConfig(enable_admin=True)).test_client()
    bad = [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff", rb'{"x": "\ud800"}', rb'{"x": "\u0000"}', b'{"x": NaN}']
    bad += [b"[" * 100_000, b'{"model": 5}', b"{}"]
    for data in bad:
        response = await client.post(path, data=data, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, data[:20]
        assert (await error_of(response))["type"] == "invalid_request_error"
    text = await client.post(path, data=b"{}", headers={"Content-Type": "text/plain"})
    assert text.status_code == 415
    assert not engine.requests
    assert not engine.encode_requests
    assert not engine.calls


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_wrong_method_is_a_405_everywhere(method: str, path: str) -> None:
    """Which says the right one."""
    client = create_app(FakeEngine(), ServerConfig(enable_admin=True)).test_client()
    other = "PUT"
    response = await client.open(path, method=other)
    assert response.status_code == 405
    assert method in response.headers["Allow"]
    await error_of(response)


async def test_short_prompts_are_not_held_up_by_a_long_one() -> None:
    """Case 19 (vllm 1026): 200,000 words are tokenized beside the event loop, and 20 others are answered meanwhile."""
    others_are_done = threading.Event()

    class WaitingTokenizer(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
            if len(text) < 100_000:
                return super().encode(text, add_special_tokens=add_special_tokens, allow_special=allow_special)
            assert others_are_done.wait(timeout=10), "the others wait for the long prompt"
            return [1] * 5

    engine = FakeVectorEngine(tokenizer=WaitingTokenizer())
    client = create_app(engine).test_client()
    long_response: list[Response] = []

    async def ask_long() -> None:
        long_response.append(await client.post("/tokenize", json={"prompt": "word " * 200_000}))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_long)
            for _ in range(20):
                assert (await client.post("/tokenize", json={"prompt": "short"})).status_code == 200
            others_are_done.set()
    assert json.loads(await long_response[0].get_data())["count"] == 5


BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1000},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1000},
    "/v1/responses": {"input": "a", "max_output_tokens": 1000},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_timeout_ends_a_request(path: str, stream: bool, autojump_clock: MockClock) -> None:
    """Case 20 (vllm 2901): 504, or an event once the headers are sent; the core is told to forget it. The field is
    named as the client wrote it.
    """
    body = {**BODIES[path], "timeout": 1.5, "stream": stream}
    async with open_scripted_engine(Script(pace_s=1.0)) as scripted:
        response = await create_app(scripted.engine).test_client().post(path, json=body)
        data = await response.get_data(as_text=True)
        assert scripted.engine.num_open_requests == 0
    assert response.status_code == (200 if stream else 504)
    event = data.removesuffix("\n\n").rpartition("\n\n")[2].removeprefix("data: ") if stream else data
    event = event.rpartition("\ndata: ")[2]
    fields = json.loads(event)
    error = fields["response"]["error"] if "response" in fields else fields["error"]
    assert error["message"] == "The request's deadline has passed: timeout is 1.5."
    if path != "/v1/responses" or not stream:
        assert error["code"] == "deadline_exceeded"


async def test_pings_and_events_have_line_feeds_only(autojump_clock: MockClock) -> None:
    """Case 46 (hey-api 3054, llama.cpp 24013): also where the model writes others."""
    engine = FakeEngine(ScriptedReply(deltas=("a\r\n", "\u2028", "\r"), first_delay_s=20.0))
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/completions", {"prompt": ["a", "b"]})):
        response = await create_app(engine).test_client().post(path, json={**body, "stream": True})
        data = await response.get_data(as_text=False)
        assert b"\r" not in data
        assert b": ping\n\n" in data
        assert all(not block or block.startswith((b"data: ", b": ping")) for block in data.split(b"\n\n"))


async def test_the_server_and_the_engine_know_a_request_by_the_same_id() -> None:
    """The log's, which the answer's header has once, is in the reply."""
    config = ServerConfig(port=0, access_log=False)
    engine = FakeEngine()
    async with open_server(create_app(engine, config), config) as server:
        for headers in ([("x-request-id", "mine")], []):
            async with open_raw_http(server.url) as client:
                body = json.dumps({"prompt": "a"}).encode()
                headers = [*headers, ("content-type", "application/json")]
                response = await client.request("POST", "/v1/completions", headers=headers, body=body)
            (request_id,) = (value for name, value in response.head.headers if name == "x-request-id")
            assert json.loads(response.body)["id"] == f"cmpl-{request_id}"
    assert engine.requests[0].request_id == "cmpl-mine"
