"""What every wire between a front end and its cores promises: ZeroMQ over ipc and TCP, and memory."""

import os
from collections.abc import Awaitable, Callable, Iterator

import attrs
import pytest
import trio
import trio.testing

from trioengine.errors import PeerUnreachableError
from trioengine.testing.memory_link import MemoryDealer, MemoryRouter
from trioengine.transport.address import create_endpoint
from trioengine.transport.interface import CORE_SEND_HIGH_WATER_MARK, CoreSocket, FrontEndSocket
from trioengine.transport.topology import bind_router, connect_dealer, core_identity
from trioengine.transport.zmq_blocking import BlockingSocket, poll

TIMEOUT_S = 10


@attrs.frozen
class Link:
    front_end: FrontEndSocket
    connect: Callable[[int], CoreSocket]
    wait_inbox: Callable[[CoreSocket], Awaitable[None]]


async def _poll(core: CoreSocket) -> None:
    assert isinstance(core, BlockingSocket)
    while not poll([core], timeout_s=0):
        await trio.lowlevel.checkpoint()


async def _wait_readable(core: CoreSocket) -> None:
    assert isinstance(core, MemoryDealer)
    await core.wait_readable()


def _no_directory(base: str) -> None:
    return None


@pytest.fixture(params=["memory", "ipc", "tcp"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    if request.param == "memory":
        memory = MemoryRouter()
        yield Link(memory, lambda rank: memory.connect(core_identity(rank)), _wait_readable)
        memory.close()
        return
    dealers: list[BlockingSocket] = []
    environ = {**os.environ, "XDG_RUNTIME_DIR": "/tmp"} if request.param == "ipc" else {}
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tcp":
            patch.setattr("trioengine.transport.address._create_private_directory", _no_directory)
        endpoint = create_endpoint(environ)
    router = bind_router(endpoint)
    assert router.endpoint.address.startswith(request.param)

    def connect(rank: int) -> BlockingSocket:
        dealers.append(connect_dealer(router.endpoint.for_core(), rank))
        return dealers[-1]

    yield Link(router.socket, connect, _poll)
    for dealer in dealers:
        dealer.close()
    router.socket.close()
    endpoint.remove()


async def joined(link: Link, rank: int = 0) -> CoreSocket:
    """A core that the front end has heard of."""
    core = link.connect(rank)
    assert core.try_send([b"hello"])
    assert await link.front_end.receive() == [core_identity(rank), b"hello"]
    return core


async def drained(link: Link, core: CoreSocket, num_messages: int) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    while len(messages) < num_messages:
        await link.wait_inbox(core)
        messages += core.drain()
    return messages


async def test_multipart_messages_travel_both_ways_in_order(link: Link) -> None:
    with trio.fail_after(TIMEOUT_S):
        core = await joined(link)
        assert core.try_send([b"a", b"", b"\x00" * 100_000])
        assert await link.front_end.receive() == [core_identity(0), b"a", b"", b"\x00" * 100_000]
        for index in range(50):
            await link.front_end.send([core_identity(0), b"%d" % index, b"x"])
        assert await drained(link, core, 50) == [[b"%d" % index, b"x"] for index in range(50)]
        assert core.drain() == []


async def test_a_message_reaches_only_the_core_that_it_names(link: Link) -> None:
    with trio.fail_after(TIMEOUT_S):
        cores = [await joined(link, rank) for rank in range(3)]
        for rank in (2, 0, 1):
            link.front_end.send_nowait([core_identity(rank), b"%d" % rank])
        for rank, core in enumerate(cores):
            assert await drained(link, core, 1) == [[b"%d" % rank]]
            assert core.drain() == []


async def test_sending_to_a_core_that_is_not_there_says_so_and_sends_nothing(link: Link) -> None:
    with trio.fail_after(TIMEOUT_S):
        with pytest.raises(PeerUnreachableError):
            link.front_end.send_nowait([core_identity(7), b"x"])
        with pytest.raises(PeerUnreachableError):
            await link.front_end.send([core_identity(7), b"x"])
        core = await joined(link)
        link.front_end.send_nowait([core_identity(0), b"after"])
        assert await drained(link, core, 1) == [[b"after"]]


async def test_a_core_that_left_becomes_unreachable(link: Link) -> None:
    with trio.fail_after(TIMEOUT_S):
        core = await joined(link)
        core.close()
        core.close()

        async def send_for_ever() -> None:
            while True:  # the news takes a moment over a real wire; what is sent until then is lost
                await link.front_end.send([core_identity(0), b"x"])

        with pytest.raises(PeerUnreachableError):
            await send_for_ever()


async def test_nothing_there_is_wouldblock_or_an_empty_list(link: Link) -> None:
    with pytest.raises(trio.WouldBlock):
        link.front_end.receive_nowait()
    assert link.front_end.receive_ready_nowait() == []
    assert link.connect(0).drain() == []


async def test_ready_messages_are_taken_at_one_go_up_to_a_limit(link: Link) -> None:
    with trio.fail_after(TIMEOUT_S):
        core = await joined(link)
        for index in range(6):
            assert core.try_send([b"%d" % index])
        messages = [await link.front_end.receive()]
        while len(messages) < 6:
            taken = link.front_end.receive_ready_nowait(max_messages=2)
            assert len(taken) <= 2
            messages += taken
            await trio.lowlevel.checkpoint()
        assert messages == [[core_identity(0), b"%d" % index] for index in range(6)]


async def test_drain_takes_no_more_than_its_limit(link: Link) -> None:
    with trio.fail_after(TIMEOUT_S):
        core = await joined(link)
        for index in range(5):
            link.front_end.send_nowait([core_identity(0), b"%d" % index])
        messages: list[list[bytes]] = []
        while len(messages) < 5:
            await link.wait_inbox(core)
            taken = core.drain(max_messages=2)
            assert 1 <= len(taken) <= 2
            messages += taken
        assert messages == [[b"%d" % index] for index in range(5)]


async def test_a_stalled_front_end_makes_try_send_refuse_and_nothing_is_lost(link: Link) -> None:
    """A refused message was not sent; once the front end reads again there is room again, and the order is kept."""
    with trio.fail_after(TIMEOUT_S):
        core = await joined(link)
        payload = bytes(64 * 1024)
        num_sent, num_refused = 0, 0
        while num_refused < 200:  # ZeroMQ's thread moves messages on for a moment after the first refusal
            if core.try_send([b"%d" % num_sent, payload]):
                num_sent, num_refused = num_sent + 1, 0
            else:
                num_refused += 1
                await trio.lowlevel.checkpoint()
        assert CORE_SEND_HIGH_WATER_MARK // 2 <= num_sent <= 4 * CORE_SEND_HIGH_WATER_MARK

        for index in range(num_sent):
            assert (await link.front_end.receive())[1] == b"%d" % index
        while not core.try_send([b"more"]):
            await trio.lowlevel.checkpoint()
        assert await link.front_end.receive() == [core_identity(0), b"more"]


async def test_every_async_call_is_a_checkpoint(link: Link) -> None:
    with trio.fail_after(TIMEOUT_S):
        core = await joined(link)
        with trio.testing.assert_checkpoints():
            await link.front_end.send([core_identity(0), b"x"])
        assert core.try_send([b"a"])
        with trio.testing.assert_checkpoints():
            await link.front_end.receive()
        assert core.try_send([b"a"])
        assert core.try_send([b"b"])
        assert (await link.front_end.receive())[1] == b"a"
        with trio.testing.assert_checkpoints():  # perhaps without waiting
            assert (await link.front_end.receive())[1] == b"b"


async def test_a_cancelled_call_has_done_nothing(link: Link) -> None:
    with trio.fail_after(TIMEOUT_S):
        core = await joined(link)
        assert core.try_send([b"kept"])
        with trio.CancelScope() as scope:
            scope.cancel()
            await link.front_end.receive()
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            scope.cancel()
            await link.front_end.send([core_identity(0), b"never"])
        assert scope.cancelled_caught
        assert await link.front_end.receive() == [core_identity(0), b"kept"]
        await link.front_end.send([core_identity(0), b"sent"])
        assert await drained(link, core, 1) == [[b"sent"]]


async def test_a_waiting_receive_can_be_cancelled_and_loses_nothing(link: Link) -> None:
    with trio.fail_after(TIMEOUT_S):
        core = await joined(link)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.front_end.receive)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert core.try_send([b"kept"])
        assert await link.front_end.receive() == [core_identity(0), b"kept"]


async def test_each_message_goes_to_one_of_several_receivers(link: Link) -> None:
    with trio.fail_after(TIMEOUT_S):
        core = await joined(link)
        received: list[bytes] = []

        async def receive_one() -> None:
            received.append((await link.front_end.receive())[1])

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(receive_one)
            await trio.testing.wait_all_tasks_blocked()
            for index in range(10):
                assert core.try_send([b"%d" % index])
        assert sorted(received) == [b"%d" % index for index in range(10)]


async def test_close_wakes_everyone_who_waits_and_refuses_everything_after(link: Link) -> None:
    num_woken = 0

    async def wait() -> None:
        nonlocal num_woken
        with pytest.raises(trio.ClosedResourceError):
            await link.front_end.receive()
        num_woken += 1

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            link.front_end.close()
    assert num_woken == 5
    link.front_end.close()
    with pytest.raises(trio.ClosedResourceError):
        await link.front_end.receive()
    with pytest.raises(trio.ClosedResourceError):
        link.front_end.receive_nowait()
    with pytest.raises(trio.ClosedResourceError):
        link.front_end.receive_ready_nowait()
    with pytest.raises(trio.ClosedResourceError):
        await link.front_end.send([core_identity(0), b"x"])
    with pytest.raises(trio.ClosedResourceError):
        link.front_end.send_nowait([core_identity(0), b"x"])
