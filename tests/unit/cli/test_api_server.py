"""One process's server: what it does before it serves."""

import socket

import pytest

from trioengine.cli.api_server import ApiServer, Serving
from trioengine.config import EngineConfig, ServerConfig
from trioengine.errors import ConfigError
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


@pytest.mark.parametrize("value", ["sql", "=/adapters/sql", "sql="])
def test_an_adapter_has_a_name_and_a_folder(value: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        ServerConfig(lora_modules=(value,))
