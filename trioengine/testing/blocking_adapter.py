"""Blocking engines in tests: a fake core in this process, and an `EngineClient` over an `LLMEngine`, which lets it be
held to the same promises.

Blocking calls take turns in threads; one task steps the engine and hands its outputs to their streams.
"""

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from types import TracebackType
from typing import TypeVar

import attrs
import trio

from trioengine.checkpoint.generation import GenerationDefaults
from trioengine.checkpoint.locate import ModelLocation
from trioengine.client.interface import EngineClient
from trioengine.client.llm_engine import LLMEngine
from trioengine.config.engine import EngineConfig
from trioengine.errors import EngineClosedError, EngineDeadError, TrioEngineError
from trioengine.frontend.input_processor import InputProcessor, ProcessedRequest
from trioengine.frontend.renderer import Renderer
from trioengine.runtime.core_process import BuiltCore
from trioengine.runtime.launch import CoreLaunch
from trioengine.testing.fake_core import build_fake_core
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.messages import Call, ModelFacts
from trioengine.types.output import RequestOutput
from trioengine.types.pooling import EncodeRequest, PoolingOutput
from trioengine.types.request import GenerateRequest

R = TypeVar("R")

_NUMBERS = count()


def build_fake_core_here(
    config: EngineConfig, location: ModelLocation, *, draft_location: ModelLocation | None = None
) -> BuiltCore:
    """In place of `runtime.build.build_engine_core`: the core of `testing.fake_core`."""
    launch = CoreLaunch((), 0, -1, config, location, draft_location, {"pace_s": "0.0005"})
    return build_fake_core(launch, lambda _stage, _fraction: None)


class BlockingStream:
    """The outputs of one request (an `OutputStream`)."""

    def __init__(self, adapter: "BlockingAdapter", request: GenerateRequest, number: str) -> None:
        self._adapter = adapter
        self._request = request
        self._number = number
        self._name = request.request_id or f"drawn-{number}"
        self.sender, self._receiver = trio.open_memory_channel[RequestOutput | TrioEngineError](math.inf)
        self.num_prompt_tokens = 0
        self.warnings: tuple[str, ...] = ()

    async def __aenter__(self) -> "BlockingStream":
        engine = self._adapter.engine
        processed = engine.process(attrs.evolve(self._request, request_id=self._number))
        assert isinstance(processed, ProcessedRequest)
        self.num_prompt_tokens, self.warnings = len(processed.prompt_token_ids), processed.warnings
        self._adapter.streams[self._number] = self
        async with self._adapter.turn:
            await trio.to_thread.run_sync(engine.start, processed)
        self._adapter.has_news.set()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self._receiver.close()
        if self._adapter.streams.pop(self._number, None) is not None:
            self._adapter.left.append(self._number)
            self._adapter.has_news.set()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            output = await self._receiver.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        except trio.ClosedResourceError:
            raise EngineClosedError("The stream was read after its block was left.") from None
        if isinstance(output, TrioEngineError):
            raise output
        return attrs.evolve(output, request_id=self._name)


class BlockingAdapter(EngineClient):
    """See the module."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.turn = trio.Lock()
        self.has_news = trio.Event()
        self.streams: dict[str, BlockingStream] = {}
        self.left: list[str] = []
        self._errors: dict[str, TrioEngineError] = {}

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    @property
    def model_name(self) -> str:
        return "blocking"

    @property
    def model_config(self) -> ModelFacts:
        return self.engine.model_config

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def generation_defaults(self) -> GenerationDefaults:
        return self.engine.generation_defaults

    @property
    def input_processor(self) -> InputProcessor:
        return InputProcessor(self.tokenizer, self.model_config)

    @property
    def renderer(self) -> Renderer:
        return self.input_processor.renderer

    def generate(self, request: GenerateRequest) -> BlockingStream:
        return BlockingStream(self, request, str(next(_NUMBERS)))

    async def encode(self, request: EncodeRequest) -> PoolingOutput:
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        raise NotImplementedError

    def check_admission(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """The blocking engine takes whatever it is given."""

    def do_log_stats(self) -> None:
        self.engine.do_log_stats()

    @property
    def dead_error(self) -> EngineDeadError | EngineClosedError | None:
        return None

    def check_health(self) -> None:
        self.engine.check_health()

    async def call(self, call: Call[R]) -> R:
        async with self.turn:
            return await trio.to_thread.run_sync(self.engine.call, call)

    async def run(self) -> None:
        """Step the engine while it has something to do."""
        while True:
            await self.has_news.wait()
            self.has_news = trio.Event()
            while self.left or self.engine.has_unfinished_requests():
                async with self.turn:
                    left, self.left = self.left, []
                    await trio.to_thread.run_sync(self.engine.abort_request, left)
                    outputs = await trio.to_thread.run_sync(self.engine.step, self._note_error)
                for output in outputs:
                    stream = self.streams.get(output.request_id)
                    if stream is None:
                        continue
                    assert isinstance(output, RequestOutput)
                    stream.sender.send_nowait(output)
                    if output.finished:
                        del self.streams[output.request_id]
                        stream.sender.close()
                errors, self._errors = self._errors, {}
                for request_id, error in errors.items():
                    if (stream := self.streams.pop(request_id, None)) is not None:
                        stream.sender.send_nowait(error)

    def _note_error(self, request_id: str, error: TrioEngineError) -> None:
        self._errors[request_id] = error


@asynccontextmanager
async def adapt(engine: LLMEngine) -> AsyncGenerator[BlockingAdapter, None]:
    """The engine as an `EngineClient` for the length of the block. It stays the caller's to close."""
    adapter = BlockingAdapter(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(adapter.run)
        yield adapter
        nursery.cancel_scope.cancel()
    engine.abort_request([*adapter.left, *adapter.streams])
