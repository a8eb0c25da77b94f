"""A client that goes, or that does not read: its handler hears of it at once and nothing is left."""

import gc
import os
import random
from collections.abc import AsyncGenerator

import pytest
import trio
from quart import Response
from quart_trio import QuartTrio
from trio.testing import wait_all_tasks_blocked

from trioengine.server.connection import NUM_WRITES_PER_CHECKPOINT
from trioengine.server.serving import ServerConfig
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import RawHttpClient, chunk_bytes, open_raw_http, request_bytes

EXTRA_BYTES = {"nothing": b"", "byte": b"x", "request": request_bytes("GET", "/health"), "much": b"x" * 100_000}


class Probe:
    """A Quart application whose handlers say when they start and when they end."""

    def __init__(self) -> None:
        self.started = trio.Event()
        self.ended = trio.Event()
        self.num_running = 0
        self.app = QuartTrio(__name__)
        self.app.get("/health")(self.health)
        self.app.get("/slow")(self.slow)
        self.app.get("/stream")(self.stream)

    async def health(self) -> str:
        return "fine"

    async def slow(self) -> str:
        """No byte of the response yet, as in a long prefill."""
        with self.watch():
            await trio.sleep_forever()
        raise AssertionError("never here")

    async def stream(self) -> Response:
        async def body() -> AsyncGenerator[bytes]:
            with self.watch():
                yield b"first"
                await trio.sleep_forever()

        response = Response(body())
        response.timeout = None
        return response

    def watch(self) -> "Probe":
        return self

    def __enter__(self) -> None:
        self.num_running += 1
        self.started.set()

    def __exit__(self, *_: object) -> None:
        self.num_running -= 1
        self.ended.set()


def vanish(client: RawHttpClient, how: str) -> None:
    match how:
        case "fin":
            client.send_fin()
        case "rst":
            client.reset()
        case "close":
            client.close()
        case _:
            raise AssertionError(how)


@pytest.mark.parametrize("extra", EXTRA_BYTES)
@pytest.mark.parametrize("how", ["fin", "rst", "close"])
@pytest.mark.parametrize("path", ["/slow", "/stream"])
async def test_a_disconnect_cancels_the_handler_at_once(path: str, how: str, extra: str) -> None:
    """Also behind bytes that the client had sent ahead."""
    probe = Probe()
    async with open_server(probe.app) as server, open_raw_http(server.url) as client:
        await client.send_request("GET", path)
        await probe.started.wait()
        if path == "/stream":
            await client.read_head()
            assert await client.read_chunk() == b"first"
        await client.send(EXTRA_BYTES[extra])
        await wait_all_tasks_blocked()
        vanish(client, how)
        await probe.ended.wait()
        assert probe.num_running == 0


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_raw_application_receives_http_disconnect(how: str) -> None:
    received: list[str] = []
    started, told = trio.Event(), trio.Event()

    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        received.append((await receive())["type"])
        started.set()
        received.append((await receive())["type"])
        received.append((await receive())["type"])
        told.set()

    async with open_server(app) as server, open_raw_http(server.url) as client:
        await client.send(request_bytes("GET", "/") + b"ahead")
        await started.wait()
        vanish(client, how)
        await told.wait()
    assert received == ["http.request", "http.disconnect", "http.disconnect"]


async def test_a_handler_that_does_not_listen_is_cancelled_after_the_grace_time() -> None:
    started, ended = trio.Event(), trio.Event()

    async def deaf(scope, receive, send) -> None:
        assert scope["type"] == "http"
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with open_server(deaf) as server, open_raw_http(server.url) as client:
        await client.send_request("GET", "/")
        await started.wait()
        client.send_fin()
        await ended.wait()
        assert await client.read_to_end() == b""


async def test_a_handler_that_writes_to_a_client_that_has_gone_lets_others_run() -> None:
    """Writes that go nowhere still give way; else this handler would stop the whole server."""
    ended = trio.Event()
    probe = Probe()

    async def write_for_ever(scope, receive, send) -> None:
        if scope["type"] != "http" or scope["path"] != "/write":
            await probe.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            ended.set()

    async with open_server(write_for_ever) as server, open_raw_http(server.url) as bystander:
        async with open_raw_http(server.url) as client:
            await client.send_request("GET", "/write")
            await client.read_exactly(1000)
            client.reset()
        assert (await bystander.request("GET", "/health")).body == b"fine"
        await ended.wait()


