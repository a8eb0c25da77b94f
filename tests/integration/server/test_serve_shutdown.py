"""`serve` ends: by its shutdown event it drains, by cancellation it stops at once, and it leaves nothing behind."""

import os

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioengine.config.server import ServerConfig
from trioengine.server.serving import serve
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import ConnectionEndedError, open_raw_http, request_bytes


class Gate:
    """A raw ASGI application that starts its response, or not, and goes on when it is released."""

    def __init__(self) -> None:
        self.started = trio.Event()
        self.release = trio.Event()
        self.ended = trio.Event()

    async def __call__(self, scope, receive, send) -> None:
        assert scope["type"] == "http"
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]}
        try:
            if scope["path"] == "/started":
                # Without a length, as a stream: the head of a whole answer comes with its body.
                await send({**start, "headers": []})
            self.started.set()
            if scope["path"] != "/now":
                await self.release.wait()
            if scope["path"] != "/started":
                await send(start)
            await send({"type": "http.response.body", "body": b"done"})
        finally:
            self.ended.set()


async def test_idle_connections_close_at_once_and_nothing_more_is_accepted() -> None:
    async with (
        open_server(Gate(), ServerConfig(port=0, shutdown_timeout_s=1000)) as server,
        open_raw_http(server.url) as used,
        open_raw_http(server.url) as unused,
    ):
        assert (await used.request("GET", "/now")).body == b"done"
        await wait_all_tasks_blocked()
        server.shutdown.set()
        assert await used.read_to_end() == b""
        assert await unused.read_to_end() == b""
        await server.stopped.wait()
        with pytest.raises(OSError, match=r"refused|111"):
            async with open_raw_http(server.url):
                pass


@pytest.mark.parametrize("path", ["/waiting", "/started"])
async def test_a_request_in_flight_ends_and_says_that_it_was_the_last(path: str) -> None:
    gate = Gate()
    async with (
        open_server(gate, ServerConfig(port=0, shutdown_timeout_s=1000)) as server,
        open_raw_http(server.url) as client,
    ):
        await client.send_request("GET", path)
        await gate.started.wait()
        server.shutdown.set()
        await wait_all_tasks_blocked()
        assert not server.stopped.is_set()
        gate.release.set()
        response = await client.read_response()
        assert response.body == b"done"
        assert response.head.header("connection") == ("close" if path == "/waiting" else None)
        assert await client.read_to_end() == b""
        await server.stopped.wait()


async def test_a_request_whose_header_is_on_its_way_is_still_answered() -> None:
    async with (
        open_server(Gate(), ServerConfig(port=0, shutdown_timeout_s=1000)) as server,
        open_raw_http(server.url) as client,
    ):
        request = request_bytes("GET", "/now")
        await client.send(request[:10])
        await wait_all_tasks_blocked()
        server.shutdown.set()
        await wait_all_tasks_blocked()
        await client.send(request[10:])
        response = await client.read_response()
        assert (response.body, response.head.header("connection")) == (b"done", "close")
        await server.stopped.wait()


async def test_what_is_in_flight_at_the_shutdown_timeout_is_cancelled() -> None:
    gate = Gate()
    async with (
        open_server(gate, ServerConfig(port=0, shutdown_timeout_s=0.05)) as server,
        open_raw_http(server.url) as client,
    ):
        await client.send_request("GET", "/started")
        await gate.started.wait()
        server.shutdown.set()
        await server.stopped.wait()
        assert gate.ended.is_set()
        head = await client.read_head()
        assert head.status == 200
        with pytest.raises(ConnectionEndedError):
            await client.read_body(head)


async def test_a_client_that_does_not_read_does_not_hold_up_shutdown() -> None:
    async def endless(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})

    async with (
        open_server(endless, ServerConfig(port=0, shutdown_timeout_s=0.05, write_timeout_s=1000)) as server,
        open_raw_http(server.url, receive_buffer_bytes=65536) as client,
    ):
        await client.send_request("GET", "/")
        await client.read_head()
        await wait_all_tasks_blocked(0.05)
        server.shutdown.set()
        await server.stopped.wait()
        assert await client.read_to_end()


async def test_shutdown_before_the_first_connection_returns() -> None:
    shutdown = trio.Event()
    shutdown.set()
    with trio.fail_after(10):
        assert await serve(Gate(), ServerConfig(port=0), shutdown=shutdown) is None


async def test_cancelling_ends_everything_at_once_and_leaves_no_descriptor() -> None:
    gate = Gate()
    num_descriptors = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            config = ServerConfig(port=0, shutdown_timeout_s=1000)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as server_nursery:
                    urls = await server_nursery.start(serve, gate, config)

                    async def stay() -> None:
                        async with open_raw_http(urls[0]) as client:
                            await client.send_request("GET", "/started")
                            await client.read_to_end()

                    for _ in range(5):
                        nursery.start_soon(stay)
                    await gate.started.wait()
                    await wait_all_tasks_blocked()
                    scope.cancel()
            assert gate.ended.is_set()
    assert scope.cancelled_caught
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
