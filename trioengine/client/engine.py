"""`open_engine`: an engine core in its own process, and the actor that speaks with it.

The block owns everything: the core process, the output handler, the watcher. Nothing of it outlives the block, and
nothing in it cancels the block: when the core dies, streams and calls raise `EngineDeadError`.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Generic, TypeVar, cast

import attrs
import trio

from trioengine.checkpoint.locate import FetchProgress, ModelLocation, resolve_model
from trioengine.client.channel import CoalescingChannel
from trioengine.client.encode import encode
from trioengine.client.interface import EngineClient
from trioengine.client.link import CoreLink, OnProgress
from trioengine.client.renderer import Renderer
from trioengine.client.stream import RequestStream
from trioengine.config import env
from trioengine.config.engine import EngineConfig
from trioengine.errors import EngineClosedError, EngineDeadError, TrioEngineError
from trioengine.frontend.frontend import AddedRequest, Frontend, PendingCall
from trioengine.frontend.input_processor import InputProcessor, ProcessedEncodeRequest, ProcessedRequest
from trioengine.frontend.pooling_state import PoolingSink
from trioengine.runtime.core_handle import CORE_MODULE, CoreHandle
from trioengine.runtime.launch import CoreLaunch
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from trioengine.transport.address import create_endpoint
from trioengine.transport.topology import bind_router, core_identity
from trioengine.types.messages import Call, ModelFacts, Ready
from trioengine.types.pooling import EncodeRequest, PoolingOutput
from trioengine.types.request import GenerateRequest

R = TypeVar("R")


class Engine(EngineClient):
    """An open engine; see `client.interface.EngineClient` for what it promises. Made by `open_engine`."""

    def __init__(
        self,
        config: EngineConfig,
        model_name: str,
        ready: Ready,
        tokenizer: Tokenizer,
        frontend: Frontend,
        link: CoreLink,
    ) -> None:
        self._config = config
        self._model_name = model_name
        self._ready = ready
        self._tokenizer = tokenizer
        self._frontend = frontend
        self._link = link
        self._input_processor = InputProcessor(tokenizer, ready.model)
        self._renderer = Renderer(tokenizer, ready.model.vocab_size)

    @property
    def config(self) -> EngineConfig:
        """What the engine was opened with."""
        return self._config

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        return self._model_name

    @property
    def model_config(self) -> ModelFacts:
        """Context length, vocabulary size, end tokens, and what the model can do."""
        return self._ready.model

    @property
    def ready(self) -> Ready:
        """What the core said when it was ready: its sizes, and the reasons for them."""
        return self._ready

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        """Checks and tokenizes requests as `generate` does."""
        return self._input_processor

    @property
    def renderer(self) -> Renderer:
        """Makes the token ids of a prompt, without asking the model anything."""
        return self._renderer

    @property
    def num_open_requests(self) -> int:
        """Requests that someone waits for."""
        return self._frontend.num_open_requests

    def generate(self, request: GenerateRequest) -> RequestStream:
        """The outputs of a request. Nothing happens before its `async with` is entered."""
        return RequestStream(self, request)

    def start(self, processed: ProcessedRequest, channel: CoalescingChannel) -> Callable[[], None]:
        """Register a request and send it to the core, for `RequestStream`. Calling the result leaves it."""
        return self._start(self._frontend.add(processed, channel))

    async def encode(self, request: EncodeRequest) -> PoolingOutput:
        """The vectors of a prompt. As `EngineClient.encode`."""
        return await encode(self, request)

    def start_encode(self, processed: ProcessedEncodeRequest, sink: PoolingSink) -> Callable[[], None]:
        """As `start`, for `encode`."""
        return self._start(self._frontend.add_encode(processed, sink))

    def _start(self, added: AddedRequest) -> Callable[[], None]:
        self._link.send(added.message)

        def leave() -> None:
            self._frontend.drop(added.state)
            self._link.aborts_are_due()

        return leave

    def abort(self, request_id: str) -> None:
        """End all live requests with this caller's id; their streams end with reason "abort"."""
        self._frontend.abort(request_id)
        self._link.aborts_are_due()

    def abort_all(self) -> None:
        """End all live requests; their streams end with reason "abort"."""
        self._frontend.abort_all()
        self._link.aborts_are_due()

    def check_admission(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Return when so many more requests may come now. As `EngineClient.check_admission`."""

    def do_log_stats(self) -> None:
        """Let the loggers of statistics say what happened."""

    async def call(self, call: Call[R]) -> R:
        """Run an operation on the core and return its typed reply. Cancelling stops the waiting, not the operation.

        Raises:
            EngineDeadError: the core died before it replied.
            TrioEngineError: the operation failed, as the operation says.
        """
        reply = _Reply[R]()
        self._link.send(self._frontend.add_call(call, PendingCall(type(call), reply.set_value, reply.set_error)))
        return await reply.wait()

    @property
    def dead_error(self) -> EngineDeadError | EngineClosedError | None:
        """Why nothing can be asked any more, for good; None while the engine lives, and while it may recover."""
        return self._frontend.dead_error

    def check_health(self) -> None:
        """Return while the core lives and makes progress.

        Raises:
            EngineDeadError: it has died, or hangs.
            EngineClosedError: the block of `open_engine` was left.
        """
        if self._frontend.dead_error is not None:
            raise attrs.evolve(self._frontend.dead_error)
        trouble = self._link.trouble()
        if trouble is not None:
            raise trouble


@asynccontextmanager
async def open_engine(
    config: EngineConfig | None = None,
    *,
    on_progress: OnProgress | None = None,
    core_module: str = CORE_MODULE,
    core_options: Mapping[str, str] | None = None,
) -> AsyncGenerator[Engine, None]:
    """An engine for the length of the block: a core process that has loaded the model, stopped when the block is left.

    Args:
        config: which model, and how to run it; the default model when None.
        on_progress: called with a stage and a fraction (0 to 1) while the model is fetched and loaded.
        core_module: another core's entry module, for tests and benchmarks; `core_options` is for it.

    Leaving the block ends every stream and call that is still open with `EngineClosedError`. An exception of the block
    leaves it as itself, not in a group. Cancelling while the engine opens leaves no process behind.

    Raises:
        ConfigError, CheckpointError, EngineStartError: the engine cannot start; no process is left behind.
    """
    config = EngineConfig() if config is None else config
    progress = _ignore_progress if on_progress is None else on_progress
    location = await _find_model(config.model, progress)
    draft_location = None if config.draft_model is None else await _find_model(config.draft_model, progress)
    with create_endpoint(env.variables()) as endpoint:
        bound = bind_router(endpoint)
        try:
            launch = CoreLaunch(
                endpoint=bound.endpoint.for_core(),
                rank=0,
                page_fd=-1,
                config=config,
                model=location,
                draft_model=draft_location,
                options=core_options or {},
            )
            core = await CoreHandle.start(launch, core_module)
            try:
                block_error: BaseException | None = None
                stop_timeout_s = 0.0  # A core that loads reads no messages, so it is not worth waiting for.
                try:
                    async with trio.open_nursery() as nursery:
                        frontend = Frontend()
                        link = CoreLink(bound.socket, core_identity(0), core, frontend)
                        link.start(nursery)
                        try:
                            tokenizer = await trio.to_thread.run_sync(load_tokenizer, location, abandon_on_cancel=True)
                            ready = await link.wait_ready(progress, timeout_s=config.startup_timeout_s)
                            stop_timeout_s = config.core_stop_timeout_s
                            name = config.served_model_name or location.served_name
                            yield Engine(config, name, ready, tokenizer, frontend, link)
                        except BaseException as error:
                            # Kept out of the nursery, which would wrap it in a group; raised again below.
                            block_error = error
                        frontend.fail_all(EngineClosedError("The engine is closed."))
                        try:
                            await link.stop(timeout_s=stop_timeout_s)
                        finally:
                            nursery.cancel_scope.cancel()
                finally:
                    # Over what the nursery raises, which is at most that a scope around the block was cancelled.
                    if block_error is not None:
                        raise block_error
            finally:
                core.close()
        finally:
            bound.socket.close()


async def _find_model(model: str | None, progress: OnProgress) -> ModelLocation:
    def report(fetched: FetchProgress) -> None:
        trio.from_thread.check_cancelled()  # Raises here, in the thread: the download ends then.
        trio.from_thread.run_sync(progress, "fetching the model", fetched.num_bytes / max(1, fetched.total_bytes))

    def find() -> ModelLocation:
        return resolve_model(model, cache_dir=env.cache_dir(), progress=report)

    return await trio.to_thread.run_sync(find, abandon_on_cancel=True)


def _ignore_progress(_stage: str, _fraction: float) -> None:
    pass


class _Reply(Generic[R]):
    """The place where one call's reply arrives."""

    def __init__(self) -> None:
        self._is_set = trio.Event()
        self._value: R | None = None
        self._error: TrioEngineError | None = None

    def set_value(self, value: R) -> None:
        self._value = value
        self._is_set.set()

    def set_error(self, error: TrioEngineError) -> None:
        self._error = error
        self._is_set.set()

    async def wait(self) -> R:
        await self._is_set.wait()
        if self._error is not None:
            raise attrs.evolve(self._error)
        return cast(R, self._value)
