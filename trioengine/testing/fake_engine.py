"""An `EngineClient` that answers from a script: no core, no model, no clock of its own.

It keeps the promises of `client.interface` that an application can see: wrong parameters are refused on entering,
leaving the block ends the request without awaiting, waiting tokens come before an error.
"""

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

import attrs
import trio

from trioengine.checkpoint.generation import GenerationDefaults
from trioengine.client.interface import EngineClient
from trioengine.config.engine import EngineConfig
from trioengine.errors import (
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineGenerateError,
    RequestError,
    TrioEngineError,
    UnavailableError,
)
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.renderer import Renderer
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.messages import (
    AddLoRA,
    Call,
    CheckIntegrity,
    CollectiveRPC,
    CoreLoad,
    FinishWeightUpdate,
    GetLoad,
    InitWeightTransfer,
    IsPaused,
    IsSleeping,
    ListLoRAs,
    LoRAInfo,
    ModelFacts,
    PauseGeneration,
    PauseMode,
    PinLoRA,
    RemoveLoRA,
    ResetMMCache,
    ResetPrefixCache,
    ResumeGeneration,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    WakeUp,
)
from trioengine.types.output import CompletionOutput, FinishReason, Logprob, PositionLogprobs, RequestOutput
from trioengine.types.params import RequestOutputKind
from trioengine.types.pooling import EncodeRequest, PoolingOutput
from trioengine.types.request import GenerateRequest, TokensPrompt

R = TypeVar("R")


@attrs.frozen
class ScriptedReply:
    """What the fake engine answers to every request. Each delta is one token."""

    deltas: Sequence[str] = ("Hello", ", ", "world", "!")
    finish_reason: FinishReason = FinishReason.STOP
    stop_reason: int | str | None = None
    error: TrioEngineError | None = None
    """Raised after the deltas, instead of finishing."""
    first_delay_s: float = 0.0
    """How long the request waits before its first token."""
    go_on: trio.Event | None = None
    """The last delta waits for it."""
    warnings: tuple[str, ...] = ()
    num_prompt_tokens: int = 5
    num_cached_tokens: int = 0


