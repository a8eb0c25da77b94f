"""`EngineClient`: what an application may ask of an engine, wherever the engine runs."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, TypeVar

from trioengine.errors import EngineClosedError, EngineDeadError
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.messages import Call, ModelFacts
from trioengine.types.output import RequestOutput
from trioengine.types.pooling import EncodeRequest, PoolingOutput
from trioengine.types.request import GenerateRequest

R = TypeVar("R")


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


class EngineClient(Protocol):
    """An open engine. Used from tasks of one Trio run, as many at once as you like."""

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        ...

    @property
    def model_facts(self) -> ModelFacts:
        """Context length, vocabulary size and end tokens."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
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

    async def call(self, call: Call[R]) -> R:
        """Run an operation on the core and return its typed reply. Cancelling stops the waiting, not the operation."""
        ...

    @property
    def dead_error(self) -> EngineDeadError | EngineClosedError | None:
        """Why nothing can be asked any more, for good; None while the engine lives, and while it may recover."""
        ...

    def check_health(self) -> None:
        """Return while the core lives and makes progress.

        Raises:
            EngineDeadError: it has died, or hangs.
        """
        ...
