"""Reads the streams of `bench frontend` over HTTP: the server in this process or in several, the reader in its own.

It and this process speak in lines of JSON on the reader's standard input and output. `load_process` is the other end.
"""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from trioengine.cli.api_server import Serving
from trioengine.cli.bench.frontend import PROMPT, STOP, ReadStreams
from trioengine.cli.bench.load_process import Setup
from trioengine.cli.bench.word_clock import WordClock
from trioengine.cli.supervisor import ApiServerGroup
from trioengine.client.cores import start_cores
from trioengine.client.interface import EngineClient
from trioengine.config.server import ServerConfig
from trioengine.errors import BenchError
from trioengine.server.app import create_app
from trioengine.server.listeners import bind_listeners
from trioengine.server.serving import serve

LOAD_MODULE = "trioengine.cli.bench.load_process"
MAX_READ_BYTES = 1 << 20


@asynccontextmanager
async def open_http_reader(
    engine: EngineClient, clock: WordClock, num_connections: int = 0
) -> AsyncGenerator["HttpReader", None]:
    """A server for this engine on a free port, and a process that reads from it, for the length of the block.

    `num_connections` are WebSockets; with 0, each stream has an HTTP connection.
    """
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        run_server = functools.partial(serve, create_app(engine), ServerConfig(port=0), shutdown=shutdown)
        urls: list[str] = await nursery.start(run_server)
        setup = Setup(urls[0], engine.model_name, [*PROMPT], STOP, [*clock.texts], num_connections)
        async with _open_reader(setup, time.process_time) as reader:
            yield reader
        shutdown.set()


@asynccontextmanager
async def open_processes_reader(
    core_module: str, core_options: Mapping[str, str], clock: WordClock, num_connections: int, num_servers: int
) -> AsyncGenerator["HttpReader", None]:
    """The same with several API-server processes over a core. What counts is their CPU, not this process's."""
    config = ServerConfig(port=0, api_server_count=num_servers, access_log=False)
    listeners = await bind_listeners(config)
    group = ApiServerGroup(config)
    send, receive = trio.open_memory_channel[Serving](1)
    async with (
        start_cores(num_clients=num_servers, core_module=core_module, core_options=core_options) as cores,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(group.run, cores.attachments, listeners, send.send_nowait)
        serving = await receive.receive()
        setup = Setup(serving.urls[0], serving.model_name, [*PROMPT], STOP, [*clock.texts], num_connections)
        async with _open_reader(setup, lambda: sum(map(_cpu_s, group.pids))) as reader:
            yield reader
        group.drain()


def _cpu_s(pid: int) -> float:
    """What a process has used so far, in steps of the kernel's clock, 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def _open_reader(setup: Setup, cpu_s: Callable[[], float]) -> AsyncGenerator["HttpReader", None]:
    async with trio.open_nursery() as nursery:
        command = [sys.executable, "-P", "-m", LOAD_MODULE]
        run_process = functools.partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process: trio.Process = await nursery.start(run_process)
        reader = HttpReader(process, cpu_s)
        await reader.ask(attrs.asdict(setup))
        yield reader
        # The end of its input is the end of the reader.
        assert process.stdin is not None
        await process.stdin.aclose()


class HttpReader:
    """The parent's end of a reader process."""

    def __init__(self, process: trio.Process, cpu_s: Callable[[], float]) -> None:
        """`cpu_s` tells how much CPU the server has used."""
        self._process = process
        self._cpu_s = cpu_s
        self._waiting = b""

    async def read(self, num_streams: int, num_tokens: int) -> ReadStreams:
        """As `frontend.Reader` says."""
        cpu_s = self._cpu_s()
        done = await self.ask({"num_streams": num_streams, "num_tokens": num_tokens})
        # Taken before the result, which is long, is parsed here.
        cpu_s = self._cpu_s() - cpu_s
        result = json.loads(await self._read_line())
        return ReadStreams(result["num_outputs"], len(result["delays_s"]), result["delays_s"], done["wall_s"], cpu_s)

    async def abort(self, num_streams: int) -> float:
        """As `frontend.Reader` says."""
        return (await self.ask({"num_aborted": num_streams}))["abort_s"]

    async def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """The reader's answer to a command.

        Raises:
            BenchError: it has ended, or a stream has failed.
        """
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(json.dumps(command).encode() + b"\n")
        except trio.BrokenResourceError:
            raise BenchError("The process that reads the streams has ended.") from None
        answer: dict[str, Any] = json.loads(await self._read_line())
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer

    async def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        parts = [self._waiting]
        while b"\n" not in parts[-1]:
            part = bytes(await self._process.stdout.receive_some(MAX_READ_BYTES))
            if not part:
                raise BenchError("The process that reads the streams has ended.")
            parts.append(part)
        line, _, self._waiting = b"".join(parts).partition(b"\n")
        return line
