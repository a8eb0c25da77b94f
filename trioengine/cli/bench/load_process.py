"""The process that reads streams for `bench frontend`: `python -P -m trioengine.cli.bench.load_process`.

It takes commands as lines of JSON on standard input and answers each in lines of JSON; it ends with its input. It is
not part of what is measured, and knows nothing of the engine but its interface over the network.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import trio

from trioengine.cli.bench.http_response import ResponseParser
from trioengine.cli.bench.load_generator import (
    CompletionLoad,
    CompletionTimes,
    Connection,
    ServerAddress,
    run_load,
)
from trioengine.cli.bench.stream_load import StreamConnection, run_stream_load
from trioengine.cli.bench.word_clock import delay_s, words_of
from trioengine.cli.line_reader import LineReader
from trioengine.cli.main import single
from trioengine.errors import BenchError
from trioengine.types.stream_messages import Create, write_message

ABORTED_STREAM_TOKENS = 1_000_000
MAX_ABORT_S = 30.0


@attrs.frozen
class Setup:
    """The first line of input: the server, the requests, and the words that tell the time."""

    url: str
    model: str
    prompt: list[int]
    stop: str
    texts: list[str]
    num_connections: int = 0
    """WebSockets that the streams share; 0 is HTTP, a connection for each stream."""


async def _main() -> None:
    reader = LineReader(sys.stdin.fileno())
    line = await reader.read_line()
    if line is None:
        return
    loader = _Loader(Setup(**json.loads(line)))
    _answer({})
    while (line := await reader.read_line()) is not None:
        command = json.loads(line)
        try:
            if "num_aborted" in command:
                _answer({"abort_s": await loader.abort(command["num_aborted"])})
            else:
                await loader.read(command["num_streams"], command["num_tokens"])
        except Exception as error:  # The border of this process: the parent raises it.
            _answer({"error": str(single(error))})


class _Loader:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._address = ServerAddress.from_url(setup.url)
        self._tick_of: Mapping[str, int] = {text: tick for tick, text in enumerate(setup.texts)}

    async def read(self, num_streams: int, num_tokens: int) -> None:
        """Read streams to their ends; answers twice: that it is done, and what it saw."""
        prompts = [self._setup.prompt] * num_streams
        started_s = time.monotonic()
        if self._setup.num_connections:
            streams = await run_stream_load(
                self._address,
                self._load(num_tokens),
                self._setup.prompt,
                num_streams=num_streams,
                num_connections=self._setup.num_connections,
            )
        else:
            streams = await run_load(self._address, self._load(num_tokens), prompts, concurrency=num_streams)
        _answer({"wall_s": time.monotonic() - started_s})
        _answer({"num_outputs": sum(len(stream.texts) for stream in streams), "delays_s": self._delays_s(streams)})

    async def abort(self, num_streams: int) -> float:
        """Open streams, hang up on all when each has begun; the seconds until the server knows none."""
        if self._setup.num_connections:
            return await self._abort_shared(num_streams, self._setup.num_connections)
        connections = [Connection(self._address) for _ in range(num_streams)]
        async with trio.open_nursery() as nursery:
            for connection in connections:
                nursery.start_soon(self._begin, connection)
        return await self._time_closing(connections)

    async def _abort_shared(self, num_streams: int, num_connections: int) -> float:
        """The same, where streams share connections."""
        connections = [StreamConnection(self._address) for _ in range(num_connections)]
        async with trio.open_nursery() as nursery:
            for index, connection in enumerate(connections):
                nursery.start_soon(self._begin_shared, connection, len(range(index, num_streams, num_connections)))
        return await self._time_closing(connections)

    async def _time_closing(self, connections: Sequence[Connection | StreamConnection]) -> float:
        async with Connection(self._address) as control:
            await _num_running(control)
            left_s = time.monotonic()
            for connection in connections:
                connection.close()
            with trio.fail_after(MAX_ABORT_S):
                while await _num_running(control):
                    pass
            return time.monotonic() - left_s

    async def _begin_shared(self, connection: StreamConnection, num_streams: int) -> None:
        await connection.__aenter__()
        body = json.loads(self._load(ABORTED_STREAM_TOKENS).body(self._setup.prompt))
        ids = [str(index) for index in range(num_streams)]
        await connection.send([write_message(Create(id_, "completions", body)) for id_ in ids])
        waiting = set(ids)
        while waiting:
            waiting -= {message["id"] for message in await connection.receive() if message["type"] == "chunk"}

    async def _begin(self, connection: Connection) -> None:
        body = self._load(ABORTED_STREAM_TOKENS).body(self._setup.prompt)
        await connection.send("POST", "/v1/completions", body)
        parser = ResponseParser()
        while not await connection.receive(parser):
            pass

    def _load(self, num_tokens: int) -> CompletionLoad:
        return CompletionLoad(model=self._setup.model, num_output_tokens=num_tokens, stop=self._setup.stop)

    def _delays_s(self, streams: list[CompletionTimes]) -> list[float]:
        return [
            delay_s(self._tick_of[word], read_s)
            for stream in streams
            for read_s, text in zip(stream.outputs_s, stream.texts, strict=True)
            for word in words_of(text)
        ]


async def _num_running(connection: Connection) -> int:
    status, body = await connection.fetch("GET", "/load")
    if status != 200:
        raise BenchError(f"/load answered {status}.")
    load = json.loads(body)
    return load["running"] + load["waiting"]


def _answer(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    trio.run(_main)
