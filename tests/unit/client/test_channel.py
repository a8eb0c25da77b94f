"""The coalescing channel: no token lost, at most one object waiting, whatever the reader does."""

from typing import Any

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.client.channel import CoalescingChannel
from trioengine.errors import EngineGenerateError
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.frontend.pending_output import PendingOutput
from trioengine.types.output import FinishReason

ENTRY = LogprobEntry(1, b"\1\0\0\0", b"\0\0\0\0")


class Reader:
    """A task that reads once, and what it got."""

    def __init__(self, channel: CoalescingChannel) -> None:
        self.channel = channel
        self.scope = trio.CancelScope()
        self.got: PendingOutput | None = None

    async def read(self) -> None:
        with self.scope:
            self.got = await self.channel.receive()


def num_waiting(channel: CoalescingChannel) -> int:
    return channel._receive.statistics().current_buffer_used


async def test_what_was_put_is_received() -> None:
    channel = CoalescingChannel()
    channel.put("a", [1])
    received = await channel.receive()
    assert (received.texts, received.token_ids, received.is_last) == (["a"], [1], False)
    assert received.is_taken


async def test_what_is_known_of_the_prompt_wakes_nobody_and_comes_with_the_first_output() -> None:
    channel = CoalescingChannel()
    reader = Reader(channel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.read)
        channel.put_prompt(3, [ENTRY])
        await wait_all_tasks_blocked()
        channel.put_prompt(0, [ENTRY])
        await wait_all_tasks_blocked()
        assert reader.got is None
        channel.put("a", [1], logprobs=[ENTRY])
    assert reader.got is not None
    assert (reader.got.num_cached_tokens, reader.got.prompt_logprobs) == (3, [ENTRY, ENTRY])
    assert (reader.got.token_ids, reader.got.logprobs) == ([1], [ENTRY])


async def test_log_probabilities_are_merged_with_their_tokens() -> None:
    channel = CoalescingChannel()
    for rank in (1, 2):
        channel.put("a", [rank], logprobs=[attrs.evolve(ENTRY, rank=rank)])
    received = await channel.receive()
    assert [entry.rank for entry in received.logprobs] == received.token_ids == [1, 2]
    channel.put("a", [3], logprobs=[attrs.evolve(ENTRY, rank=3)])
    assert [entry.rank for entry in (await channel.receive()).logprobs] == [3]
    assert len(received.logprobs) == 2


async def test_a_slow_reader_gets_one_larger_output() -> None:
    channel = CoalescingChannel()
    for index in range(1000):
        channel.put("x", [index])
        assert num_waiting(channel) == 1
    channel.put("!", [1000], FinishReason.STOP, "!")
    received = await channel.receive()
    assert received.token_ids == list(range(1001))
    assert "".join(received.texts) == "x" * 1000 + "!"
    assert (received.finish_reason, received.stop_reason) == (FinishReason.STOP, "!")
    with pytest.raises(trio.EndOfChannel):
        await channel.receive()


async def test_a_sleeping_reader_is_handed_the_first_put_and_the_next_is_merged_into_it() -> None:
    """Until the reader has run, both are one output."""
    channel = CoalescingChannel()
    reader = Reader(channel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.read)
        await wait_all_tasks_blocked()
        channel.put("a", [1])
        channel.put("b", [2])
        assert num_waiting(channel) == 0
    assert reader.got is not None
    assert reader.got.token_ids == [1, 2]
    channel.put("c", [3])
    assert (await channel.receive()).token_ids == [3]
    assert reader.got.token_ids == [1, 2]


async def test_a_cancel_at_the_hand_over_loses_nothing() -> None:
    """A reader that has been handed an output gets it, though it was cancelled before it ran."""
    channel = CoalescingChannel()
    reader = Reader(channel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.read)
        await wait_all_tasks_blocked()
        channel.put("a", [1])
        reader.scope.cancel()
        channel.put("b", [2])
    assert reader.got is not None
    assert reader.got.token_ids == [1, 2]
    assert not reader.scope.cancelled_caught


async def test_a_put_after_a_cancelled_read_waits_for_the_next() -> None:
    channel = CoalescingChannel()
    reader = Reader(channel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.read)
        await wait_all_tasks_blocked()
        reader.scope.cancel()
        channel.put("a", [1])
    assert reader.got is None
    assert reader.scope.cancelled_caught
    assert (await channel.receive()).token_ids == [1]


