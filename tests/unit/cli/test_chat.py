"""The conversation: what is remembered, and what Ctrl-C stops. The reader: lines however the bytes come."""

import os
from pathlib import Path

import pytest
import trio
import trio.testing

from trioengine.cli.chat import Conversation
from trioengine.cli.line_reader import LineReader
from trioengine.errors import RequestError
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import ChatPrompt

DELTAS = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA)


async def test_each_answer_becomes_part_of_the_next_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(ScriptedReply(deltas=("Hi", "!")))
    conversation = Conversation("Be brief.", DELTAS)
    await conversation.answer(engine, "Hello")
    await conversation.answer(engine, "Again")

    prompt = engine.requests[1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [(message["role"], message["content"]) for message in prompt.messages] == [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", "Hi!"),
        ("user", "Again"),
    ]
    assert capsys.readouterr().out == "Hi!Hi!"


async def test_stopping_an_answer_keeps_what_was_said_and_the_engine_forgets_it() -> None:
    never = trio.Event()
    engine = FakeEngine(ScriptedReply(deltas=("Once", " upon", " a"), go_on=never))
    conversation = Conversation(None, DELTAS)
    assert not conversation.stop_answer()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(conversation.answer, engine, "Tell me")
        await trio.testing.wait_all_tasks_blocked()
        assert conversation.stop_answer()
    assert not engine.live
    assert conversation.messages[-1] == {"role": "assistant", "content": "Once upon"}
    assert not conversation.stop_answer()


async def test_a_refused_message_leaves_the_conversation_as_it_was() -> None:
    conversation = Conversation("Be brief.", DELTAS)
    with pytest.raises(RequestError):
        await conversation.answer(FakeEngine(enter_error=RequestError("too long")), "Hello")
    assert len(conversation.messages) == 1
    assert not conversation.stop_answer()


async def test_lines_are_whole_however_their_bytes_come() -> None:
    read_fd, write_fd = os.pipe()
    try:
        reader = LineReader(read_fd)
        lines: list[str | None] = []

        async def read() -> None:
            lines.append(await reader.read_line())

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                os.write(write_fd, "gr\u00fc".encode()[:-1])
                await trio.testing.wait_all_tasks_blocked()
                assert lines == []
                os.write(write_fd, "\u00fc".encode()[-1:] + b"n\r\nsecond\nno end")
            os.close(write_fd)
            while lines[-1] is not None:
                await read()
        assert lines == ["gr\u00fcn", "second", "no end", None]
    finally:
        os.close(read_fd)


async def test_a_read_that_is_cancelled_loses_nothing() -> None:
    read_fd, write_fd = os.pipe()
    try:
        reader = LineReader(read_fd)
        os.write(write_fd, b"begin")
        with trio.move_on_after(0) as scope:
            await reader.read_line()
        assert scope.cancelled_caught
        os.write(write_fd, b" end\n")
        with trio.fail_after(10):
            assert await reader.read_line() == "begin end"
    finally:
        os.close(read_fd)
        os.close(write_fd)


async def test_a_regular_file_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_text("one\ntwo\n")
    fd = os.open(path, os.O_RDONLY)
    try:
        reader = LineReader(fd)
        assert [await reader.read_line() for _ in range(3)] == ["one", "two", None]
    finally:
        os.close(fd)


async def test_the_null_device_is_an_input_that_has_ended() -> None:
    """`trioengine chat < /dev/null`: epoll refuses it, as it does regular files."""
    fd = os.open(os.devnull, os.O_RDONLY)
    try:
        assert await LineReader(fd).read_line() is None
    finally:
        os.close(fd)
