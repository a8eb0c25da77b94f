"""`EngineClient`: what an application may ask of an engine, wherever the engine runs."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol

from trioengine.checkpoint.generation import GenerationDefaults
from trioengine.client.operations import EngineOperations
from trioengine.config.engine import EngineConfig
from trioengine.errors import EngineClosedError, EngineDeadError
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.renderer import Renderer
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.output import RequestOutput
from trioengine.types.pooling import EncodeRequest, PoolingOutput
from trioengine.types.request import GenerateRequest


class OutputStream(Protocol):
    """The outputs of one request: `async with` admits and sends it, `async for` reads.

    Entering checks the request and raises `RequestError` before anything is sent; it raises `UnavailableError` when the
    engine is full. Leaving the block, for whatever reason and at whatever await, aborts what is unfinished, without
    awaiting. A reader that is slower than the engine gets larger outputs, never fewer tokens.
    """

    @property
    def num_prompt_tokens(self) -> int:
        """Known once the block is entered."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was changed to make the request fit; known once the block is entered."""
        ...

    async def __aenter__(self) -> "OutputStream": ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            EngineGenerateError: this request failed. Tokens that came before it were delivered first.
            EngineDeadError: the engine died.
        """
        ...


class EngineClient(EngineOperations, Protocol):
    """An open engine. Used from tasks of one Trio run, as many at once as you like.

    `testing.engine_conformance` holds what every implementation promises.
    """

    @property
    def config(self) -> EngineConfig:
        """What the engine was opened with."""
        ...

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """What the model's authors recommend. Nothing here applies it by itself: the server does, for its requests."""
        ...

    @property
    def input_processor(self) -> InputProcessor:
        """Checks and tokenizes requests as `generate` does."""
        ...

    @property
    def renderer(self) -> Renderer:
        """Makes the token ids of a prompt, without asking the model anything."""
        ...

    def generate(self, request: GenerateRequest) -> OutputStream:
        """The outputs of a request. Nothing happens before its `async with` is entered."""
        ...

    async def encode(self, request: EncodeRequest) -> PoolingOutput:
        """The vectors of a prompt. Cancelling aborts the request, without awaiting.

        Raises:
            RequestError: nothing was sent.
            UnavailableError: the engine is full.
            EngineGenerateError: this request failed, or was ended by `abort`.
            EngineDeadError: the engine died.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End all live requests with this caller's id; their streams end with reason "abort".

        Unknown ids are ignored.
        """
        ...

    def check_admission(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Return when so many more requests, with so many tokens of prompts in all, may come now.

        For a server that would rather say no before it reads on; `generate` and `encode` ask for themselves.

        Raises:
            UnavailableError: the engine is full; `retry_after_s` says when to come again.
        """
        ...

    def do_log_stats(self) -> None:
        """Let the loggers of statistics say now what happened since they last did."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether requests and calls can be answered: it is open, and no core has died."""
        return self.dead_error is None

    @property
    def is_stopped(self) -> bool:
        """Whether nothing can be asked any more: it has died, or its block was left."""
        return self.dead_error is not None

    @property
    def errored(self) -> bool:
        """Whether it has died."""
        return isinstance(self.dead_error, EngineDeadError)

    @property
    def dead_error(self) -> EngineDeadError | EngineClosedError | None:
        """Why nothing can be asked any more, for good; None while the engine lives, and while it may recover."""
        ...

    def check_health(self) -> None:
        """Return while all cores live and make progress. The death of one is the death of the engine.

        Raises:
            EngineDeadError: one has died, or hangs; `cause` is the core's own account where it left one.
            EngineClosedError: the block of `open_engine` was left.
        """
        ...
