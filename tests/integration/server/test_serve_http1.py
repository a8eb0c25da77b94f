"""What a client of `serve` sees over HTTP/1.1: answers, keep-alive, pipelining, errors."""

import errno
import json
import logging
import socket
from contextlib import suppress

import pytest
import trio
from quart import request
from quart_trio import QuartTrio
from trio.testing import wait_all_tasks_blocked

from trioengine.config.server import ServerConfig
from trioengine.errors import ConfigError, ServerStartError
from trioengine.server.connection import MAX_PAUSED_BYTES
from trioengine.server.listeners import bind_listeners
from trioengine.server.serving import serve
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import ConnectionEndedError, open_raw_http, request_bytes


def make_quart_app() -> QuartTrio:
    app = QuartTrio(__name__)
    app.config["MAX_CONTENT_LENGTH"] = None

    @app.get("/health")
    async def health() -> str:
        return "fine"

    @app.get("/number/<int:number>")
    async def number(number: int) -> str:
        return str(number)

    @app.post("/length")
    async def length() -> str:
        return str(len(await request.get_data()))

    @app.get("/broken")
    async def broken() -> str:
        raise RuntimeError("this handler is broken")

    return app


async def echo_scope(scope, receive, send) -> None:
    """A raw ASGI application that knows no lifespan."""
    assert scope["type"] == "http"
    body = json.dumps({"method": scope["method"], "path": scope["path"]}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def test_one_connection_serves_many_requests() -> None:
    async with open_server(make_quart_app()) as server, open_raw_http(server.url) as client:
        for number in range(5):
            assert (await client.request("GET", f"/number/{number}")).body == b"%d" % number
        assert (await client.request("POST", "/length", body=b"x" * 100_000)).body == b"100000"
        assert (await client.request("HEAD", "/health")).head.header("content-length") == "4"
        assert (await client.request("GET", "/health")).body == b"fine"


@pytest.mark.parametrize(("path", "line"), [("/health", b"HTTP/1.1 200 OK"), ("/none", b"HTTP/1.1 404 Not Found")])
async def test_a_status_has_its_phrase(path: str, line: bytes) -> None:
    """It may be empty, but h2load then counts no status at all."""
    async with open_server(make_quart_app()) as server, open_raw_http(server.url) as client:
        await client.send(request_bytes("GET", path, headers=[("connection", "close")]))
        assert (await client.read_to_end()).startswith(line + b"\r\n")


async def test_the_reported_address_has_the_real_port() -> None:
    async with open_server(echo_scope, ServerConfig(host="127.0.0.1", port=0)) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert not server.url.endswith(":0")


async def test_serves_on_listeners_that_are_bound_already() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with open_server(echo_scope, listeners=[listener]) as server, open_raw_http(server.url) as client:
        assert server.url == f"http://127.0.0.1:{port}"
        assert (await client.request("GET", "/")).status == 200
    assert listener.fileno() == -1


async def test_an_address_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"127.0.0.1 port {port}"):
            await serve(echo_scope, ServerConfig(port=port))


async def test_an_address_can_be_bound_before_there_is_anything_to_serve() -> None:
    """Until then nobody is accepted; who binds it in between, and listens first, has it."""
    [ours] = await bind_listeners(ServerConfig(port=0))
    port = ours.getsockname()[1]
    with pytest.raises(OSError):
        await trio.open_tcp_stream("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ServerStartError, match=str(port)):
        await serve(echo_scope, ServerConfig(), listeners=[ours])
    assert ours.fileno() == -1


async def test_a_host_that_is_none_is_an_error_that_names_it() -> None:
    with pytest.raises(ServerStartError, match=r"no-host\.invalid"):
        await bind_listeners(ServerConfig(host="no-host.invalid"))


@pytest.mark.parametrize("option", ["max_body_bytes", "max_connections", "keep_alive_timeout_s", "header_timeout_s"])
def test_a_limit_that_cannot_work_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        ServerConfig(**{option: 0})


async def test_http2_without_tls_is_refused() -> None:
    with pytest.raises(ConfigError, match="http2 needs TLS"):
        await serve(echo_scope, ServerConfig(port=0, http2=True))


PARTS = [b"x", b"y" * 15, b"z" * 16, b"\r\n0\r\n\r\n", b"w" * 300_000]


async def send_in_parts(scope, receive, send) -> None:
    assert scope["type"] == "http"
    headers = [(b"content-length", b"%d" % sum(map(len, PARTS)))] if scope["path"] == "/known" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in PARTS:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body"})


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["/known", "/unknown"])
async def test_a_body_in_parts_is_framed_as_its_client_can_read_it(path: str, version: str) -> None:
    """Twice on one connection where there can be two."""
    async with open_server(send_in_parts) as server, open_raw_http(server.url) as client:
        for _ in range(1 if version == "1.0" else 2):
            await client.send(f"GET {path} HTTP/{version}\r\nhost: localhost\r\n\r\n".encode())
            head = await client.read_head()
            is_chunked = (path, version) == ("/unknown", "1.1")
            assert (head.header("transfer-encoding") == "chunked") is is_chunked
            if is_chunked:
                assert [await client.read_chunk() for _ in PARTS] == PARTS
                assert await client.read_chunk() == b""
            elif path == "/known":
                assert await client.read_body(head) == b"".join(PARTS)
            else:
                assert await client.read_to_end() == b"".join(PARTS)


