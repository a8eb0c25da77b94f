"""OpenAI's SDK, as it is, on `/v1/responses`: synchronous and asynchronous, over HTTP and over a WebSocket."""

import asyncio  # noqa: TID251 - The SDK's asynchronous WebSocket is asyncio's.
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import httpx2
import openai
import pydantic
import pytest
import trio
import websockets
from openai.types.responses import Response

from trioengine.config.server import ServerConfig
from trioengine.server.app import create_app
from trioengine.server.responses import open_responses
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.testing.http_server import RunningServer, open_server
from trioengine.types.request import ChatPrompt

T = TypeVar("T")
CONFIG = ServerConfig(port=0, access_log=False, tool_call_parser="hermes")  # pyright: ignore[reportArgumentType]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
MODEL = "fake-model"


class Sum(pydantic.BaseModel):
    a: int


@asynccontextmanager
async def open_app(
    engine: FakeEngine,
    config: ServerConfig = CONFIG,
    stop: trio.Event | None = None,
    shutdown: trio.Event | None = None,
) -> AsyncGenerator[RunningServer, None]:
    async with open_responses(stop=stop) as responses:
        app = create_app(engine, config, responses=responses, stop=stop, shutdown=shutdown)
        async with open_server(app, config) as server:
            yield server


def make_client(server: RunningServer, api_key: str = "k") -> Any:
    # Its unions of two dozen classes would make every line a check of types.
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0, timeout=20)


def make_async_client(server: RunningServer) -> Any:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0, timeout=20)


