"""`encode`: one request for vectors, from its check to its vectors."""

from collections.abc import Callable
from typing import Protocol

import attrs
import trio

from trioengine.errors import TrioEngineError
from trioengine.frontend.input_processor import InputProcessor, ProcessedEncodeRequest
from trioengine.frontend.pooling_state import PoolingSink
from trioengine.types.pooling import EncodeRequest, PoolingOutput


class EncodeOwner(Protocol):
    """What `encode` needs of its engine."""

    @property
    def input_processor(self) -> InputProcessor:
        """Checks and tokenizes."""
        ...

    def check_health(self) -> None:
        """Raises `EngineDeadError` when no request can be started."""
        ...

    def check_admission(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Raises `UnavailableError` when the engine is too full for a request more."""
        ...

    def start_encode(
        self, processed: ProcessedEncodeRequest, sink: PoolingSink, *, waited_s: float
    ) -> Callable[[], None]:
        """Register and send a request that has been here for so long; the result, called once, aborts what is
        unfinished. Does not wait.
        """
        ...


async def encode(owner: EncodeOwner, request: EncodeRequest) -> PoolingOutput:
    """The vectors of a prompt; see `client.interface.EngineClient.encode` for what it promises."""
    owner.check_health()
    owner.check_admission()
    entered_s = trio.current_time()
    processor = owner.input_processor
    if processor.is_long(request):
        # The tokenizer lets other threads run, so a long prompt holds nobody up.
        processed = await trio.to_thread.run_sync(processor.process_encode, request, abandon_on_cancel=True)
    else:
        processed = processor.process_encode(request)
        await trio.lowlevel.checkpoint()
    place = _Place()
    # Nothing awaits between: either the request is registered and will be left, or neither.
    leave = owner.start_encode(processed, place, waited_s=trio.current_time() - entered_s)
    try:
        return await place.wait()
    finally:
        leave()


class _Place:
    """Where the vectors arrive."""

    def __init__(self) -> None:
        self._is_set = trio.Event()
        self._output: PoolingOutput | None = None
        self._error: TrioEngineError | None = None

    def put(self, output: PoolingOutput) -> None:
        self._output = output
        self._is_set.set()

    def fail(self, error: TrioEngineError) -> None:
        self._error = error
        self._is_set.set()

    async def wait(self) -> PoolingOutput:
        await self._is_set.wait()
        if self._error is not None:
            # A copy: other requests may have been given the same object.
            raise attrs.evolve(self._error)
        assert self._output is not None
        return self._output
