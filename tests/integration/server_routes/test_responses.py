"""`/v1/responses` over scripted engines: what is kept and for whom, responses in the background, and their ends."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import attrs
import pytest
import trio
from hypercorn.typing import ASGIReceiveEvent, ASGISendEvent, HTTPScope
from quart import Response
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.client.interface import EngineClient
from trioengine.config.engine import EngineConfig
from trioengine.config.server import ServerConfig
from trioengine.errors import EngineClosedError, EngineDeadError, RequestError, UnavailableError
from trioengine.openai.responses.store import StoreLimits
from trioengine.server.app import create_app
from trioengine.server.responses import Responses, open_responses, store_limits
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import ScriptedEngine, open_scripted_engine
from trioengine.types.messages import AbortRequests
from trioengine.types.output import FinishReason
from trioengine.types.request import ChatPrompt

PATH = "/v1/responses"
HERMES = ServerConfig(tool_call_parser="hermes")  # pyright: ignore[reportArgumentType]
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = ("Let me ", "add.\n<tool", '_call>{"name": "add", "argu', 'ments": {"a"', ": 1}}</tool_call>")
KEYS = {"mine": {"Authorization": "Bearer a"}, "yours": {"Authorization": "Bearer b"}}


@attrs.frozen
class Client:
    """Asks one application."""

    app: Any
    responses: Responses

    async def ask(self, method: str, path: str = "", headers: Mapping[str, str] | None = None, **body: Any) -> Response:
        return await self.app.test_client().open(
            PATH + path,
            method=method,
            headers=headers,
            json=body.get("json") if path else body if method == "POST" else None,
        )

    async def get(self, path: str, **headers: str) -> Any:
        return await self.answer("GET", path, headers=headers)

    async def create(self, **body: Any) -> Any:
        return await self.answer("POST", input="Hi", **body)

    async def answer(self, method: str, path: str = "", status: int = 200, **more: Any) -> Any:
        response = await self.ask(method, path, **more)
        fields = json.loads(await response.get_data(as_text=False))
        assert response.status_code == status, fields
        return fields

    async def error(self, method: str, path: str = "", status: int = 404, **more: Any) -> Any:
        return (await self.answer(method, path, status, **more))["error"]

    async def stream(self, into: list[Any], method: str = "POST", path: str = "", **more: Any) -> None:
        """Add the events of a stream to `into`. The test client has a body when it has ended."""
        body: dict[str, Any] = {"input": "Hi", "stream": True, **more} if method == "POST" else {}
        into += await events_of(await self.ask(method, path, **body))

    async def settle(self, response_id: str) -> Any:
        """A response of the background once it has ended."""
        stored = self.responses.get(response_id, "")
        while (running := self.responses.running(stored)) is not None:
            await running.news.wait()
        return await self.get(f"/{response_id}")


@asynccontextmanager
async def open_client(
    engine: EngineClient,
    config: ServerConfig | None = None,
    limits: StoreLimits | None = None,
    *,
    stop: trio.Event | None = None,
    shutdown: trio.Event | None = None,
) -> AsyncGenerator[Client, None]:
    async with open_responses(limits, stop=stop) as responses:
        yield Client(create_app(engine, config, responses=responses, stop=stop, shutdown=shutdown), responses)


async def events_of(response: Response) -> list[Any]:
    """The events of a stream; each says its name twice."""
    assert response.status_code == 200
    data = await response.get_data(as_text=True)
    assert "\r" not in data
    found: list[Any] = []
    for block in data.removesuffix("\n\n").split("\n\n"):
        if block != ": ping":
            name, event = block.split("\n")
            found.append(json.loads(event.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def only_id(client: Client) -> str:
    (response_id,) = list(client.responses.store._responses)  # pyright: ignore[reportPrivateUsage]
    return response_id


async def test_a_response_has_the_answer_and_is_kept() -> None:
    """With its input; a second goes on from it."""
    engine = FakeEngine()
    async with open_client(engine) as client:
        first = await client.create(instructions="Be brief.")
        assert first["output"][0]["content"][0]["text"] == "Hello, world!"
        assert await client.get(f"/{first['id']}") == first
        second = await client.create(previous_response_id=first["id"])
        items = (await client.get(f"/{second['id']}/input_items?order=asc"))["data"]
        assert [item["role"] for item in items] == ["user", "assistant", "user"]
        prompt = engine.requests[1].prompt
        assert isinstance(prompt, ChatPrompt)
        assert [message["role"] for message in prompt.messages] == ["user", "assistant", "user"]
        # A response's instructions are not the next one's.
        assert second["previous_response_id"] == first["id"]
        assert second["instructions"] is None


async def test_input_items_are_listed_in_pages() -> None:
    """The newest first unless told otherwise."""
    async with open_client(FakeEngine()) as client:
        items = [{"role": "user", "content": str(number)} for number in range(5)]
        response = await client.answer("POST", input=items)
        path = f"/{response['id']}/input_items"
        page = await client.get(f"{path}?limit=2")
        assert [item["content"][0]["text"] for item in page["data"]] == ["4", "3"]
        assert page["has_more"]
        assert page["last_id"] == page["data"][-1]["id"]
        rest = await client.get(f"{path}?limit=3&after={page['last_id']}")
        assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
        assert not rest["has_more"]
        for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")):
            assert (await client.error("GET", f"{path}?{query}", 400))["param"] == param


async def test_input_is_counted_without_an_answer() -> None:
    """With what it goes on from; a conversation that is too long is an error by the client's path."""
    engine = FakeEngine()
    async with open_client(engine) as client:
        first = await client.create()
        num_requests = len(engine.requests)
        alone = await client.answer("POST", "/input_tokens", json={"input": "Hi"})
        more = await client.answer("POST", "/input_tokens", json={"input": "Hi", "previous_response_id": first["id"]})
        assert alone["object"] == "response.input_tokens"
        assert 0 < alone["input_tokens"] < more["input_tokens"]
        error = await client.error("POST", "/input_tokens", 400, json={"input": "Hi", "tools": [{"type": "mcp"}]})
        assert error["param"] == "tools[0].type"
        assert len(engine.requests) == num_requests


