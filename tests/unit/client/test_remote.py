"""What is particular to an engine that is remote: the connection and its loss. The rest is the conformance suite's."""

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioengine.client import remote_link
from trioengine.client.interface import OutputStream
from trioengine.client.remote import RemoteEngine, open_remote
from trioengine.client.remote_link import CREDITS
from trioengine.config.server import ServerConfig
from trioengine.errors import (
    AuthenticationError,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineGenerateError,
    ForbiddenError,
    PeerUnreachableError,
    RequestError,
    UnavailableError,
)
from trioengine.server.app import create_app
from trioengine.server.serving import serve
from trioengine.testing.fake_engine import FakeEngine
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.testing.fake_vectors import FakeVectorEngine
from trioengine.testing.http_server import open_server
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import ScriptedEngine, open_scripted_engine
from trioengine.types.messages import GetLoad
from trioengine.types.output import RequestOutput
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.pooling import EncodeRequest
from trioengine.types.request import GenerateRequest, TextPrompt, TokensPrompt

KEY = "the-key"


def endless(**more: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1_000_000, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    return GenerateRequest("abc", sampling, **more)


def short(num_tokens: int, kind: RequestOutputKind = RequestOutputKind.DELTA) -> GenerateRequest:
    return GenerateRequest(
        "abc", SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, output_kind=kind)
    )


@asynccontextmanager
async def open_pair(script: Script | None = None) -> AsyncGenerator[tuple[ScriptedEngine, RemoteEngine]]:
    async with open_scripted_engine(script or Script(pace_s=0.0005)) as scripted:
        config = ServerConfig(port=0)
        app = create_app(scripted.engine, config)
        async with open_server(app, config) as server, open_remote(server.url) as remote:
            yield scripted, remote


