"""The core's end: never blocks but in `poll`, and `poll` waits for exactly what it is asked for."""

import threading
import time
from collections.abc import Iterator

import attrs
import pytest
import zmq

from trioengine.transport.zmq_blocking import BlockingSocket, Waker, poll

LONG_S = 20.0


@attrs.frozen
class Links:
    """Makes cores with queues of one message, and holds all sockets until the test has ended."""

    context: zmq.Context[zmq.Socket[bytes]] = attrs.field(factory=zmq.Context)
    front_ends: list[zmq.Socket[bytes]] = attrs.field(factory=list[zmq.Socket[bytes]])
    cores: list[BlockingSocket] = attrs.field(factory=list[BlockingSocket])

    def connect(self, name: str = "link") -> tuple[BlockingSocket, zmq.Socket[bytes]]:
        """A core, and its front end's raw socket."""
        front_end, core = self.context.socket(zmq.DEALER), self.context.socket(zmq.DEALER)
        self.front_ends.append(front_end)
        self.cores.append(BlockingSocket(core))
        front_end.set(zmq.RCVHWM, 1)
        core.set(zmq.SNDHWM, 1)
        front_end.bind(f"inproc://{name}")
        core.connect(f"inproc://{name}")
        return self.cores[-1], front_end


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links()
    yield links
    for core in links.cores:
        core.close()
    links.context.destroy(linger=0)


def fill(core: BlockingSocket) -> int:
    num_sent = 0
    while core.try_send([b"%d" % num_sent]):
        num_sent += 1
    return num_sent


def test_poll_returns_when_any_inbox_has_a_message(links: Links) -> None:
    (first, _), (second, front_end) = links.connect("first"), links.connect("second")
    assert not poll([first, second], timeout_s=0)
    front_end.send_multipart([b"a", b"b"])
    assert poll([first, second], timeout_s=LONG_S)
    assert not poll([first], timeout_s=0)
    assert second.drain() == [[b"a", b"b"]]
    assert not poll([first, second], timeout_s=0)


def test_poll_waits_no_shorter_than_it_was_told(links: Links) -> None:
    """Half a millisecond must not become a spin of zeros."""
    core, _ = links.connect()
    start = time.monotonic()
    assert not poll([core], timeout_s=0.0005)
    assert time.monotonic() - start >= 0.0005


def test_a_full_queue_refuses_and_poll_tells_when_there_is_room(links: Links) -> None:
    core, front_end = links.connect()
    num_sent = fill(core)
    assert num_sent >= 1
    assert not core.try_send([b"refused", b"whole"])
    assert not poll([core], full=[core], timeout_s=0)
    received = [front_end.recv_multipart() for _ in range(num_sent)]
    assert received == [[b"%d" % index] for index in range(num_sent)]
    assert poll([core], full=[core], timeout_s=LONG_S)
    assert not poll([core], timeout_s=0)  # room alone is not asked for
    assert core.try_send([b"sent", b"whole"])
    assert front_end.recv_multipart() == [b"sent", b"whole"]


def test_room_is_noticed_at_once(links: Links) -> None:
    """Without a poll in between: ZeroMQ itself would look only after a millisecond."""
    core, front_end = links.connect()
    for _ in range(100):
        for _ in range(fill(core)):
            front_end.recv_multipart()
        assert core.try_send([b"x"])
        front_end.recv_multipart()


def test_poll_for_messages_and_room_at_once(links: Links) -> None:
    (full, full_front_end), (idle, _) = links.connect("full"), links.connect("idle")
    fill(full)
    full_front_end.send(b"abort")
    assert poll([full, idle], full=[full], timeout_s=LONG_S)
    assert full.drain() == [[b"abort"]]
    assert not poll([full, idle], full=[full], timeout_s=0)


def test_a_blocking_socket_is_closed_twice_with_its_context() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    core = BlockingSocket(context.socket(zmq.DEALER), owned_context=context)
    core.close()
    core.close()
    assert context.closed


@pytest.fixture
def waker() -> Iterator[Waker]:
    waker = Waker()
    yield waker
    waker.close()


def test_another_thread_ends_a_poll(links: Links, waker: Waker) -> None:
    core, _ = links.connect()
    thread = threading.Thread(target=waker.wake)
    thread.start()
    assert poll([core], waker=waker, timeout_s=LONG_S)
    thread.join()
    assert core.drain() == []


def test_wakes_before_a_poll_end_it_and_no_other(links: Links, waker: Waker) -> None:
    """However many there were; more than a descriptor holds are no more than one."""
    core, _ = links.connect()
    for _ in range(10_000):
        waker.wake()
    assert poll([core], waker=waker, timeout_s=0)
    assert not poll([core], waker=waker, timeout_s=0)


def test_a_message_ends_a_poll_that_can_be_woken(links: Links, waker: Waker) -> None:
    core, front_end = links.connect()
    front_end.send(b"a")
    assert poll([core], waker=waker, timeout_s=LONG_S)
    assert core.drain() == [[b"a"]]


def test_a_wake_after_close_does_nothing(waker: Waker) -> None:
    """A thread may not know yet that the core has gone."""
    waker.close()
    waker.wake()
    waker.close()
    assert waker.fileno() == -1
