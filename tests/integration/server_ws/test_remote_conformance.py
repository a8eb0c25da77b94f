"""A remote engine keeps the promises of `EngineClient`: over `serve()`, and over trio-websocket alone."""

import functools
import ssl
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from trioengine.client.engine import Engine
from trioengine.client.interface import EngineClient
from trioengine.client.remote import RemoteEngine, open_remote
from trioengine.config.server import ServerConfig
from trioengine.core.engine_core import EngineCore
from trioengine.errors import AuthenticationError, PeerUnreachableError, RequestError
from trioengine.server.app import create_app
from trioengine.server.serving import serve
from trioengine.server.ws_endpoint import serve_stream
from trioengine.testing.engine_conformance import CHECKS, OPERATION_CHECKS, Subject
from trioengine.testing.fake_core import BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE, fake_core_config, fake_ready
from trioengine.testing.fake_executor import FakeExecutor, new_weight
from trioengine.testing.http_server import open_server
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import open_scripted_engine
from trioengine.types.messages import CheckIntegrity
from trioengine.types.params import SamplingParams
from trioengine.types.request import GenerateRequest

SERVERS = ("serve", "trio-websocket")


@asynccontextmanager
async def open_remote_of(engine: EngineClient, server: str) -> AsyncGenerator[RemoteEngine, None]:
    config = ServerConfig(port=0, enable_admin=True)
    if server == "serve":
        async with open_server(create_app(engine, config), config) as running, open_remote(running.url) as remote:
            yield remote
        return
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(serve_stream, engine, config)
        async with open_remote(urls[0]) as remote:
            yield remote
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("server", SERVERS)
async def test_everything_of_a_scripted_core(server: str) -> None:
    """All checks on one engine and one connection, one after the other."""
    async with open_scripted_engine(Script(pace_s=0.001, num_cached_tokens=3)) as scripted:
        async with open_remote_of(scripted.engine, server) as remote:
            for check in CHECKS:
                await check(Subject(remote, remote))
        assert scripted.frontend.num_open_requests == 0


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
async def test_a_prompt_that_no_message_may_have_is_refused(text: str) -> None:
    """The server reads no more of such a message than whose it is; nobody waits for its answer in vain."""
    async with open_scripted_engine() as scripted, open_remote_of(scripted.engine, "trio-websocket") as remote:
        with trio.fail_after(5), pytest.raises(RequestError, match="which is not text") as raised:
            async with remote.generate(GenerateRequest(text, SamplingParams(max_tokens=1))):
                pass
        assert raised.value.param == "body.prompt.text"
        await remote.call(CheckIntegrity())


@pytest.mark.parametrize("server", SERVERS)
async def test_everything_of_an_engine_core(server: str) -> None:
    """Operations too, over the real core."""
    executor = FakeExecutor(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE, max_loras=fake_core_config().max_loras
    )
    core = EngineCore(fake_core_config(), executor, clock=trio.current_time)
    async with open_scripted_engine(Script(pace_s=0.0005), core, fake_ready()) as scripted:
        async with open_remote_of(scripted.engine, server) as remote:
            for check in (*CHECKS, *OPERATION_CHECKS):
                await check(subject_of(scripted.engine, remote))
            await remote.call(CheckIntegrity())
        assert scripted.frontend.num_open_requests == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 that is its own authority, with its key in the same file."""
    path = tmp_path_factory.mktemp("certificate") / "server.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(path), "-out", str(path) + ".crt", "-subj", "/CN=server", "-days", "2"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    path.write_text(path.read_text() + Path(str(path) + ".crt").read_text())
    return path


@pytest.mark.parametrize("server", SERVERS)
async def test_over_tls(server: str, certificate: Path) -> None:
    """Only to the server that the certificate is of."""
    config = ServerConfig(port=0, ssl_certfile=str(certificate))
    async with open_scripted_engine(Script(pace_s=0.001)) as scripted, trio.open_nursery() as nursery:
        if server == "serve":
            run = functools.partial(serve, create_app(scripted.engine, config), config)
        else:
            run = functools.partial(serve_stream, scripted.engine, config)
        (url,) = await nursery.start(run)
        assert url.startswith(("https://", "wss://"))
        async with open_remote(url, tls=ssl.create_default_context(cafile=str(certificate))) as remote:
            assert await Subject(remote, remote).outputs()
        with pytest.raises(PeerUnreachableError):
            async with open_remote(url):
                pass
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("server", SERVERS)
async def test_only_with_the_key(server: str) -> None:
    config = ServerConfig(port=0, api_key=("the-key",))
    async with open_scripted_engine(Script()) as scripted, trio.open_nursery() as nursery:
        if server == "serve":
            run = functools.partial(serve, create_app(scripted.engine, config), config)
        else:
            run = functools.partial(serve_stream, scripted.engine, config)
        (url,) = await nursery.start(run)
        async with open_remote(url, "the-key") as remote:
            assert await Subject(remote, remote).outputs()
        for key in ("wrong", None):
            with pytest.raises(AuthenticationError):
                async with open_remote(url, key):
                    pass
        nursery.cancel_scope.cancel()


def subject_of(engine: Engine, remote: RemoteEngine) -> Subject:
    assert remote.model_name == engine.model_name
    sampling = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
    return Subject(
        remote,
        remote,
        sampling,
        SamplingParams(seed=1, max_tokens=100_000, ignore_eos=True),
        new_weights=(new_weight(7),),
    )
