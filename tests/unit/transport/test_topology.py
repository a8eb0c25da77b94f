"""Front end's ROUTER and core's DEALER over real sockets: strangers, peers that vanish, many engines, no leaks."""

import contextlib
import os
import random
import socket as plain_socket
import threading
from collections.abc import Iterator
from itertools import count

import attrs
import pytest
import trio
import zmq

from trioengine.errors import PeerUnreachableError
from trioengine.transport import address
from trioengine.transport.address import Endpoint, create_endpoint
from trioengine.transport.topology import (
    MAX_MESSAGE_BYTES,
    BoundRouter,
    bind_router,
    connect_dealer,
    core_identity,
    core_rank,
)
from trioengine.transport.zmq_blocking import BlockingSocket, poll

TIMEOUT_S = 20


def make_endpoint(transport: str) -> Endpoint:
    if transport == "ipc":
        return create_endpoint({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(address, "_create_private_directory", _no_directory)
        return create_endpoint({})


def _no_directory(base: str) -> None:
    return None


@pytest.fixture(params=["ipc", "tcp"])
def router(request: pytest.FixtureRequest) -> Iterator[BoundRouter]:
    with make_endpoint(request.param) as endpoint:
        router = bind_router(endpoint)
        yield router
        router.socket.close()


@pytest.fixture
def core(router: BoundRouter) -> Iterator[BlockingSocket]:
    core = connect_dealer(router.endpoint.for_core(), 0)
    yield core
    core.close()


_greetings = count()


async def assert_works(router: BoundRouter, core: BlockingSocket) -> None:
    """The front end and the core still talk; what others said in between is skipped.

    Each greeting is another one: that of a core before, which has come late, is not taken for this one's. Nothing here
    blocks, so that the deadline around it counts.
    """
    greeting = b"are you there %d" % next(_greetings)
    assert core.try_send([greeting])
    while await router.socket.receive() != [core_identity(0), greeting]:
        pass
    router.socket.send_nowait([core_identity(0), greeting])
    while not poll([core], timeout_s=0):  # noqa: ASYNC110 (it has no event)
        await trio.sleep(0.001)
    assert core.drain() == [[greeting]]


def connect_plainly(endpoint: Endpoint) -> plain_socket.socket:
    if endpoint.directory is not None:
        stranger = plain_socket.socket(plain_socket.AF_UNIX)
        stranger.connect(endpoint.address.removeprefix("ipc://"))
    else:
        stranger = plain_socket.create_connection(("127.0.0.1", int(endpoint.address.rpartition(":")[2])))
    return stranger


GREETING_NULL = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "half a greeting": GREETING_NULL[:20],
    "a greeting and noise": GREETING_NULL + random.Random(1).randbytes(1000),
    "an endless frame": GREETING_NULL + READY + b"\x02" + (2**62).to_bytes(8, "big") + b"x" * 1000,
    "a frame over the limit": GREETING_NULL + READY + b"\x02" + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "big") + b"x",
    "a message without end": GREETING_NULL + READY + b"\x01\x01x" * 100,
    "noise": random.Random(2).randbytes(5000),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_a_stranger_with_a_raw_socket_disturbs_nobody(
    router: BoundRouter, core: BlockingSocket, garbage: bytes
) -> None:
    with trio.fail_after(TIMEOUT_S):
        await assert_works(router, core)
        with connect_plainly(router.endpoint) as stranger:
            stranger.sendall(garbage)
            await assert_works(router, core)
        await assert_works(router, core)


async def test_a_strangers_dealer_is_a_stranger(router: BoundRouter, core: BlockingSocket) -> None:
    """On ipc its message arrives under an identity that is no core's; over TCP, without the key, it does not arrive."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        with trio.fail_after(TIMEOUT_S):
            await assert_works(router, core)
            stranger.connect(router.endpoint.address)
            if router.endpoint.curve is None:
                stranger.send_multipart([b"\x00" * 10, b"garbage"])
                identity, *rest = await router.socket.receive()
                assert rest == [b"\x00" * 10, b"garbage"]
                assert core_rank(identity) is None
            else:
                for _ in range(20):
                    # Without waiting: ZeroMQ may have given the connection up, and nobody would ever take the message.
                    with contextlib.suppress(zmq.Again):
                        stranger.send_multipart([b"\x00" * 10, b"garbage"], flags=zmq.NOBLOCK)
                    await assert_works(router, core)
                    assert not stranger.poll(0)
            await assert_works(router, core)


async def test_a_second_core_of_the_same_rank_does_not_take_the_firsts_place(
    router: BoundRouter, core: BlockingSocket
) -> None:
    with trio.fail_after(TIMEOUT_S):
        await assert_works(router, core)
        impostor = connect_dealer(router.endpoint.for_core(), 0)
        other = connect_dealer(router.endpoint.for_core(), 1)
        assert impostor.try_send([b"impostor"])
        assert other.try_send([b"other"])
        assert await router.socket.receive() == [core_identity(1), b"other"]
        await assert_works(router, core)
        assert impostor.drain() == []
        impostor.close()
        other.close()


async def test_a_vanished_core_is_unreachable_and_the_others_go_on(router: BoundRouter, core: BlockingSocket) -> None:
    async def send_until_unreachable(rank: int) -> None:
        while True:
            await router.socket.send([core_identity(rank), b"abort"])

    with trio.fail_after(TIMEOUT_S):
        for rank in range(1, 6):
            vanishing = connect_dealer(router.endpoint.for_core(), rank)
            assert vanishing.try_send([b"hello"])
            assert (await router.socket.receive())[0] == core_identity(rank)
            vanishing.close()
            with pytest.raises(PeerUnreachableError):
                await send_until_unreachable(rank)
            await assert_works(router, core)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_zeromqs_own_heartbeats_stay_off(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They abort the process when a peer dies while its messages fill our queue; on TCP the kernel asks instead."""
    made: list[zmq.Socket[bytes]] = []
    make_socket = zmq.Context[zmq.Socket[bytes]].socket

    def recording(context: zmq.Context[zmq.Socket[bytes]], socket_type: int) -> zmq.Socket[bytes]:
        made.append(make_socket(context, socket_type))
        return made[-1]

    monkeypatch.setattr(zmq.Context, "socket", recording)
    with make_endpoint(transport) as endpoint:
        router = bind_router(endpoint)
        core = connect_dealer(router.endpoint.for_core(), 0)
        towards_others = [socket for socket in made if socket.get(zmq.TYPE) != zmq.PAIR]
        assert len(towards_others) == 2
        for socket in towards_others:
            assert socket.get(zmq.HEARTBEAT_IVL) == 0
            assert (socket.get(zmq.TCP_KEEPALIVE) == 1) is (transport == "tcp")
        core.close()
        router.socket.close()


async def test_a_core_that_dies_while_the_front_end_does_not_read_does_no_harm(router: BoundRouter) -> None:
    """Its full queue stays readable, whole and in order; reading it to the end frees the place."""
    core = connect_dealer(router.endpoint.for_core(), 0)
    with trio.fail_after(TIMEOUT_S):
        for index in range(20):
            while not core.try_send([b"%d" % index]):
                await trio.lowlevel.checkpoint()
        first = await router.socket.receive()
        core.close()
        received = [first]

        async def read_and_send() -> None:
            while True:
                received.extend(router.socket.receive_ready_nowait())
                await router.socket.send([core_identity(0), b"abort"])

        with pytest.raises(PeerUnreachableError):
            await read_and_send()
        assert received == [[core_identity(0), b"%d" % index] for index in range(len(received))]
        is_heard = False
        while not is_heard:  # The place is free a moment later; who comes before is never heard.
            successor = connect_dealer(router.endpoint.for_core(), 0)
            with trio.move_on_after(0.5):
                await assert_works(router, successor)
                is_heard = True
            successor.close()


def test_a_vanished_front_end_never_blocks_the_core() -> None:
    with make_endpoint("ipc") as endpoint:
        router = bind_router(endpoint)
        core = connect_dealer(endpoint, 0)
        router.socket.close()
        num_sent = 0
        while core.try_send([bytes(1000)]):
            num_sent += 1
        assert num_sent < 1000
        assert core.drain() == []
        poll([core], full=[core], timeout_s=0.01)  # It may have been connected for a moment, and so be told.
        core.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_core_hears_that_its_front_end_is_gone_and_all_that_it_said(transport: str) -> None:
    """Its wait ends, and what was sent before the end is still there."""
    with make_endpoint(transport) as endpoint:
        router = bind_router(endpoint)
        core = connect_dealer(router.endpoint.for_core(), 0)
        with trio.fail_after(TIMEOUT_S):
            await assert_works(router, core)
            assert not core.is_peer_gone
            assert not poll([core], timeout_s=0)
            await router.socket.send([core_identity(0), b"last"])
            assert poll([core], timeout_s=TIMEOUT_S)
            router.socket.close()
            while not core.is_peer_gone:
                await trio.lowlevel.checkpoint()
        assert poll([core], timeout_s=TIMEOUT_S)
        assert core.drain() == [[b"last"]]
        assert poll([core], timeout_s=TIMEOUT_S)
        core.close()


async def test_a_core_with_another_key_is_told_that_it_is_refused_and_its_wait_ends() -> None:
    with make_endpoint("tcp") as endpoint, make_endpoint("tcp") as other:
        router = bind_router(endpoint)
        stranger = connect_dealer(attrs.evolve(router.endpoint, curve=other.curve).for_core(), 0)
        with trio.fail_after(TIMEOUT_S):
            while not poll([stranger], timeout_s=0):  # noqa: ASYNC110 (it has no event)
                await trio.sleep(0.001)
            assert (stranger.is_peer_gone, stranger.is_refused) == (True, True)
            assert poll([stranger], timeout_s=TIMEOUT_S)
            core = connect_dealer(router.endpoint.for_core(), 0)
            await assert_works(router, core)
            assert (core.is_peer_gone, core.is_refused) == (False, False)
            router.socket.close()
            while not core.is_peer_gone:  # noqa: ASYNC110
                await trio.sleep(0.001)
            assert not core.is_refused
        core.close()
        stranger.close()


async def test_a_core_that_is_refused_at_first_is_taken_later() -> None:
    """Something that forwards a port takes connections for an engine that is not there yet, and ends them."""
    with plain_socket.create_server(("127.0.0.1", 0)) as forwarder:
        host, port = forwarder.getsockname()
        with make_endpoint("tcp") as endpoint:
            endpoint = attrs.evolve(endpoint, address=f"tcp://{host}:{port}")
            core = connect_dealer(endpoint.for_core(), 0)
            with trio.fail_after(TIMEOUT_S):
                while not core.is_refused:
                    taken, _ = await trio.to_thread.run_sync(forwarder.accept)
                    taken.close()
                    await trio.sleep(0.001)
                forwarder.close()
                router = bind_router(endpoint)
                await assert_works(router, core)
            assert not core.is_peer_gone
            assert not poll([core], timeout_s=0)
            core.close()
            router.socket.close()


@pytest.mark.slow
def test_a_core_that_nobody_asks_is_refused_for_ever_and_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a core loads it reads no news; 2,000 of them once were all that ZeroMQ's thread found room for."""
    make_socket = zmq.Context[zmq.Socket[bytes]].socket

    def impatient(context: zmq.Context[zmq.Socket[bytes]], socket_type: int) -> zmq.Socket[bytes]:
        socket = make_socket(context, socket_type)
        socket.set(zmq.RECONNECT_IVL, 1)
        return socket

    monkeypatch.setattr(zmq.Context, "socket", impatient)
    with plain_socket.create_server(("127.0.0.1", 0)) as forwarder, make_endpoint("tcp") as endpoint:
        forwarder.settimeout(TIMEOUT_S)
        host, port = forwarder.getsockname()
        core = connect_dealer(attrs.evolve(endpoint, address=f"tcp://{host}:{port}").for_core(), 0)
        for _ in range(2100):
            taken, _ = forwarder.accept()
            taken.close()
        assert core.is_refused
        core.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_32_engines_at_the_same_moment_do_not_clash(transport: str) -> None:
    """Case 14: every one has an address of its own and hears its own core only."""
    routers = [bind_router(make_endpoint(transport)) for _ in range(32)]
    assert len({router.endpoint.address for router in routers}) == 32
    cores = [connect_dealer(router.endpoint.for_core(), 0) for router in routers]
    with trio.fail_after(TIMEOUT_S):
        for index, core in enumerate(cores):
            assert core.try_send([b"%d" % index])
        for index, router in enumerate(routers):
            assert await router.socket.receive() == [core_identity(0), b"%d" % index]
    for router, core in zip(routers, cores, strict=True):
        core.close()
        router.socket.close()
        router.endpoint.remove()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_opening_and_closing_50_times_leaks_no_descriptor_no_thread_and_no_file(transport: str) -> None:
    num_descriptors, threads = -1, set[int]()
    directories: list[str] = []
    with trio.fail_after(TIMEOUT_S):
        for round_number in range(51):
            with make_endpoint(transport) as endpoint:
                directories.append(endpoint.directory or "/nonexistent")
                router = bind_router(endpoint)
                core = connect_dealer(router.endpoint.for_core(), 0)
                await assert_works(router, core)
                core.close()
                with trio.move_on_after(0):
                    await router.socket.receive()
                router.socket.close()
            if round_number == 0:  # what trio and ZeroMQ keep for good is there from now on
                num_descriptors, threads = count_descriptors(), thread_ids()
    assert count_descriptors() == num_descriptors
    assert thread_ids() <= threads  # no new one; of those of earlier tests some may have ended
    assert not any(map(os.path.exists, directories))


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def thread_ids() -> set[int]:
    if os.path.exists("/proc/self/task"):
        return set(map(int, os.listdir("/proc/self/task")))
    return {thread.ident or 0 for thread in threading.enumerate()}


def test_an_address_that_cannot_be_bound_is_an_error_that_leaves_nothing() -> None:
    threads = thread_ids()
    with pytest.raises(zmq.ZMQError):
        bind_router(Endpoint("ipc:///nonexistent/directory/zmq"))
    with pytest.raises(zmq.ZMQError):
        connect_dealer(Endpoint("no address"), 0)
    assert thread_ids() <= threads


@pytest.mark.parametrize("rank", [0, 1, 255, 2**32 - 1])
def test_identities_are_ranks_and_back(rank: int) -> None:
    assert core_rank(core_identity(rank)) == rank
    assert not core_identity(rank).startswith(b"\0")  # ZeroMQ keeps those for itself


@pytest.mark.parametrize("identity", [b"", b"\x00abcd", b"\x01abc", b"\x01abcde", b"x"])
def test_other_identities_are_no_rank(identity: bytes) -> None:
    assert core_rank(identity) is None
