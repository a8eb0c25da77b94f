"""`RequestStream`: one request, from entering its block to leaving it."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import attrs
import trio

from trioengine.client.channel import CoalescingChannel
from trioengine.errors import EngineClosedError, TrioEngineError
from trioengine.frontend.input_processor import InputProcessor, ProcessedRequest
from trioengine.frontend.pending_output import OutputBuilder, ParallelOutputBuilder, output_builder
from trioengine.types.output import RequestOutput
from trioengine.types.params import MAX_N, RequestOutputKind
from trioengine.types.request import GenerateRequest

_NOT_ENTERED = "Enter the stream first: `async with engine.generate(request) as outputs`."


class RequestOwner(Protocol):
    """What a stream needs of its engine."""

    @property
    def input_processor(self) -> InputProcessor:
        """Checks and tokenizes."""
        ...

    def check_health(self) -> None:
        """Raises `EngineDeadError` when no request can be started."""
        ...

    def check_admission(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Raises `UnavailableError` when the engine is too full for so many answers more."""
        ...

    def start(
        self, processed: ProcessedRequest, channel: CoalescingChannel, *, waited_s: float
    ) -> "Callable[[], None]":
        """Register and send a request that has been here for so long; the result, called once, aborts what is
        unfinished. Does not wait.
        """
        ...


class RequestStream:
    """The outputs of one request; see `client.interface.OutputStream` for what it promises."""

    def __init__(self, owner: RequestOwner, request: GenerateRequest) -> None:
        self._owner = owner
        self._request = request
        self._channel: CoalescingChannel | None = None
        self._processed: ProcessedRequest | None = None
        self._builder: OutputBuilder | ParallelOutputBuilder | None = None
        self._leave: Callable[[], None] | None = None
        self._error: TrioEngineError | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; known once the block is entered."""
        return len(self._entered.prompt_token_ids)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was changed to make the request fit; known once the block is entered."""
        return self._entered.warnings

    async def __aenter__(self) -> "RequestStream":
        if self._processed is not None:
            raise RuntimeError("A request stream is entered once; call generate() again.")
        owner = self._owner
        owner.check_health()
        entered_s = trio.current_time()
        n = self._request.sampling.n
        # Whether there is room is asked before any work; what `n` is, below: a wrong one is no reason to come again.
        owner.check_admission(n if type(n) is int and n <= MAX_N else 0)
        if owner.input_processor.is_long(self._request):
            # The tokenizer lets other threads run, so a long prompt holds nobody up.
            processed = await trio.to_thread.run_sync(
                owner.input_processor.process, self._request, abandon_on_cancel=True
            )
        else:
            processed = owner.input_processor.process(self._request)
            await trio.lowlevel.checkpoint()
        # From here to the end nothing awaits: either the request is registered and will be left, or neither.
        sampling = processed.sampling
        kind = sampling.output_kind
        is_final_only = kind is RequestOutputKind.FINAL_ONLY
        channel = CoalescingChannel(n=sampling.n, is_final_only=is_final_only, interval=sampling.stream_interval or 1)
        self._leave = owner.start(processed, channel, waited_s=trio.current_time() - entered_s)
        self._channel = channel
        self._processed = processed
        self._builder = output_builder(processed, is_cumulative=kind is RequestOutputKind.CUMULATIVE)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._leave is not None:
            self._leave()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        builder, channel = self._builder, self._channel
        if builder is None or channel is None:
            raise RuntimeError(_NOT_ENTERED)
        if self._error is not None:
            await trio.lowlevel.checkpoint()
            # A copy, so that tracebacks of several requests and attempts do not pile up on one object.
            raise attrs.evolve(self._error)
        try:
            pending = await channel.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        except trio.ClosedResourceError:
            raise EngineClosedError("The stream was read after its block was left.") from None
        if pending.error is not None:
            self._error = pending.error
            if not pending.has_output:
                raise attrs.evolve(pending.error)
        return builder.build(pending)

    @property
    def _entered(self) -> ProcessedRequest:
        if self._processed is None:
            raise RuntimeError(_NOT_ENTERED)
        return self._processed