class Relay:
    """A port that leads to a server, until the line is cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_dead = False
        self._lines: list[trio.CancelScope] = []
        self.num_connections = 0

    async def run(self, *, task_status: trio.TaskStatus[int]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listeners[0].socket.getsockname()[1])
        await trio.serve_listeners(self._serve, listeners)

    def cut(self) -> None:
        for line in self._lines:
            line.cancel()
        self._lines.clear()

    def die(self) -> None:
        """Carry nothing more, and say nothing of it."""
        self._is_dead = True

    async def _serve(self, client: trio.SocketStream) -> None:
        self.num_connections += 1
        async with await trio.open_tcp_stream("127.0.0.1", self._port) as server, client:
            with trio.CancelScope() as line:
                self._lines.append(line)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._carry, client, server)
                    nursery.start_soon(self._carry, server, client)

    async def _carry(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        try:
            while data := await source.receive_some():
                if self._is_dead:
                    continue
                await target.send_all(data)
            await target.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


@asynccontextmanager
async def open_through_relay() -> AsyncGenerator[tuple[ScriptedEngine, RemoteEngine, Relay]]:
    async with open_scripted_engine(Script(pace_s=0.0005)) as scripted:
        config = ServerConfig(port=0)
        async with (
            open_server(create_app(scripted.engine, config), config) as server,
            trio.open_nursery() as nursery,
        ):
            relay = Relay(int(server.url.rpartition(":")[2]))
            port = await nursery.start(relay.run)
            async with open_remote(f"ws://127.0.0.1:{port}") as remote:
                yield scripted, remote, relay
            nursery.cancel_scope.cancel()


async def read(stream: OutputStream, outputs: list[RequestOutput] | None = None) -> None:
    """Read to the end, and keep the outputs."""
    async for output in stream:
        if outputs is not None:
            outputs.append(output)


async def idle(engine: Any) -> None:
    with trio.fail_after(5):
        while (await engine.call(GetLoad())).running:
            pass


# Loss of the connection


async def test_whoever_waits_when_the_connection_is_lost_hears_of_it_and_nothing_is_asked_again() -> None:
    async with open_through_relay() as (scripted, remote, relay):
        errors: list[EngineDeadError] = []

        async def wait_for(func: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(EngineDeadError) as caught:
                await func()
            errors.append(caught.value)

        async with remote.generate(endless()) as first, remote.generate(endless()) as second:
            await anext(first)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for, lambda: read(first))
                nursery.start_soon(wait_for, lambda: read(second))
                await wait_all_tasks_blocked()
                relay.cut()
            with pytest.raises(EngineDeadError):
                await anext(first)
        assert len(errors) == 2
        assert errors[0] is not errors[1]
        for ask in (lambda: remote.generate(endless()).__aenter__(), lambda: remote.call(GetLoad())):
            with pytest.raises(EngineDeadError):
                await ask()
        with pytest.raises(EngineDeadError):
            remote.check_health()
        assert (remote.is_running, remote.errored) == (False, True)
        # The server aborts what nobody reads.
        await idle(scripted.engine)
        num_adds = scripted.num_adds
        await remote.reconnect()
        remote.check_health()
        assert (remote.is_running, remote.dead_error) == (True, None)
        async with remote.generate(short(3)) as stream:
            assert [output.finished async for output in stream][-1]
        assert scripted.num_adds == num_adds + 1
        assert relay.num_connections == 2
        await remote.reconnect()
        assert relay.num_connections == 2


async def test_output_that_came_before_the_loss_is_read_first() -> None:
    async with open_through_relay() as (_, remote, relay), remote.generate(endless()) as stream:
        first = await anext(stream)
        assert first.outputs[0].text
        # The reader sleeps; the server's chunks, as many as there is credit for, arrive.
        while remote.live_link.num_waiting_chunks < CREDITS - 1:
            await trio.lowlevel.checkpoint()
        relay.cut()
        while remote.is_running:
            await trio.lowlevel.checkpoint()
        outputs: list[RequestOutput] = []
        with pytest.raises(EngineDeadError):
            await read(stream, outputs)
        assert len(outputs) == CREDITS - 1
        assert all(output.outputs[0].text for output in outputs)


async def test_the_servers_end_is_the_loss_of_the_connection() -> None:
    async with open_scripted_engine(Script(pace_s=0.0005)) as scripted, trio.open_nursery() as nursery:
        config = ServerConfig(port=0, shutdown_timeout_s=0.0)
        app, shutdown = create_app(scripted.engine, config), trio.Event()
        (url,) = await nursery.start(functools.partial(serve, app, config, shutdown=shutdown))
        async with open_remote(url) as remote, remote.generate(endless()) as stream:
            await anext(stream)
            shutdown.set()
            with pytest.raises(EngineDeadError):
                await read(stream)
            assert remote.errored
            with pytest.raises(PeerUnreachableError):
                await remote.reconnect()


async def test_a_server_that_answers_no_ping_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cable that is pulled says nothing: without pings whoever waits would wait for ever."""
    monkeypatch.setattr(remote_link, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(remote_link, "PING_TIMEOUT_S", 1.0)
    async with open_through_relay() as (scripted, remote, relay), remote.generate(endless()) as stream:
        await anext(stream)
        relay.die()
        with trio.fail_after(5), pytest.raises(EngineDeadError):
            await read(stream)
        assert remote.errored
        await idle(scripted.engine)


async def test_who_reconnects_at_the_same_time_connects_once() -> None:
    async with open_through_relay() as (_, remote, relay):
        relay.cut()
        while remote.is_running:
            await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(remote.reconnect)
        assert relay.num_connections == 2
        remote.check_health()


# Slow readers


async def test_a_slow_reader_gets_larger_outputs_and_holds_little_on_both_sides() -> None:
    async with open_pair() as (scripted, remote):
        async with remote.generate(short(500)) as stream:
            first = await anext(stream)
            await idle(scripted.engine)
            await remote.call(GetLoad())
            assert remote.live_link.num_waiting_chunks <= CREDITS
            outputs = [first, *[output async for output in stream]]
        assert len(outputs) <= CREDITS + 2
        assert "".join(output.outputs[0].text for output in outputs) == ("abc" * 167)[:500]
        assert outputs[-1].num_generated_tokens == 500


async def test_whole_texts_are_sent_once_and_put_together_here() -> None:
    async with open_pair() as (_, remote), remote.generate(short(60, RequestOutputKind.CUMULATIVE)) as stream:
        outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].text == "abc" * 20
    assert len(outputs[-1].outputs[0].token_ids) == 60


# What else is particular