@attrs.define(eq=False)
class FakeCoreState:
    """What operations on a `FakeEngine` have done."""

    is_paused: bool = False
    went_on: trio.Event = attrs.field(factory=trio.Event)
    """Set when a pause or a sleep ends."""
    asleep: frozenset[str] = frozenset()
    loras: dict[str, LoRAInfo] = attrs.field(factory=dict[str, LoRAInfo])
    is_profiling: bool = False
    transfer: str | None = None
    num_updates: int = 0
    num_weight_versions: int = 0

    @property
    def is_on_hold(self) -> bool:
        """Whether requests wait."""
        return self.is_paused or bool(self.asleep)

    def run(self, call: Call[Any], load: CoreLoad) -> object:
        """What a core would reply. RequestError: what a core would refuse."""
        match call:
            case GetLoad():
                return load
            case ResetPrefixCache():
                return load.running == 0
            case CheckIntegrity() | ResetMMCache():
                return None
            case CollectiveRPC(method):
                raise RequestError(f"No worker has a method {method!r} for collective_rpc.", param="method")
            case PauseGeneration() | ResumeGeneration() | IsPaused() | Sleep() | WakeUp() | IsSleeping():
                return self._pause(call)
            case AddLoRA() | RemoveLoRA() | PinLoRA() | ListLoRAs():
                return self._lora(call)
            case StartProfile() | StopProfile():
                return self._profile(call)
            case InitWeightTransfer() | UpdateWeights() | FinishWeightUpdate():
                return self._weights(call)
            case _:
                raise EngineGenerateError(f"The fake engine cannot {type(call).__name__}.")

    def _pause(self, call: Call[Any]) -> bool | None:
        match call:
            case PauseGeneration():
                self.is_paused = True
            case ResumeGeneration():
                self.is_paused = False
            case Sleep(level):
                if level not in (1, 2):
                    raise RequestError(f"level must be 1 or 2, not {level}.", param="level")
                self.asleep = _MEMORY_TAGS
            case WakeUp(tags):
                if not _MEMORY_TAGS.issuperset(tags):
                    raise RequestError("tags may be weights and kv_cache.", param="tags")
                self.asleep -= frozenset(tags) or _MEMORY_TAGS
            case IsPaused():
                return self.is_on_hold
            case _:
                return bool(self.asleep)
        if not self.is_on_hold:
            self.went_on.set()
            self.went_on = trio.Event()
        return None

    def _lora(self, call: Call[Any]) -> tuple[LoRAInfo, ...] | None:
        match call:
            case AddLoRA(name, path):
                self.loras[name] = LoRAInfo(name, path, is_pinned=False)
            case RemoveLoRA(name) | PinLoRA(name):
                if name not in self.loras:
                    raise RequestError(f"There is no LoRA adapter {name!r}.", param="lora")
                known = self.loras.pop(name)
                if isinstance(call, PinLoRA):
                    self.loras[name] = attrs.evolve(known, is_pinned=True)
            case _:
                return tuple(self.loras.values())
        return None

    def _profile(self, call: Call[Any]) -> str | None:
        if isinstance(call, StartProfile) is self.is_profiling:
            raise RequestError("A profile runs already." if self.is_profiling else "No profile runs.")
        self.is_profiling = not self.is_profiling
        return None if self.is_profiling else "/fake/profile.json"

    def _weights(self, call: Call[Any]) -> str | None:
        match call:
            case InitWeightTransfer(method):
                self.transfer, self.num_updates = method, 0
            case _ if self.transfer is None:
                raise RequestError("No transfer of weights has begun.")
            case FinishWeightUpdate(version):
                self.transfer = None
                self.num_weight_versions += 1
                return version or str(self.num_weight_versions)
            case _:
                self.num_updates += 1
        return None


_MEMORY_TAGS = frozenset({"weights", "kv_cache"})