async def test_ten_pipelined_requests_are_answered_in_order() -> None:
    async with open_server(make_quart_app()) as server, open_raw_http(server.url) as client:
        await client.send(b"".join(request_bytes("GET", f"/number/{number}") for number in range(10)))
        bodies = [(await client.read_response()).body for _ in range(10)]
        assert bodies == [b"%d" % number for number in range(10)]


async def test_pipelined_requests_with_bodies_are_answered_in_order() -> None:
    async with open_server(make_quart_app()) as server, open_raw_http(server.url) as client:
        sizes = [1, 70_000, 3, 0, 50_000]
        await client.send(b"".join(request_bytes("POST", "/length", body=b"x" * size) for size in sizes if size))
        assert [(await client.read_response()).body for size in sizes if size] == [b"%d" % s for s in sizes if s]


async def test_a_request_that_arrives_byte_by_byte_is_answered() -> None:
    async with open_server(make_quart_app()) as server, open_raw_http(server.url) as client:
        for byte in request_bytes("POST", "/length", body=b"12345"):
            await client.send(bytes([byte]))
        assert (await client.read_response()).body == b"5"


async def test_far_too_many_pipelined_bytes_end_the_connection() -> None:
    """Behind bytes that nobody reads a disconnect would go unseen, so they are not left unread."""
    handler_ended = trio.Event()

    async def wait_forever(scope, receive, send) -> None:
        assert scope["type"] == "http"
        try:
            await trio.sleep_forever()
        finally:
            handler_ended.set()

    async with open_server(wait_forever) as server, open_raw_http(server.url) as client:
        await client.send(request_bytes("GET", "/"))
        with suppress(ConnectionError):
            await client.send(b"x" * (MAX_PAUSED_BYTES * 2))
        await handler_ended.wait()
        assert await client.read_to_end() == b""


@pytest.mark.parametrize("app", [make_quart_app(), echo_scope], ids=["quart", "raw"])
async def test_an_idle_connection_is_closed_after_the_keep_alive_timeout(app) -> None:
    async with (
        open_server(app, ServerConfig(port=0, keep_alive_timeout_s=0.05)) as server,
        open_raw_http(server.url) as client,
    ):
        assert (await client.request("GET", "/health")).status == 200
        assert await client.read_to_end() == b""


async def test_the_keep_alive_timeout_does_not_run_during_a_request() -> None:
    release = trio.Event()

    async def answer_when_released(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await release.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async with (
        open_server(
            answer_when_released, ServerConfig(port=0, keep_alive_timeout_s=0.01, header_timeout_s=0.01)
        ) as server,
        open_raw_http(server.url) as client,
        open_raw_http(server.url) as idle_client,
    ):
        await client.send_request("GET", "/")
        # The other connection's timeout has passed, so this one's would have, too.
        assert await idle_client.read_to_end() == b""
        release.set()
        assert (await client.read_response()).status == 204


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: test\r\n"])
async def test_a_header_that_does_not_end_is_cut_after_the_header_timeout(sent: bytes) -> None:
    async with (
        open_server(echo_scope, ServerConfig(port=0, header_timeout_s=0.05)) as server,
        open_raw_http(server.url) as client,
    ):
        await client.send(sent)
        assert await client.read_to_end() == b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /\xc3\xa4 HTTP/1.1\r\nhost: test\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: test\r\ncontent-length: x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: test\r\nbig: " + b"x" * 100_000, 431),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"POST /length HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (
            b"POST /length HTTP/1.1\r\nhost: test\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
    ],
    ids=["line", "path", "host", "length", "tls", "oversize", "h2c", "encoding", "chunk", "length and encoding"],
)
async def test_what_is_not_http1_gets_an_error_and_the_server_lives_on(sent: bytes, status: int) -> None:
    async with open_server(make_quart_app()) as server:
        async with open_raw_http(server.url) as client:
            await client.send(sent)
            response = await client.read_response()
            assert response.status == status
            assert response.head.header("content-type") == "application/json"
            assert set(json.loads(response.body)["error"]) == {"message", "type", "param", "code"}
            assert await client.read_to_end() == b""
        async with open_raw_http(server.url) as client:
            assert (await client.request("GET", "/health")).status == 200


