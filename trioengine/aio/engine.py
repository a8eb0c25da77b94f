"""`open_engine` for asyncio: the engine of `trioengine.client` in a thread with a Trio run of its own.

The same requests, outputs, errors and operations as there. What is different: `check_health`, `check_admission` and
`do_log_stats` are awaited too, as they are answered by the other thread.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TypeVar

import attrs
import trio

from trioengine.aio.portal import Portal, open_portal
from trioengine.checkpoint.generation import GenerationDefaults
from trioengine.client import engine as trio_engine
from trioengine.client.link import OnProgress
from trioengine.client.operations import EngineOperations
from trioengine.client.stream import RequestStream as TrioRequestStream
from trioengine.config.engine import EngineConfig
from trioengine.errors import EngineClosedError, EngineDeadError, TrioEngineError
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.renderer import Renderer
from trioengine.observability.loggers import StatLoggerFactory
from trioengine.runtime.core_handle import CORE_MODULE
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.messages import Call, ModelFacts
from trioengine.types.output import RequestOutput
from trioengine.types.pooling import EncodeRequest, PoolingOutput
from trioengine.types.request import GenerateRequest

R = TypeVar("R")


class Engine(EngineOperations):
    """An open engine, for the tasks of one asyncio loop; see `client.interface.EngineClient` for what it promises."""

    def __init__(self, portal: Portal[trio_engine.Engine]) -> None:
        self._portal = portal
        self._engine = portal.value

    @property
    def config(self) -> EngineConfig:
        """What the engine was opened with."""
        return self._engine.config

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        return self._engine.model_name

    @property
    def model_config(self) -> ModelFacts:
        """Context length, vocabulary size, end tokens, and what the model can do."""
        return self._engine.model_config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """What the model's authors recommend. Nothing here applies it by itself."""
        return self._engine.generation_defaults

    @property
    def input_processor(self) -> InputProcessor:
        """Checks and tokenizes requests as `generate` does."""
        return self._engine.input_processor

    @property
    def renderer(self) -> Renderer:
        """Makes the token ids of a prompt, without asking the model anything."""
        return self._engine.renderer

    @property
    def dead_error(self) -> EngineDeadError | EngineClosedError | None:
        """Why nothing can be asked any more; None while the engine lives."""
        return self._engine.dead_error

    @property
    def is_running(self) -> bool:
        """Whether requests and calls can be answered."""
        return self._engine.is_running

    @property
    def is_stopped(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._engine.is_stopped

    @property
    def errored(self) -> bool:
        """Whether it has died."""
        return self._engine.errored

    def generate(self, request: GenerateRequest) -> "RequestStream":
        """The outputs of a request. Nothing happens before its `async with` is entered."""
        return RequestStream(self._portal, request)

    async def encode(self, request: EncodeRequest) -> PoolingOutput:
        """The vectors of a prompt. Cancelling aborts the request. As `EngineClient.encode`."""
        return await self._portal.run(partial(self._engine.encode, request))

    def abort(self, request_id: str) -> None:
        """End all live requests with this caller's id; their streams end with reason "abort"."""
        self._portal.post(self._engine.abort, request_id)

    async def call(self, call: Call[R]) -> R:
        """Run an operation on all cores. Cancelling stops the waiting, not the operation."""
        return await self._portal.run(partial(self._engine.call, call))

    async def check_health(self) -> None:
        """As `EngineClient.check_health`."""
        await self._portal.run(partial(_in_trio, self._engine.check_health))

    async def check_admission(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """As `EngineClient.check_admission`."""
        await self._portal.run(partial(_in_trio, partial(self._engine.check_admission, n, num_prompt_tokens)))

    async def do_log_stats(self) -> None:
        """As `EngineClient.do_log_stats`."""
        await self._portal.run(partial(_in_trio, self._engine.do_log_stats))


async def _in_trio(function: Callable[[], None]) -> None:
    await trio.lowlevel.checkpoint()
    function()


class RequestStream:
    """The outputs of one request, read by one task; see `client.interface.OutputStream` for what it promises.

    One output at most is on its way between the threads; the next ones are merged meanwhile, as for any slow reader.
    """

    def __init__(self, portal: Portal[trio_engine.Engine], request: GenerateRequest) -> None:
        self._portal = portal
        self._request = request
        self._leave: Callable[[], None] | None = None
        self._changed = asyncio.Event()
        self._stream: TrioRequestStream | None = None
        self._output: RequestOutput | None = None
        self._is_ended = False
        self._error: BaseException | None = None
        self._is_left = False
        self._taken = trio.Event()  # The other thread's.

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; known once the block is entered."""
        return self._entered.num_prompt_tokens

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was changed to make the request fit; known once the block is entered."""
        return self._entered.warnings

    async def __aenter__(self) -> "RequestStream":
        if self._leave is not None:
            raise RuntimeError("A request stream is entered once; call generate() again.")
        self._leave = self._portal.start(self._serve, self._end)
        try:
            await self._until(lambda: self._stream is not None or self._is_ended)
        except asyncio.CancelledError:
            self._leave()
            raise
        if self._stream is None:
            raise self._copied_error()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self._is_left = True
        self._changed.set()
        if self._leave is not None:
            self._leave()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. A cancelled call has taken none.

        Raises:
            EngineGenerateError: this request failed. Tokens that came before it were delivered first.
            EngineDeadError: the engine died.
        """
        _ = self._entered
        await self._until(lambda: self._output is not None or self._is_ended or self._is_left)
        if self._is_left:
            raise EngineClosedError("The stream was read after its block was left.")
        output, self._output = self._output, None
        if output is not None:
            self._portal.post(self._note_taken)
            return output
        if self._error is not None:
            raise self._copied_error()
        raise StopAsyncIteration

    @property
    def _entered(self) -> TrioRequestStream:
        if self._stream is None:
            raise RuntimeError("Enter the stream first: `async with engine.generate(request) as outputs`.")
        return self._stream

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _copied_error(self) -> BaseException:
        # A copy, so that tracebacks of several attempts do not pile up on one object.
        return attrs.evolve(self._error) if isinstance(self._error, TrioEngineError) else self._error or RuntimeError()

    # Called by the other thread, in this one.

    def _enter(self, stream: TrioRequestStream) -> None:
        self._stream = stream
        self._changed.set()

    def _put(self, output: RequestOutput) -> None:
        self._output = output
        self._changed.set()

    def _end(self, _: None, error: BaseException | None) -> None:
        self._is_ended, self._error = True, error
        self._changed.set()

    # In the other thread

    async def _serve(self) -> None:
        async with self._portal.value.generate(self._request) as stream:
            self._portal.tell(self._enter, stream)
            async for output in stream:
                self._portal.tell(self._put, output)
                await self._taken.wait()
                self._taken = trio.Event()

    def _note_taken(self) -> None:
        self._taken.set()


@asynccontextmanager
async def open_engine(
    config: EngineConfig | None = None,
    *,
    on_progress: OnProgress | None = None,
    stat_loggers: Sequence[StatLoggerFactory] = (),
    core_module: str = CORE_MODULE,
    core_options: Mapping[str, str] | None = None,
) -> AsyncGenerator[Engine, None]:
    """An engine for the length of the block, which is of asyncio code. As `trioengine.client.open_engine`.

    It may be used by the tasks of this loop. `on_progress` is called in the loop's thread, `stat_loggers` in another.
    """
    loop = asyncio.get_running_loop()

    def tell_progress(stage: str, fraction: float) -> None:
        assert on_progress is not None
        loop.call_soon_threadsafe(on_progress, stage, fraction)

    opening = partial(
        trio_engine.open_engine,
        config,
        on_progress=None if on_progress is None else tell_progress,
        stat_loggers=stat_loggers,
        core_module=core_module,
        core_options=core_options,
    )
    async with open_portal(opening) as portal:
        yield Engine(portal)