@attrs.define(eq=False)
class FakeEngine(EngineClient):
    """The engine. `live` and `left` tell what became of its requests."""

    reply: ScriptedReply = attrs.field(factory=ScriptedReply)
    enter_error: TrioEngineError | None = None
    """Raised on entering every request, and by `check_admission` where it says that the engine is full."""
    health_error: TrioEngineError | None = None
    model_name: str = "fake-model"  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    model_config: ModelFacts = attrs.field(factory=lambda: ModelFacts(2048, 1000, (2,)))  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    config: EngineConfig = attrs.field(factory=EngineConfig)  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    generation_defaults: GenerationDefaults = attrs.field(factory=GenerationDefaults)  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    tokenizer: FakeTokenizer = attrs.field(factory=FakeTokenizer)  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    load: CoreLoad = attrs.field(factory=lambda: CoreLoad(running=0, waiting=0, free_blocks=10, total_blocks=10))
    core: FakeCoreState = attrs.field(factory=FakeCoreState)
    requests: list[GenerateRequest] = attrs.field(factory=list[GenerateRequest])
    """Every request that was entered."""
    calls: list[Call[Any]] = attrs.field(factory=list[Call[Any]])
    """Every operation that was asked for, oldest first."""
    live: set["FakeOutputStream"] = attrs.field(factory=lambda: set[FakeOutputStream]())
    """The requests whose block is open."""
    num_aborted: int = 0
    """Requests left before they had finished."""
    num_stats_logged: int = 0
    last_left: trio.Event = attrs.field(factory=trio.Event)
    """Set whenever no request is live any more; a request that is entered replaces it."""

    @property
    def input_processor(self) -> InputProcessor:
        """A real one. `generate` does without it, as the reply has nothing to do with the prompt."""
        return InputProcessor(self.tokenizer, self.model_config)

    @property
    def renderer(self) -> Renderer:
        """A real one."""
        return self.input_processor.renderer

    def generate(self, request: GenerateRequest) -> "FakeOutputStream":
        """A stream of the scripted reply."""
        return FakeOutputStream(self, request, self.reply)

    async def encode(self, request: EncodeRequest) -> PoolingOutput:
        """Not there: a fake that answers with text gives no vectors."""
        await trio.lowlevel.checkpoint()
        raise NotImplementedError(f"the fake engine has no vectors for {request}")

    def abort(self, request_id: str) -> None:
        """End the live requests with this id."""
        for stream in [stream for stream in self.live if stream.request.request_id == request_id]:
            stream.abort()

    def check_admission(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Raises `enter_error` where it is an `UnavailableError`."""
        if isinstance(self.enter_error, UnavailableError):
            raise self.enter_error

    def do_log_stats(self) -> None:
        """Counted only."""
        self.num_stats_logged += 1

    async def call(self, call: Call[R]) -> R:
        """Done on `core`, which remembers it."""
        await trio.lowlevel.checkpoint()
        self.calls.append(call)
        if self.dead_error is not None:
            raise self.dead_error
        if isinstance(call, (PauseGeneration, Sleep)) and call.mode is PauseMode.ABORT:
            for stream in self.live:
                stream.abort()
        load = attrs.evolve(self.load, running=self.load.running + len(self.live))
        return cast(R, self.core.run(call, load))

    @property
    def dead_error(self) -> EngineDeadError | EngineClosedError | None:
        """`health_error`, where it is for good."""
        return self.health_error if isinstance(self.health_error, (EngineDeadError, EngineClosedError)) else None

    def check_health(self) -> None:
        """Raises `health_error`."""
        if self.health_error is not None:
            raise self.health_error


class FakeOutputStream:
    """One scripted request. All of its answers are the same."""

    def __init__(self, engine: FakeEngine, request: GenerateRequest, reply: ScriptedReply) -> None:
        self.request = request
        self._engine = engine
        self._reply = reply
        self._num_sent = 0
        self._num_reported = 0
        self._text = ""
        self._is_first = True
        self._is_aborted = False
        self._is_finished = False
        self._left = trio.Event()
        self._aborted = trio.Event()
        self._first_token_time_s = 0.0
        self._deadline_s = math.inf

    @property
    def num_prompt_tokens(self) -> int:
        """As scripted, or the length of a prompt of token ids."""
        prompt = self.request.prompt
        return len(prompt.token_ids) if isinstance(prompt, TokensPrompt) else self._reply.num_prompt_tokens

    @property
    def warnings(self) -> tuple[str, ...]:
        """As scripted."""
        return self._reply.warnings

    def abort(self) -> None:
        """Finish with reason "abort" at the next read, or in the one that waits."""
        self._is_aborted = True
        self._aborted.set()

    async def __aenter__(self) -> "FakeOutputStream":
        self._engine.check_health()
        if self._engine.enter_error is not None:
            raise self._engine.enter_error
        self.request.sampling.validate()
        await trio.lowlevel.checkpoint()
        # A time, so that readers that give up waiting and try again do not make it longer.
        self._first_token_time_s = trio.current_time() + self._reply.first_delay_s
        limit_s = self.request.deadlines.total_s
        self._deadline_s = math.inf if limit_s is None else trio.current_time() + limit_s
        if not self._engine.live:
            self._engine.last_left = trio.Event()
        self._engine.live.add(self)
        self._engine.requests.append(self.request)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self._left.set()
        self._engine.live.discard(self)
        self._engine.num_aborted += not self._is_finished
        if not self._engine.live:
            self._engine.last_left.set()

    def __aiter__(self) -> "FakeOutputStream":
        return self

    async def __anext__(self) -> RequestOutput:
        await trio.lowlevel.checkpoint()
        if self._is_finished:
            raise StopAsyncIteration
        while True:
            await self._wait_for_token()
            text = self._next_delta()
            self._text += text
            kind = self.request.sampling.output_kind
            if kind is RequestOutputKind.FINAL_ONLY and not self._is_finished:
                continue
            return self._output(text if kind is RequestOutputKind.DELTA else self._text)

    async def _wait_for_token(self) -> None:
        async with trio.open_nursery() as nursery:
            # Leaving wakes the reader, as the real stream does.
            nursery.start_soon(self._wait_or_end, nursery.cancel_scope)
            nursery.start_soon(self._wait_aborted, nursery.cancel_scope)
            with trio.move_on_at(self._deadline_s):
                await self._left.wait()
            nursery.cancel_scope.cancel()
        if self._left.is_set():
            raise EngineClosedError("The stream was read after its block was left.")
        if trio.current_time() >= self._deadline_s:
            raise DeadlineExceededError("The request's deadline has passed.")

    async def _wait_or_end(self, scope: trio.CancelScope) -> None:
        while self._engine.core.is_on_hold:
            await self._engine.core.went_on.wait()
        if trio.current_time() < self._first_token_time_s:
            await trio.sleep_until(self._first_token_time_s)
        is_last = self._num_sent >= len(self._reply.deltas) - 1
        if is_last and self._reply.go_on is not None:
            await self._reply.go_on.wait()
        scope.cancel()

    async def _wait_aborted(self, scope: trio.CancelScope) -> None:
        await self._aborted.wait()
        scope.cancel()

    def _next_delta(self) -> str:
        deltas = self._reply.deltas
        if self._reply.error is not None and self._num_sent == len(deltas):
            raise self._reply.error
        if self._is_aborted or not deltas or self.request.sampling.max_tokens == 0:
            self._is_finished = True
            return ""
        text = deltas[self._num_sent]
        self._num_sent += 1
        self._is_finished = self._num_sent == len(deltas) and self._reply.error is None
        return text

    def _output(self, text: str) -> RequestOutput:
        finish_reason = FinishReason.ABORT if self._is_aborted else self._reply.finish_reason
        if self.request.sampling.max_tokens == 0:
            finish_reason = FinishReason.LENGTH
        is_delta = self.request.sampling.output_kind is RequestOutputKind.DELTA
        num_tokens = self._num_sent - (self._num_reported if is_delta else 0)
        self._num_reported = self._num_sent
        sampling = self.request.sampling
        is_first, self._is_first = self._is_first, False
        prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
        if sampling.prompt_logprobs is not None and (is_first or not is_delta):
            scripted = scripted_logprobs(sampling.prompt_logprobs)
            prompt_logprobs = (None, *[scripted] * (self.num_prompt_tokens - 1))
        logprobs = None if sampling.logprobs is None else (scripted_logprobs(sampling.logprobs),) * num_tokens
        choices = [
            CompletionOutput(
                index=index,
                text=text,
                token_ids=(1,) * num_tokens,
                logprobs=logprobs,
                finish_reason=finish_reason if self._is_finished else None,
                stop_reason=self._reply.stop_reason if self._is_finished else None,
            )
            for index in range(sampling.n)
        ]
        return RequestOutput(
            request_id=self.request.request_id or "fake-request",
            prompt_token_ids=(1,) * self.num_prompt_tokens,
            outputs=tuple(choices),
            finished=self._is_finished,
            num_generated_tokens=self._num_sent * sampling.n,
            num_cached_tokens=self._reply.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )


def scripted_logprobs(num_wanted: int) -> PositionLogprobs:
    """The log probabilities of each token of a `FakeEngine`, which is always 1."""
    top = tuple(Logprob(1 + place, -1.0 - place, 1 + place, b"x") for place in range(num_wanted))
    return PositionLogprobs(Logprob(1, -1.0, 1, b"x"), top)