async def test_a_call_and_its_result_go_round() -> None:
    """The result may be alone in the next request."""
    engine = FakeEngine(ScriptedReply(deltas=CALL))
    async with open_client(engine, HERMES) as client:
        first = await client.create(tools=[TOOL])
        message, call = first["output"]
        assert message["content"][0]["text"] == "Let me add."
        assert (call["name"], call["arguments"]) == ("add", '{"a": 1}')
        result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "2"}]
        engine.reply = ScriptedReply()
        second = await client.answer("POST", input=result, previous_response_id=first["id"], tools=[TOOL])
        assert second["status"] == "completed"
        alone = await client.error("POST", status=400, input=result)
        assert alone["param"] == "input[0].call_id"


async def test_items_can_be_referred_to() -> None:
    """While a response that has them is kept."""
    async with open_client(FakeEngine()) as client:
        first = await client.create()
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        second = await client.answer("POST", input=[reference, {"role": "user", "content": "b"}])
        assert second["status"] == "completed"
        error = await client.error("POST", input=[{"type": "item_reference", "id": "msg_0"}])
        assert error["param"] == "input[0].id"


async def test_what_is_not_there_is_a_404() -> None:
    """By every address, and as what a conversation goes on from."""
    async with open_client(FakeEngine()) as client:
        for method, path in (
            ("GET", "/resp_0"),
            ("DELETE", "/resp_0"),
            ("POST", "/resp_0/cancel"),
            ("GET", "/resp_0/input_items"),
        ):
            assert (await client.error(method, path))["code"] == "not_found"
        error = await client.error("POST", input="Hi", previous_response_id="resp_0")
        assert error["param"] == "previous_response_id"
        unkept = await client.create(store=False)
        assert unkept["store"] is False
        await client.error("GET", f"/{unkept['id']}")


async def test_another_keys_responses_are_not_there() -> None:
    """Not to look at, to end, to go on from or to refer to."""
    config = ServerConfig(api_key=("a", "b"))
    async with open_client(FakeEngine(), config) as client:
        mine = await client.create(headers=KEYS["mine"])
        path = f"/{mine['id']}"
        for method, address in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
            await client.error(method, address, headers=KEYS["yours"])
        bodies: list[dict[str, Any]] = [
            {"input": "Hi", "previous_response_id": mine["id"]},
            {"input": [{"type": "item_reference", "id": mine["output"][0]["id"]}]},
        ]
        for body in bodies:
            asked: Any = {**body, "headers": KEYS["yours"]}
            await client.error("POST", **asked)
        assert await client.answer("GET", path, headers=KEYS["mine"]) == mine


