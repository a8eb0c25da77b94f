"""What a supervisor and its API servers say to each other arrives as it was."""

import attrs
import pytest
import trio

from trioengine.cli.api_server import Serving
from trioengine.cli.api_server_process import ApiServerLaunch, read_report, receive_message, report_of
from trioengine.config import ServerConfig
from trioengine.errors import CheckpointError, EngineDeadError, PromptTooLongError, TrioEngineError


class OneByteStream(trio.abc.ReceiveStream):
    """Hands out one byte at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = list(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        return bytes([self._data.pop(0)]) if self._data else b""

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


CONFIG = ServerConfig(
    port=0, api_key=("one", "two"), allowed_origins=("https://page.example",), ssl_certfile="x.pem", http2=True
)


@pytest.mark.parametrize("config", [ServerConfig(), CONFIG], ids=["defaults", "set"])
async def test_a_launch_arrives_whatever_pieces_it_comes_in(config: ServerConfig) -> None:
    launch = ApiServerLaunch(3, config, [5, 6], b"\0\xff")
    data = await receive_message(OneByteStream(launch.to_bytes()))
    assert data is not None
    assert ApiServerLaunch.from_bytes(data) == launch
    assert attrs.asdict(ApiServerLaunch.from_bytes(data).config) == attrs.asdict(config)


@pytest.mark.parametrize(
    "outcome",
    [
        Serving("a-model", ["http://127.0.0.1:1"]),
        EngineDeadError("It died.", "because"),
        CheckpointError("It is broken.", "model.gguf"),
        PromptTooLongError(num_prompt_tokens=5, max_model_len=4),
    ],
)
async def test_a_report_arrives(outcome: Serving | TrioEngineError) -> None:
    data = await receive_message(OneByteStream(report_of(outcome)))
    assert data is not None
    arrived = read_report(data)
    assert type(arrived) is type(outcome)
    assert str(arrived) == str(outcome)


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 10])
async def test_a_message_that_is_cut_is_none(num_bytes: int) -> None:
    message = report_of(Serving("a-model", ["http://127.0.0.1:1"]))
    assert await receive_message(OneByteStream(message[:num_bytes])) is None
