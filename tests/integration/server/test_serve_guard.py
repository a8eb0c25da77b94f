"""An error in one connection ends that connection: WebSockets and HTTP/2 provoke what Hypercorn does not survive."""

import ssl
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TypeVar

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
import trio
import trio.lowlevel
from quart import request, websocket
from quart_trio import QuartTrio
from trio.testing import wait_all_tasks_blocked
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Event, Request, TextMessage

from trioengine.server.http2 import MAX_RESETS
from trioengine.server.serving import ServerConfig
from trioengine.testing.http_server import RunningServer, open_server
from trioengine.testing.raw_http import RawHttpClient, open_raw_http

E = TypeVar("E", bound=h2.events.Event)


def make_app() -> QuartTrio:
    app = QuartTrio(__name__)
    app.config["PROPAGATE_EXCEPTIONS"] = True

    @app.get("/health")
    async def health() -> str:
        return "fine"

    @app.post("/length")
    async def length() -> str:
        return str(len(await request.get_data()))

    @app.websocket("/echo")
    async def echo() -> None:
        while True:
            await websocket.send(await websocket.receive())

    @app.websocket("/broken")
    async def broken() -> None:
        await websocket.accept()
        await websocket.receive()
        raise RuntimeError("this handler is broken")

    @app.websocket("/late")
    async def late() -> None:
        await trio.sleep_forever()

    return app


@asynccontextmanager
async def check_bystander(server: RunningServer) -> AsyncGenerator[None]:
    """A connection that is open before the block still works after it."""
    async with open_raw_http(server.url) as bystander:
        assert (await bystander.request("GET", "/health")).body == b"fine"
        yield
        assert (await bystander.request("GET", "/health")).body == b"fine"


def upgrade_bytes(path: str) -> bytes:
    return WSConnection(ConnectionType.CLIENT).send(Request(host="localhost", target=path))


class WebSocketClient:
    def __init__(self, client: RawHttpClient) -> None:
        self._client = client
        self._connection = WSConnection(ConnectionType.CLIENT)

    async def connect(self, path: str) -> None:
        await self.send(Request(host="localhost", target=path))
        assert isinstance(await self.receive(), AcceptConnection)

    async def send(self, event: Event) -> None:
        await self._client.send(self._connection.send(event))

    async def receive(self) -> Event:
        while True:
            for event in self._connection.events():
                return event
            data = await self._client.read_some()
            self._connection.receive_data(data or None)


async def test_a_websocket_echoes_and_closes_normally() -> None:
    async with open_server(make_app()) as server, open_raw_http(server.url) as client:
        ws = WebSocketClient(client)
        await ws.connect("/echo")
        await ws.send(TextMessage("hello"))
        assert (await ws.receive()) == TextMessage("hello")
        await ws.send(CloseConnection(1000))
        answer = await ws.receive()
        assert isinstance(answer, CloseConnection)
        assert answer.code == 1000
        assert await client.read_to_end() == b""


@pytest.mark.parametrize("extra", [b"x", b"\x81\x85\0\0\0\0hello", bytes(10_000)], ids=["byte", "frame", "much"])
@pytest.mark.parametrize("path", ["/echo", "/late", "/nothing"])
async def test_bytes_before_the_websocket_is_accepted_end_this_connection_only(path: str, extra: bytes) -> None:
    """Case 45 (hypercorn 225)."""
    async with (
        open_server(make_app()) as server,
        check_bystander(server),
        open_raw_http(server.url) as client,
    ):
        await client.send(upgrade_bytes(path) + extra)
        head = await client.read_head()
        assert head.status in (400, 404)
        await client.read_to_end()


@pytest.mark.parametrize("extra", [b"x", b"\xff\xff" * 50], ids=["byte", "frames"])
async def test_nonsense_on_an_open_websocket_ends_this_connection_only(extra: bytes) -> None:
    async with open_server(make_app()) as server, check_bystander(server), open_raw_http(server.url) as client:
        ws = WebSocketClient(client)
        await ws.connect("/echo")
        await client.send(extra)
        client.send_fin()
        await client.read_to_end()


async def test_a_failing_websocket_handler_closes_with_1011(caplog) -> None:
    async with open_server(make_app()) as server, check_bystander(server), open_raw_http(server.url) as client:
        ws = WebSocketClient(client)
        await ws.connect("/broken")
        await ws.send(TextMessage("go"))
        closing = await ws.receive()
        assert isinstance(closing, CloseConnection)
        assert closing.code == 1011
    assert "this handler is broken" in caplog.text


