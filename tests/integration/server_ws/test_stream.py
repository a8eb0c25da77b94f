"""`/v1/stream` as its clients see it, over `serve()` and over trio-websocket alone."""

import gc
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioengine.config.server import ServerConfig
from trioengine.errors import CheckpointError, EngineDeadError
from trioengine.server import stream_connection, websocket, ws_endpoint
from trioengine.server.app import create_app
from trioengine.server.ws_endpoint import serve_stream
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import open_raw_http, request_bytes
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import ScriptedEngine, open_scripted_engine
from trioengine.testing.websocket_frames import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    UPGRADE,
    FrameClient,
    Received,
    close_frame,
    frame,
    open_frames,
    upgrade,
)
from trioengine.types.messages import GetLoad

PATH = "/v1/stream"
KEY = "the-key"
ENDLESS = 1_000_000
CHAT_TEMPLATE = {"prompt": {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ messages }}"}}
LOGITS_PROCESSORS = {"prompt": {"text": "a"}, "sampling": {"logits_processors": {"mine": "{}"}}}


class StreamClient:
    """Says messages and reads answers."""

    def __init__(self, frames: FrameClient) -> None:
        self.frames = frames

    async def send(self, *messages: dict[str, Any]) -> None:
        await self.frames.send(*(frame(TEXT, json.dumps(message).encode()) for message in messages))

    async def receive(self) -> dict[str, Any]:
        """The next message; a close is one of type "closed"."""
        while (received := await self.frames.receive()).opcode == PING:
            pass
        if received.opcode == CLOSE:
            return {"type": "closed", "code": received.code}
        assert received.opcode == TEXT
        return json.loads(received.payload)

    async def receive_type(self, type_: str) -> dict[str, Any]:
        message = await self.receive()
        assert message["type"] == type_, message
        return message

    async def create(self, id_: str = "1", endpoint: str = "completions", **body: Any) -> None:
        """A completion of so many tokens, endless where nothing is said. `credits` is the protocol's."""
        more = {"credits": body.pop("credits")} if "credits" in body else {}
        if endpoint == "completions":
            body = {"prompt": [97, 98, 99], "max_tokens": ENDLESS, "temperature": 0, "ignore_eos": True, **body}
        await self.send({"type": "create", "id": id_, "endpoint": endpoint, "body": body, **more})

    async def read_to_end(self, id_: str = "1") -> list[dict[str, Any]]:
        """All messages about this request, when there are no others."""
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1]["type"] not in ("done", "error"):
            messages.append(await self.receive())
            assert messages[-1].get("id") == id_, messages[-1]
        return messages

    async def load(self) -> int:
        """How many requests the core has."""
        await self.create("load", "call", name="GetLoad")
        while (message := await self.receive()).get("id") != "load":
            pass
        await self.receive_type("done")
        return message["data"]["reply"]["running"] + message["data"]["reply"]["waiting"]


@attrs.frozen
class Served:
    """A server of `/v1/stream`."""

    url: str
    engine: ScriptedEngine
    shutdown: trio.Event
    stop: trio.Event

    @asynccontextmanager
    async def connect(self, *headers: tuple[str, str], greets: bool = True) -> AsyncGenerator[StreamClient]:
        async with open_frames(self.url, PATH, headers) as frames:
            client = StreamClient(frames)
            if greets:
                await client.send({"type": "hello", "version": 1})
                await client.receive_type("hello")
            yield client

    async def wait_idle(self) -> None:
        """Return once the core knows of no request."""
        with trio.fail_after(5):
            load = await self.engine.engine.call(GetLoad())
            while load.running or load.waiting:
                await trio.lowlevel.checkpoint()
                load = await self.engine.engine.call(GetLoad())