async def test_a_handler_that_does_nothing_but_write_lets_others_run() -> None:
    num_chunks = 320
    num_turns_of_others = 0
    done = trio.Event()

    async def write_at_once(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await trio.lowlevel.checkpoint()
        before = num_turns_of_others
        for _ in range(num_chunks):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        # In the first and the last turn the other task may have run before this one: Trio's order is arbitrary.
        assert num_turns_of_others - before >= num_chunks // NUM_WRITES_PER_CHECKPOINT - 1
        await send({"type": "http.response.body"})
        done.set()

    async def take_turns() -> None:
        nonlocal num_turns_of_others
        while not done.is_set():
            num_turns_of_others += 1
            await trio.lowlevel.checkpoint()

    async with (
        open_server(write_at_once) as server,
        open_raw_http(server.url) as client,
        trio.open_nursery() as nursery,
    ):
        await client.send_request("GET", "/")
        nursery.start_soon(take_turns)
        assert (await client.read_response()).body == b"x" * num_chunks
        await done.wait()


async def test_a_handler_that_leaves_its_body_unread_can_answer_and_end() -> None:
    """More messages wait than its inbox takes; the end of the response frees whoever brings them."""

    async def answer_unread(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await wait_all_tasks_blocked()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with open_server(answer_unread) as server, open_raw_http(server.url) as client:
        headers = [("transfer-encoding", "chunked")]
        await client.send(request_bytes("POST", "/", headers=headers) + chunk_bytes(b"x") * 100 + chunk_bytes(b""))
        assert (await client.read_response()).body == b"ok"
        assert await client.read_to_end() == b""


async def test_a_slow_reader_holds_its_handler_back_and_gets_everything() -> None:
    """Backpressure: what is sent is bounded by the sockets' buffers, whatever the handler has to say."""
    chunk = b"x" * 65536
    num_chunks = 1024
    num_sent = 0

    async def huge(scope, receive, send) -> None:
        nonlocal num_sent
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(num_chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            num_sent += 1
        await send({"type": "http.response.body"})

    async with open_server(huge) as server, open_raw_http(server.url, receive_buffer_bytes=65536) as client:
        await client.send_request("GET", "/")
        await client.read_head()
        await wait_all_tasks_blocked(0.05)
        assert num_sent * len(chunk) < 16 * 1024 * 1024
        num_read = 0
        while part := await client.read_chunk():
            num_read += len(part)
        assert num_read == num_chunks * len(chunk)


async def test_a_client_that_does_not_read_is_dropped_after_the_write_timeout() -> None:
    ended = trio.Event()

    async def endless(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        finally:
            ended.set()

    async with (
        open_server(endless, ServerConfig(port=0, write_timeout_s=0.1)) as server,
        open_raw_http(server.url, receive_buffer_bytes=65536) as client,
    ):
        await client.send_request("GET", "/")
        await ended.wait()


async def test_a_write_that_is_cancelled_halfway_ends_the_connection() -> None:
    """What comes after half a chunk would be read as its second half."""
    outcome: list[bool] = []
    done = trio.Event()

    async def give_up(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with trio.move_on_after(0.1) as scope:
            await send({"type": "http.response.body", "body": bytes(32 * 1024 * 1024), "more_body": True})
        outcome.append(scope.cancelled_caught)
        await send({"type": "http.response.body", "body": b"after"})
        done.set()

    async with open_server(give_up) as server, open_raw_http(server.url, receive_buffer_bytes=65536) as client:
        await client.send_request("GET", "/")
        await done.wait()
        received = await client.read_to_end()
        assert outcome == [True]
        assert b"after" not in received
        assert len(received) < 32 * 1024 * 1024


def count_tasks() -> int:
    root = trio.lowlevel.current_root_task()
    assert root is not None
    tasks, waiting = 0, [root]
    while waiting:
        task = waiting.pop()
        tasks += 1
        waiting += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return tasks


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_200_connections_that_vanish_at_random_leave_no_task_and_no_descriptor() -> None:
    probe = Probe()
    rng = random.Random(7)
    messages = [
        request_bytes("GET", "/health"),
        request_bytes("GET", "/slow"),
        request_bytes("GET", "/stream"),
        request_bytes("POST", "/health", body=b"x" * 5000)[:-2000],
        request_bytes("GET", "/stream") + request_bytes("GET", "/health") * 3,
        b"GET /hea",
        b"",
        b"nonsense\r\n\r\n",
        request_bytes("GET", "/health", headers=[("connection", "close")]),
    ]

    async def come_and_go(url: str) -> None:
        async with open_raw_http(url) as client:
            await client.send(rng.choice(messages))
            for _ in range(rng.randrange(30)):
                await trio.lowlevel.checkpoint()
            vanish(client, rng.choice(["rst", "close"]))

    async with open_server(probe.app) as server:
        async with open_raw_http(server.url) as client:
            assert (await client.request("GET", "/health")).status == 200
        await wait_all_tasks_blocked(0.01)
        gc.collect()  # What other tests of this process have left holds descriptors until it is found.
        num_tasks, num_descriptors = count_tasks(), count_descriptors()
        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(come_and_go, server.url)
        while count_tasks() > num_tasks or count_descriptors() > num_descriptors:
            await wait_all_tasks_blocked(0.01)
        assert probe.num_running == 0
        assert (count_tasks(), count_descriptors()) == (num_tasks, num_descriptors)