async def test_an_open_websocket_is_told_that_the_server_goes_away() -> None:
    config = ServerConfig(port=0, shutdown_timeout_s=0.05)
    async with open_server(make_app(), config) as server, open_raw_http(server.url) as client:
        ws = WebSocketClient(client)
        await ws.connect("/echo")
        server.shutdown.set()
        closing = await ws.receive()
        assert isinstance(closing, CloseConnection)
        assert closing.code == 1001
        await server.stopped.wait()


async def test_a_refused_upgrade_ends_its_connection() -> None:
    async with open_server(make_app()) as server, open_raw_http(server.url) as client:
        await client.send(upgrade_bytes("/nothing"))
        assert (await client.read_head()).status == 404
        await client.read_to_end()


def anonymous_tls_context(side: int) -> ssl.SSLContext:
    """TLS without certificates, so that no test needs a key: for nothing but a test."""
    context = ssl.SSLContext(side)
    if side == ssl.PROTOCOL_TLS_CLIENT:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")
    return context


class Http2Client:
    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream
        config = h2.config.H2Configuration(header_encoding=None, validate_outbound_headers=False)
        self.protocol = h2.connection.H2Connection(config)
        self.protocol.initiate_connection()
        self.events: list[h2.events.Event] = []

    async def flush(self) -> None:
        await self._stream.send_all(self.protocol.data_to_send())

    async def send_headers(self, stream_id: int, method: bytes, path: bytes, *extra: tuple[bytes, bytes]) -> None:
        address = ((b":scheme", b"https"), (b":authority", b"localhost"))
        headers = [(b":method", method), (b":path", path), *address, *extra]
        self.protocol.send_headers(stream_id, headers, end_stream=method == b"GET")
        await self.flush()

    async def read_status(self, stream_id: int) -> bytes:
        """The status of the response on this stream, or nothing if the connection ends before it."""
        while data := await self._receive():
            for event in self.protocol.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream_id:
                    return dict(event.headers)[b":status"]
            await self.flush()
        return b""

    async def read_event(self, kind: type[E] | tuple[type[E], ...]) -> E:
        """The next event of this kind."""
        while data := await self._receive():
            for event in self.protocol.receive_data(data):
                if isinstance(event, kind):
                    return event
        raise AssertionError(f"the connection has ended without {kind}")

    async def wait_for_window(self, stream_id: int, num_bytes: int) -> None:
        """Until the server lets so much through; it must let the connection go on."""
        while self.protocol.local_flow_control_window(stream_id) < num_bytes:
            data = await self._receive()
            assert data
            self.protocol.receive_data(data)

    async def wait_for_end(self) -> bool:
        while await self._receive():
            pass
        return True

    async def _receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(65536))
        except trio.BrokenResourceError:
            return b""


