"""A WebSocket without a socket: pings, and the inbox of an application."""

import itertools
from collections.abc import Awaitable, Callable

import pytest
import trio
from hypercorn.protocol.events import Data, Event, Request, Response, StreamClosed
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.server.websocket import MAX_UNREAD_BYTES, PING_INTERVAL_S, Inbox, WebSocketStream, frame
from trioengine.testing.websocket_frames import CLOSE, PING, PONG, TEXT, UPGRADE
from trioengine.testing.websocket_frames import frame as client_frame

REQUEST = Request(1, [(name.encode(), value.encode()) for name, value in UPGRADE], "1.1", "GET", b"/", {})


async def accepting(scope, receive, send, *_) -> None:
    """Accepts, and reads to the end."""
    await receive()
    await send({"type": "websocket.accept"})
    while (await receive())["type"] == "websocket.receive":
        pass


class Sent:
    """What a stream has sent."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def send(self, event: Event) -> None:
        self.events.append(event)

    @property
    def opcodes(self) -> list[int]:
        return [event.data[0] & 0xF for event in self.events if isinstance(event, Data)]


async def open_stream(app: Callable[..., Awaitable[None]], nursery: trio.Nursery) -> tuple[WebSocketStream, Sent]:
    sent = Sent()
    stream = WebSocketStream(
        app,
        nursery.start_soon,
        sent.send,
        stream_id=1,
        is_tls=False,
        client=None,
        server=None,
        max_message_bytes=1000,
    )
    await stream.handle(REQUEST)
    await wait_all_tasks_blocked()
    assert isinstance(sent.events[0], Response)
    assert sent.events[0].status_code == 101
    return stream, sent


async def test_a_client_that_answers_no_ping_is_closed_with_1011(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        stream, sent = await open_stream(accepting, nursery)
        await trio.sleep(PING_INTERVAL_S * 1.5)
        assert sent.opcodes == [PING]
        await stream.handle(Data(1, client_frame(PONG, b"trioengine")))
        await trio.sleep(PING_INTERVAL_S)
        assert sent.opcodes == [PING, PING]
        await trio.sleep(PING_INTERVAL_S)
        assert sent.opcodes == [PING, PING, CLOSE]
        (closing,) = [event.data for event in sent.events if isinstance(event, Data) and event.data[0] & 0xF == CLOSE]
        assert int.from_bytes(closing[2:4], "big") == 1011
        assert isinstance(sent.events[-1], StreamClosed)


async def test_pings_end_with_the_connection(autojump_clock: MockClock) -> None:
    """Else the connection's nursery would wait for them."""
    started_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        stream, _ = await open_stream(accepting, nursery)
        await stream.handle(StreamClosed(1))
    assert trio.current_time() == started_s


async def test_a_client_whose_messages_are_not_read_need_not_answer(autojump_clock: MockClock) -> None:
    """Its answers would stand behind them."""

    async def deaf(scope, receive, send, *_) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await trio.sleep(PING_INTERVAL_S * 10)
        while (await receive())["type"] == "websocket.receive":
            pass

    async with trio.open_nursery() as nursery:
        stream, sent = await open_stream(deaf, nursery)
        await trio.sleep(PING_INTERVAL_S * 1.5)
        messages = client_frame(TEXT, b"x" * 1000) * (MAX_UNREAD_BYTES // 1000 + 2)
        nursery.start_soon(stream.handle, Data(1, messages))
        await trio.sleep(PING_INTERVAL_S * 5)
        assert sent.opcodes == [PING]
        await stream.handle(StreamClosed(1))


async def test_an_inbox_is_full_by_bytes_and_by_messages() -> None:
    for num_bytes in (MAX_UNREAD_BYTES, 0):
        inbox = Inbox()
        num_messages = 0
        while not inbox.is_full:
            inbox.put_nowait({"type": "websocket.receive", "text": str(num_messages), "bytes": None}, num_bytes)
            num_messages += 1
            assert num_messages < 1000
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbox.wait_for_room)
            await wait_all_tasks_blocked()
            assert nursery.child_tasks
            for number in range(num_messages):
                message = await inbox.receive()
                assert message["type"] == "websocket.receive"
                assert message["text"] == str(number)


async def test_a_disconnect_comes_behind_what_waits_and_frees_whoever_brings_more() -> None:
    inbox = Inbox()
    inbox.put_nowait({"type": "websocket.receive", "text": "a", "bytes": None}, MAX_UNREAD_BYTES)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.wait_for_room)
        await wait_all_tasks_blocked()
        inbox.disconnect(1001)
        inbox.disconnect(1006)
    inbox.put_nowait({"type": "websocket.receive", "text": "late", "bytes": None})
    assert (await inbox.receive())["type"] == "websocket.receive"
    for _ in range(2):
        assert await inbox.receive() == {"type": "websocket.disconnect", "code": 1001}


@pytest.mark.parametrize("length", [0, 1, 125, 126, 127, 65535, 65536, 70000])
def test_the_length_of_a_frame_takes_the_fewest_bytes(length: int) -> None:
    data = frame(b"x" * length)
    # A client's frame of the same message, without its mask.
    assert data == client_frame(TEXT, b"x" * length, masked=False)


FRAMES = st.one_of(
    st.binary(max_size=20),
    st.builds(
        client_frame,
        st.integers(0, 15),
        st.binary(max_size=130),
        fin=st.booleans(),
        rsv=st.sampled_from([0, 0, 0, 4]),
        masked=st.sampled_from([True, True, True, False]),
        length=st.sampled_from([None, None, 2, 8]),
    ),
    st.builds(lambda text, fin: client_frame(TEXT, text.encode(), fin=fin), st.text(max_size=20), st.booleans()),
)


@given(frames=st.lists(FRAMES, max_size=12), sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5))
async def test_whatever_bytes_come_they_are_answered_with_whole_frames_and_one_close(
    frames: list[bytes], sizes: list[int]
) -> None:
    data = b"".join(frames)
    async with trio.open_nursery() as nursery:
        stream, sent = await open_stream(accepting, nursery)
        for size in itertools.cycle(sizes):
            if not data:
                break
            await stream.handle(Data(1, data[:size]))
            data = data[size:]
        await stream.handle(StreamClosed(1))
        nursery.cancel_scope.deadline = trio.current_time() + 10
    assert not nursery.cancel_scope.cancelled_caught
    assert set(sent.opcodes) <= {PONG, CLOSE}
    assert sent.opcodes.count(CLOSE) <= 1
    if CLOSE in sent.opcodes:
        assert sent.opcodes[-1] == CLOSE
        assert sum(isinstance(event, StreamClosed) for event in sent.events) == 1
