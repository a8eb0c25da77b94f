"""`open_engine`: engine cores in their own processes, and the actor that speaks with them.

The block owns everything: the core processes, the output handler, the watchers. Nothing of it outlives the block, and
nothing in it cancels the block: when a core dies, streams and calls raise `EngineDeadError`. `attach_engine` is the
same for cores that another process has started (`client.cores`).
"""

import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Generic, TypeVar, cast

import attrs
import trio

from trioengine.checkpoint.generation import GenerationDefaults, read_generation_defaults
from trioengine.checkpoint.locate import ModelLocation
from trioengine.client.channel import CoalescingChannel
from trioengine.client.cores import Attachment, check_health, ignore_progress, open_link, start_cores
from trioengine.client.encode import encode
from trioengine.client.interface import EngineClient
from trioengine.client.link import CoreLink, LinkClient, OnProgress, WatchedCore
from trioengine.client.stream import RequestStream
from trioengine.config.engine import EngineConfig
from trioengine.errors import EngineClosedError, EngineDeadError, RequestError, TrioEngineError
from trioengine.frontend.admission import AdmissionLimits
from trioengine.frontend.frontend import AddedRequest, Frontend, PendingCall
from trioengine.frontend.input_processor import InputProcessor, ProcessedEncodeRequest, ProcessedRequest
from trioengine.frontend.pooling_state import PoolingSink
from trioengine.frontend.renderer import Renderer
from trioengine.frontend.shared_loras import check_added, odd_loras
from trioengine.observability.loggers import StatLoggerFactory, make_stat_loggers
from trioengine.observability.stats import StatLogger
from trioengine.runtime.core_handle import CORE_MODULE, AttachedCore
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from trioengine.transport.topology import bind_router
from trioengine.types.messages import AddLoRA, Call, ListLoRAs, ModelFacts, Ready, RemoveLoRA
from trioengine.types.pooling import EncodeRequest, PoolingOutput
from trioengine.types.request import GenerateRequest

R = TypeVar("R")


class Engine(EngineClient):
    """An open engine, made by `open_engine` or `attach_engine`; see `EngineClient` for what it promises."""

    def __init__(
        self,
        config: EngineConfig,
        model_name: str,
        ready: Ready,
        tokenizer: Tokenizer,
        link: CoreLink,
        generation_defaults: GenerationDefaults | None = None,
    ) -> None:
        self._config = config
        self._generation_defaults = generation_defaults or GenerationDefaults()
        self._model_name = model_name
        self._ready = ready
        self._tokenizer = tokenizer
        self._frontend = link.client.frontend
        self._link = link
        self._input_processor = InputProcessor(tokenizer, ready.model, random.Random(config.seed))
        self._renderer = self._input_processor.renderer
        self._adding_lora = trio.Lock()

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
        """What the first core said when it was ready: its sizes, and the reasons for them."""
        return self._ready

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """What the model's authors recommend. Nothing here applies it by itself."""
        return self._generation_defaults

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

    def start(
        self, processed: ProcessedRequest, channel: CoalescingChannel, *, waited_s: float = 0.0
    ) -> Callable[[], None]:
        """Register a request and send it to the core, for `RequestStream`. Calling the result leaves it."""
        return self._start(self._frontend.add(processed, channel, waited_s=waited_s))

    async def encode(self, request: EncodeRequest) -> PoolingOutput:
        """The vectors of a prompt. As `EngineClient.encode`."""
        return await encode(self, request)

    def start_encode(
        self, processed: ProcessedEncodeRequest, sink: PoolingSink, *, waited_s: float = 0.0
    ) -> Callable[[], None]:
        """As `start`, for `encode`."""
        return self._start(self._frontend.add_encode(processed, sink, waited_s=waited_s))

    def _start(self, added: AddedRequest) -> Callable[[], None]:
        self._link.send_request(added)

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
        self._frontend.check_admission(n, num_prompt_tokens)

    @property
    def stat_loggers(self) -> Sequence[StatLogger]:
        """Who takes the statistics."""
        return self._link.client.stat_loggers

    def do_log_stats(self) -> None:
        """Let the loggers of statistics say what happened. As `EngineClient.do_log_stats`."""
        for stat_logger in self.stat_loggers:
            stat_logger.log()

    async def call(self, call: Call[R]) -> R:
        """Run an operation on all cores. As `EngineClient.call`."""
        if isinstance(call, AddLoRA) and self._frontend.num_cores > 1:
            async with self._adding_lora:
                await self._add_lora(call)
            return call.combine([None])
        return call.combine(await self._replies(call))

    async def _replies(self, call: Call[R]) -> list[R]:
        """What each core says."""
        return [await reply.wait() for reply in [self._ask(core, call) for core in self._frontend.cores_of(call)]]

    def _ask(self, core: int, call: Call[R]) -> "_Reply[R]":
        reply = _Reply[R]()
        pending = PendingCall(type(call), reply.set_value, reply.set_error)
        self._link.send(core, self._frontend.add_call(call, pending, core))
        return reply

    async def _add_lora(self, call: AddLoRA) -> None:
        """Add an adapter to all cores, or to none. What one of them has forgotten for it, all forget."""
        errors: list[TrioEngineError] = []
        for reply in [self._ask(core, call) for core in range(self._frontend.num_cores)]:
            try:
                await reply.wait()
            except TrioEngineError as error:
                errors.append(error)
        lists = await self._replies(ListLoRAs())
        for reply in [self._ask(core, RemoveLoRA(name)) for core, name in odd_loras(lists)]:
            with contextlib.suppress(RequestError):  # Another client has removed it meanwhile.
                await reply.wait()
        if errors:
            raise errors[0]
        check_added(call.name, lists)

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
        check_health(self._frontend, self._link)


