"""What requests pass before any application: keys, origins, hosts, root path, slow bodies, the access log."""

import json
import logging
import re
from typing import Any

import pytest
import trio
from quart import request
from quart_trio import QuartTrio
from trio.testing import MockClock, wait_all_tasks_blocked
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Event, RejectConnection, Request, TextMessage

from trioengine.config.server import ServerConfig
from trioengine.server.access import AccessRules
from trioengine.server.app import create_app
from trioengine.server.gate import Gate
from trioengine.testing.fake_engine import FakeEngine
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import RawHttpClient, RawResponse, open_raw_http, request_bytes

KEY = "the-key"
AUTHORIZED = ("authorization", f"Bearer {KEY}")
PAGE = ("origin", "https://page.example")
ORIGINS = {"allowed_origins": ["https://page.example"]}


def config(**options: Any) -> ServerConfig:
    return ServerConfig(port=0, **options)


async def echo(scope, receive, send) -> None:
    """Says what it got; every path and method exists, WebSockets too."""
    if scope["type"] == "websocket":
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept", "subprotocol": None, "headers": []})
        message = await receive()
        await send({"type": "websocket.send", "text": f"you said {message['text']}", "bytes": None})
        await send({"type": "websocket.close", "code": 1000, "reason": None})
        return
    assert scope["type"] == "http"
    data = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return
        data += message["body"]
        if not message["more_body"]:
            break
    reply = {
        "path": scope["path"],
        "root_path": scope["root_path"],
        "request_id": scope["state"]["request_id"],
        "length": len(data),
    }
    body = json.dumps(reply).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def check_is_error(response: RawResponse, status: int, code: str) -> None:
    assert response.status == status
    assert response.head.header("content-type") == "application/json"
    error = json.loads(response.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert response.head.header("x-request-id")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", ["/v1/models", "/anything", "/health/", "/metrics"])
async def test_without_the_key_no_address_answers(method: str, path: str) -> None:
    """Case 43 (vllm 58144): by default, whatever the application has there. The page that asked may read why."""
    async with (
        open_server(echo, config(api_key=KEY, **ORIGINS)) as server,
        open_raw_http(server.url) as client,
    ):
        response = await client.request(method, path, headers=[PAGE])
        check_is_error(response, 401, "invalid_api_key")
        assert response.head.header("www-authenticate") == "Bearer"
        assert response.head.header("access-control-allow-origin") == PAGE[1]
        assert response.head.header("vary") == "Origin"
        async with open_raw_http(server.url) as another:
            assert (await another.request(method, path, headers=[PAGE, AUTHORIZED])).status == 200


async def test_without_the_key_no_route_of_ours_answers() -> None:
    """Case 43 (vllm 58144): every rule of the application, admin's too, by every method that it takes."""
    server_config = config(api_key=KEY, enable_admin=True, **ORIGINS)
    engine = FakeEngine()
    app = create_app(engine, server_config)
    addresses = {
        (method, re.sub("<[^>]*>", "x", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"OPTIONS"}
    }
    open_paths = {"/", "/static/x", "/health", "/ready", "/ping"}
    closed = [(method, path) for method, path in addresses if path not in open_paths or method not in ("GET", "HEAD")]
    assert len(closed) > 30
    async with open_server(app, server_config) as server:
        for method, path in closed:
            async with open_raw_http(server.url) as client:
                await client.send_request(method, path, headers=[PAGE])
                response = await client.read_response(is_head=method == "HEAD")
                assert response.status == 401, (method, path)
                assert response.head.header("access-control-allow-origin") == PAGE[1]
                assert method == "HEAD" or json.loads(response.body)["error"]["code"] == "invalid_api_key"
    assert not engine.requests


async def test_while_the_server_drains_a_request_on_an_open_connection_is_503() -> None:
    """One whose head was on its way when the signal came; it may be tried again elsewhere."""
    shutdown = trio.Event()
    app = create_app(FakeEngine(), config(), shutdown=shutdown)
    request = request_bytes(
        "POST", "/v1/completions", headers=[("content-type", "application/json")], body=b'{"prompt": "Hi"}'
    )
    async with open_server(app, config(shutdown_timeout_s=1000)) as server, open_raw_http(server.url) as client:
        await client.send(request)
        assert (await client.read_response()).status == 200
        await client.send(request[:10])
        await wait_all_tasks_blocked()
        shutdown.set()
        server.shutdown.set()
        await wait_all_tasks_blocked()
        await client.send(request[10:])
        response = await client.read_response()
        check_is_error(response, 503, "overloaded")
        assert response.head.header("connection") == "close"
        assert int(response.head.header("retry-after") or 0) > 0
        assert await client.read_to_end() == b""


async def test_health_and_preflight_need_no_key() -> None:
    """Case 43 (vllm 58144)."""
    asks = [PAGE, ("access-control-request-method", "POST"), ("access-control-request-headers", "authorization")]
    async with open_server(echo, config(api_key=KEY, **ORIGINS)) as server, open_raw_http(server.url) as client:
        for path in ("/health", "/ready", "/ping", "/", "/static/page.js"):
            assert (await client.request("GET", path)).status == 200
        response = await client.request("OPTIONS", "/v1/chat/completions", headers=asks)
        assert (response.status, response.body) == (204, b"")
        assert response.head.header("access-control-allow-origin") == PAGE[1]
        assert response.head.header("access-control-allow-headers") == "authorization"
        names = [name for name, _ in response.head.headers]
        assert len(set(names)) == len(names), "browsers refuse an answer that allows an origin twice"
        foreign = [("origin", "https://other.example"), *asks[1:]]
        response = await client.request("OPTIONS", "/v1/chat/completions", headers=foreign)
        assert response.status == 403
        assert response.head.header("access-control-allow-origin") is None
        assert (await client.request("GET", "/health")).status == 200


async def test_a_page_of_another_origin_drives_nothing() -> None:
    async with open_server(echo, config()) as server, open_raw_http(server.url) as client:
        check_is_error(await client.request("POST", "/v1/models", headers=[PAGE], body=b"{}"), 403, "forbidden")
    async with open_server(echo, config(**ORIGINS)) as server, open_raw_http(server.url) as client:
        response = await client.request("POST", "/v1/models", headers=[PAGE], body=b"{}")
        assert response.status == 200
        assert response.head.header("access-control-allow-origin") == PAGE[1]
        assert (await client.request("POST", "/x", headers=[("origin", "http://localhost")])).status == 200


async def test_a_loopback_server_refuses_names_that_are_not_its_own() -> None:
    async with open_server(echo, config()) as server, open_raw_http(server.url) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: rebound.example\r\n\r\n")
        check_is_error(await client.read_response(), 403, "forbidden")
    for server_config in (config(allowed_hosts="rebound.example"), config(host="0.0.0.0")):
        async with open_server(echo, server_config) as server, open_raw_http(server.url) as client:
            await client.send(b"GET / HTTP/1.1\r\nhost: rebound.example\r\n\r\n")
            assert (await client.read_response()).status == 200


@pytest.mark.parametrize(
    ("path", "below"), [("/llm/v1/x", "/v1/x"), ("/v1/x", "/v1/x"), ("/llm", "/"), ("/llmx", "/llmx")]
)
async def test_a_proxy_may_take_the_root_path_away_or_not(path: str, below: str) -> None:
    async with open_server(echo, config(root_path="/llm/")) as server, open_raw_http(server.url) as client:
        seen = json.loads((await client.request("GET", path)).body)
        assert (seen["root_path"], seen["path"]) == ("/llm", "/llm" + below)


async def test_routes_and_open_paths_are_found_below_the_root_path() -> None:
    app = QuartTrio(__name__)

    @app.get("/health")
    async def health() -> str:
        return request.root_path

    async with (
        open_server(app, config(root_path="/llm", api_key=KEY)) as server,
        open_raw_http(server.url) as client,
    ):
        for path in ("/health", "/llm/health"):
            response = await client.request("GET", path)
            assert (response.status, response.body) == (200, b"/llm")


async def test_a_request_has_the_id_that_it_brings_or_a_new_one() -> None:
    async with open_server(echo, config()) as server, open_raw_http(server.url) as client:
        for brought in ("my-id-1", "x" * 128):
            response = await client.request("GET", "/", headers=[("x-request-id", brought)])
            assert response.head.header("x-request-id") == json.loads(response.body)["request_id"] == brought
        for brought in ("two words", "x" * 129, ""):
            response = await client.request("GET", "/", headers=[("x-request-id", brought)])
            made = response.head.header("x-request-id")
            assert made is not None
            assert made != brought
            assert made == json.loads(response.body)["request_id"]


async def test_a_body_that_does_not_come_is_408_and_others_live_on() -> None:
    ended = trio.Event()

    async def app(scope, receive, send) -> None:
        try:
            await echo(scope, receive, send)
        finally:
            ended.set()

    async with (
        open_server(app, config(body_timeout_s=0.05)) as server,
        open_raw_http(server.url) as bystander,
        open_raw_http(server.url) as client,
    ):
        await client.send(request_bytes("POST", "/", headers=[("content-length", "10")]) + b"half")
        response = await client.read_response()
        check_is_error(response, 408, "request_timeout")
        assert response.head.header("connection") == "close"
        assert await client.read_to_end() == b""
        assert ended.is_set()
        assert (await bystander.request("POST", "/", body=b"whole")).status == 200


async def test_a_body_in_drops_gets_hardly_more_time_than_one_that_does_not_come(autojump_clock: MockClock) -> None:
    """A byte each second: after ten seconds and a hundredth it is over."""
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        await trio.sleep(1)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": [], "client": None, "state": {}}
    server_config = config(body_timeout_s=9.5)
    gate = Gate(echo, server_config, AccessRules(server_config, is_loopback=True), trio.Event())
    started_s = trio.current_time()
    await gate(scope, receive, send)
    assert [message.get("status") for message in sent] == [408, None]
    assert 9.5 <= trio.current_time() - started_s < 9.6


async def test_an_application_that_takes_its_time_is_not_the_clients_fault() -> None:
    """Neither between the parts of a body nor once it is whole."""
    release = trio.Event()

    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        first = await receive()
        await release.wait()
        rest = await receive()
        assert (first["body"], rest["body"]) == (b"abc", b"")
        with trio.move_on_after(0.1):
            await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async with open_server(app, config(body_timeout_s=0.05)) as server, open_raw_http(server.url) as client:
        await client.send_request("POST", "/", body=b"abc")
        with trio.move_on_after(0.1):
            await client.read_head()
        release.set()
        assert (await client.read_response()).status == 200


async def test_each_request_is_one_line_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trioengine.access")
    started = trio.Event()

    async def app(scope, receive, send) -> None:
        if scope["path"] != "/endless":
            await echo(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"12345", "more_body": True})
        started.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    server_config = config(disable_access_log_for_endpoints=["/health"], api_key=KEY)
    async with open_server(app, server_config) as server:
        async with open_raw_http(server.url) as client:
            await client.request("GET", "/health")
            await client.request("POST", "/v1/x?secret=1", headers=[AUTHORIZED, ("x-request-id", "id-1")], body=b"{}")
            await client.request("GET", "/a%0Ab", headers=[AUTHORIZED])
            await client.send_request("GET", "/endless", headers=[AUTHORIZED])
            await started.wait()
            assert len(caplog.records) == 2
        await wait_all_tasks_blocked()
        async with open_raw_http(server.url) as client:
            assert (await client.request("GET", "/v1/models")).status == 401
    lines = [record.getMessage() for record in caplog.records if record.name == "trioengine.access"]
    assert len(lines) == 4
    assert '"POST /v1/x" 200 ' in lines[0]
    assert lines[0].endswith(" id-1")
    assert lines[0].startswith("127.0.0.1:")
    assert '"GET /a\\nb" 200 ' in lines[1]
    assert '"GET /endless" 200 5 B ' in lines[2]
    assert lines[2].endswith(" cut")
    assert '"GET /v1/models" 401 ' in lines[3]
    assert "secret" not in caplog.text


async def test_no_line_where_none_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trioengine.access")
    async with open_server(echo, config(access_log=False)) as server, open_raw_http(server.url) as client:
        assert (await client.request("GET", "/")).status == 200
    assert not caplog.records


class WebSocketClient:
    def __init__(self, client: RawHttpClient) -> None:
        self._client = client
        self._connection = WSConnection(ConnectionType.CLIENT)

    async def connect(self, headers: list[tuple[str, str]]) -> Event:
        pairs = [(name.encode(), value.encode()) for name, value in headers]
        await self.send(Request(host="localhost", target="/socket", extra_headers=pairs))
        return await self.receive()

    async def send(self, event: Event) -> None:
        await self._client.send(self._connection.send(event))

    async def receive(self) -> Event:
        while True:
            for event in self._connection.events():
                return event
            self._connection.receive_data(await self._client.read_some() or None)


@pytest.mark.parametrize(
    ("headers", "status"),
    [([("authorization", "Bearer wrong")], 401), ([AUTHORIZED, PAGE], 403), ([PAGE], 403)],
)
async def test_an_upgrade_that_may_not_be_is_refused(headers: list[tuple[str, str]], status: int) -> None:
    async with open_server(echo, config(api_key=KEY)) as server, open_raw_http(server.url) as client:
        answer = await WebSocketClient(client).connect(headers)
        assert isinstance(answer, RejectConnection)
        assert answer.status_code == status


async def test_a_websocket_with_the_key_in_its_header_is_the_applications() -> None:
    async with open_server(echo, config(api_key=KEY)) as server, open_raw_http(server.url) as client:
        socket = WebSocketClient(client)
        assert isinstance(await socket.connect([AUTHORIZED]), AcceptConnection)
        await socket.send(TextMessage("hello"))
        assert await socket.receive() == TextMessage("you said hello")


async def test_a_browsers_websocket_brings_its_key_in_its_first_message() -> None:
    async with open_server(echo, config(api_key=KEY, **ORIGINS)) as server, open_raw_http(server.url) as client:
        socket = WebSocketClient(client)
        assert isinstance(await socket.connect([PAGE]), AcceptConnection)
        await socket.send(TextMessage(json.dumps({"api_key": KEY})))
        await socket.send(TextMessage("hello"))
        assert await socket.receive() == TextMessage("you said hello")
        assert isinstance(await socket.receive(), CloseConnection)


@pytest.mark.parametrize(
    "first", ["hello", "[]", '{"api_key": 3}', '{"api_key": "wrong"}', '{"api_key": "\\ud800"}', "[" * 9999]
)
async def test_a_websocket_whose_first_message_has_no_key_never_reaches_the_application(first: str) -> None:
    async def app(scope, receive, send) -> None:
        raise AssertionError("reached")

    async with open_server(app, config(api_key=KEY)) as server, open_raw_http(server.url) as client:
        socket = WebSocketClient(client)
        assert isinstance(await socket.connect([]), AcceptConnection)
        await socket.send(TextMessage(first))
        answer = await socket.receive()
        assert isinstance(answer, CloseConnection)
        assert answer.code == 1008


async def test_a_websocket_that_says_nothing_is_closed() -> None:
    server_config = config(api_key=KEY, header_timeout_s=0.05)
    async with open_server(echo, server_config) as server, open_raw_http(server.url) as client:
        socket = WebSocketClient(client)
        assert isinstance(await socket.connect([]), AcceptConnection)
        assert isinstance(await socket.receive(), CloseConnection)
