"""The programs of docs/stream-protocol.md do what it says, with a core whose model is a fake."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import trioengine
from trioengine.client.engine import Engine
from trioengine.client.remote import open_remote
from trioengine.config.server import ServerConfig
from trioengine.server.ws_endpoint import serve_stream
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import open_scripted_engine
from trioengine.types.request import GenerateRequest

PAGE = Path(__file__).parents[3] / "docs" / "stream-protocol.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
RUN = "trio.run(main)\n"


@asynccontextmanager
async def open_scripted() -> AsyncGenerator[Engine]:
    async with open_scripted_engine(Script()) as scripted:
        yield scripted.engine


def main_of(text: str, old: str, new: str, printed: list[str] | None = None, wrote: trio.Event | None = None) -> Any:
    """The program that has this text, with another address, inside a Trio that runs."""
    [program] = [block for block in BLOCKS if text in block]
    assert program.endswith(RUN)
    assert old in program

    def write(*words: str, **_: object) -> None:
        if printed is not None:
            printed.extend(words)
        if wrote is not None:
            wrote.set()

    names: dict[str, Any] = {"print": write}
    exec(program.removesuffix(RUN).replace(old, new), names)
    return names["main"]


def test_every_program_is_run_here() -> None:
    assert len(BLOCKS) == 2


async def test_a_program_with_a_remote_engine() -> None:
    printed: list[str] = []
    async with open_scripted() as engine, trio.open_nursery() as nursery:
        [url] = await nursery.start(serve_stream, engine, ServerConfig(port=0))
        with trio.fail_after(10):
            await main_of("open_remote(", "ws://127.0.0.1:8000", url, printed)()
        nursery.cancel_scope.cancel()
    assert "".join(printed).startswith("Once upon a time")


async def test_an_endpoint_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trioengine, "open_engine", open_scripted)
    printed, wrote = list[str](), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(main_of("start(serve_stream", "port=8001", "port=0", printed, wrote))
        with trio.fail_after(10):
            await wrote.wait()
            async with open_remote(printed[-1]) as remote, remote.generate(GenerateRequest("abc")) as outputs:
                assert [output.finished async for output in outputs][-1]
        nursery.cancel_scope.cancel()
