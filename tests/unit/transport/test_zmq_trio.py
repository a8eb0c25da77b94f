"""`TrioSocket`: nothing lost, nothing twice, nobody left waiting; under cancels, tiny queues and shared use."""

import collections
import random
import select
import tempfile
from collections.abc import Iterator

import attrs
import pytest
import trio
import trio.testing
import zmq

from trioengine.errors import PeerUnreachableError
from trioengine.transport import frames
from trioengine.transport.zmq_trio import TrioSocket

TIMEOUT_S = 20
PADDING = bytes(32 * 1024)
"""Makes messages that the kernel's buffers cannot hold by the hundred, so that senders do wait."""


@attrs.frozen
class Pair:
    """Two connected sockets with queues of one message."""

    left: TrioSocket
    right: TrioSocket
    raw_left: zmq.Socket[bytes]
    raw_right: zmq.Socket[bytes]


@pytest.fixture(params=["inproc", "ipc", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from make_pair(request.param, zmq.PAIR, zmq.PAIR)


@pytest.fixture(params=["inproc", "ipc", "tcp"])
def dealers(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from make_pair(request.param, zmq.DEALER, zmq.DEALER)


def make_pair(transport: str, left_type: int, right_type: int) -> Iterator[Pair]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    left, right = context.socket(left_type), context.socket(right_type)
    for socket in (left, right):
        socket.set(zmq.SNDHWM, 1)
        socket.set(zmq.RCVHWM, 1)
        socket.set(zmq.LINGER, 0)
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        if transport == "tcp":
            public_key, secret_key = zmq.curve_keypair()
            left.set(zmq.CURVE_SERVER, 1)
            left.set(zmq.CURVE_SECRETKEY, secret_key)
            right.set(zmq.CURVE_SERVERKEY, public_key)
            public_key, secret_key = zmq.curve_keypair()
            right.set(zmq.CURVE_PUBLICKEY, public_key)
            right.set(zmq.CURVE_SECRETKEY, secret_key)
        left.bind({"inproc": "inproc://pair", "ipc": f"ipc://{directory}/pair", "tcp": "tcp://127.0.0.1:*"}[transport])
        address = left.get(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        right.connect(address.rstrip(b"\0").decode())
        pair = Pair(TrioSocket(left), TrioSocket(right), left, right)
        yield pair
        pair.left.close()
        pair.right.close()
        context.term()


class Exchange:
    """Several senders and receivers on one direction of a pair, and the account of what was sent and received."""

    def __init__(self, source: TrioSocket, sink: TrioSocket, num_messages: int) -> None:
        self.source = source
        self.sink = sink
        self.num_messages = num_messages
        self.num_left = 0
        self.sent: list[tuple[int, int]] = []
        self.received: list[list[tuple[int, int]]] = []
        self.is_done = trio.Event()

    def start(self, nursery: trio.Nursery, num_senders: int, num_receivers: int, chaos: "Chaos | None" = None) -> None:
        self.num_left = num_senders * self.num_messages
        for sender in range(num_senders):
            nursery.start_soon(self._send, sender, chaos)
        for receiver in range(num_receivers):
            self.received.append([])
            # A cancelled wait is begun anew and would hide a lost wake-up; half of the receivers are never cancelled.
            nursery.start_soon(self._receive, self.received[-1], chaos if receiver % 2 else None)

    async def _send(self, sender: int, chaos: "Chaos | None") -> None:
        for index in range(self.num_messages):
            message = [b"%d" % sender, b"%d" % index, PADDING]
            is_sent = False
            while not is_sent:
                with trio.CancelScope() as scope:
                    if chaos:
                        chaos.add(scope)
                    await self.source.send(message)
                    is_sent = True
            self.sent.append((sender, index))

    async def _receive(self, received: list[tuple[int, int]], chaos: "Chaos | None") -> None:
        while not self.is_done.is_set():
            with trio.CancelScope() as scope:
                if chaos:
                    chaos.add(scope)
                sender, index, padding = await self.sink.receive()
                assert padding == PADDING
                received.append((int(sender), int(index)))
                self.num_left -= 1
                if self.num_left == 0:
                    self.is_done.set()

    def check(self) -> None:
        everything = [message for received in self.received for message in received]
        assert not [message for message, count in collections.Counter(everything).items() if count > 1]
        assert sorted(everything) == sorted(self.sent)
        for received in self.received:  # each receiver sees each sender's messages in their order
            last: dict[int, int] = {}
            for sender, index in received:
                assert index > last.get(sender, -1)
                last[sender] = index


class Chaos:
    """Cancels the waits it is told of at random moments, until there have been `num_cancels`."""

    def __init__(self, seed: int, num_cancels: int) -> None:
        self.random = random.Random(seed)
        self.num_left = num_cancels
        self.scopes: list[trio.CancelScope] = []

    def add(self, scope: trio.CancelScope) -> None:
        self.scopes.append(scope)

    async def run(self, is_done: trio.Event) -> None:
        while self.num_left and not is_done.is_set():
            for _ in range(self.random.randrange(4)):
                await trio.lowlevel.checkpoint()
            self.random.shuffle(self.scopes)
            for scope in self.scopes[: self.random.randrange(4)]:
                scope.cancel()
                self.num_left -= 1
            self.scopes = self.scopes[-8:]
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 1), (3, 1), (1, 3), (3, 3)])
async def test_sends_and_receives_both_ways_at_once_never_stall(
    pair: Pair, num_senders: int, num_receivers: int
) -> None:
    """Any call on the socket may eat the descriptor's edge; with queues of one message all wait all the time."""
    there, back = Exchange(pair.left, pair.right, 60), Exchange(pair.right, pair.left, 60)
    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for exchange in (there, back):
                exchange.start(nursery, num_senders, num_receivers)
            await there.is_done.wait()
            await back.is_done.wait()
            nursery.cancel_scope.cancel()
    there.check()
    back.check()


@pytest.mark.parametrize("seed", range(6))
async def test_random_cancels_lose_nothing_and_repeat_nothing(dealers: Pair, seed: int) -> None:
    there, back = Exchange(dealers.left, dealers.right, 60), Exchange(dealers.right, dealers.left, 60)
    chaos = Chaos(seed, num_cancels=400)
    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for exchange in (there, back):
                exchange.start(nursery, num_senders=3, num_receivers=4, chaos=chaos)
                nursery.start_soon(chaos.run, exchange.is_done)
            await there.is_done.wait()
            await back.is_done.wait()
            nursery.cancel_scope.cancel()
    there.check()
    back.check()


async def test_a_thousand_cancelled_sends_send_nothing(pair: Pair) -> None:
    """What was cancelled, at once or while it waited for room, never arrives; what was not arrives once."""
    num_sent = 0

    async def send_late() -> None:
        nonlocal num_sent
        await pair.left.send([b"late"])
        num_sent += 1

    with trio.fail_after(TIMEOUT_S):
        await pair.left.send([b"first"])
        assert await pair.right.receive() == [b"first"]
        num_sent = await fill(pair.left)
        for _ in range(1000):
            with trio.CancelScope() as scope:
                scope.cancel()
                await pair.left.send([b"cancelled"])
            assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                nursery.start_soon(send_late)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.left.send, [b"last"])
            received = [await pair.right.receive() for _ in range(num_sent + 1)]
    assert [b"cancelled"] not in received
    assert received[-1] == [b"last"]