async def test_leaving_the_block_ends_everything_and_its_error_comes_out_as_itself() -> None:
    mine = KeyError("mine")
    async with open_scripted_engine(Script(pace_s=0.0005)) as scripted:
        config = ServerConfig(port=0)
        async with open_server(create_app(scripted.engine, config), config) as server:
            caught: KeyError | None = None
            try:
                async with open_remote(server.url) as remote:
                    stream = remote.generate(endless())
                    await stream.__aenter__()
                    await anext(stream)
                    raise mine
            except KeyError as error:
                caught = error
            assert caught is mine
            with pytest.raises(EngineClosedError):
                remote.check_health()
            with pytest.raises(EngineClosedError):
                await read(stream)
            await stream.__aexit__(None, None, None)
            with pytest.raises(EngineClosedError):
                await remote.reconnect()
            await idle(scripted.engine)


async def test_a_cancelled_block_leaves_nothing() -> None:
    async with open_scripted_engine(Script(pace_s=0.0005)) as scripted:
        config = ServerConfig(port=0)
        async with open_server(create_app(scripted.engine, config), config) as server:
            with trio.CancelScope() as scope:
                async with open_remote(server.url) as remote, remote.generate(endless()) as stream:
                    await anext(stream)
                    scope.cancel()
                    await trio.sleep_forever()
            assert scope.cancelled_caught
            await idle(scripted.engine)


async def test_errors_of_the_engine_keep_their_class() -> None:
    engine = FakeEngine()
    config = ServerConfig(port=0)
    async with open_server(create_app(engine, config), config) as server, open_remote(server.url) as remote:
        for error in (
            UnavailableError("full", retry_after_s=7.0),
            RequestError("wrong", param="seed"),
            EngineGenerateError("broken"),
        ):
            engine.enter_error = error
            with pytest.raises(type(error)) as caught:
                async with remote.generate(short(3)):
                    pass
            if not isinstance(error, EngineGenerateError):
                assert str(caught.value) == str(error)
            assert getattr(caught.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)
            assert getattr(caught.value, "param", None) == getattr(error, "param", None)
        engine.enter_error = None
        with pytest.raises(ForbiddenError):
            await remote.sleep()


async def test_vectors_come_over() -> None:
    engine = FakeVectorEngine()
    config = ServerConfig(port=0)
    async with open_server(create_app(engine, config), config) as server, open_remote(server.url) as remote:
        assert remote.model_config == engine.model_config
        own = await engine.encode(EncodeRequest("some text"))
        output = await remote.encode(EncodeRequest("some text", request_id="mine"))
        assert output.request_id == "mine"
        assert output.data.tolist() == own.data.tolist()
        assert output.prompt_token_ids == own.prompt_token_ids


async def test_a_tokenizer_is_the_callers_to_bring() -> None:
    config = ServerConfig(port=0)
    async with open_server(create_app(FakeEngine(), config), config) as server:
        async with open_remote(server.url) as remote:
            for name in ("tokenizer", "renderer", "input_processor"):
                with pytest.raises(ConfigError) as caught:
                    getattr(remote, name)
                assert caught.value.option == "tokenizer"
        async with open_remote(server.url, tokenizer=FakeTokenizer()) as remote:
            assert remote.renderer.render(TextPrompt("ab")) == TokensPrompt((97, 98), "ab")


# Connecting


async def test_a_server_that_lets_nobody_in_is_an_error_of_its_own() -> None:
    config = ServerConfig(port=0, api_key=KEY)
    async with open_server(create_app(FakeEngine(), config), config) as server:
        for key in ("wrong", None):
            with pytest.raises(AuthenticationError):
                async with open_remote(server.url, key):
                    pass
        async with open_remote(server.url + "/v1", KEY) as remote:
            assert remote.model_name == "fake-model"


async def test_where_there_is_no_server_is_an_error() -> None:
    with trio.socket.socket() as sock:
        await sock.bind(("127.0.0.1", 0))
        with pytest.raises(PeerUnreachableError):
            async with open_remote(f"ws://127.0.0.1:{sock.getsockname()[1]}"):
                pass


@pytest.mark.parametrize("tls", [False, True])
async def test_a_server_that_says_nothing_is_not_waited_for_long(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_link, "CONNECT_TIMEOUT_S", 0.05)
    with trio.socket.socket() as sock, trio.fail_after(5):
        await sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(PeerUnreachableError):
            async with open_remote(f"{'wss' if tls else 'ws'}://127.0.0.1:{sock.getsockname()[1]}"):
                pass


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "ws://", "ws://host:99999999", "ws://host:x"])
async def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        async with open_remote(url):
            pass