@pytest.fixture(params=["serve", "trio-websocket"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@asynccontextmanager
async def open_served(kind: str, script: Script | None = None, **options: Any) -> AsyncGenerator[Served]:
    config = ServerConfig(port=0, **options)
    shutdown, stop = trio.Event(), trio.Event()
    async with open_scripted_engine(script or Script(pace_s=0.001)) as scripted:
        engine = scripted.engine
        if kind == "serve":
            app = create_app(engine, config, shutdown=shutdown, stop=stop)
            async with open_server(app, config) as server:
                yield Served(server.url, scripted, shutdown, stop)
        else:
            async with trio.open_nursery() as nursery:

                async def run(*, task_status: trio.TaskStatus[list[str]]) -> None:
                    await serve_stream(engine, config, shutdown=shutdown, stop=stop, task_status=task_status)

                (url,) = await nursery.start(run)
                yield Served(url.replace("ws:", "http:"), scripted, shutdown, stop)
                nursery.cancel_scope.cancel()
        assert scripted.frontend.num_open_requests == 0


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for each in messages if each["type"] == "chunk" for choice in each["data"]["choices"])


# What is answered


async def test_the_greeting_names_model_and_limits(kind: str) -> None:
    async with open_served(kind, max_body_bytes=1000) as served, served.connect(greets=False) as client:
        await client.send({"type": "hello", "version": 1})
        hello = await client.receive_type("hello")
        assert hello["version"] == 1
        assert hello["model"] == "scripted"
        assert hello["limits"]["max_message_bytes"] == 1000
        assert hello["limits"]["max_model_len"] > 0


async def test_a_stream_joined_is_the_whole_reply(kind: str) -> None:
    async with open_served(kind) as served, served.connect() as client:
        await client.create(max_tokens=8)
        started, *chunks, done = await client.read_to_end()
        assert started == {"type": "started", "id": "1", "prompt_tokens": 3, "warnings": []}
        assert done["finish"] == ["length"]
        assert done["usage"]["completion_tokens"] == 8
        await client.create(max_tokens=8, stream=False)
        _, whole, whole_done = await client.read_to_end()
        assert whole["data"]["object"] == "text_completion"
        assert text_of(chunks) == text_of([whole]) == "abcabcab"
        assert (whole_done["finish"], whole_done["usage"]) == (done["finish"], done["usage"])


async def test_chunks_are_the_objects_that_http_streams() -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    async with open_served("serve") as served, served.connect() as client, open_raw_http(served.url) as http:
        headers = [("content-type", "application/json")]
        sent = json.dumps({**body, "stream": True}).encode()
        reply = await http.request("POST", "/v1/chat/completions", headers=headers, body=sent)
        events = [json.loads(line[6:]) for line in reply.body.split(b"\n\n") if line.startswith(b"data: {")]
        await client.create(endpoint="chat", **body)
        chunks = [message["data"] for message in await client.read_to_end() if message["type"] == "chunk"]

    def joined(objects: list[dict[str, Any]]) -> tuple[Any, ...]:
        choices = [choice for each in objects for choice in each["choices"]]
        return (
            [sorted(objects[0]), objects[0]["object"], objects[0]["model"], choices[0]["delta"]["role"]],
            "".join(choice["delta"].get("content") or "" for choice in choices),
            choices[-1]["finish_reason"],
            objects[-1]["usage"],
        )

    assert joined(chunks) == joined(events)


async def test_several_prompts_and_answers_are_one_request(kind: str) -> None:
    async with open_served(kind) as served, served.connect() as client:
        await client.create(prompt=[[97, 98], [99]], n=2, max_tokens=4, temperature=1.0, seed=1)
        started, *chunks, done = await client.read_to_end()
        assert started["prompt_tokens"] == 3
        texts: dict[int, str] = {}
        for chunk in chunks:
            for choice in chunk["data"]["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == {0: "abab", 1: "abab", 2: "cccc", 3: "cccc"}
        assert done["finish"] == ["length"] * 4
        assert done["usage"]["completion_tokens"] == 16


async def test_many_requests_share_a_connection_and_each_gets_its_own_answer(kind: str) -> None:
    async with open_served(kind) as served, served.connect() as client:
        for index in range(50):
            await client.create(str(index), prompt=[97 + index % 20], max_tokens=6, credits=1)
        texts = dict.fromkeys(map(str, range(50)), "")
        num_open = 50
        while num_open:
            message = await client.receive()
            if message["type"] == "chunk":
                texts[message["id"]] += message["data"]["choices"][0]["text"]
                await client.send({"type": "credit", "id": message["id"], "n": 1})
            num_open -= message["type"] == "done"
        assert texts == {str(index): chr(97 + index % 20) * 6 for index in range(50)}


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "param", "code"),
    [
        ("completions", {"temperature": 1e9}, 400, "temperature", "invalid_value"),
        ("completions", {"max_tokens": "3"}, 400, "max_tokens", "invalid_value"),
        ("completions", {"model": "another"}, 404, "model", "model_not_found"),
        ("completions", {"prompt": []}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": ["a"] * 1025}, 400, "prompt", "invalid_value"),
        ("chat", {"messages": []}, 400, "messages", "invalid_value"),
        ("chat", {}, 400, "messages", "invalid_value"),
        ("generate", {"prompt": {"text": "a"}, "sampling": {"n": 0}}, 400, "n", "invalid_value"),
        ("generate", {"prompt": 3}, 400, "prompt", "invalid_value"),
        ("generate", CHAT_TEMPLATE, 403, "prompt.chat_template", "forbidden"),
        ("encode", CHAT_TEMPLATE, 403, "prompt.chat_template", "forbidden"),
        ("generate", LOGITS_PROCESSORS, 403, "sampling.logits_processors", "forbidden"),
        ("encode", {"prompt": {"text": "a"}}, 400, "model", "invalid_value"),
        ("call", {"name": "Nothing"}, 400, "name", "invalid_value"),
        ("call", {"name": "Sleep"}, 403, None, "forbidden"),
    ],
)
async def test_errors_are_those_of_http_and_the_connection_goes_on(
    kind: str, endpoint: str, body: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    async with open_served(kind) as served, served.connect() as client:
        await client.create("1", endpoint, **body)
        (error,) = await client.read_to_end()
        assert (error["status"], error["error"]["param"], error["error"]["code"]) == (status, param, code)
        await client.create("1", max_tokens=1)
        assert (await client.read_to_end())[-1]["type"] == "done"


async def test_an_operation_fails_with_what_its_caller_can_use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the files that it names; and that the engine hangs, at once."""

    async def call(_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise CheckpointError("/a is damaged.", path="/a")

    def check_health() -> None:
        raise EngineDeadError("It shows no sign of life.")

    async with open_served(kind, enable_admin=True) as served, served.connect() as client:
        monkeypatch.setattr(served.engine.engine, "call", call)
        await client.create("1", "call", name="UpdateWeights", fields={"path": "/a"})
        (error,) = await client.read_to_end()
        assert (error["status"], error["error"]["param"], error["error"]["message"]) == (400, "path", "/a is damaged.")
        monkeypatch.setattr(served.engine.engine, "check_health", check_health)
        await client.create("1", "call", name="GetLoad")
        (error,) = await client.read_to_end()
        assert (error["status"], error["error"]["code"]) == (503, "engine_dead")


async def test_a_strict_server_refuses_what_it_would_change(kind: str) -> None:
    async with open_served(kind, strict=True) as served, served.connect() as client:
        await client.create(max_tokens=2, nonsense=1)
        (error,) = await client.read_to_end()
        assert error["error"]["param"] == "nonsense"
    async with open_served(kind) as served, served.connect() as client:
        await client.create(max_tokens=2, nonsense=1)
        assert (await client.read_to_end())[0]["warnings"] == ["fields without effect: nonsense"]


# Flow control and ends


async def test_without_credit_output_is_merged_and_nothing_is_lost(kind: str) -> None:
    async with open_served(kind) as served, served.connect() as client:
        await client.create(max_tokens=60, credits=1)
        await client.receive_type("started")
        first = await client.receive_type("chunk")
        # All of it is generated, and no further chunk came.
        await served.wait_idle()
        await client.create("call", "call", name="GetLoad")
        assert [message["type"] for message in await client.read_to_end("call")] == ["chunk", "done"]
        await client.send({"type": "credit", "id": "1", "n": 1})
        rest, done = await client.read_to_end()
        assert text_of([first, rest]) == "abc" * 20
        assert done["finish"] == ["length"]


async def test_a_cancelled_request_tells_what_it_had_and_ends(kind: str) -> None:
    async with open_served(kind) as served, served.connect() as client:
        await client.create(credits=1)
        await client.create("2")
        while (await client.receive())["type"] != "chunk":
            pass
        await client.send({"type": "cancel", "id": "1"}, {"type": "cancel", "id": "2"})
        done: dict[str, Any] = {}
        while len(done) < 2:
            message = await client.receive()
            if message["type"] == "done":
                done[message["id"]] = message["finish"]
        assert done == {"1": ["abort"], "2": ["abort"]}
        assert await client.load() == 0


async def test_a_request_that_is_cancelled_at_once_is_over_and_its_id_is_free(kind: str) -> None:
    async with open_served(kind) as served, served.connect() as client:
        create = {"type": "create", "id": "1", "endpoint": "completions", "body": {"prompt": [97], "max_tokens": 2}}
        for _ in range(20):
            await client.send(create, {"type": "cancel", "id": "1"}, create)
            assert (await client.read_to_end())[-1]["finish"] == ["abort"]
            assert (await client.read_to_end())[-1]["finish"] == ["length"]
        await served.wait_idle()


@pytest.mark.parametrize("end", ["fin", "rst", "close", "nonsense", "no message"])
async def test_the_end_of_the_socket_aborts_all_its_requests_and_no_other(kind: str, end: str) -> None:
    async with open_served(kind) as served, served.connect() as other:
        await other.create("other", credits=1)
        async with served.connect() as client:
            for index in range(5):
                await client.create(str(index), credits=index % 2)
            for _ in range(5):
                while (await client.receive())["type"] != "started":
                    pass
            match end:
                case "fin":
                    client.frames.http.send_fin()
                case "rst":
                    client.frames.http.reset()
                case "close":
                    await client.frames.send(close_frame(1000))
                case "nonsense":
                    await client.frames.send(b"\xff" * 20)
                case _:
                    await client.frames.send(frame(BINARY, b"x"))
            with trio.fail_after(5):
                while await other.load() > 1:
                    pass
        assert await other.load() == 1
        await other.send({"type": "cancel", "id": "other"})


async def test_leaving_the_server_aborts_everything(kind: str) -> None:
    """`open_served` asserts that the engine knows nothing any more."""
    async with open_served(kind) as served, served.connect() as client:
        await client.create()
        await client.receive_type("started")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(0x3, b"x"), 1002),
        (frame(TEXT, b"x", masked=False), 1002),
        (frame(BINARY, b"x"), 1003),
        (frame(TEXT, b"\xff\xff"), 1007),
        (frame(TEXT, b"x" * 2001), 1009),
        (frame(TEXT, b"x" * 1001, fin=False) + frame(CONTINUATION, b"x" * 1000), 1009),
        (frame(TEXT, b'{"type": "hello", "version": 1}'), 1008),
        (close_frame(1000), 1000),
    ],
    ids=["opcode", "no mask", "binary", "no UTF-8", "too long", "too long in parts", "a second hello", "closed"],
)
async def test_close_codes(kind: str, sent: bytes, code: int) -> None:
    async with open_served(kind, max_body_bytes=2000) as served, served.connect() as client:
        await client.frames.send(sent)
        if kind == "trio-websocket" and code in (1002, 1007):
            # It ends the connection of whoever sends no frames without a word.
            assert await client.frames.http.read_to_end() == b""
            return
        message = await client.receive()
        if message["type"] == "error":
            message = await client.receive()
        assert message == {"type": "closed", "code": code}


async def test_a_failure_of_the_server_closes_with_1011(kind: str, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def fail(text: str) -> None:
        raise RuntimeError(f"cannot read {text}")

    async with open_served(kind) as served, served.connect() as bystander, served.connect() as client:
        monkeypatch.setattr(stream_connection, "parse_message", fail)
        await client.send({"type": "cancel", "id": "1"})
        assert await client.receive_type("closed") == {"type": "closed", "code": 1011}
        monkeypatch.undo()
        await bystander.create(max_tokens=1)
        assert (await bystander.read_to_end())[-1]["type"] == "done"
    assert "cannot read" in caplog.text


async def test_a_server_that_shuts_down_lets_requests_end(kind: str) -> None:
    async with open_served(kind) as served, served.connect() as idle, served.connect() as client:
        await client.create(credits=0, max_tokens=3)
        await client.receive_type("started")
        served.shutdown.set()
        assert await idle.receive() == {"type": "closed", "code": 1001}
        await client.create("2", max_tokens=1)
        refused = await client.receive_type("error")
        assert (refused["id"], refused["status"]) == ("2", 503)
        await client.send({"type": "credit", "id": "1", "n": 100})
        assert (await client.read_to_end())[-1]["finish"] == ["length"]
        assert await client.receive() == {"type": "closed", "code": 1001}


@pytest.mark.parametrize("sent", [b"", b"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\n"], ids=["nothing", "half"])
async def test_an_endpoint_that_shuts_down_waits_for_nobody_who_has_not_come_in(sent: bytes) -> None:
    async with (
        open_served("trio-websocket", api_key=KEY, header_timeout_s=600) as served,
        open_raw_http(served.url) as stranger,
        served.connect(greets=False) as without_key,
    ):
        await stranger.send(sent)
        served.shutdown.set()
        assert await without_key.receive() == {"type": "closed", "code": 1001}
        with trio.fail_after(5):
            assert await stranger.read_to_end() == b""


async def test_connections_over_the_limit_wait_their_turn(kind: str) -> None:
    async with (
        open_served(kind, max_connections=1) as served,
        served.connect() as first,
        open_raw_http(served.url) as second,
    ):
        await first.create(max_tokens=1)
        await first.read_to_end()
        # Whoever waits has no place at the server: there is no task and no descriptor of his.
        gc.collect()
        num_descriptors = len(os.listdir("/proc/self/fd"))
        async with open_raw_http(served.url):
            assert len(os.listdir("/proc/self/fd")) == num_descriptors + 1
            await wait_all_tasks_blocked()
            assert len(os.listdir("/proc/self/fd")) == num_descriptors + 1
        await first.frames.send(close_frame(1000))
        await first.frames.http.read_to_end()
        assert (await upgrade(second, PATH)).status == 101


async def test_pings_are_answered_with_what_they_carry(kind: str) -> None:
    async with open_served(kind) as served, served.connect() as client:
        await client.frames.send(frame(PING, b"42"), frame(PING), frame(PING, b"x" * 125))
        for payload in (b"42", b"", b"x" * 125):
            assert await client.frames.receive() == Received(PONG, payload)


async def test_a_client_that_answers_no_ping_is_closed_with_1011_and_its_requests_end(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (websocket, ws_endpoint):
        monkeypatch.setattr(module, "PING_INTERVAL_S", 0.05)
    async with open_served(kind) as served, served.connect(greets=False) as client:
        await client.send({"type": "hello", "version": 1})
        await client.create(credits=0)
        while (message := await client.receive())["type"] != "closed":
            pass
        assert message["code"] == 1011
        await served.wait_idle()


async def test_a_server_that_stops_tells_the_requests_that_run(kind: str) -> None:
    async with open_served(kind) as served, served.connect() as client:
        await client.create(credits=0)
        await client.receive_type("started")
        served.shutdown.set()
        served.stop.set()
        error = await client.receive_type("error")
        assert (error["id"], error["status"], error["error"]["code"]) == ("1", 503, "engine_closed")
        assert await client.receive() == {"type": "closed", "code": 1001}


async def test_the_death_of_the_engine_is_an_error_of_each_request(kind: str) -> None:
    async with open_served(kind) as served, served.connect() as client:
        await client.create(credits=1)
        await client.receive_type("started")
        await client.receive_type("chunk")
        served.engine.kill()
        await client.send({"type": "credit", "id": "1", "n": 100})
        error = (await client.read_to_end())[-1]
        assert (error["status"], error["error"]["code"]) == (503, "engine_dead")
        await client.create("2")
        assert (await client.read_to_end("2"))[-1]["error"]["code"] == "engine_dead"


# Who may come in


async def test_the_key_is_in_the_header_or_in_the_greeting(kind: str) -> None:
    async with open_served(kind, api_key=KEY) as served:
        async with served.connect(("authorization", f"Bearer {KEY}")) as client:
            await client.create(max_tokens=1)
            assert (await client.read_to_end())[-1]["type"] == "done"
        async with served.connect(greets=False) as client:
            await client.send({"type": "hello", "version": 1, "api_key": KEY})
            await client.receive_type("hello")
            await client.create(max_tokens=1)
            assert (await client.read_to_end())[-1]["type"] == "done"
        for first in ({"type": "hello", "version": 1}, {"type": "hello", "version": 1, "api_key": "wrong"}, {}):
            async with served.connect(greets=False) as client:
                await client.send(first)
                assert await client.receive() == {"type": "closed", "code": 1008}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (PATH, [("authorization", "Bearer wrong")], 401),
        (PATH, [("origin", "https://evil.example")], 403),
        ("/v1/nothing", [("authorization", f"Bearer {KEY}")], 404),
    ],
)
async def test_upgrades_that_may_not_be_are_refused(
    kind: str, path: str, headers: list[tuple[str, str]], status: int
) -> None:
    async with open_served(kind, api_key=KEY) as served, open_raw_http(served.url) as http:
        head = await upgrade(http, path, headers)
        assert head.status == status
        assert "error" in json.loads(await http.read_body(head))


async def test_a_name_that_is_not_the_servers_is_refused(kind: str) -> None:
    """A page whose name leads here (DNS rebinding) has that name as its origin too."""
    async with open_served(kind) as served, open_raw_http(served.url) as http:
        asked = request_bytes("GET", PATH, headers=[*UPGRADE, ("origin", "http://evil.example")])
        await http.send(asked.replace(b"host: localhost", b"host: evil.example"))
        assert (await http.read_head()).status == 403


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"POST /v1/stream HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\nhello",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["nothing", "zeros", "no upgrade", "half an upgrade", "POST", "TLS"],
)
@pytest.mark.parametrize("end", ["fin", "rst"])
async def test_whatever_strangers_send_the_others_go_on(kind: str, data: bytes, end: str) -> None:
    # For as long trio-websocket waits for the rest, also when the stranger has gone.
    async with open_served(kind, header_timeout_s=0.2) as served, served.connect() as bystander:
        async with open_raw_http(served.url) as http:
            await http.send(data)
            if end == "fin":
                http.send_fin()
                await http.read_to_end()
            else:
                http.reset()
        await bystander.create(max_tokens=1)
        assert (await bystander.read_to_end())[-1]["type"] == "done"


async def test_a_ping_during_the_closing_harms_nobody(kind: str) -> None:
    """trio-websocket's reader fails at it; its own server would end with it."""
    async with open_served(kind) as served, served.connect() as bystander, served.connect() as client:
        await client.frames.send(
            frame(BINARY, b"x"), frame(PING, b"1"), frame(TEXT, b"{}"), frame(PING, b"2"), close_frame(1003)
        )
        await client.frames.http.read_to_end()
        await bystander.create(max_tokens=1)
        assert (await bystander.read_to_end())[-1]["type"] == "done"


@pytest.mark.parametrize(("sent", "is_cut"), [(close_frame(1000), False), (frame(CLOSE), False), (b"", True)])
async def test_a_websocket_that_its_client_closes_is_not_logged_as_cut(
    caplog: pytest.LogCaptureFixture, sent: bytes, is_cut: bool
) -> None:
    caplog.set_level("INFO", "trioengine.access")
    async with open_served("serve") as served, served.connect() as client:
        await client.frames.send(sent)
        client.frames.http.send_fin()
        await client.frames.http.read_to_end()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "trioengine.access"]
    assert line.endswith(" cut") == is_cut