async def fill(socket: TrioSocket) -> int:
    """Send until nothing more fits and ZeroMQ's threads are at rest; return how many messages that took."""
    num_sent, num_refused = 0, 0
    while num_refused < 1000:
        try:
            socket.send_nowait([PADDING])
            num_sent, num_refused = num_sent + 1, 0
        except trio.WouldBlock:
            num_refused += 1
            await trio.lowlevel.checkpoint()
    return num_sent


async def test_a_message_that_came_during_a_send_wakes_the_receiver(pair: Pair) -> None:
    """The send looks at the news and so silences the descriptor that the receiver's task watches."""
    received: list[list[bytes]] = []

    async def receive() -> None:
        received.append(await pair.left.receive())

    with trio.fail_after(TIMEOUT_S):
        await pair.right.send([b"hello"])
        assert await pair.left.receive() == [b"hello"]
        for index in range(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
                pair.raw_right.send(b"%d" % index)
                while not pair.raw_left.poll(0):  # eats the edge, as any use of the socket may
                    pass
                pair.left.send_nowait([b"x"])
            assert await pair.right.receive() == [b"x"]
    assert received == [[b"%d" % index] for index in range(20)]


async def test_a_message_that_comes_between_two_looks_is_not_slept_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receive finds nothing, a message comes, and then EVENTS is read for the sake of a sender who waits."""
    real_try_receive = frames.try_receive
    has_come = False

    def try_receive_too_early(socket: zmq.Socket[bytes]) -> list[bytes] | None:
        nonlocal has_come
        parts = real_try_receive(socket)
        if parts is None and socket is pair.raw_left and not has_come:
            has_come = True
            pair.raw_right.send(b"just now")
            select.select([socket.fileno()], [], [], TIMEOUT_S)
        return parts

    with trio.fail_after(TIMEOUT_S):
        await pair.right.send([b"hello"])
        assert await pair.left.receive() == [b"hello"]
        await fill(pair.left)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.left.send, [PADDING])
            await trio.testing.wait_all_tasks_blocked()
            monkeypatch.setattr(frames, "try_receive", try_receive_too_early)
            assert await pair.left.receive() == [b"just now"]
            nursery.cancel_scope.cancel()
    assert has_come


@pytest.mark.parametrize("num_cancelled", [1, 2, 3])
async def test_when_the_watching_task_is_cancelled_another_takes_over(pair: Pair, num_cancelled: int) -> None:
    received: list[list[bytes]] = []
    scopes: list[trio.CancelScope] = []

    async def receive() -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            received.append(await pair.right.receive())

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
            for scope in scopes[:num_cancelled]:  # the first of them watches
                scope.cancel()
            for _ in range(4 - num_cancelled):
                await pair.left.send([b"x"])
    assert received == [[b"x"]] * (4 - num_cancelled)


async def test_a_message_and_a_cancel_at_the_same_moment_do_not_lose_the_message(pair: Pair) -> None:
    received: list[list[bytes]] = []

    async def receive(scope: trio.CancelScope) -> None:
        with scope:
            received.append(await pair.right.receive())

    with trio.fail_after(TIMEOUT_S):
        await pair.left.send([b"hello"])
        assert await pair.right.receive() == [b"hello"]
        for index in range(100):
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()
                nursery.start_soon(receive, scope)
                await trio.testing.wait_all_tasks_blocked()
                await pair.left.send([b"%d" % index])
                for _ in range(index % 5):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
            if not scope.cancelled_caught:
                continue
            received.append(await pair.right.receive())
    assert received == [[b"%d" % index] for index in range(100)]


async def test_close_wakes_receivers_and_senders(pair: Pair) -> None:
    num_woken = 0

    async def expect_closed(nursery_task: str) -> None:
        nonlocal num_woken
        with pytest.raises(trio.ClosedResourceError):
            await (pair.left.receive() if nursery_task == "receive" else pair.left.send([b"x"]))
        num_woken += 1

    with trio.fail_after(TIMEOUT_S):
        await pair.left.send([b"first"])
        assert await pair.right.receive() == [b"first"]
        await fill(pair.left)
        async with trio.open_nursery() as nursery:
            for task in ("receive", "send", "receive", "send"):
                nursery.start_soon(expect_closed, task)
            await trio.testing.wait_all_tasks_blocked()
            pair.left.close()
    assert num_woken == 4


async def test_a_closed_socket_can_be_left_while_its_watcher_is_cancelled(pair: Pair) -> None:
    """Both in one moment, as at the end of a nursery whose body closes the socket."""
    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(pair.left.receive)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            pair.left.close()
    with pytest.raises(trio.ClosedResourceError):
        pair.left.receive_nowait()


async def test_nowait_calls_serve_those_who_wait(pair: Pair) -> None:
    """Calls that never wait make room for a waiting sender, and do not take a wake-up from a waiting receiver."""
    there = Exchange(pair.left, pair.right, 100)
    num_taken = 0

    async def take() -> None:
        nonlocal num_taken
        while not there.is_done.is_set():
            for sender, index, _ in pair.right.receive_ready_nowait(3):
                there.received[0].append((int(sender), int(index)))
                num_taken += 1
                there.num_left -= 1
            if there.num_left == 0:
                there.is_done.set()
            await trio.lowlevel.checkpoint()

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            there.start(nursery, num_senders=3, num_receivers=2)
            nursery.start_soon(take)
            await there.is_done.wait()
            nursery.cancel_scope.cancel()
    everything = [message for received in there.received for message in received]
    assert len(everything) == 300
    assert sorted(everything) == sorted(there.sent)


async def test_what_is_no_message_is_refused_whole(pair: Pair) -> None:
    with trio.fail_after(TIMEOUT_S):
        with pytest.raises(ValueError, match="at least one part"):
            await pair.left.send([])
        with pytest.raises(TypeError, match="not str"):
            await pair.left.send([b"half", "a message"])  # pyright: ignore[reportArgumentType]
        await pair.left.send([b"whole"])
        assert await pair.right.receive() == [b"whole"]


def test_a_socket_is_closed_without_trio_and_twice() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw = context.socket(zmq.PAIR)
    socket = TrioSocket(raw, owned_context=context)
    socket.close()
    socket.close()
    assert raw.closed
    assert context.closed


def test_a_socket_serves_one_trio_run_after_another() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    left.bind("inproc://pair")
    right.connect("inproc://pair")
    socket, peer = TrioSocket(left), TrioSocket(right)

    async def run() -> list[bytes]:
        with trio.fail_after(TIMEOUT_S):
            with trio.move_on_after(0.001):
                await socket.receive()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(peer.send, [b"x"])
                return await socket.receive()

    assert [trio.run(run) for _ in range(3)] == [[b"x"]] * 3
    socket.close()
    peer.close()
    context.term()


def test_a_router_must_have_an_unbounded_send_queue() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw = context.socket(zmq.ROUTER)
    with pytest.raises(ValueError, match="SNDHWM"):
        TrioSocket(raw)
    context.destroy(linger=0)


async def test_unreachable_peers_do_not_disturb_a_waiting_receiver() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    raw.set(zmq.SNDHWM, 0)
    raw.set(zmq.ROUTER_MANDATORY, 1)
    raw.bind("inproc://router")
    dealer.set(zmq.ROUTING_ID, b"core")
    dealer.connect("inproc://router")
    router = TrioSocket(raw)
    received: list[list[bytes]] = []

    async def receive() -> None:
        for _ in range(20):
            received.append(await router.receive())

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            for index in range(20):
                await trio.testing.wait_all_tasks_blocked()
                dealer.send(b"%d" % index)
                with pytest.raises(PeerUnreachableError):
                    router.send_nowait([b"nobody", b"x"])
    assert received == [[b"core", b"%d" % index] for index in range(20)]
    router.close()
    dealer.close(linger=0)
    context.term()
