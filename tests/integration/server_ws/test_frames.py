"""Frames of the kinds that the Autobahn test suite sends, at any ASGI application that `serve` serves."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioengine.config.server import ServerConfig
from trioengine.server.websocket import MAX_UNREAD_BYTES
from trioengine.testing.http_server import RunningServer, open_server
from trioengine.testing.raw_http import open_raw_http
from trioengine.testing.websocket_frames import (
    BINARY,
    CONTINUATION,
    KEY,
    PING,
    PONG,
    TEXT,
    FrameClient,
    Received,
    close_frame,
    frame,
    open_frames,
    upgrade,
)

MAX_MESSAGE_BYTES = 200_000


async def echo(scope, receive, send) -> None:
    """Sends back what it gets."""
    assert scope["type"] == "websocket"
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"], "bytes": message["bytes"]})


@asynccontextmanager
async def open_echo() -> AsyncGenerator[FrameClient]:
    config = ServerConfig(port=0, max_body_bytes=MAX_MESSAGE_BYTES)
    async with open_server(echo, config) as server, open_frames(server.url) as client:
        yield client
        # One connection's fault is its own.
        async with open_frames(server.url) as other:
            await other.send(frame(TEXT, b"fine"))
            assert await other.receive() == Received(TEXT, b"fine")


GOOD: dict[str, tuple[Sequence[bytes], Sequence[Received]]] = {
    "1.1.1 an empty text": ([frame(TEXT)], [Received(TEXT, b"")]),
    "1.1.2 125 bytes": ([frame(TEXT, b"*" * 125)], [Received(TEXT, b"*" * 125)]),
    "1.1.3 126 bytes": ([frame(TEXT, b"*" * 126)], [Received(TEXT, b"*" * 126)]),
    "1.1.6 65535 bytes": ([frame(TEXT, b"*" * 65535)], [Received(TEXT, b"*" * 65535)]),
    "1.1.7 65536 bytes": ([frame(TEXT, b"*" * 65536)], [Received(TEXT, b"*" * 65536)]),
    "1.2.1 an empty binary": ([frame(BINARY)], [Received(BINARY, b"")]),
    "1.2.7 65536 binary bytes": ([frame(BINARY, b"\xfe" * 65536)], [Received(BINARY, b"\xfe" * 65536)]),
    "2.1 an empty ping": ([frame(PING)], [Received(PONG, b"")]),
    "2.3 a binary ping": ([frame(PING, b"\0\xff\xfe")], [Received(PONG, b"\0\xff\xfe")]),
    "2.4 125 bytes of ping": ([frame(PING, b"\xfe" * 125)], [Received(PONG, b"\xfe" * 125)]),
    "2.7 pongs that nobody asked for": ([frame(PONG, b"x"), frame(PONG), frame(TEXT, b"a")], [Received(TEXT, b"a")]),
    "2.10 ten pings": (
        [frame(PING, b"%d" % number) for number in range(10)],
        [Received(PONG, b"%d" % number) for number in range(10)],
    ),
    "5.3 a text in fragments": (
        [frame(TEXT, b"frag", fin=False), frame(CONTINUATION, b"ment")],
        [Received(TEXT, b"fragment")],
    ),
    "5.6 a ping between fragments": (
        [frame(TEXT, b"frag", fin=False), frame(PING, b"p"), frame(CONTINUATION, b"ment")],
        [Received(PONG, b"p"), Received(TEXT, b"fragment")],
    ),
    "5.19 fragments and pings by turns": (
        [
            frame(TEXT, b"a", fin=False),
            frame(PING, b"1"),
            frame(CONTINUATION, b"b", fin=False),
            frame(PING, b"2"),
            frame(CONTINUATION, b"c"),
        ],
        [Received(PONG, b"1"), Received(PONG, b"2"), Received(TEXT, b"abc")],
    ),
    "6.1.2 empty fragments": (
        [frame(TEXT, fin=False), frame(CONTINUATION, fin=False), frame(CONTINUATION)],
        [Received(TEXT, b"")],
    ),
    "6.2.1 text that is no ASCII": ([frame(TEXT, "κόσμε😀".encode())], [Received(TEXT, "κόσμε😀".encode())]),
    "6.2.3 characters split over fragments": (
        [
            *(
                frame(CONTINUATION if place else TEXT, bytes((byte,)), fin=False)
                for place, byte in enumerate("é😀".encode())
            ),
            frame(CONTINUATION),
        ],
        [Received(TEXT, "é😀".encode())],
    ),
    "6.22 noncharacters": ([frame(TEXT, "\uffff\ufdd0".encode())], [Received(TEXT, "\uffff\ufdd0".encode())]),
    "9.1.1 a longer message": ([frame(TEXT, b"*" * 150_000)], [Received(TEXT, b"*" * 150_000)]),
    "9.3.1 many fragments": (
        [frame(TEXT, b"*" * 64, fin=False), *[frame(CONTINUATION, b"*" * 64, fin=False)] * 500, frame(CONTINUATION)],
        [Received(TEXT, b"*" * 64 * 501)],
    ),
}


@pytest.mark.parametrize(("frames", "answers"), GOOD.values(), ids=GOOD.keys())
async def test_good_frames_are_answered(frames: Sequence[bytes], answers: Sequence[Received]) -> None:
    async with open_echo() as client:
        await client.send(*frames)
        assert [await client.receive() for _ in answers] == list(answers)
        await client.send(close_frame(1000))
        assert (await client.receive_close()).code == 1000


@pytest.mark.parametrize("name", ["1.1.3 126 bytes", "5.6 a ping between fragments", "6.2.1 text that is no ASCII"])
async def test_bytes_one_by_one_are_the_same_frames(name: str) -> None:
    frames, answers = GOOD[name]
    async with open_echo() as client:
        for byte in b"".join(frames):
            await client.send(bytes((byte,)))
        assert [await client.receive() for _ in answers] == list(answers)


BAD: dict[str, tuple[Sequence[bytes], int]] = {
    "2.5 126 bytes of ping": ([frame(PING, b"\xfe" * 126)], 1002),
    "3.1 a reserved bit": ([frame(TEXT, b"a", rsv=1)], 1002),
    "3.5 a reserved bit of a binary": ([frame(BINARY, b"a", rsv=5)], 1002),
    "3.6 a reserved bit of a ping": ([frame(PING, b"a", rsv=6)], 1002),
    "3.x compression that was not agreed on": ([frame(TEXT, b"\xf2\x48\xcd\xc9\xc9\x07\x00", rsv=4)], 1002),
    "4.1.1 opcode 3": ([frame(3)], 1002),
    "4.1.5 opcode 7": ([frame(7, b"a")], 1002),
    "4.2.1 opcode 11": ([frame(11)], 1002),
    "4.2.5 opcode 15": ([frame(15, b"a")], 1002),
    "5.1 a ping in fragments": ([frame(PING, b"a", fin=False), frame(CONTINUATION, b"b")], 1002),
    "5.9 a continuation of nothing": ([frame(CONTINUATION, b"a")], 1002),
    "5.15 a continuation after the end": (
        [frame(TEXT, b"a", fin=False), frame(CONTINUATION, b"b"), frame(CONTINUATION, b"c")],
        1002,
    ),
    "5.18 a text inside a text": ([frame(TEXT, b"a", fin=False), frame(TEXT, b"b")], 1002),
    "6.3.1 bytes that are no UTF-8": ([frame(TEXT, b"\xce\xba\xed\xa0\x80edited")], 1007),
    "6.4.1 no UTF-8, in the first fragment": ([frame(TEXT, b"\xf4\x90\x80\x80", fin=False)], 1007),
    "6.6.1 half a character at the end": ([frame(TEXT, b"\xce")], 1007),
    "6.21 a surrogate": ([frame(TEXT, b"\xed\xa0\x80")], 1007),
    "7.3.2 a close frame of one byte": ([frame(8, b"\x03")], 1002),
    "7.3.6 a close frame of 126 bytes": ([frame(8, b"\x03\xe8" + b"*" * 124)], 1002),
    "7.5.1 a reason that is no UTF-8": ([close_frame(1000, b"\xce\xba\xed\xa0\x80")], 1007),
    "7.9.1 code 0": ([close_frame(0)], 1002),
    "7.9.3 code 1004": ([close_frame(1004)], 1002),
    "7.9.4 code 1005": ([close_frame(1005)], 1002),
    "7.9.5 code 1006": ([close_frame(1006)], 1002),
    "7.9.7 code 1016": ([close_frame(1016)], 1002),
    "7.9.10 code 2999": ([close_frame(2999)], 1002),
    "7.13.2 code 65535": ([close_frame(65535)], 1002),
    "a frame without a mask": ([frame(TEXT, b"a", masked=False)], 1002),
    "two bytes of length where one does": ([frame(TEXT, b"a", length=2)], 1002),
    "eight bytes of length where one does": ([frame(TEXT, b"a", length=8)], 1002),
    "a length of 2**63": ([b"\x81\xff" + (1 << 63).to_bytes(8, "big") + b"\0\0\0\0"], 1002),
    "a message over the limit": ([frame(TEXT, b"*" * (MAX_MESSAGE_BYTES + 1))], 1009),
    "a message over the limit by its bytes": ([frame(TEXT, "é".encode() * (MAX_MESSAGE_BYTES // 2 + 1))], 1009),
    "fragments over the limit": (
        [frame(BINARY, b"*" * 150_000, fin=False), frame(CONTINUATION, b"*" * 60_000, fin=False)],
        1009,
    ),
}


@pytest.mark.parametrize(("frames", "code"), BAD.values(), ids=BAD.keys())
async def test_bad_frames_close_with_their_code(frames: Sequence[bytes], code: int) -> None:
    async with open_echo() as client:
        await client.send(frame(TEXT, b"first"))
        assert await client.receive() == Received(TEXT, b"first")
        await client.send(*frames)
        assert (await client.receive_close()).code == code


@pytest.mark.parametrize("code", [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999])
async def test_a_close_is_answered_with_its_code(code: int) -> None:
    async with open_echo() as client:
        await client.send(close_frame(code, b"a reason"))
        assert (await client.receive_close()).code == code


async def test_a_close_without_a_code_is_answered_and_what_follows_is_ignored() -> None:
    async with open_echo() as client:
        await client.send(frame(8), frame(TEXT, b"late"), frame(PING))
        assert (await client.receive_close()).code is None


async def test_a_length_that_is_announced_takes_no_memory() -> None:
    """The limit counts what has come; the announcement alone is not believed."""
    async with open_echo() as client:
        await client.send(b"\x82\xff" + (1 << 62).to_bytes(8, "big") + b"\0\0\0\0" + b"x" * 1000)
        client.http.send_fin()
        await client.http.read_to_end()


# The upgrade


async def answer_to(*headers: tuple[str, str]) -> tuple[int, str | None, str | None]:
    async with open_server(echo) as server, open_raw_http(server.url) as http:
        head = await upgrade(http, "/", headers)
        return head.status, head.header("sec-websocket-accept"), head.header("sec-websocket-extensions")


async def test_an_upgrade_is_accepted_without_compression() -> None:
    status, accept, extensions = await answer_to(("sec-websocket-extensions", "permessage-deflate"))
    assert (status, accept, extensions) == (101, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", None)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("sec-websocket-version", "12")], 426),
        ([("sec-websocket-version", "")], 426),
        ([("sec-websocket-key", "")], 400),
        ([("sec-websocket-key", "short")], 400),
        ([("sec-websocket-key", KEY[:-4])], 400),
        ([("upgrade", "WebSocket"), ("connection", "keep-alive, Upgrade")], 101),
        ([("connection", "Upgrade"), ("connection", "keep-alive")], 101),
    ],
)
async def test_upgrades_that_are_wrong_are_refused(headers: list[tuple[str, str]], status: int) -> None:
    assert (await answer_to(*headers))[0] == status


# The application's side


async def test_an_application_may_return_refuse_or_answer() -> None:
    async def app(scope, receive, send) -> None:
        await receive()
        match scope["path"]:
            case "/closes":
                await send({"type": "websocket.close"})
            case "/answers":
                await send({"type": "websocket.http.response.start", "status": 418, "headers": []})
                await send({"type": "websocket.http.response.body", "body": b"tea", "more_body": False})
            case "/fails":
                raise RuntimeError("before it was accepted")
            case "/returns":
                await send({"type": "websocket.accept"})
            case "/closes-4000":
                await send({"type": "websocket.accept"})
                await send({"type": "websocket.close", "code": 4000, "reason": "r" * 200})
                await send({"type": "websocket.send", "text": "late"})

    async with open_server(app) as server:
        for path, status in (("/closes", 403), ("/answers", 418), ("/fails", 500), ("/nothing", 500)):
            async with open_raw_http(server.url) as http:
                assert (await upgrade(http, path)).status == status
        for path, code in (("/returns", 1000), ("/closes-4000", 4000)):
            async with open_frames(server.url, path) as client:
                assert (await client.receive_close()).code == code


async def test_a_failing_application_closes_with_1011(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope, receive, send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        raise RuntimeError("this application is broken")

    async with open_server(app) as server, open_frames(server.url) as client:
        await client.send(frame(TEXT, b"go"))
        assert (await client.receive_close()).code == 1011
    assert "this application is broken" in caplog.text


async def test_texts_go_out_as_a_message_each() -> None:
    async def app(scope, receive, send) -> None:
        assert "trioengine.texts" in scope["extensions"]
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "texts": [b"a", b"", b"c" * 126]})

    async with open_server(app) as server, open_frames(server.url) as client:
        assert [(await client.receive()).payload for _ in range(3)] == [b"a", b"", b"c" * 126]


@asynccontextmanager
async def open_counting() -> AsyncGenerator[tuple[RunningServer, list[str | None], list[trio.Event]]]:
    """An application that reads nothing until it is told to; the codes that it is told at the end."""
    codes: list[str | None] = []
    go_on, over = trio.Event(), trio.Event()

    async def app(scope, receive, send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await go_on.wait()
        while (message := await receive())["type"] == "websocket.receive":
            codes.append(message["text"])
        codes.append(str(message["code"]))
        over.set()

    async with open_server(app) as server:
        yield server, codes, [go_on, over]


async def test_what_an_application_leaves_unread_is_bounded_and_nothing_is_lost() -> None:
    text = b"x" * 10_000
    async with open_counting() as (server, texts, (go_on, over)), open_frames(server.url) as client:
        num_sent = 0

        async def send_on() -> None:
            nonlocal num_sent
            while True:
                await client.send(frame(TEXT, text))
                num_sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_on)
            num_before = -1
            while num_sent > num_before:
                num_before = num_sent
                await wait_all_tasks_blocked(0.05)
                # What the kernel holds is megabytes; what is here would be without an end.
                assert num_sent * len(text) < 100 * 1024 * 1024
            nursery.cancel_scope.cancel()
        go_on.set()
        client.http.close()
        await over.wait()
        assert len(texts) >= num_sent
        assert texts[0] == text.decode()
    assert 10 * len(text) > MAX_UNREAD_BYTES


@pytest.mark.parametrize(
    ("end", "code"),
    [("fin", 1006), ("rst", 1006), ("close 1000", 1000), ("close 4000", 4000), ("close", 1005), ("nonsense", 1002)],
)
async def test_an_application_hears_of_the_end_at_once(end: str, code: int) -> None:
    async with open_counting() as (server, texts, (go_on, over)), open_frames(server.url) as client:
        go_on.set()
        match end.split():
            case ["fin"]:
                client.http.send_fin()
            case ["rst"]:
                client.http.reset()
            case ["close", number]:
                await client.send(close_frame(int(number)))
            case ["close"]:
                await client.send(frame(8))
            case _:
                await client.send(b"\xff" * 10)
        with trio.fail_after(5):
            await over.wait()
        assert texts == [str(code)]


# The server's end


async def test_a_server_that_shuts_down_waits_for_no_key() -> None:
    config = ServerConfig(port=0, api_key=("k",), header_timeout_s=600, shutdown_timeout_s=600)
    async with open_server(echo, config) as server, open_frames(server.url) as client:
        server.shutdown.set()
        assert (await client.receive_close()).code == 1001
        await server.stopped.wait()


async def test_a_server_that_shuts_down_says_1001() -> None:
    config = ServerConfig(port=0, shutdown_timeout_s=0.05)
    async with open_server(echo, config) as server, open_frames(server.url) as client:
        server.shutdown.set()
        assert (await client.receive_close()).code == 1001
        await server.stopped.wait()
