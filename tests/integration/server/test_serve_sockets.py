"""Where a server listens besides host and port: a path, an inherited descriptor."""

import os
import socket
import stat
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from trioengine.config.server import ServerConfig
from trioengine.errors import ServerStartError
from trioengine.server.listeners import bind_listeners, inherited_listener, is_loopback
from trioengine.testing.http_server import open_server
from trioengine.testing.raw_http import RawHttpClient, open_raw_http


async def fine(scope, receive, send) -> None:
    assert scope["type"] == "http"
    assert scope["client"] is None or scope["client"][0] == "127.0.0.1"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"fine"})


@asynccontextmanager
async def open_unix(path: Path) -> AsyncGenerator[RawHttpClient]:
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        await sock.connect(str(path))
        yield RawHttpClient(sock)


@pytest.mark.parametrize("mode", ["600", "666"])
async def test_a_path_is_listened_on_with_its_mode_and_gone_afterwards(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "engine.sock"
    async with open_server(fine, ServerConfig(uds=str(path), uds_mode=mode)) as server:
        assert server.url == f"http+unix://{path}"
        assert stat.S_IMODE(path.stat().st_mode) == int(mode, 8)
        async with open_unix(path) as client:
            assert (await client.request("GET", "/")).body == b"fine"
            await client.send(b"GET / HTTP/1.1\r\nhost: any.name\r\n\r\n")
            assert (await client.read_response()).status == 200
        server.shutdown.set()
        await server.stopped.wait()
    assert not path.exists()


async def test_what_an_ended_server_has_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(path))
    async with open_server(fine, ServerConfig(uds=str(path))), open_unix(path) as client:
        assert (await client.request("GET", "/")).body == b"fine"


async def test_a_path_that_somebody_listens_on_stays_theirs(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    async with open_server(fine, ServerConfig(uds=str(path))):
        with pytest.raises(ServerStartError, match=r"engine\.sock"):
            await bind_listeners(ServerConfig(uds=str(path)))
        async with open_unix(path) as client:
            assert (await client.request("GET", "/")).body == b"fine"


async def test_a_path_of_a_server_that_is_about_to_listen_stays_its(tmp_path: Path) -> None:
    """One that loads its model: it has taken the path, and refuses connections still."""
    path = tmp_path / "x.sock"
    [theirs] = await bind_listeners(ServerConfig(uds=str(path)))
    with theirs:
        with pytest.raises(ServerStartError, match="in use"):
            await bind_listeners(ServerConfig(uds=str(path)))
        theirs.listen()
        async with open_unix(path):
            pass


async def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("important")
    with pytest.raises(ServerStartError, match=r"notes\.txt"):
        await bind_listeners(ServerConfig(uds=str(path)))
    assert path.read_text() == "important"


async def test_a_path_that_another_server_has_taken_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    [ours] = await bind_listeners(ServerConfig(uds=str(path)))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        ours.close()
        assert path.exists()


async def test_a_descriptor_is_listened_on() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with open_server(fine, ServerConfig(fd=listener.detach())) as server, open_raw_http(server.url) as client:
        assert server.url.endswith(f":{port}")
        assert (await client.request("GET", "/")).body == b"fine"


def test_a_descriptor_that_is_no_stream_socket_is_an_error() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        with pytest.raises(ServerStartError, match=str(datagrams.fileno())):
            inherited_listener(datagrams.fileno())
        assert datagrams.getsockname()
    with open(os.devnull) as file, pytest.raises(ServerStartError, match="no socket"):
        inherited_listener(file.fileno())


async def test_loopback_is_what_only_this_machine_reaches(tmp_path: Path) -> None:
    for host, expected in (("127.0.0.1", True), ("127.0.0.3", True), ("0.0.0.0", False)):
        [sock] = await bind_listeners(ServerConfig(host=host, port=0))
        with sock:
            assert is_loopback([sock]) is expected
    [unix] = await bind_listeners(ServerConfig(uds=str(tmp_path / "x.sock")))
    with unix:
        assert not is_loopback([unix])
