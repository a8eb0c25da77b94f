"""`bench frontend`: what everything but the model costs and how soon it delivers.

A scripted core, a real process over ZeroMQ, makes one token for each stream and step. This process is the front end,
with the bundled model's tokenizer, one stop string to look for and DELTA outputs; in modes "http" and "ws" it is also
the server, and a process of its own reads the streams. CPU is this process's alone, all threads, or that of the API
servers where there are several: neither the core's nor that of such a reader.

The delay of delivery is measured without any help of the code that is measured: the tokens tell the time. Each token
that the core makes is a word which stands for the moment at which its step ended, on the clock that all processes of a
machine share; the reader takes the word's moment from the moment at which it reads it.
"""

import enum
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs
import trio

from trioengine.checkpoint.locate import resolve_model
from trioengine.cli.bench.report import BenchReport
from trioengine.cli.bench.statistics import percentile_ms
from trioengine.cli.bench.word_clock import CLOCK_TICK_S, WordClock, delay_s
from trioengine.cli.progress import Progress
from trioengine.client import open_engine
from trioengine.client.interface import EngineClient
from trioengine.config import env
from trioengine.errors import BenchError, ConfigError
from trioengine.runtime.collector import tune_garbage_collector
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from trioengine.types.messages import GetLoad
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest

CORE_MODULE = "trioengine.testing.scripted_core"
STOP = "<|never generated|>"
PROMPT = tuple(range(1000, 1016))
NUM_ABORTED_STREAMS = 128
ABORTED_STREAM_TOKENS = 1_000_000
NUM_WARM_UP_TOKENS = 16
NUM_CONNECTIONS = 16
"""Of mode "ws"."""
MAX_ABORT_S = 30.0


class Mode(enum.Enum):
    """Who reads the streams."""

    CLIENT = "client"
    HTTP = "http"
    WS = "ws"
    """Over `/v1/stream`, many streams on each connection."""


@attrs.frozen
class ReadStreams:
    """What the reader of a number of streams saw."""

    num_outputs: int
    num_tokens: int
    delays_s: Sequence[float]
    wall_s: float
    cpu_s: float
    """Of the process of the engine's front end."""


class Reader(Protocol):
    """Reads streams from the engine, in this process or over HTTP."""

    async def read(self, num_streams: int, num_tokens: int) -> ReadStreams:
        """Read so many streams of so many tokens to their ends, all at once."""
        ...

    async def abort(self, num_streams: int) -> float:
        """Open streams, leave all of them when each has begun, and return the seconds until the core knew none."""
        ...