async def test_a_cancelled_read_takes_nothing() -> None:
    channel = CoalescingChannel()
    channel.put("a", [1])
    with trio.CancelScope() as scope:
        scope.cancel()
        await channel.receive()
    channel.put("b", [2])
    assert (await channel.receive()).token_ids == [1, 2]


@pytest.mark.parametrize("is_final_only", [False, True])
async def test_an_error_comes_behind_waiting_tokens(is_final_only: bool) -> None:
    channel = CoalescingChannel(is_final_only=is_final_only)
    channel.put("a", [1])
    error = EngineGenerateError("broken")
    channel.fail(error)
    received = await channel.receive()
    assert (received.texts, received.token_ids, received.error) == (["a"], [1], error)
    with pytest.raises(trio.EndOfChannel):
        await channel.receive()


async def test_an_error_alone_is_received() -> None:
    channel = CoalescingChannel()
    channel.put("a", [1])
    await channel.receive()
    error = EngineGenerateError("broken")
    channel.fail(error)
    received = await channel.receive()
    assert (received.token_ids, received.error) == ([], error)


async def test_final_only_wakes_its_reader_once() -> None:
    channel = CoalescingChannel(is_final_only=True)
    reader = Reader(channel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.read)
        for index in range(5):
            channel.put("x", [index])
            await wait_all_tasks_blocked()
            assert reader.got is None
            assert num_waiting(channel) == 0
        channel.put("", [], FinishReason.LENGTH)
    assert reader.got is not None
    assert reader.got.token_ids == [0, 1, 2, 3, 4]
    assert reader.got.finish_reason is FinishReason.LENGTH


async def test_putting_for_a_reader_that_has_left_does_nothing() -> None:
    channel = CoalescingChannel()
    channel.put("a", [1])
    channel.close()
    channel.close()
    channel.put("b", [2])
    channel.put("c", [3], FinishReason.LENGTH)
    with pytest.raises(trio.ClosedResourceError):
        await channel.receive()


async def test_leaving_wakes_a_reader_in_another_task() -> None:
    channel = CoalescingChannel()
    woken: list[str] = []

    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await channel.receive()
        woken.append("woken")

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            channel.close()
    assert woken == ["woken"]


@given(
    schedule=st.lists(st.sampled_from(["put", "put", "yield", "read", "cancelled read"]), max_size=40),
    ending=st.sampled_from(["finish", "finish with text", "error"]),
    is_final_only=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_whatever_the_schedule_the_joined_outputs_are_what_was_put(
    schedule: list[str], ending: str, is_final_only: bool
) -> None:
    """At most one object waits, and none that was received changes afterwards."""

    async def run() -> None:
        channel = CoalescingChannel(is_final_only=is_final_only)
        put: list[int] = []
        received: list[PendingOutput] = []
        as_received: list[Any] = []

        async def read(scope: trio.CancelScope) -> None:
            with scope:
                output = await channel.receive()
                received.append(output)
                as_received.append((list(output.token_ids), list(output.texts), output.is_last))

        async with trio.open_nursery() as nursery:
            for action in schedule:
                match action:
                    case "put":
                        put.append(len(put))
                        channel.put(f"{put[-1]} ", put[-1:])
                    case "yield":
                        await wait_all_tasks_blocked()
                    case "read" | "cancelled read":
                        scope = trio.CancelScope()
                        if not nursery.child_tasks:  # One reader.
                            nursery.start_soon(read, scope)
                            await trio.lowlevel.checkpoint()
                        if action == "cancelled read":
                            scope.cancel()
                assert num_waiting(channel) <= 1
            match ending:
                case "finish":
                    channel.put("", [], FinishReason.LENGTH)
                case "finish with text":
                    put.append(len(put))
                    channel.put(f"{put[-1]} ", put[-1:], FinishReason.LENGTH)
                case _:
                    channel.fail(EngineGenerateError("broken"))
        while not received or not received[-1].is_last:
            await read(trio.CancelScope())
        with pytest.raises(trio.EndOfChannel):
            await channel.receive()
        assert [token for output in received for token in output.token_ids] == put
        assert "".join(text for output in received for text in output.texts) == "".join(f"{each} " for each in put)
        assert as_received == [(output.token_ids, output.texts, output.is_last) for output in received]
        assert [output.is_last for output in received] == [False] * (len(received) - 1) + [True]
        assert len(received) == 1 or not is_final_only

    trio.run(run, clock=MockClock(autojump_threshold=1))
