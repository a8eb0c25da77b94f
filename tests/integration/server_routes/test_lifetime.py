"""What becomes of a request in the engine when its client vanishes, the server stops, or the answer takes long."""

import json
from typing import Any

import pytest
import trio
from hypercorn.typing import ASGIReceiveEvent, ASGISendEvent, HTTPScope
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.config.server import ServerConfig
from trioengine.server.app import create_app
from trioengine.server.stream_body import PING_INTERVAL_S
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import open_raw_http

PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
STREAMED = {**CHAT, "stream": True}
JSON = (("Content-Type", "application/json"),)


def chat_scope() -> HTTPScope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {},
        "extensions": {},
    }


class AsgiClient:
    """A client that vanishes when told to, at whatever event the application has sent last."""

    def __init__(self, body: dict[str, Any], *, accepts: int) -> None:
        """Accept so many events; the next `send` waits for ever."""
        self._body = json.dumps(body).encode()
        self._accepts = accepts
        self._has_sent_body = False
        self.vanish = trio.Event()
        self.sent: list[ASGISendEvent] = []

    async def receive(self) -> ASGIReceiveEvent:
        if not self._has_sent_body:
            self._has_sent_body = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.vanish.wait()
        return {"type": "http.disconnect"}

    async def send(self, event: ASGISendEvent) -> None:
        if len(self.sent) >= self._accepts:
            await trio.sleep_forever()
        self.sent.append(event)
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3, 4])
async def test_a_client_that_vanishes_from_a_stream_ends_its_request(num_accepted: int) -> None:
    """Case 3 (vllm 9428, llama.cpp 13262): at every event, also before the first look at the body."""
    engine = FakeEngine()
    client = AsgiClient(STREAMED, accepts=num_accepted)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(create_app(engine), chat_scope(), client.receive, client.send)
            await wait_all_tasks_blocked()
            assert len(engine.requests) == 1
            assert len(client.sent) == num_accepted
            client.vanish.set()
    assert not engine.live


@pytest.mark.parametrize("body", [CHAT, STREAMED], ids=["whole", "streamed"])
async def test_a_client_that_vanishes_while_it_waits_ends_its_request(body: dict[str, Any]) -> None:
    """Case 3 (vllm 9428, llama.cpp 13262): queued, or in a long prefill."""
    engine = FakeEngine(ScriptedReply(deltas=["x"], go_on=trio.Event()))
    client = AsgiClient(body, accepts=100)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(create_app(engine), chat_scope(), client.receive, client.send)
            await wait_all_tasks_blocked()
            assert len(engine.live) == 1
            client.vanish.set()
    assert not engine.live
    assert engine.num_aborted == 1