async def test_responses_are_forgotten(autojump_clock: MockClock) -> None:
    """After their time to live, also when nobody asks for them; deleted ones at once."""
    async with open_client(FakeEngine(), limits=StoreLimits(time_to_live_s=100.0)) as client:
        deleted, kept = await client.create(), await client.create()
        assert (await client.answer("DELETE", f"/{deleted['id']}"))["deleted"] is True
        await client.error("GET", f"/{deleted['id']}")
        await trio.sleep(99)
        await client.get(f"/{kept['id']}")
        await trio.sleep(1)
        await client.error("GET", f"/{kept['id']}")
        await client.create()
        await trio.sleep(200)
        assert len(client.responses.store) == 0


@pytest.mark.parametrize("options", [{"responses_ttl_s": 0.0}, {"responses_max_bytes": 0}])
async def test_an_operator_may_keep_nothing(options: dict[str, Any]) -> None:
    """Of an application without `open_responses`, and of the background. What is streamed comes whole all the same."""
    config = ServerConfig(**options)
    async with open_responses(store_limits(config)) as responses:
        for one in (None, responses):
            app = create_app(FakeEngine(), config, responses=one)
            client = Client(app, responses)
            kept = await client.create()
            await client.error("GET", f"/{kept['id']}")
        if "responses_ttl_s" in options:
            events: list[Any] = []
            await client.stream(events, background=True)
            assert events[-1]["type"] == "response.completed"
        assert len(responses.store) == 0


async def test_only_so_many_are_kept() -> None:
    """The oldest go first."""
    async with open_client(FakeEngine(), limits=StoreLimits(max_responses=2)) as client:
        first, second, third = [await client.create() for _ in range(3)]
        await client.error("GET", f"/{first['id']}")
        for response in (second, third):
            assert await client.get(f"/{response['id']}") == response


@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_parameters_are_a_400_before_any_event(stream: bool) -> None:
    """Streamed or not; and what only the core finds wrong with a form, with the client's path."""
    schema = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    error = RequestError("structured_outputs.json: too large.", param="structured_outputs.json")
    async with open_client(FakeEngine(ScriptedReply(deltas=(), error=error))) as client:
        found = await client.error("POST", status=400, input="Hi", text=text, stream=stream)
        assert found["param"] == "text.format"
    async with open_client(FakeEngine(enter_error=RequestError("no", param="temperature"))) as client:
        found = await client.error("POST", status=400, input="Hi", stream=stream)
        assert found["param"] == "temperature"
        found = await client.error("POST", status=400, input="Hi", stream=stream, background=True)
        assert found["param"] == "temperature"
        assert len(client.responses.store) == 0


async def test_the_joined_events_are_the_response_that_is_kept() -> None:
    """And it is kept before the stream has ended."""
    async with open_client(FakeEngine()) as client:
        events: list[Any] = []
        await client.stream(events)
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        final = events[-1]["response"]
        assert text == final["output"][0]["content"][0]["text"] == "Hello, world!"
        assert await client.get(f"/{final['id']}") == final


async def test_a_stream_begins_before_the_answer(autojump_clock: MockClock) -> None:
    """A client sees at once that its request was taken, then pings."""
    async with open_client(FakeEngine(ScriptedReply(first_delay_s=6.0))) as client:
        data = await (await client.ask("POST", input="Hi", stream=True)).get_data(as_text=True)
        assert data.index("response.in_progress") < data.index(": ping") < data.index("output_text.delta")


async def test_a_stream_that_fails_says_so_and_ends() -> None:
    """As an event: the headers are sent. The failed response is kept, and cannot be gone on from."""
    engine = FakeEngine(ScriptedReply(error=EngineDeadError("gone", cause="secret")))
    async with open_client(engine) as client:
        events = await events_of(await client.ask("POST", input="Hi", stream=True))
        assert events[-1]["type"] == "response.failed"
        failed = events[-1]["response"]
        assert failed["error"]["code"] == "server_error"
        assert failed["output"][0]["content"][0]["text"] == "Hello, world!"
        assert (await client.get(f"/{failed['id']}"))["status"] == "failed"
        error = await client.error("POST", status=400, input="Hi", previous_response_id=failed["id"])
        assert error["param"] == "previous_response_id"


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    """And can be gone on from."""
    engine = FakeEngine(ScriptedReply(finish_reason=FinishReason.LENGTH))
    async with open_client(engine) as client:
        response = await client.create(max_output_tokens=4)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        engine.reply = ScriptedReply()
        assert (await client.create(previous_response_id=response["id"]))["status"] == "completed"


