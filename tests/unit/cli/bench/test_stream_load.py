"""The reader of `bench frontend --mode ws` against a real server."""

import pytest

from trioengine.cli.bench.load_generator import CompletionLoad, ServerAddress
from trioengine.cli.bench.stream_load import FrameSplitter, StreamConnection, client_frame, run_stream_load
from trioengine.config.server import ServerConfig
from trioengine.errors import BenchError, EngineGenerateError
from trioengine.server.app import create_app
from trioengine.server.websocket import frame
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.testing.http_server import open_server
from trioengine.testing.websocket_frames import PING, TEXT, open_frames

LOAD = CompletionLoad(model="fake-model", num_output_tokens=3)
REPLY = ScriptedReply(deltas=(" a",) * 100)


@pytest.mark.parametrize("step", [1, 2, 3, 1000, 10**6])
def test_frames_come_out_of_any_pieces(step: int) -> None:
    payloads = [b"", b"a", b"b" * 125, b"c" * 126, b"d" * 70_000]
    data = b"".join(map(frame, payloads))
    splitter, frames = FrameSplitter(), list[tuple[int, bytes]]()
    for start in range(0, len(data), step):
        frames += splitter.feed(data[start : start + step])
    assert frames == [(TEXT, payload) for payload in payloads]


async def test_streams_share_connections_and_are_read_to_their_ends() -> None:
    """Longer than their first credits last."""
    engine = FakeEngine(REPLY)
    config = ServerConfig(port=0)
    async with open_server(create_app(engine, config), config) as server:
        address = ServerAddress.from_url(server.url)
        streams = await run_stream_load(address, LOAD, [1, 2], num_streams=7, num_connections=3)
    assert len(streams) == len(engine.requests) == 7
    for stream in streams:
        assert "".join(stream.texts) == " a" * 100
        assert len(stream.outputs_s) == len(stream.texts)
        assert stream.outputs_s == sorted(stream.outputs_s)
        assert stream.sent_s <= stream.outputs_s[0]


async def test_a_stream_that_fails_ends_the_load() -> None:
    engine = FakeEngine(enter_error=EngineGenerateError("broken"))
    config = ServerConfig(port=0)
    async with open_server(create_app(engine, config), config) as server:
        address = ServerAddress.from_url(server.url)
        with pytest.raises(BenchError):
            await run_stream_load(address, LOAD, [1, 2], num_streams=4, num_connections=2)


async def test_a_server_that_refuses_is_an_error() -> None:
    config = ServerConfig(port=0)
    async with open_server(create_app(FakeEngine(), config), config) as server:
        connection = StreamConnection(ServerAddress.from_url(server.url + "/nowhere"))
        with pytest.raises(BenchError):
            await connection.__aenter__()
        connection.close()


async def test_its_frames_are_what_servers_take() -> None:
    async def echo(scope, receive, send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})

    async with open_server(echo) as server, open_frames(server.url) as client:
        for payload in (b"", b"a" * 125, b"b" * 126, b"c" * 65536):
            await client.send(client_frame(payload))
            received = await client.receive()
            assert (received.opcode, received.payload) == (TEXT, payload)
        await client.send(client_frame(b"p", PING))
        assert (await client.receive()).payload == b"p"
