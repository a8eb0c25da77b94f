"""TLS from the options: certificates, clients' certificates, HTTP/2 by ALPN, and nothing older than 1.2."""

import ssl
import subprocess
import warnings
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import pytest
import trio

from trioengine.config.server import ServerConfig
from trioengine.errors import ConfigError
from trioengine.server.tls import load_tls
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import open_raw_http

PASSWORD = "a password"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: an authority `ca.pem`, and `server.pem` and `client.pem` that it has signed, each with its key."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
    for name in ("server", "client"):
        openssl(
            "req", "-x509", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}",
            "-addext", "subjectAltName=IP:127.0.0.1", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2",
        )  # fmt: skip
    openssl("pkey", "-in", "server.key", "-aes256", "-passout", f"pass:{PASSWORD}", "-out", "locked.key")
    return folder


def server_config(folder: Path, **options: object) -> ServerConfig:
    files = {"ssl_certfile": str(folder / "server.pem"), "ssl_keyfile": str(folder / "server.key")}
    return ServerConfig(**{"port": 0, **files, **options})  # pyright: ignore[reportArgumentType]


def client_context(folder: Path, *, alpn: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.set_alpn_protocols(list(alpn))
    return context


@asynccontextmanager
async def open_tls(url: str, context: ssl.SSLContext) -> AsyncGenerator[trio.SSLStream[trio.SocketStream]]:
    host, port = url.removeprefix("https://").split(":")
    async with await trio.open_tcp_stream(host, int(port)) as transport:
        stream = trio.SSLStream(transport, context, server_hostname=host, https_compatible=True)
        await stream.do_handshake()
        yield stream


async def get(stream: trio.SSLStream[trio.SocketStream]) -> bytes:
    await stream.send_all(b"GET /x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    received = b""
    while part := await stream.receive_some():
        received += part
    return received


async def say_scheme(scope, receive, send) -> None:
    assert scope["type"] == "http"
    body = scope["scheme"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize(
    "key", [{}, {"ssl_keyfile": "locked.key", "ssl_keyfile_password": PASSWORD}], ids=["plain", "locked"]
)
async def test_a_client_that_knows_the_authority_is_served(certificates: Path, key: dict[str, str]) -> None:
    options = {name: str(certificates / value) if name == "ssl_keyfile" else value for name, value in key.items()}
    async with (
        open_server(say_scheme, server_config(certificates, **options)) as server,
        open_tls(server.url, client_context(certificates)) as stream,
    ):
        answer = await get(stream)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"https")


async def test_a_key_in_the_certificates_file_needs_no_option(certificates: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes((certificates / "server.pem").read_bytes() + (certificates / "server.key").read_bytes())
    assert load_tls(ServerConfig(ssl_certfile=str(both))) is not None
    assert load_tls(ServerConfig()) is None


async def test_a_client_without_a_certificate_is_refused_where_one_is_needed(certificates: Path) -> None:
    options = {"ssl_ca_certs": str(certificates / "ca.pem"), "ssl_cert_reqs": 2}
    async with open_server(say_scheme, server_config(certificates, **options)) as server:
        answer = b""
        # With TLS 1.3 the handshake is over before the client hears of it, as an alert or as the end.
        with suppress(trio.BrokenResourceError):
            async with open_tls(server.url, client_context(certificates)) as stream:
                answer = await get(stream)
        assert answer == b""
        context = client_context(certificates)
        context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
        async with open_tls(server.url, context) as stream:
            assert b" 200 " in await get(stream)


async def test_tls_1_1_is_refused(certificates: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.minimum_version = ssl.TLSVersion.TLSv1_1
    async with open_server(say_scheme, server_config(certificates)) as server:
        with pytest.raises(trio.BrokenResourceError):
            async with open_tls(server.url, context):
                pass


async def test_http2_is_offered_when_asked_for(certificates: Path) -> None:
    async with (
        open_server(say_scheme, server_config(certificates, http2=True)) as server,
        open_tls(server.url, client_context(certificates, alpn=("h2", "http/1.1"))) as stream,
    ):
        assert stream.selected_alpn_protocol() == "h2"
        protocol = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        protocol.initiate_connection()
        address = [(b":scheme", b"https"), (b":authority", b"localhost")]
        protocol.send_headers(1, [(b":method", b"GET"), (b":path", b"/"), *address], end_stream=True)
        await stream.send_all(protocol.data_to_send())
        events: list[h2.events.Event] = []
        while not any(isinstance(event, h2.events.StreamEnded) for event in events):
            events += protocol.receive_data(await stream.receive_some())
        [response] = [event for event in events if isinstance(event, h2.events.ResponseReceived)]
        assert (b":status", b"200") in (response.headers or [])


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
        b"http2-settings: \r\n\r\n",
    ],
    ids=["prior knowledge", "upgrade"],
)
async def test_http2_in_clear_text_is_refused(sent: bytes) -> None:
    """An upgrade is answered as if it were not asked for, prior knowledge is an error."""
    async with open_server(say_scheme, ServerConfig(port=0)) as server, open_raw_http(server.url) as client:
        await client.send(sent)
        assert (await client.read_response()).status == (505 if sent.startswith(b"PRI") else 200)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ssl_certfile": "nothing.pem"}, "nothing.pem"),
        ({"ssl_keyfile": "client.key"}, "client.key"),
        ({"ssl_keyfile": "locked.key"}, "locked.key"),
        ({"ssl_keyfile": "locked.key", "ssl_keyfile_password": "wrong"}, "locked.key"),
        ({"ssl_ca_certs": "server.key"}, "server.key"),
    ],
)
def test_files_that_do_not_fit_are_an_error_that_names_them(
    certificates: Path, options: dict[str, str], named: str
) -> None:
    paths = {name: value if name.endswith("password") else str(certificates / value) for name, value in options.items()}
    with pytest.raises(ConfigError, match=named):
        load_tls(server_config(certificates, **paths))
