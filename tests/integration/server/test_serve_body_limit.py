"""Request bodies over the limit get 413 and cost nobody else anything."""

import json

import pytest
import trio
from quart import request
from quart_trio import QuartTrio

from trioengine.server.serving import ServerConfig
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import RawResponse, chunk_bytes, open_raw_http, request_bytes

LIMIT_BYTES = 1024 * 1024


def make_app() -> QuartTrio:
    app = QuartTrio(__name__)
    app.config["MAX_CONTENT_LENGTH"] = None

    @app.get("/health")
    async def health() -> str:
        return "fine"

    @app.post("/length")
    async def length() -> str:
        return str(len(await request.get_data()))

    return app


def check_is_413(response: RawResponse) -> None:
    assert response.status == 413
    assert response.head.header("content-type") == "application/json"
    assert response.head.header("connection") == "close"
    error = json.loads(response.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")


async def test_a_body_of_exactly_the_limit_passes() -> None:
    async with (
        open_server(make_app(), ServerConfig(port=0, max_body_bytes=LIMIT_BYTES)) as server,
        open_raw_http(server.url) as client,
    ):
        assert (await client.request("POST", "/length", body=b"x" * LIMIT_BYTES)).body == b"%d" % LIMIT_BYTES
        head = request_bytes("POST", "/length", headers=[("transfer-encoding", "chunked")])
        await client.send(head + chunk_bytes(b"x" * LIMIT_BYTES) + chunk_bytes(b""))
        assert (await client.read_response()).body == b"%d" % LIMIT_BYTES


async def test_a_content_length_over_the_limit_is_413_before_the_body_is_sent() -> None:
    """Case 18 (vllm 24910)."""
    is_called = False

    async def app(scope, receive, send) -> None:
        nonlocal is_called
        assert scope["type"] == "http"
        is_called = True

    async with (
        open_server(app, ServerConfig(port=0, max_body_bytes=LIMIT_BYTES)) as server,
        open_raw_http(server.url) as client,
    ):
        length = str(LIMIT_BYTES + 1)
        await client.send_request("POST", "/", headers=[("content-length", length)])
        check_is_413(await client.read_response())
        assert await client.read_to_end() == b""
    assert not is_called


async def test_a_client_that_reads_only_after_sending_everything_gets_the_413() -> None:
    """The server reads on for a while, or its reset would destroy the response on its way."""
    async with (
        open_server(make_app(), ServerConfig(port=0, max_body_bytes=LIMIT_BYTES)) as server,
        open_raw_http(server.url) as client,
    ):
        await client.send_request("POST", "/length", body=bytes(8 * LIMIT_BYTES))
        check_is_413(await client.read_response())
        assert await client.read_to_end() == b""


async def test_a_chunked_body_over_the_limit_is_413_and_others_live_on() -> None:
    async with (
        open_server(make_app(), ServerConfig(port=0, max_body_bytes=LIMIT_BYTES)) as server,
        open_raw_http(server.url) as bystander,
        open_raw_http(server.url) as client,
    ):
        assert (await bystander.request("GET", "/health")).body == b"fine"
        await client.send(request_bytes("POST", "/length", headers=[("transfer-encoding", "chunked")]))
        for _ in range(5):
            await client.send(chunk_bytes(bytes(LIMIT_BYTES // 4)))
        check_is_413(await client.read_response())
        assert (await bystander.request("GET", "/health")).body == b"fine"


async def test_a_body_over_the_limit_after_the_response_started_cuts_the_response() -> None:
    ended = trio.Event()

    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await receive()
        finally:
            ended.set()

    async with (
        open_server(app, ServerConfig(port=0, max_body_bytes=LIMIT_BYTES)) as server,
        open_raw_http(server.url) as client,
    ):
        await client.send(request_bytes("POST", "/", headers=[("transfer-encoding", "chunked")]))
        assert (await client.read_head()).status == 200
        await client.send(chunk_bytes(bytes(LIMIT_BYTES + 1)))
        await ended.wait()
        assert await client.read_to_end() == b""


@pytest.mark.parametrize(("num_bytes", "status"), [(100, 200), (LIMIT_BYTES + 1, 413)])
async def test_a_client_that_expects_100_continue_is_answered(num_bytes: int, status: int) -> None:
    """It is told to go on only where the body will be taken."""
    async with (
        open_server(make_app(), ServerConfig(port=0, max_body_bytes=LIMIT_BYTES)) as server,
        open_raw_http(server.url) as client,
    ):
        headers = [("expect", "100-continue"), ("content-length", str(num_bytes))]
        await client.send_request("POST", "/length", headers=headers)
        if status == 200:
            assert (await client.read_head()).status == 100
            await client.send(bytes(num_bytes))
        assert (await client.read_response()).status == status


async def test_other_routes_answer_while_a_body_of_27_mb_arrives() -> None:
    """Case 18 (vllm 24910): counted, not timed: as long as the upload lasts, health is asked again and again."""
    body = bytes(27_000_000)
    num_answers = 0
    async with (
        open_server(make_app()) as server,
        open_raw_http(server.url) as uploader,
        open_raw_http(server.url) as poller,
    ):
        with trio.CancelScope() as polling:

            async def upload() -> None:
                response = await uploader.request("POST", "/length", body=body)
                assert response.body == b"27000000"
                polling.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(upload)
                while True:
                    assert (await poller.request("GET", "/health")).body == b"fine"
                    num_answers += 1
    assert num_answers >= 10