@asynccontextmanager
async def open_engine(
    config: EngineConfig | None = None,
    *,
    on_progress: OnProgress | None = None,
    stat_loggers: Sequence[StatLoggerFactory] = (),
    core_module: str = CORE_MODULE,
    core_options: Mapping[str, str] | None = None,
) -> AsyncGenerator[Engine, None]:
    """An engine for the length of the block: core processes that have loaded the model, stopped when the block is left.

    There are `data_parallel_size` cores, between which requests are balanced; operations run on all. Those that are to
    run on other machines are waited for.

    Args:
        config: which model, and how to run it; the default model when None.
        on_progress: called with a stage and a fraction (0 to 1) while the model is fetched and loaded.
        stat_loggers: who takes statistics too, besides those that the configuration and plug-ins ask for.
        core_module: another core's entry module, for tests and benchmarks; `core_options` is for it.

    Leaving the block ends every stream and call that is still open with `EngineClosedError`. An exception of the block
    leaves it as itself, not in a group. Cancelling while the engine opens leaves no process behind.

    Raises:
        ConfigError, CheckpointError, EngineStartError: the engine cannot start; no process is left behind.
    """
    config = EngineConfig() if config is None else config
    with ExitStack() as stack:

        def make_client(location: ModelLocation, num_cores: int) -> LinkClient:
            return _make_client(stack, config, location, num_cores, stat_loggers)

        async with start_cores(
            config,
            make_client=make_client,
            on_progress=on_progress,
            core_module=core_module,
            core_options=core_options,
        ) as cores:
            tokenizer, defaults = await trio.to_thread.run_sync(_read_model, cores.model, abandon_on_cancel=True)
            ready, *_ = await cores.wait_ready(on_progress)
            yield Engine(config, _model_name(config, cores.model), ready, tokenizer, cores.link, defaults)


@asynccontextmanager
async def attach_engine(
    attachment: Attachment, *, stat_loggers: Sequence[StatLoggerFactory] = (), api_server: int | None = None
) -> AsyncGenerator[Engine, None]:
    """An engine for the length of the block, over cores that another process has started with `start_cores`.

    It waits until the cores take requests. Leaving the block ends its own requests and nothing else. Each client sees
    only the outputs of its own requests; operations (`sleep`, `abort` by the core and the like) are felt by all. When
    this process vanishes, the cores abort its requests.

    Args:
        attachment: as `start_cores` gave it. Its descriptors stay open, and the caller's.
        stat_loggers: as for `open_engine`.
        api_server: which of several API-server processes this is, for the statistics.

    Raises:
        CheckpointError, EngineStartError: why the cores cannot start.
        EngineDeadError: they are gone.
    """
    config = attachment.config
    with ExitStack() as stack:
        cores: dict[int, WatchedCore] = {}
        for core in attachment.cores:
            cores[core.rank] = attached = AttachedCore(core, config.step_timeout_s)
            stack.callback(attached.close)
        bound = bind_router(attachment.endpoint)
        stack.callback(bound.socket.close)
        client = _make_client(
            stack, config, attachment.model, len(cores), stat_loggers, api_server, Path(attachment.metrics_folder)
        )
        async with open_link(bound.socket, cores, client) as link:
            tokenizer, defaults = await trio.to_thread.run_sync(_read_model, attachment.model, abandon_on_cancel=True)
            ready, *_ = await link.wait_ready(ignore_progress, timeout_s=config.startup_timeout_s)
            yield Engine(config, _model_name(config, attachment.model), ready, tokenizer, link, defaults)


def _read_model(location: ModelLocation) -> tuple[Tokenizer, GenerationDefaults]:
    """What a front end reads of the model's files. In a thread."""
    return load_tokenizer(location), read_generation_defaults(location)


def _make_client(
    stack: ExitStack,
    config: EngineConfig,
    location: ModelLocation,
    num_cores: int,
    extra: Sequence[StatLoggerFactory],
    api_server: int | None = None,
    metrics_folder: Path | None = None,
) -> LinkClient:
    """A front end as `config` says, and those who take its statistics, who are closed with the stack."""
    name = _model_name(config, location)
    loggers = make_stat_loggers(
        config,
        num_cores=num_cores,
        model_name=name,
        extra=extra,
        api_server=api_server,
        metrics_folder=metrics_folder,
    )
    for each in loggers:
        stack.callback(each.close)
    frontend = Frontend(
        num_cores=num_cores,
        first_rank=config.data_parallel_rank or 0,
        clock=trio.current_time,
        admission=AdmissionLimits(
            max_num_queued_reqs=config.max_num_queued_reqs, max_num_queued_tokens=config.max_num_queued_tokens
        ),
        stat_loggers=loggers,
        chunk_size=config.output_proc_chunk_size,
        enable_log_requests=config.enable_log_requests,
    )
    return LinkClient(frontend, loggers, config.log_stats_interval_s)


def _model_name(config: EngineConfig, location: ModelLocation) -> str:
    return config.served_model_name or location.served_name


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