async def test_a_head_request_that_is_refused_gets_no_body() -> None:
    async with (
        open_server(echo_scope, ServerConfig(port=0, max_header_bytes=2048)) as server,
        open_raw_http(server.url) as client,
    ):
        await client.send(request_bytes("HEAD", "/", headers=[("x-much", "a" * 3000)]))
        head, _, body = (await client.read_to_end()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert body == b""


@pytest.mark.parametrize(("num_bytes", "status"), [(1000, 200), (2100, 431), (200_000, 431)])
async def test_a_head_over_the_limit_is_431_however_it_arrives(num_bytes: int, status: int) -> None:
    """At one go, so that h11 never holds an unfinished one; the server lives on."""
    async with open_server(echo_scope, ServerConfig(port=0, max_header_bytes=2048)) as server:
        async with open_raw_http(server.url) as client:
            await client.send(request_bytes("GET", "/", headers=[("x-much", "a" * num_bytes)]))
            assert (await client.read_head()).status == status
        async with open_raw_http(server.url) as client:
            assert (await client.request("GET", "/")).status == 200


async def test_an_upgrade_to_h2c_is_ignored() -> None:
    async with open_server(make_quart_app()) as server, open_raw_http(server.url) as client:
        headers = [("connection", "upgrade, http2-settings"), ("upgrade", "h2c"), ("http2-settings", "AAMAAABk")]
        response = await client.request("GET", "/health", headers=headers)
        assert (response.status, response.body) == (200, b"fine")
        assert (await client.request("GET", "/health")).body == b"fine"


async def test_a_failing_handler_is_a_logged_500_and_the_connection_of_others_lives_on(caplog) -> None:
    async def fail(scope, receive, send) -> None:
        assert scope["type"] == "http"
        raise RuntimeError("this application is broken")

    async with (
        open_server(fail) as server,
        open_raw_http(server.url) as bystander,
        open_raw_http(server.url) as client,
    ):
        assert (await client.request("GET", "/")).status == 500
        assert (await bystander.request("GET", "/")).status == 500
    assert "this application is broken" in caplog.text


async def test_a_handler_that_fails_in_the_middle_of_its_response_cuts_it(caplog) -> None:
    async def fail_late(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("in the middle")

    async with open_server(fail_late) as server, open_raw_http(server.url) as client:
        await client.send_request("GET", "/")
        await client.read_head()
        assert await client.read_chunk() == b"half"
        with pytest.raises(ConnectionEndedError):
            await client.read_chunk()
    assert "in the middle" in caplog.text


async def test_running_out_of_descriptors_does_not_end_the_server(caplog) -> None:
    class ExhaustedListener(socket.socket):
        num_failures = 3

        def accept(self):
            if self.num_failures:
                self.num_failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    listener = ExhaustedListener()
    listener.bind(("127.0.0.1", 0))
    async with open_server(echo_scope, listeners=[listener]) as server, open_raw_http(server.url) as client:
        assert (await client.request("GET", "/")).status == 200
    assert "Too many open files" in caplog.text


async def test_connections_over_the_limit_wait_their_turn() -> None:
    async with (
        open_server(echo_scope, ServerConfig(port=0, max_connections=1)) as server,
        open_raw_http(server.url) as first,
        open_raw_http(server.url) as second,
    ):
        assert (await first.request("GET", "/")).status == 200
        await second.send_request("GET", "/")
        await wait_all_tasks_blocked()
        first.close()
        assert (await second.read_response()).status == 200


async def test_a_failed_startup_is_an_error_with_its_reason() -> None:
    app = QuartTrio(__name__)

    @app.before_serving
    async def fail() -> None:
        raise RuntimeError("no database")

    with pytest.raises(ServerStartError, match="no database"):
        await serve(app, ServerConfig(port=0))


async def test_the_lifespan_surrounds_the_requests() -> None:
    app = make_quart_app()
    seen: list[str] = []

    @app.before_serving
    async def start() -> None:
        seen.append("started")

    @app.after_serving
    async def stop() -> None:
        seen.append("stopped")

    @app.after_request
    async def note(response):
        seen.append("answered")
        return response

    async with open_server(app) as server:
        async with open_raw_http(server.url) as client:
            await client.request("GET", "/health")
        server.shutdown.set()
        await server.stopped.wait()
    assert seen == ["started", "answered", "stopped"]


async def test_serving_leaves_loggers_alone() -> None:
    before = {name: logging.getLogger(name).handlers for name in ("hypercorn.error", "hypercorn.access")}
    async with open_server(echo_scope) as server, open_raw_http(server.url) as client:
        await client.request("GET", "/")
    assert {name: logging.getLogger(name).handlers for name in before} == before