async def test_reasoning_is_an_item_of_its_own() -> None:
    """As its text, or as its summary where one is asked for."""
    deltas = ("<think>", "2 + 2", "</think>", "\n\n", "4")
    config = EngineConfig(reasoning_parser="qwen3")  # pyright: ignore[reportArgumentType]
    async with open_client(FakeEngine(ScriptedReply(deltas=deltas), config=config)) as client:
        reasoning, message = (await client.create())["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "2 + 2"}]
        assert message["content"][0]["text"] == "4"
        reasoning, _ = (await client.create(reasoning={"summary": "auto"}))["output"]
        assert reasoning["summary"] == [{"type": "summary_text", "text": "2 + 2"}]


async def test_a_response_in_the_background_outlives_its_request() -> None:
    """It is queued, in progress with what there is so far, and then done."""
    go_on = trio.Event()
    async with open_client(FakeEngine(ScriptedReply(go_on=go_on))) as client:
        begun = await client.create(background=True)
        assert begun["status"] in ("queued", "in_progress")
        await wait_all_tasks_blocked()
        so_far = await client.get(f"/{begun['id']}")
        assert so_far["status"] == "in_progress"
        assert so_far["output"][0]["content"][0]["text"] == "Hello, world"
        going_on = await client.error("POST", status=400, input="Hi", previous_response_id=begun["id"])
        assert going_on["param"] == "previous_response_id"
        go_on.set()
        done = await client.settle(begun["id"])
        assert done["status"] == "completed"
        assert done["output"][0]["content"][0]["text"] == "Hello, world!"


async def test_events_of_the_background_can_be_read_again_from_anywhere() -> None:
    """Also while more come; what was not kept is a 400."""
    go_on = trio.Event()
    async with open_client(FakeEngine(ScriptedReply(go_on=go_on))) as client:
        first: list[Any] = []
        again: list[Any] = []
        late: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.stream, first, background=True))
            await wait_all_tasks_blocked()
            path = f"/{only_id(client)}?stream=true&starting_after=4"
            nursery.start_soon(client.stream, again, "GET", path)
            await wait_all_tasks_blocked()
            go_on.set()
        assert [event["sequence_number"] for event in first] == list(range(len(first)))
        assert again == first[5:]
        assert first[-1]["type"] == "response.completed"
        await client.stream(late, "GET", path)
        assert late == again
        plain = await client.create(background=True)
        for query, param in (("stream=true", "stream"), ("starting_after=1", "starting_after"), ("stream=5", "stream")):
            assert (await client.error("GET", f"/{plain['id']}?{query}", 400))["param"] == param


async def test_a_reader_waits_with_pings(autojump_clock: MockClock) -> None:
    """As other streams do."""
    async with open_client(FakeEngine(ScriptedReply(first_delay_s=12.0))) as client:
        response = await client.ask("POST", input="Hi", stream=True, background=True)
        data = await response.get_data(as_text=True)
        assert data.count(": ping\n\n") == 2
        assert data.rstrip().splitlines()[-2] == "event: response.completed"


@asynccontextmanager
async def open_scripted_client(script: Script) -> AsyncGenerator[tuple[ScriptedEngine, Client], None]:
    async with open_scripted_engine(script) as scripted, open_client(scripted.engine) as client:
        yield scripted, client


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
@pytest.mark.parametrize("method", ["cancel", "delete"])
async def test_a_cancel_ends_a_response_wherever_it_is(where: str, method: str, autojump_clock: MockClock) -> None:
    """Case 3: the core is told at once, and forgets it within a step; what was there stays in a cancelled one."""
    async with open_scripted_client(Script(pace_s=1.0, max_num_seqs=1)) as (scripted, client):
        if where == "queue":
            await client.create(background=True, max_output_tokens=1000)
        begun = await client.create(background=True, max_output_tokens=1000)
        await trio.sleep(5.5 if where != "prefill" else 0.5)
        path = f"/{begun['id']}"
        assert (await client.get(path))["status"] == ("in_progress" if where == "decode" else "queued")
        ended = await client.answer("POST" if method == "cancel" else "DELETE", path + "/cancel" * (method == "cancel"))
        await trio.sleep(1)
        assert any(isinstance(message, AbortRequests) for message in scripted.received)
        assert scripted.engine.num_open_requests == (1 if where == "queue" else 0)
        if method == "delete":
            await client.error("GET", path)
        else:
            assert ended["status"] == "cancelled"
            assert bool(ended["output"]) == (where == "decode")
            # A second time changes nothing.
            assert await client.answer("POST", f"{path}/cancel") == ended == await client.get(path)


