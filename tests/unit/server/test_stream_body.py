"""A streamed body on its own: who leaves the request, and what a reader of the body sees."""

import json

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioengine.errors import RequestError
from trioengine.openai.chat_answer import ChatForm
from trioengine.openai.chat_stream import chat_events
from trioengine.openai.sse import ReplyHead
from trioengine.server.stream_body import StreamBody, enter_request
from trioengine.testing.fake_engine import FakeEngine, FakeOutputStream, ScriptedReply
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.output import RequestOutput
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest

REQUEST = GenerateRequest("Hi", SamplingParams(output_kind=RequestOutputKind.DELTA))
HEAD = ReplyHead("id", 0, "model")


async def read_body(engine: FakeEngine, outputs: FakeOutputStream, chunks: list[bytes]) -> None:
    """What Quart does: a route in a task of the nursery of one HTTP request, then the body."""
    scope = await enter_request(outputs)
    assert engine.live
    async with StreamBody(outputs, chat_events(HEAD, ChatForm(tokenizer=FakeTokenizer())), scope) as body:
        async for chunk in body:
            chunks.append(chunk)
    await wait_all_tasks_blocked()
    assert not engine.live


async def test_a_body_that_was_read_leaves_its_request() -> None:
    """At its end, before the HTTP request's nursery is cancelled."""
    engine, chunks = FakeEngine(), list[bytes]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_body, engine, engine.generate(REQUEST), chunks)
    assert len(chunks) == 4
    assert all(chunks)
    assert chunks[-1].endswith(b"data: [DONE]\n\n")
    assert engine.num_aborted == 0


async def test_a_request_that_is_refused_leaves_no_task() -> None:
    """The error reaches the route, and the nursery ends by itself."""
    engine = FakeEngine(enter_error=RequestError("no"))

    async def route() -> None:
        with pytest.raises(RequestError):
            await enter_request(engine.generate(REQUEST))

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(route)
    assert not engine.live


async def test_a_request_whose_body_nobody_reads_is_left_with_its_nursery() -> None:
    """The route has returned, and the client is gone before the headers."""
    engine = FakeEngine()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(enter_request, engine.generate(REQUEST))
        await wait_all_tasks_blocked()
        assert len(engine.live) == 1
        nursery.cancel_scope.cancel()
    assert not engine.live
    assert engine.num_aborted == 1


async def test_a_request_that_is_entered_in_a_cancelled_nursery_is_left() -> None:
    """The task that leaves it starts even then."""
    engine = FakeEngine()

    async def route(scope: trio.CancelScope) -> None:
        with trio.CancelScope(shield=True):
            scope.cancel()
            await enter_request(engine.generate(REQUEST))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(route, nursery.cancel_scope)
    assert len(engine.requests) == 1
    assert not engine.live


async def test_outputs_that_end_without_a_last_one_are_an_error() -> None:
    """A stream that merely stops would be taken for an answer."""

    class Ending(FakeOutputStream):
        async def __anext__(self) -> RequestOutput:
            raise StopAsyncIteration

    engine, chunks = FakeEngine(), list[bytes]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_body, engine, Ending(engine, REQUEST, ScriptedReply()), chunks)
    (event,) = chunks
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "generation_failed"


async def test_a_bug_while_streaming_is_an_error_event() -> None:
    """Without its message, which is for the log."""

    class Broken(FakeOutputStream):
        async def __anext__(self) -> RequestOutput:
            raise ValueError("secret")

    engine, chunks = FakeEngine(), list[bytes]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_body, engine, Broken(engine, REQUEST, ScriptedReply()), chunks)
    (event,) = chunks
    assert b"secret" not in event
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "internal_error"