@asynccontextmanager
async def open_tls(url: str, *, alpn: list[str]) -> AsyncGenerator[trio.SSLStream[trio.SocketStream]]:
    host, port = url.removeprefix("https://").split(":")
    context = anonymous_tls_context(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(alpn)
    async with await trio.open_tcp_stream(host, int(port)) as transport:
        stream = trio.SSLStream(transport, context, https_compatible=True)
        await stream.do_handshake()
        yield stream


def open_tls_server(*, http2: bool) -> AbstractAsyncContextManager[RunningServer]:
    tls = anonymous_tls_context(ssl.PROTOCOL_TLS_SERVER)
    config = ServerConfig(port=0, max_body_bytes=1000, shutdown_timeout_s=1000, http2=http2)
    return open_server(make_app(), config, tls=tls)


@pytest.mark.parametrize(("http2", "chosen"), [(True, "h2"), (False, "http/1.1")])
async def test_http2_is_chosen_only_when_asked_for(http2: bool, chosen: str) -> None:
    async with (
        open_tls_server(http2=http2) as server,
        open_tls(server.url, alpn=["h2", "http/1.1"]) as stream,
    ):
        assert server.url.startswith("https://")
        assert stream.selected_alpn_protocol() == chosen
        if http2:
            client = Http2Client(stream)
            await client.send_headers(1, b"GET", b"/health")
            assert await client.read_status(1) == b"200"
        else:
            await stream.send_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            received = b""
            while part := await stream.receive_some():
                received += part
            assert received.startswith(b"HTTP/1.1 200")
            assert received.endswith(b"fine")


async def test_an_idle_http2_connection_closes_at_once_on_shutdown() -> None:
    async with (
        open_tls_server(http2=True) as server,
        open_tls(server.url, alpn=["h2"]) as stream,
    ):
        client = Http2Client(stream)
        await client.send_headers(1, b"GET", b"/health")
        assert await client.read_status(1) == b"200"
        client.protocol.ping(b"anything")
        await client.flush()
        await wait_all_tasks_blocked()
        server.shutdown.set()
        assert await client.wait_for_end()
        await server.stopped.wait()


@asynccontextmanager
async def check_http2_bystander(server: RunningServer) -> AsyncGenerator[None]:
    async with open_tls(server.url, alpn=["h2"]) as stream:
        bystander = Http2Client(stream)
        await bystander.send_headers(1, b"GET", b"/health")
        assert await bystander.read_status(1) == b"200"
        yield
        await bystander.send_headers(3, b"GET", b"/health")
        assert await bystander.read_status(3) == b"200"


async def test_websockets_over_http2_are_sent_to_http1() -> None:
    """By the settings, and where a client asks all the same, by the reset (RFC 8441, RFC 9113 7)."""
    async with (
        open_tls_server(http2=True) as server,
        check_http2_bystander(server),
        open_tls(server.url, alpn=["h2"]) as stream,
    ):
        client = Http2Client(stream)
        await client.send_headers(
            1, b"CONNECT", b"/echo", (b":protocol", b"websocket"), (b"sec-websocket-version", b"13")
        )
        settings = await client.read_event(h2.events.RemoteSettingsChanged)
        assert h2.settings.SettingCodes.ENABLE_CONNECT_PROTOCOL not in settings.changed_settings
        await client.flush()
        reset = await client.read_event(h2.events.StreamReset)
        assert reset.error_code == h2.errors.ErrorCodes.HTTP_1_1_REQUIRED


async def test_http2_clients_that_wait_before_they_send_are_told_to_go_on() -> None:
    """Only where the body will be taken."""
    async with open_tls_server(http2=True) as server, open_tls(server.url, alpn=["h2"]) as stream:
        client = Http2Client(stream)
        expects = (b"expect", b"100-continue")
        await client.send_headers(1, b"POST", b"/length", expects, (b"content-length", b"900"))
        told = await client.read_event(h2.events.InformationalResponseReceived)
        assert told.stream_id == 1
        client.protocol.send_data(1, bytes(900), end_stream=True)
        await client.flush()
        assert await client.read_status(1) == b"200"
        await client.send_headers(3, b"POST", b"/length", expects, (b"content-length", b"1001"))
        event = await client.read_event((h2.events.InformationalResponseReceived, h2.events.ResponseReceived))
        assert dict(event.headers)[b":status"] == b"413"


async def test_http2_data_after_an_early_413_ends_at_most_this_connection() -> None:
    """Case 45 (hypercorn 225)."""
    async with (
        open_tls_server(http2=True) as server,
        check_http2_bystander(server),
        open_tls(server.url, alpn=["h2"]) as stream,
    ):
        client = Http2Client(stream)
        await client.send_headers(1, b"POST", b"/length", (b"content-length", b"100000"))
        assert await client.read_status(1) == b"413"
        client.protocol.send_data(1, bytes(5000))
        await client.flush()
        await wait_all_tasks_blocked()


async def test_http2_data_after_an_early_413_leaves_the_other_streams_of_its_connection_alone() -> None:
    """As much as the connection's window lets through, so that it must be given back."""
    async with open_tls_server(http2=True) as server, open_tls(server.url, alpn=["h2"]) as stream:
        client = Http2Client(stream)
        for stream_id in (1, 3, 5):
            await client.send_headers(stream_id, b"POST", b"/length", (b"content-length", b"100000"))
            assert await client.read_status(stream_id) == b"413"
            for _ in range(2):
                await client.wait_for_window(stream_id, 15_000)
                client.protocol.send_data(stream_id, bytes(15_000))
                await client.flush()
        await client.send_headers(7, b"POST", b"/length", (b"content-length", b"900"))
        client.protocol.send_data(7, bytes(900), end_stream=True)
        await client.flush()
        assert await client.read_status(7) == b"200"


async def test_http2_streams_that_come_while_the_server_drains_are_refused() -> None:
    """With the code that says that nothing was done, so that clients try again elsewhere."""
    release = trio.Event()

    async def wait(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    tls = anonymous_tls_context(ssl.PROTOCOL_TLS_SERVER)
    async with (
        open_server(wait, ServerConfig(port=0, http2=True, shutdown_timeout_s=1000), tls=tls) as server,
        open_tls(server.url, alpn=["h2"]) as stream,
    ):
        client = Http2Client(stream)
        await client.send_headers(1, b"GET", b"/")
        await wait_all_tasks_blocked()
        server.shutdown.set()
        await wait_all_tasks_blocked()
        await client.send_headers(3, b"GET", b"/")
        reset = await client.read_event(h2.events.StreamReset)
        assert (reset.stream_id, reset.error_code) == (3, h2.errors.ErrorCodes.REFUSED_STREAM)
        release.set()
        assert await client.read_status(1) == b"200"
        await server.stopped.wait()


async def test_a_client_that_resets_streams_as_fast_as_it_opens_them_is_cut_off() -> None:
    """CVE-2023-44487."""
    async with (
        open_tls_server(http2=True) as server,
        check_http2_bystander(server),
        open_tls(server.url, alpn=["h2"]) as stream,
    ):
        client = Http2Client(stream)
        num_opened = 0
        with suppress(trio.BrokenResourceError):
            while num_opened < 20 * MAX_RESETS:
                await client.send_headers(2 * num_opened + 1, b"GET", b"/health")
                client.protocol.reset_stream(2 * num_opened + 1)
                num_opened += 1
                await client.flush()
                await trio.lowlevel.checkpoint()
        assert await client.wait_for_end()
        assert num_opened < 20 * MAX_RESETS


async def test_a_path_that_is_not_ascii_ends_at_most_this_connection() -> None:
    async with (
        open_tls_server(http2=True) as server,
        check_http2_bystander(server),
        open_tls(server.url, alpn=["h2"]) as stream,
    ):
        client = Http2Client(stream)
        await client.send_headers(1, b"GET", "/ä".encode())
        assert await client.wait_for_end()


async def test_a_client_that_does_not_speak_tls_ends_its_own_connection_only() -> None:
    async with (
        open_tls_server(http2=True) as server,
        check_http2_bystander(server),
        open_raw_http(server.url.replace("https", "http")) as client,
    ):
        await client.send(b"GET / HTTP/1.1\r\n\r\n")
        await client.read_to_end()


async def test_an_http2_stream_whose_client_takes_nothing_ends_and_its_neighbours_go_on() -> None:
    """While parts are written, and when the last one waits to be taken."""
    ended = trio.Event()

    async def write(scope, receive, send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await make_app()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            if scope["path"] == "/once":
                await send({"type": "http.response.body", "body": bytes(66_000), "more_body": False})
            while scope["path"] == "/parts":
                await send({"type": "http.response.body", "body": bytes(16_000), "more_body": True})
        finally:
            ended.set()

    tls = anonymous_tls_context(ssl.PROTOCOL_TLS_SERVER)
    config = ServerConfig(port=0, http2=True, write_timeout_s=0.05)
    for path in (b"/once", b"/parts"):
        async with open_server(write, config, tls=tls) as server, open_tls(server.url, alpn=["h2"]) as stream:
            client = Http2Client(stream)
            await client.send_headers(1, b"GET", path)
            reset = await client.read_event(h2.events.StreamReset)
            assert (reset.stream_id, reset.error_code) == (1, h2.errors.ErrorCodes.CANCEL)
            client.protocol.increment_flow_control_window(65535)
            await client.send_headers(3, b"GET", b"/health")
            assert await client.read_status(3) == b"200"
        await ended.wait()
        ended = trio.Event()


async def test_an_http2_connection_has_no_last_request() -> None:
    """Hypercorn would end it after a thousand, whatever its other streams do."""

    async def nothing(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    tls = anonymous_tls_context(ssl.PROTOCOL_TLS_SERVER)
    config = ServerConfig(port=0, http2=True, access_log=False)
    async with open_server(nothing, config, tls=tls) as server, open_tls(server.url, alpn=["h2"]) as stream:
        client = Http2Client(stream)
        for number in range(1005):
            await client.send_headers(2 * number + 1, b"GET", b"/")
            assert await client.read_status(2 * number + 1) == b"204"


async def test_an_http2_client_that_takes_nothing_holds_its_handler_back() -> None:
    """HTTP/2 has flow control of its own: the window is used up, and the handler waits instead of filling memory."""
    num_sent_bytes = 0
    ended = trio.Event()
    piece = bytes(16 * 1024)

    async def write_for_ever(scope, receive, send) -> None:
        nonlocal num_sent_bytes
        if scope["type"] != "http":
            await make_app()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                num_sent_bytes += len(piece)
        finally:
            ended.set()

    tls = anonymous_tls_context(ssl.PROTOCOL_TLS_SERVER)
    async with open_server(write_for_ever, ServerConfig(port=0, http2=True), tls=tls) as server:
        async with open_tls(server.url, alpn=["h2"]) as stream:
            client = Http2Client(stream)
            await client.send_headers(1, b"GET", b"/")
            assert await client.read_status(1) == b"200"
            await wait_all_tasks_blocked(0.05)
            # A window of 64 KiB, and what Hypercorn's stream buffer takes: twice 16 KiB and one piece over it.
            assert len(piece) < num_sent_bytes <= 65536 + 4 * len(piece)
        await ended.wait()
