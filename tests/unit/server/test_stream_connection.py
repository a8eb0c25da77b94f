"""One client of `/v1/stream` over a transport in memory: who waits for whom, and what is left at its end."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.openai.stream_protocol import CONGESTED_BYTES, StartRequest
from trioengine.server.stream_connection import (
    HELLO_TIMEOUT_S,
    LONG_MESSAGE_CHARS,
    Answer,
    LiveRequest,
    StreamConnection,
)
from trioengine.types.stream_messages import StreamLimits

HELLO = {"type": "hello", "version": 1}
DATA = b'"' + b"x" * 998 + b'"'


@attrs.define(eq=False, slots=False)
class MemoryTransport:
    """A client that says what it is told to, and reads only while `is_reading` is set."""

    sent: list[bytes] = attrs.field(factory=list[bytes])
    writes: list[int] = attrs.field(factory=list[int])
    """Messages of each write."""
    closed: tuple[int, str] | None = None
    is_reading: trio.Event = attrs.field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self.say, self._said = trio.open_memory_channel[str | bytes | None](1000)
        self.is_reading.set()

    async def receive(self) -> str | bytes | None:
        return await self._said.receive()

    async def send(self, texts: Sequence[bytes]) -> None:
        await self.is_reading.wait()
        self.sent.extend(texts)
        self.writes.append(len(texts))

    async def close(self, code: int, reason: str) -> None:
        self.closed = (code, reason)
        self.say.send_nowait(None)

    def tell(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self.say.send_nowait(json.dumps(message))

    def create(self, id_: str = "1", **more: Any) -> None:
        self.tell({"type": "create", "id": id_, "endpoint": "chat", "body": {}, **more})

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.sent]


@asynccontextmanager
async def open_connection(
    answer: Answer, *messages: dict[str, Any]
) -> AsyncGenerator[tuple[MemoryTransport, list[str]]]:
    transport = MemoryTransport()
    aborted: list[str] = []
    connection = StreamConnection(transport, answer, aborted.append, model_name="a-model", limits=StreamLimits())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        transport.tell(HELLO, *messages)
        await wait_all_tasks_blocked()
        yield transport, aborted
        nursery.cancel_scope.cancel()


async def test_a_client_that_does_not_read_stops_the_reading_of_the_engine() -> None:
    num_made = 0

    async def answer(request: LiveRequest, start: StartRequest) -> None:
        nonlocal num_made
        request.started(1)
        for _ in range(3000):
            await request.wait_to_read()
            request.chunk(DATA)
            num_made += 1
            await trio.lowlevel.checkpoint()
        request.done()

    async with open_connection(answer) as (transport, _):
        transport.is_reading = trio.Event()
        for index in range(3):
            transport.create(str(index))
        await wait_all_tasks_blocked()
        # What the transport has in hand, and as much again.
        assert num_made * len(DATA) < 2 * CONGESTED_BYTES + 10_000
        transport.is_reading.set()
        await wait_all_tasks_blocked()
        assert num_made == 9000
        assert sum(message["type"] == "chunk" for message in transport.messages) == 9000
        assert sum(message["type"] == "done" for message in transport.messages) == 3


async def test_messages_that_wait_go_in_one_write() -> None:
    async def answer(request: LiveRequest, start: StartRequest) -> None:
        for _ in range(10):
            request.chunk(b"{}")
        request.done()

    async with open_connection(answer) as (transport, _):
        transport.create()
        await wait_all_tasks_blocked()
        assert transport.writes == [1, 11]


async def test_its_end_leaves_every_request() -> None:
    left: list[str] = []

    async def answer(request: LiveRequest, start: StartRequest) -> None:
        request.started(1)
        try:
            await trio.sleep_forever()
        finally:
            left.append(start.create.id)

    async with open_connection(answer) as (transport, _):
        for id_ in "123":
            transport.create(id_)
        await wait_all_tasks_blocked()
        assert left == []
        transport.say.send_nowait(None)
        await wait_all_tasks_blocked()
        assert sorted(left) == ["1", "2", "3"]


async def test_an_old_request_says_nothing_in_the_name_of_a_new_one_with_its_id() -> None:
    """It was cancelled before the engine had it, and goes on a little: in a thread, say."""
    go_on = trio.Event()
    live: list[LiveRequest] = []

    async def answer(request: LiveRequest, start: StartRequest) -> None:
        live.append(request)
        with trio.CancelScope(shield=True):
            await go_on.wait()
        request.started(1)
        request.chunk(b'"of the first"' if request is live[0] else b'"of the second"')
        request.done(["stop"])

    async with open_connection(answer) as (transport, aborted):
        transport.create()
        transport.tell({"type": "cancel", "id": "1"})
        transport.create()
        await wait_all_tasks_blocked()
        go_on.set()
        await wait_all_tasks_blocked()
        assert [(each["type"], each.get("data", each.get("finish"))) for each in transport.messages[1:]] == [
            ("done", ["abort"]),
            ("started", None),
            ("chunk", "of the second"),
            ("done", ["stop"]),
        ]
        assert aborted == []


async def test_a_cancel_is_the_engines_once_it_has_the_request() -> None:
    async def answer(request: LiveRequest, start: StartRequest) -> None:
        request.engine_ids = ["a", "b"]
        request.started(1)
        await request.wait_to_read()
        request.chunk(b"{}")
        request.done(["abort"])

    async with open_connection(answer) as (transport, aborted):
        transport.create(credits=0)
        await wait_all_tasks_blocked()
        transport.tell({"type": "cancel", "id": "1"})
        await wait_all_tasks_blocked()
        assert aborted == ["a", "b"]
        assert [each["type"] for each in transport.messages] == ["hello", "started", "chunk", "done"]


async def test_a_request_that_fails_ends_itself_only(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(request: LiveRequest, start: StartRequest) -> None:
        if start.create.id == "bad":
            raise RuntimeError("secret")
        request.done()

    async with open_connection(answer) as (transport, _):
        transport.create("bad")
        transport.create("good")
        await wait_all_tasks_blocked()
        ends = {each["id"]: each for each in transport.messages[1:]}
        assert (ends["bad"]["status"], ends["good"]["type"]) == (500, "done")
        assert b"secret" not in b"".join(transport.sent)
    assert "secret" in caplog.text


async def test_a_long_message_is_read_like_any_other() -> None:
    seen: list[object] = []

    async def answer(request: LiveRequest, start: StartRequest) -> None:
        seen.append(start.create.body["text"])
        request.done()

    text = "x" * LONG_MESSAGE_CHARS
    async with open_connection(answer) as (transport, _):
        transport.create(body={"text": text})
        while len(transport.sent) < 2:
            await trio.lowlevel.checkpoint()
    assert seen == [text]


async def test_a_client_that_does_not_greet_is_closed(autojump_clock: MockClock) -> None:
    async def answer(request: LiveRequest, start: StartRequest) -> None:
        raise AssertionError("reached")

    transport = MemoryTransport()
    connection = StreamConnection(transport, answer, lambda _: None, model_name="a-model", limits=StreamLimits())
    await connection.run()
    assert trio.current_time() == pytest.approx(HELLO_TIMEOUT_S)
    assert transport.closed is not None
    assert transport.closed[0] == 1008


async def test_a_client_that_does_not_answer_the_closing_is_left(autojump_clock: MockClock) -> None:
    async def answer(request: LiveRequest, start: StartRequest) -> None:
        raise AssertionError("reached")

    class Deaf(MemoryTransport):
        async def close(self, code: int, reason: str) -> None:
            self.closed = (code, reason)

    transport = Deaf()
    connection = StreamConnection(transport, answer, lambda _: None, model_name="a-model", limits=StreamLimits())
    transport.say.send_nowait(b"binary")
    with trio.fail_after(60):
        await connection.run()
    assert transport.closed == (1003, "Messages are text.")
