"""The coalescing channel: no token lost, at most one object waiting, whatever the reader does."""

from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.client.channel import CoalescingChannel
from trioengine.errors import EngineGenerateError
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.frontend.pending_output import ParallelPendingOutput, PendingOutput
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
            self.got = await self.channel.receive()  # type: ignore[assignment]


async def test_what_was_put_is_received() -> None:
    channel = CoalescingChannel()
    channel.put("a", [1])
    received = await channel.receive()
    assert (received.texts, received.token_ids, received.is_last) == (["a"], [1], False)


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
    assert [entry.rank for entry in received.logprobs or ()] == received.token_ids == [1, 2]
    channel.put("a", [3], logprobs=[attrs.evolve(ENTRY, rank=3)])
    assert [entry.rank for entry in (await channel.receive()).logprobs or ()] == [3]
    assert len(received.logprobs or ()) == 2


async def test_a_slow_reader_gets_one_larger_output() -> None:
    channel = CoalescingChannel()
    for index in range(1000):
        channel.put("x", [index])
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
        channel.put("", [], FinishReason.LENGTH)
    assert reader.got is not None
    assert reader.got.token_ids == [0, 1, 2, 3, 4]
    assert reader.got.finish_reason is FinishReason.LENGTH


async def test_a_prompt_that_comes_after_the_wake_up_belongs_to_that_output() -> None:
    channel = CoalescingChannel()
    reader = Reader(channel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.read)
        await wait_all_tasks_blocked()
        channel.put("a", [1])
        channel.put_weight_version("2")
    assert reader.got is not None
    assert reader.got.weight_version == "2"
    channel.put("b", [2])
    assert (await channel.receive()).weight_version is None


async def test_an_interval_holds_tokens_until_there_are_enough() -> None:
    """The first output and the last excepted; how they were put makes no difference."""
    channel = CoalescingChannel(interval=3)
    got: list[list[int]] = []

    async def read() -> None:
        while not got or got[-1][-1] != 10:
            got.append(list((await channel.receive()).token_ids))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        for number in range(8):
            channel.put("x", [number])
            await wait_all_tasks_blocked()
        channel.put("x", [8, 9])
        await wait_all_tasks_blocked()
        channel.put("x", [10], FinishReason.LENGTH)
    assert got == [[0], [1, 2, 3], [4, 5, 6], [7, 8, 9], [10]]


async def test_an_error_does_not_wait_for_an_interval() -> None:
    channel = CoalescingChannel(interval=100)
    channel.put("x", [0])
    await channel.receive()
    channel.put("x", [1])
    channel.fail(EngineGenerateError("broken"))
    received = await channel.receive()
    assert (received.token_ids, str(received.error)) == ([1], "broken")


async def test_several_answers_merge_by_index_and_end_with_the_last() -> None:
    channel = CoalescingChannel(n=2)
    channel.put("a", [1], index=1)
    channel.put("b", [2], index=0)
    channel.put("c", [3], FinishReason.LENGTH, index=1)
    received = await channel.receive()
    assert isinstance(received, ParallelPendingOutput)
    assert {index: each.token_ids for index, each in received.answers.items()} == {1: [1, 3], 0: [2]}
    assert not received.is_last
    channel.put("d", [4], FinishReason.STOP, "d", index=0)
    received = await channel.receive()
    assert isinstance(received, ParallelPendingOutput)
    assert {index: each.token_ids for index, each in received.answers.items()} == {0: [4]}
    assert received.is_last
    with pytest.raises(trio.EndOfChannel):
        await channel.receive()


@pytest.mark.parametrize(("is_final_only", "interval"), [(True, 1), (False, 10)])
async def test_several_answers_are_held_together(is_final_only: bool, interval: int) -> None:
    """FINAL_ONLY until all have ended; an interval until one has enough tokens or has ended."""
    channel = CoalescingChannel(n=2, is_final_only=is_final_only, interval=interval)
    reader, first = Reader(channel), Reader(channel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.read)
        channel.put("a", [1], index=0)
        await wait_all_tasks_blocked()
        assert (first.got is None) == is_final_only
        if not is_final_only:
            nursery.start_soon(reader.read)
            channel.put("a", [1], index=0)
            await wait_all_tasks_blocked()
            assert reader.got is None
        channel.put("b", [2], FinishReason.LENGTH, index=1)
        await wait_all_tasks_blocked()
        assert (first.got is None) == (reader.got is None) == is_final_only
        channel.put("c", [3], FinishReason.LENGTH, index=0)
    assert first.got is not None
    if is_final_only:
        assert isinstance(first.got, ParallelPendingOutput)
        assert {index: each.token_ids for index, each in first.got.answers.items()} == {0: [1, 3], 1: [2]}


async def test_there_is_one_reader() -> None:
    channel = CoalescingChannel()
    reader = Reader(channel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.read)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await channel.receive()
        channel.put("a", [1])
    assert reader.got is not None


async def test_receiving_what_waits_is_a_checkpoint() -> None:
    channel = CoalescingChannel()
    channel.put("a", [1])
    with trio.testing.assert_checkpoints():
        await channel.receive()
    channel.put("", [], FinishReason.LENGTH)
    await channel.receive()
    with trio.testing.assert_checkpoints(), pytest.raises(trio.EndOfChannel):
        await channel.receive()


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