async def in_thread(func: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(func)


async def in_asyncio(func: Callable[[], Awaitable[T]]) -> T:
    async def run() -> T:
        return await func()

    return await trio.to_thread.run_sync(lambda: asyncio.run(run()))


async def test_everything_of_the_synchronous_client() -> None:
    """Create, stream, parse, retrieve, list, cancel, delete; and the classes of its errors."""
    engine = FakeEngine()

    def use() -> None:
        with make_client(server) as client:
            first = client.responses.create(model=MODEL, input="Hi", metadata={"a": "b"})
            assert first.output_text == "Hello, world!"
            assert first.usage is not None
            assert first.usage.total_tokens == 9
            events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
            assert events[-1].type == "response.completed"
            with client.responses.stream(model=MODEL, input="Hi") as stream:
                assert "".join(event.delta for event in stream if event.type == "response.output_text.delta")
                assert stream.get_final_response().output_text == "Hello, world!"
            second = client.responses.create(model=MODEL, input="more", previous_response_id=first.id)
            assert client.responses.retrieve(second.id) == second
            assert len(list(client.responses.input_items.list(second.id, limit=2))) == 3
            begun = client.responses.create(model=MODEL, input="Hi", background=True)
            assert client.responses.cancel(begun.id).status in ("cancelled", "completed")
            client.responses.delete(second.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(second.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.create(model=MODEL, input="Hi", previous_response_id=second.id)
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(model=MODEL, input="Hi", tools=[{"type": "web_search"}])
            assert caught.value.param == "tools[0].type"

    async with open_app(engine) as server:
        await in_thread(use)
        assert not engine.live


async def test_everything_of_the_asynchronous_client() -> None:
    """The same, with events of the background that are read from the middle."""
    engine = FakeEngine()

    async def use() -> None:
        async with make_async_client(server) as client:
            first = await client.responses.create(model=MODEL, input="Hi")
            async with client.responses.stream(model=MODEL, input="Hi", previous_response_id=first.id) as stream:
                final = await stream.get_final_response()
            assert final.output_text == "Hello, world!"
            events = [
                event
                async for event in await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
            ]
            created = events[0]
            assert created.type == "response.created"
            again = await client.responses.retrieve(created.response.id, stream=True, starting_after=3)
            assert [event async for event in again] == events[4:]
            async with client.responses.stream(response_id=created.response.id, starting_after=3) as resumed:
                assert (await resumed.get_final_response()).output_text == "Hello, world!"
            items = [item async for item in client.responses.input_items.list(final.id, order="asc")]
            assert [item.type for item in items] == ["message"] * 3
            await client.responses.cancel(created.response.id)
            await client.responses.delete(created.response.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(created.response.id)

    async with open_app(engine) as server:
        await in_asyncio(use)
        assert not engine.live


async def test_what_is_parsed_has_the_clients_classes() -> None:
    """Answers and arguments of calls, streamed and whole."""

    def use() -> None:
        with make_client(server) as client:
            engine.reply = ScriptedReply(deltas=('{"a"', ": 1}"))
            parsed = client.responses.parse(model=MODEL, input="Hi", text_format=Sum)
            assert parsed.output_parsed == Sum(a=1)
            with client.responses.stream(model=MODEL, input="Hi", text_format=Sum) as stream:
                assert stream.get_final_response().output_parsed == Sum(a=1)
            engine.reply = ScriptedReply(deltas=("Well. ", CALL[:20], CALL[20:50], CALL[50:]))
            tool = openai.pydantic_function_tool(Sum, name="add")["function"]
            tools: Any = [{"type": "function", **tool}]
            answer = client.responses.parse(model=MODEL, input="Hi", tools=tools)
            call = answer.output[1]
            assert call.type == "function_call"
            assert call.arguments == '{"a": 1}'
            with client.responses.stream(model=MODEL, input="Hi", tools=tools) as stream:
                deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
            assert "".join(deltas) == '{"a": 1}'

    engine = FakeEngine()
    async with open_app(engine) as server:
        await in_thread(use)


async def test_a_stream_that_its_reader_leaves_ends_in_the_engine() -> None:
    """Case 3 (vllm 9428)."""
    engine = FakeEngine(ScriptedReply(go_on=trio.Event()))

    def use() -> None:
        with make_client(server) as client, client.responses.create(model=MODEL, input="Hi", stream=True) as stream:
            next(iter(stream))

    async with open_app(engine) as server:
        await in_thread(use)
        await engine.last_left.wait()
        assert engine.num_aborted == 1


async def test_responses_one_after_the_other_on_a_websocket() -> None:
    """Each goes on from the last, though nothing is stored; what is wrong is an event, and the connection goes on."""
    engine = FakeEngine()

    def answer(connection: Any) -> Response:
        while True:
            event = connection.recv()
            assert event.type != "error", event
            if event.type == "response.completed":
                return event.response

    def use() -> None:
        with make_client(server) as client, client.responses.connect() as connection:
            connection.response.create(model=MODEL, input="Hi", store=False)
            first = answer(connection)
            assert first.output_text == "Hello, world!"
            connection.response.create(model=MODEL, input="b", store=False, previous_response_id=first.id)
            second = answer(connection)
            errors: list[tuple[dict[str, Any], int, str | None]] = [
                ({"input": "c", "previous_response_id": first.id}, 404, "previous_response_id"),
                ({"input": "c", "model": "none"}, 404, "model"),
                ({"input": "c", "background": True}, 400, "background"),
                ({"input": "c", "tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
            ]
            for fields, status, param in errors:
                connection.response.create(**fields)
                event = connection.recv()
                assert event.type == "error"
                assert (event.status, event.error.param) == (status, param)
            connection.response.steer(input=[], previous_response_id=second.id)
            assert connection.recv().error.param == "type"
            connection.send_raw("{")
            assert connection.recv().type == "error"
            connection.response.create(model=MODEL, input="d", previous_response_id=second.id)
            stored = answer(connection)
            assert client.responses.retrieve(stored.id).output_text == "Hello, world!"
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(second.id)

    async with open_app(engine) as server:
        await in_thread(use)
        prompts = [cast(ChatPrompt, request.prompt) for request in engine.requests]
        assert [len(prompt.messages) for prompt in prompts] == [1, 3, 5]


async def test_lanes_are_answered_at_the_same_time() -> None:
    """Those of one lane in their order; every event says of which it is."""
    engine = FakeEngine()

    async def use() -> None:
        async with make_async_client(server) as client, client.responses.connect() as connection:
            for stream_id in ("a", "b", "a"):
                await connection.response.create(model=MODEL, input="Hi", stream_id=stream_id)
            numbers: dict[str, list[int]] = {"a": [], "b": []}
            num_completed = 0
            while num_completed < 3:
                event: Any = await connection.recv()
                numbers[event.stream_id].append(event.sequence_number)
                num_completed += event.type == "response.completed"
            one = list(range(12))
            assert numbers == {"a": [*one, *one], "b": one}

    async with open_app(engine) as server:
        await in_asyncio(use)
        assert not engine.live


async def test_a_prepared_response_is_gone_on_from() -> None:
    """`generate: false` answers nothing, and asks the engine for nothing."""
    engine = FakeEngine()

    async def use() -> None:
        async with make_async_client(server) as client, client.responses.connect() as connection:
            await connection.response.create(model=MODEL, input="long", generate=False)
            events: list[Any] = [await connection.recv() for _ in range(3)]
            assert events[-1].type == "response.completed"
            assert events[-1].response.output == []
            previous_id = events[-1].response.id
            await connection.response.create(model=MODEL, input="short", previous_response_id=previous_id)
            while (await connection.recv()).type != "response.completed":
                pass

    async with open_app(engine) as server:
        await in_asyncio(use)
        assert len(engine.requests) == 1


async def test_a_response_on_a_websocket_can_be_cancelled() -> None:
    """By an event; the connection goes on with the next."""
    engine = FakeEngine(ScriptedReply(go_on=trio.Event()))

    async def use() -> None:
        async with make_async_client(server) as client, client.responses.connect() as connection:
            await connection.response.create(model=MODEL, input="Hi")
            created: Any = await connection.recv()
            await connection.send({"type": "response.cancel", "response_id": created.response.id})
            while (event := await connection.recv()).type != "response.incomplete":
                pass
            assert event.response.status == "cancelled"
            engine.reply = ScriptedReply()
            await connection.response.create(model=MODEL, input="Hi")
            while (await connection.recv()).type != "response.completed":
                pass

    async with open_app(engine) as server:
        await in_asyncio(use)
        assert not engine.live


async def test_closing_the_connection_aborts_what_is_on_it() -> None:
    """Case 3: all lanes, and what waits in them."""
    engine = FakeEngine(ScriptedReply(go_on=trio.Event()))

    def use() -> None:
        with make_client(server) as client, client.responses.connect() as connection:
            for stream_id in ("a", "b", "b"):
                connection.response.create(model=MODEL, input="Hi", stream_id=stream_id)
            names: set[str | None] = set()
            while len(names) < 2:
                event: Any = connection.recv()
                names.add(event.stream_id)

    async with open_app(engine) as server:
        await in_thread(use)
        await engine.last_left.wait()
        assert engine.num_aborted == len(engine.requests) == 2


async def test_too_many_on_one_connection_are_refused() -> None:
    """With an error that says to come again; the others are answered."""
    go_on = trio.Event()
    engine = FakeEngine(ScriptedReply(go_on=go_on))

    def use() -> None:
        with make_client(server) as client, client.responses.connect() as connection:
            for _ in range(70):
                connection.response.create(model=MODEL, input="Hi")
            num_errors = 0
            num_completed = 0
            while num_errors + num_completed < 70:
                event: Any = connection.recv()
                if event.type == "error":
                    assert event.status == 503
                    num_errors += 1
                    if num_errors == 6:
                        trio.from_thread.run_sync(go_on.set)
                num_completed += event.type == "response.completed"
            assert num_errors == 6

    async with open_app(engine) as server:
        await in_thread(use)


async def test_a_websocket_needs_the_key() -> None:
    """And sees the responses of its own key only."""
    config = ServerConfig(port=0, access_log=False, api_key=("k", "other"))

    def use() -> None:
        with make_client(server, api_key="wrong") as client:
            with pytest.raises(websockets.exceptions.InvalidStatus) as caught, client.responses.connect():
                pass
            assert caught.value.response.status_code == 401
        with make_client(server) as mine, make_client(server, api_key="other") as other:
            stored = mine.responses.create(model=MODEL, input="Hi")
            with other.responses.connect() as connection:
                connection.response.create(model=MODEL, input="Hi", previous_response_id=stored.id)
                event = connection.recv()
                assert event.type == "error"
                assert event.status == 404

    async with open_app(FakeEngine(), config) as server:
        await in_thread(use)


async def test_a_server_that_drains_lets_responses_finish_and_then_says_goodbye() -> None:
    """With 1001; new ones are refused meanwhile."""
    go_on, shutdown = trio.Event(), trio.Event()
    engine = FakeEngine(ScriptedReply(go_on=go_on))

    def use() -> None:
        with make_client(server) as client, client.responses.connect() as connection:
            connection.response.create(model=MODEL, input="Hi", stream_id="a")
            assert connection.recv().type == "response.created"
            trio.from_thread.run_sync(shutdown.set)
            connection.response.create(model=MODEL, input="Hi", stream_id="b")
            while (event := connection.recv()).type != "error":
                pass
            assert event.status == 503
            trio.from_thread.run_sync(go_on.set)
            while connection.recv().type != "response.completed":
                pass
            with pytest.raises(websockets.exceptions.ConnectionClosed) as caught:
                connection.recv()
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1001

    async with open_app(engine, shutdown=shutdown) as server:
        await in_thread(use)


async def test_the_servers_stop_fails_what_is_on_a_websocket() -> None:
    """With the event, before the goodbye."""
    stop, shutdown = trio.Event(), trio.Event()
    engine = FakeEngine(ScriptedReply(go_on=trio.Event()))

    def use() -> None:
        with make_client(server) as client, client.responses.connect() as connection:
            connection.response.create(model=MODEL, input="Hi")
            assert connection.recv().type == "response.created"
            trio.from_thread.run_sync(shutdown.set)
            trio.from_thread.run_sync(stop.set)
            while (event := connection.recv()).type != "response.failed":
                pass
            assert event.response.error is not None

    async with open_app(engine, stop=stop, shutdown=shutdown) as server:
        await in_thread(use)
        assert not engine.live


async def test_a_message_that_is_no_text_closes_the_connection() -> None:
    """With 1003; the server goes on."""

    def use() -> None:
        with make_client(server) as client:
            with client.responses.connect() as connection:
                connection._connection.send(b"\x00")
                with pytest.raises(websockets.exceptions.ConnectionClosed) as caught:
                    connection.recv()
                assert caught.value.rcvd is not None
                assert caught.value.rcvd.code == 1003
            assert httpx2.get(f"{server.url}/health").status_code == 200

    async with open_app(FakeEngine()) as server:
        await in_thread(use)
