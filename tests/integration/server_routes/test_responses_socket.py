"""A WebSocket of the Responses API over a scripted core: cancellation wherever a response is, and slow readers."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.server.context import ServerContext
from trioengine.server.responses_socket import MAX_WAITING, ResponsesConnection
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import ScriptedEngine, open_scripted_engine
from trioengine.types.messages import AbortRequests


class MemorySocket:
    """Both ends of a WebSocket."""

    def __init__(self) -> None:
        self._to_server, self._from_client = trio.open_memory_channel[str | None](100)
        self.events: list[Any] = []
        self.num_writes = 0
        self.may_write = trio.Event()
        self.may_write.set()
        self.close_code: int | None = None

    def send_event(self, **fields: object) -> None:
        self._to_server.send_nowait(json.dumps(fields))

    def hang_up(self) -> None:
        self._to_server.send_nowait(None)

    async def receive(self) -> str | bytes | None:
        return await self._from_client.receive()

    async def send(self, texts: Sequence[bytes]) -> None:
        await trio.lowlevel.checkpoint()
        await self.may_write.wait()
        self.num_writes += 1
        self.events += map(json.loads, texts)

    async def close(self, code: int, reason: str) -> None:
        await trio.lowlevel.checkpoint()
        self.close_code = code


@asynccontextmanager
async def open_socket(script: Script) -> AsyncGenerator[tuple[ScriptedEngine, MemorySocket], None]:
    async with open_scripted_engine(script) as scripted:
        socket = MemorySocket()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ResponsesConnection(ServerContext(scripted.engine), socket, "").run)
            yield scripted, socket
            nursery.cancel_scope.cancel()
        assert scripted.frontend.num_open_requests == 0


def create(socket: MemorySocket, **more: object) -> None:
    socket.send_event(type="response.create", input="Hi", max_output_tokens=1000, **more)


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
@pytest.mark.parametrize("names_it", [False, True])
async def test_a_cancel_ends_a_response_wherever_it_is(where: str, names_it: bool, autojump_clock: MockClock) -> None:
    """Case 3: within a step, by its id or by its lane; the next of the lane begins."""
    async with open_socket(Script(pace_s=1.0, max_num_seqs=1)) as (scripted, socket):
        if where == "queue":
            create(socket, stream_id="other")
        await trio.sleep(1.5)
        create(socket, stream_id="mine")
        await trio.sleep(0.2 if where == "prefill" else 4.0)
        mine = [event for event in socket.events if event["stream_id"] == "mine"]
        assert [event["type"] for event in mine[:2]] == ["response.created", "response.in_progress"]
        assert (len(mine) > 2) == (where == "decode")
        naming: dict[str, object] = {"response_id": mine[0]["response"]["id"]} if names_it else {"stream_id": "mine"}
        socket.send_event(type="response.cancel", **naming)
        await trio.sleep(2.0)
        last = [event for event in socket.events if event["stream_id"] == "mine"][-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["status"] == "cancelled"
        assert any(isinstance(message, AbortRequests) for message in scripted.received)
        assert scripted.engine.num_open_requests == (1 if where == "queue" else 0)


async def test_hanging_up_ends_all(autojump_clock: MockClock) -> None:
    """Case 3: what runs, what waits for the core and what waits in a lane, within a step."""
    async with open_socket(Script(pace_s=1.0, max_num_seqs=1)) as (scripted, socket):
        for stream_id in ("a", "b", "b", "c"):
            create(socket, stream_id=stream_id)
        await trio.sleep(3.5)
        assert scripted.num_adds == 3
        socket.hang_up()
        await wait_all_tasks_blocked()
        assert scripted.engine.num_open_requests == 0
        await trio.sleep(2.0)
        assert scripted.num_adds == 3


async def test_a_slow_reader_costs_less(autojump_clock: MockClock) -> None:
    """What comes meanwhile becomes one event; nothing is lost."""
    async with open_socket(Script(pace_s=0.01)) as (_, socket):
        socket.send_event(type="response.create", input="Hi", max_output_tokens=500)
        await trio.sleep(0.1)
        socket.may_write = trio.Event()
        await trio.sleep(60)
        socket.may_write.set()
        await wait_all_tasks_blocked()
        deltas = [event["delta"] for event in socket.events if event["type"] == "response.output_text.delta"]
        final = socket.events[-1]["response"]
        assert len(deltas) < 20
        assert "".join(deltas) == final["output"][0]["content"][0]["text"]
        assert final["usage"]["output_tokens"] == 500


async def test_an_error_says_of_which_stream_it_is(autojump_clock: MockClock) -> None:
    """Also one that comes before the event is in its lane, and one of too many."""
    async with open_socket(Script(pace_s=1.0)) as (_, socket):
        socket.send_event(type="session.update", stream_id="a")
        for _ in range(MAX_WAITING):
            create(socket, stream_id="b")
        create(socket, stream_id="c")
        await wait_all_tasks_blocked()
        errors = [event for event in socket.events if event["type"] == "error"]
        assert [(error["status"], error["stream_id"]) for error in errors] == [(400, "a"), (503, "c")]


async def test_what_is_no_event_is_an_error_and_the_connection_goes_on(autojump_clock: MockClock) -> None:
    """Each says what was wrong."""
    async with open_socket(Script()) as (_, socket):
        wrong: list[dict[str, object]] = [
            {},
            {"type": 5},
            {"type": "session.update"},
            {"type": "response.create", "stream_id": 5},
            {"type": "response.create", "stream_id": "x" * 257},
            {"type": "response.create", "input": "Hi", "generate": "no"},
            {"type": "response.create"},
            {"type": "response.create", "input": "Hi", "temperature": "hot"},
        ]
        for fields in wrong:
            socket.send_event(**fields)
        await wait_all_tasks_blocked()
        assert [event["error"]["param"] for event in socket.events] == [
            "type",
            "type",
            "type",
            "stream_id",
            "stream_id",
            "generate",
            "input",
            "temperature",
        ]
        assert all(event["status"] == 400 for event in socket.events)
        socket.send_event(type="response.cancel", response_id="resp_0")
        socket.send_event(type="response.create", input="Hi", max_output_tokens=2)
        await wait_all_tasks_blocked()
        assert socket.events[-1]["type"] == "response.incomplete"
        assert socket.close_code is None