async def test_only_the_background_can_be_cancelled() -> None:
    """And what has ended stays as it is."""
    async with open_client(FakeEngine()) as client:
        plain = await client.create()
        await client.error("POST", f"/{plain['id']}/cancel", 400)
        begun = await client.create(background=True)
        done = await client.settle(begun["id"])
        assert await client.answer("POST", f"/{begun['id']}/cancel") == done


async def test_a_deletion_ends_its_readers() -> None:
    """With the event of a cancellation."""
    engine = FakeEngine(ScriptedReply(go_on=trio.Event()))
    async with open_client(engine) as client:
        events: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.stream, events, background=True))
            await wait_all_tasks_blocked()
            await client.answer("DELETE", f"/{only_id(client)}")
        assert events[-1]["response"]["status"] == "cancelled"
        await wait_all_tasks_blocked()
        assert len(engine.live) == 0


async def test_a_failure_in_the_background_is_told_to_whoever_asks() -> None:
    """One response's failure is its own."""
    engine = FakeEngine(ScriptedReply(error=EngineDeadError("gone")))
    async with open_client(engine) as client:
        begun = await client.create(background=True)
        failed = await client.settle(begun["id"])
        assert failed["error"]["code"] == "server_error"
        engine.reply = ScriptedReply()
        assert (await client.create())["status"] == "completed"


async def test_too_many_in_the_background_are_refused() -> None:
    """With 503, until one of them has ended."""
    engine = FakeEngine(ScriptedReply(go_on=trio.Event()))
    async with open_client(engine, limits=StoreLimits(max_responses=2)) as client:
        first = await client.create(background=True)
        await client.create(background=True)
        refused = await client.ask("POST", input="Hi", background=True)
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        await client.answer("POST", f"/{first['id']}/cancel")
        await client.create(background=True)


async def test_leaving_the_block_ends_what_runs() -> None:
    """And the engine is told."""
    engine = FakeEngine(ScriptedReply(go_on=trio.Event()))
    async with open_client(engine) as client:
        for _ in range(3):
            await client.create(background=True)
        assert len(engine.live) == 3
    assert len(engine.live) == 0
    assert engine.num_aborted == 3


async def test_the_servers_stop_fails_what_runs() -> None:
    """Readers get the event, and nothing new is taken."""
    engine, stop, shutdown = FakeEngine(ScriptedReply(go_on=trio.Event())), trio.Event(), trio.Event()
    async with open_client(engine, stop=stop, shutdown=shutdown) as client:
        events: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.stream, events, background=True))
            await wait_all_tasks_blocked()
            shutdown.set()
            assert (await client.ask("POST", input="Hi", background=True)).status_code == 503
            stop.set()
        assert events[-1]["type"] == "response.failed"
        await wait_all_tasks_blocked()
        assert len(engine.live) == 0


@pytest.mark.parametrize("num_checkpoints", range(0, 40, 2))
async def test_a_client_that_vanishes_while_it_begins_leaves_nothing(num_checkpoints: int) -> None:
    """Case 1: before it knows the id nobody could ask for the response; after that it goes on."""
    engine = FakeEngine(ScriptedReply(go_on=trio.Event()))
    sent: list[ASGISendEvent] = []
    body = json.dumps({"input": "Hi", "background": True}).encode()

    async def receive() -> ASGIReceiveEvent:
        if sent or body in given:
            await trio.sleep_forever()
        given.append(body)
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(event: ASGISendEvent) -> None:
        sent.append(event)
        await trio.lowlevel.checkpoint()

    given: list[bytes] = []
    async with open_client(engine) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.app, _SCOPE, receive, send)
            for _ in range(num_checkpoints):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert len(engine.live) == len(client.responses.store)
        assert len(engine.live) == 1 or not sent


_SCOPE = cast(
    HTTPScope,
    {
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
    },
)


async def test_an_application_without_the_actor_makes_none_in_the_background() -> None:
    """But keeps responses."""
    client = Client(create_app(FakeEngine()), Responses())
    error = await client.error("POST", status=400, input="Hi", background=True)
    assert error["param"] == "background"
    kept = await client.create()
    assert (await client.get(f"/{kept['id']}"))["id"] == kept["id"]


async def test_errors_of_the_block_are_not_wrapped() -> None:
    """As `open_engine` has it."""
    for error in (EngineClosedError("x"), UnavailableError("y")):
        with pytest.raises(type(error)):
            async with open_responses():
                raise error
