"""One process's server: what it does before it serves."""

import socket
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

import trioengine.server
from trioengine.cli.api_server import ApiServer, Serving
from trioengine.config import EngineConfig, ServerConfig
from trioengine.errors import ConfigError
from trioengine.openai.responses.store import StoreLimits
from trioengine.server import responses
from trioengine.server.responses import Responses
from trioengine.testing.fake_engine import FakeEngine
from trioengine.types.messages import AddLoRA


async def test_adapters_to_begin_with_are_there_before_anybody_is_served() -> None:
    engine = FakeEngine(config=EngineConfig(enable_lora=True))
    server = ApiServer(ServerConfig(lora_modules=("sql=/adapters/a=b", "polite=/adapters/polite")))
    found: list[tuple[str, str]] = []

    def on_serving(serving: Serving) -> None:
        assert serving.model_name == "fake-model"
        found.extend((call.name, call.path) for call in engine.calls if isinstance(call, AddLoRA))
        server.drain()

    await server.run(engine, [socket.create_server(("127.0.0.1", 0))], on_serving)
    assert found == [("sql", "/adapters/a=b"), ("polite", "/adapters/polite")]


async def test_what_is_kept_of_responses_is_the_operators_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[StoreLimits | None] = []

    def open_responses(of: StoreLimits | None = None, **options: Any) -> AbstractAsyncContextManager[Responses]:
        limits.append(of)
        return responses.open_responses(of, **options)

    monkeypatch.setattr(trioengine.server, "open_responses", open_responses, raising=False)
    server = ApiServer(ServerConfig(responses_ttl_s=5.0, responses_max_bytes=1000))
    await server.run(FakeEngine(), [socket.create_server(("127.0.0.1", 0))], lambda _: server.drain())
    assert limits == [StoreLimits(max_bytes=1000, time_to_live_s=5.0)]


@pytest.mark.parametrize("value", ["sql", "=/adapters/sql", "sql="])
def test_an_adapter_has_a_name_and_a_folder(value: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        ServerConfig(lora_modules=(value,))