@pytest.mark.parametrize("num_checkpoints", range(0, 60, 3))
async def test_a_cancel_at_any_checkpoint_leaves_nothing(num_checkpoints: int) -> None:
    """Cases 1 (vllm 57061) and 3: while body, headers or chunks are on their way, while it is entered, at its end."""
    engine = FakeEngine()
    client = AsgiClient(STREAMED, accepts=100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(create_app(engine), chat_scope(), client.receive, client.send)
        for _ in range(num_checkpoints):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert not engine.live


async def test_a_waiting_stream_pings(autojump_clock: MockClock) -> None:
    """Case 46 (llama.cpp 24013): every few seconds until the first token, in comments that a parser of events skips."""
    engine = FakeEngine(ScriptedReply(first_delay_s=3.5 * PING_INTERVAL_S))
    response = await create_app(engine).test_client().post(PATH, json=STREAMED)
    events = (await response.get_data(as_text=True)).split("\n\n")
    assert events[:3] == [": ping"] * 3
    assert all(event.startswith("data: ") for event in events[3:-1])
    assert '"content":"Hello"' in events[3]
    assert events[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("body", [CHAT, STREAMED], ids=["whole", "streamed"])
async def test_an_answer_may_take_an_hour(body: dict[str, Any], autojump_clock: MockClock) -> None:
    """Quart cuts responses after a minute unless told otherwise."""
    engine = FakeEngine(ScriptedReply(first_delay_s=3600.0))
    client = AsgiClient(body, accepts=10_000)
    await create_app(engine)(chat_scope(), client.receive, client.send)
    assert client.sent[0].get("status") == 200
    assert client.sent[-1].get("more_body") is False
    assert b"Hello" in b"".join(event.get("body", b"") for event in client.sent)


async def test_new_requests_are_refused_once_the_server_shuts_down() -> None:
    """With 503 and Retry-After, while the answers under way go on."""
    shutdown, go_on = trio.Event(), trio.Event()
    engine = FakeEngine(ScriptedReply(go_on=go_on))
    app = create_app(engine, shutdown=shutdown)
    client = AsgiClient(STREAMED, accepts=100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app, chat_scope(), client.receive, client.send)
        await wait_all_tasks_blocked()
        shutdown.set()
        refused = await app.test_client().post(PATH, json=CHAT)
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        assert (await refused.get_json())["error"]["type"] == "service_unavailable_error"
        go_on.set()
    assert b"".join(event.get("body", b"") for event in client.sent).endswith(b"data: [DONE]\n\n")
    assert len(engine.requests) == 1


@pytest.mark.parametrize("body", [CHAT, STREAMED], ids=["whole", "streamed"])
async def test_what_is_left_at_the_end_gets_an_error(body: dict[str, Any]) -> None:
    """An event in a stream, 503 otherwise; the engine's request is gone at once."""
    stop = trio.Event()
    engine = FakeEngine(ScriptedReply(go_on=trio.Event()))
    client = AsgiClient(body, accepts=100)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(create_app(engine, stop=stop), chat_scope(), client.receive, client.send)
            await wait_all_tasks_blocked()
            stop.set()
    assert not engine.live
    start, *parts = client.sent
    assert start.get("status") == (200 if body is STREAMED else 503)
    last_event = b"".join(part.get("body", b"") for part in parts).rstrip().split(b"\n\n")[-1]
    assert json.loads(last_event.removeprefix(b"data: "))["error"]["code"] == "engine_closed"


async def test_an_operator_may_end_a_stream() -> None:
    """It then finishes with reason "abort", whole and valid."""
    go_on = trio.Event()
    engine = FakeEngine(ScriptedReply(deltas=["a", "b"], go_on=go_on))
    client = AsgiClient(STREAMED, accepts=100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(create_app(engine), chat_scope(), client.receive, client.send)
        await wait_all_tasks_blocked()
        engine.abort(engine.requests[0].request_id or "")
        go_on.set()
    body = b"".join(event.get("body", b"") for event in client.sent)
    assert b'"finish_reason":"abort"' in body
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("way", ["fin", "rst"])
@pytest.mark.parametrize("body", [CHAT, STREAMED], ids=["whole", "streamed"])
async def test_a_closed_socket_ends_the_request(body: dict[str, Any], way: str) -> None:
    """Case 3 (vllm 9428, llama.cpp 13262), through the real server: with FIN and with RST."""
    engine = FakeEngine(ScriptedReply(deltas=["a", "b", "c"], go_on=trio.Event()))
    async with open_server(create_app(engine)) as server, open_raw_http(server.url) as client:
        await client.send_request("POST", PATH, headers=JSON, body=json.dumps(body).encode())
        if body is STREAMED:
            await client.read_head()
            assert b'"content":"a"' in await client.read_chunk()
        else:
            while not engine.live:
                await trio.lowlevel.checkpoint()
        left = engine.last_left
        client.reset() if way == "rst" else client.close()
        await left.wait()
    assert engine.num_aborted == 1


async def test_a_client_that_does_not_read_loses_its_request() -> None:
    """In the engine, too, once the write's deadline has passed; the server goes on."""
    engine = FakeEngine(ScriptedReply(deltas=["x" * 1_000_000] * 20))
    config = ServerConfig(port=0, write_timeout_s=0.1)
    with trio.fail_after(20):
        async with (
            open_server(create_app(engine), config) as server,
            open_raw_http(server.url, receive_buffer_bytes=65536) as client,
            open_raw_http(server.url) as bystander,
        ):
            await client.send_request("POST", PATH, headers=JSON, body=json.dumps(STREAMED).encode())
            while not engine.live:
                await trio.lowlevel.checkpoint()
            await engine.last_left.wait()
            assert engine.num_aborted == 1
            assert (await bystander.request("GET", "/health")).status == 200


async def test_a_stream_arrives_in_chunks_through_the_real_server() -> None:
    """Each event in a write of its own, then [DONE], and the connection serves the next request."""
    async with open_server(create_app(FakeEngine())) as server, open_raw_http(server.url) as client:
        first = await client.request("POST", PATH, headers=JSON, body=json.dumps(STREAMED).encode())
        second = await client.request("POST", PATH, headers=JSON, body=json.dumps(CHAT).encode())
    assert first.head.header("content-type") == "text/event-stream; charset=utf-8"
    assert first.body.count(b"data: ") == 5
    assert first.body.endswith(b"data: [DONE]\n\n")
    assert second.status == 200