@attrs.frozen(kw_only=True)
class FrontendBench:
    """A number of streams of a number of tokens each, read to their ends."""

    num_streams: int
    num_tokens: int
    mode: Mode
    pace_s: float = 0.0
    num_servers: int = 1
    """API-server processes; more than one are processes of their own."""

    async def run(self) -> BenchReport:
        """Open the engine around a scripted core and measure.

        Raises:
            BenchError: the streams were not what the core had made.
        """
        clock = WordClock.of((await trio.to_thread.run_sync(_default_tokenizer)).token_texts(True))
        options = self._core_options(clock)
        num_connections = NUM_CONNECTIONS if self.mode is Mode.WS else 0
        if self.num_servers > 1:
            return await self._run_servers(clock, options, num_connections)
        progress = Progress()
        async with open_engine(core_module=CORE_MODULE, core_options=options, on_progress=progress) as engine:
            progress.clear()
            if self.mode is Mode.CLIENT:
                return await self._measure(ClientReader(engine, clock))
            from trioengine.cli.bench.http_reader import open_http_reader

            async with open_http_reader(engine, clock, num_connections) as reader:
                return await self._measure(reader)

    async def _run_servers(self, clock: WordClock, options: Mapping[str, str], num_connections: int) -> BenchReport:
        if self.mode is Mode.CLIENT:
            raise ConfigError("In mode client there are no API servers.", option="api_server_count")
        from trioengine.cli.bench.http_reader import open_processes_reader

        async with open_processes_reader(CORE_MODULE, options, clock, num_connections, self.num_servers) as reader:
            return await self._measure(reader)

    def _core_options(self, clock: WordClock) -> dict[str, str]:
        clock_tokens = ",".join(map(str, clock.token_ids))
        return {"pace_s": str(self.pace_s), "clock_tokens": clock_tokens, "clock_tick_s": str(CLOCK_TICK_S)}

    async def _measure(self, reader: Reader) -> BenchReport:
        await reader.read(self.num_streams, NUM_WARM_UP_TOKENS)
        tune_garbage_collector()
        # Streams of one token cost what every request costs.
        request_cpu_s = (await reader.read(self.num_streams, 1)).cpu_s / self.num_streams
        streams = await reader.read(self.num_streams, self.num_tokens)
        num_tokens = self.num_streams * self.num_tokens
        if streams.num_tokens != num_tokens:
            raise BenchError(f"{streams.num_tokens} tokens arrived of the {num_tokens} that were generated.")
        num_later_outputs = streams.num_outputs - self.num_streams
        later_cpu_s = streams.cpu_s - self.num_streams * request_cpu_s
        has_chunks = self.mode is not Mode.CLIENT and num_later_outputs > 0
        return BenchReport(
            output_tokens_per_s=num_tokens / streams.wall_s,
            cpu_us_per_token=streams.cpu_s / num_tokens * 1e6,
            # The first chunk's cost is in that of the request.
            cpu_us_per_chunk=later_cpu_s / num_later_outputs * 1e6 if has_chunks else None,
            cpu_us_per_request=request_cpu_s * 1e6,
            outputs_per_token=streams.num_outputs / num_tokens,
            delivery_p50_ms=percentile_ms(streams.delays_s, 50),
            delivery_p99_ms=percentile_ms(streams.delays_s, 99),
            abort_ms=await reader.abort(NUM_ABORTED_STREAMS) * 1000,
        )


class ClientReader:
    """Reads in this process, as an application does that embeds the engine."""

    def __init__(self, engine: EngineClient, clock: WordClock) -> None:
        self._engine = engine
        self._clock = clock

    async def read(self, num_streams: int, num_tokens: int) -> ReadStreams:
        """As `Reader` says."""
        reads: list[tuple[float, tuple[int, ...]]] = []
        wall_s, cpu_s = time.monotonic(), time.process_time()
        async with trio.open_nursery() as nursery:
            for _ in range(num_streams):
                nursery.start_soon(self._read_one, _request(num_tokens), reads)
        wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
        tick_of = {token_id: tick for tick, token_id in enumerate(self._clock.token_ids)}
        delays_s = [delay_s(tick_of[token_id], read_s) for read_s, token_ids in reads for token_id in token_ids]
        return ReadStreams(len(reads), len(delays_s), delays_s, wall_s, cpu_s)

    async def _read_one(self, request: GenerateRequest, reads: list[tuple[float, tuple[int, ...]]]) -> None:
        async with self._engine.generate(request) as outputs:
            async for output in outputs:
                # Only noted here; what it means is worked out after the clock of the measurement has stopped.
                reads.append((time.monotonic(), output.outputs[0].token_ids))

    async def abort(self, num_streams: int) -> float:
        """As `Reader` says."""
        begun = trio.Event()
        num_begun = 0

        async def read_until_left() -> None:
            nonlocal num_begun
            async with self._engine.generate(_request(ABORTED_STREAM_TOKENS)) as outputs:
                await anext(outputs)
                num_begun += 1
                if num_begun == num_streams:
                    begun.set()
                async for _ in outputs:
                    pass

        async with trio.open_nursery() as nursery:
            for _ in range(num_streams):
                nursery.start_soon(read_until_left)
            await begun.wait()
            left_s = time.monotonic()
            nursery.cancel_scope.cancel()
        with trio.fail_after(MAX_ABORT_S):
            while (await self._engine.call(GetLoad())).running:
                pass
        return time.monotonic() - left_s


def _default_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(cache_dir=env.cache_dir()))


def _request(num_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=num_tokens, stop=STOP, output_kind=RequestOutputKind.DELTA)
    return GenerateRequest(PROMPT, sampling)
