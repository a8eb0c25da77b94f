"""`LLMEngine`: the engine for a program that steps it itself, without an event loop. `LLM` is made of it.

Everything happens in the calls: `step` lets the core compute (or waits for core processes) and returns what is new.
Calls of several threads take turns.
"""

import os
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import attrs

from trioengine.checkpoint.generation import GenerationDefaults, read_generation_defaults
from trioengine.checkpoint.locate import ModelLocation, resolve_model
from trioengine.client.blocking import HEALTH_INTERVAL_S, BlockingClient, InprocClient, SyncMPClient
from trioengine.client.blocking_operations import BlockingOperations
from trioengine.client.interrupts import Interrupts
from trioengine.client.llm_inputs import (
    DefaultSamplingParams,
    EngineArgs,
    LoRARequest,
    PromptLike,
    cache_salt_of,
    to_prompt,
)
from trioengine.client.llm_outputs import PoolingRequestOutput, RequestOutput
from trioengine.client.llm_requests import News, OpenEncodeRequest, OpenRequest
from trioengine.config import env
from trioengine.config.engine import EngineConfig
from trioengine.core.executor import Executor
from trioengine.errors import ConfigError, EngineClosedError, TrioEngineError
from trioengine.frontend.frontend import AddedRequest, Frontend, PendingCall
from trioengine.frontend.input_processor import InputProcessor, ProcessedEncodeRequest, ProcessedRequest
from trioengine.frontend.shared_loras import odd_loras
from trioengine.observability.loggers import StatLoggerFactory, make_stat_loggers
from trioengine.observability.stats import StatLogger
from trioengine.runtime.core_handle import CORE_MODULE
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from trioengine.types.messages import AddLoRA, Call, ListLoRAs, ModelFacts, Ready, RemoveLoRA, StartWave
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import EncodeRequest, PoolingParams
from trioengine.types.request import Deadlines, GenerateRequest, Prompt

R = TypeVar("R")


class LLMEngine(BlockingOperations):
    """An engine that computes while it is stepped. It holds the model's memory until `close`, or until it is dropped.

    Raises of every call:
        EngineDeadError: the engine has died, and why.
        EngineClosedError: it was closed.
        KeyboardInterrupt: Ctrl-C. Requests stay as they are, and nothing is lost.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        multiprocess: bool | None = None,
        stat_loggers: Sequence[StatLoggerFactory] = (),
        core_module: str = CORE_MODULE,
        core_options: Mapping[str, str] | None = None,
    ) -> None:
        """Load the model.

        Args:
            config: which model, and how to run it; the default model when None.
            multiprocess: whether cores are processes of their own; None is where there are several. A core in this
                process computes only during calls; its parts are reachable as `model_executor`.
            stat_loggers: as for `open_engine`.
            core_module: another core's entry module, for tests; `core_options` is for it.

        Raises:
            ConfigError, CheckpointError, EngineStartError: the engine cannot start. Nothing is left behind.
        """
        super().__init__()
        config = EngineConfig() if config is None else config
        num_cores = len(config.local_ranks)
        if multiprocess is None:
            multiprocess = config.data_parallel_size > 1
        if config.data_parallel_size > 1 and not multiprocess:
            raise ConfigError("Several cores are processes of their own (multiprocess).", option="data_parallel_size")
        location = _find(config.model, config.revision)
        draft_location = None if config.draft_model is None else _find(config.draft_model)
        self._config = config
        self._tokenizer = load_tokenizer(location)
        self._generation_defaults = read_generation_defaults(location)
        self._stat_loggers = make_stat_loggers(
            config,
            num_cores=num_cores,
            model_name=config.served_model_name or location.served_name,
            extra=stat_loggers,
        )
        self._stats_due_s = time.monotonic() + config.log_stats_interval_s
        # No admission limits: who steps the engine knows what waits.
        self._frontend = Frontend(
            num_cores=num_cores,
            first_rank=config.data_parallel_rank or 0,
            stat_loggers=self._stat_loggers,
            chunk_size=config.output_proc_chunk_size,
            enable_log_requests=config.enable_log_requests,
        )
        self.interrupts = Interrupts()
        """Around work that Ctrl-C must not tear apart."""
        try:
            if multiprocess:
                self._client: BlockingClient = SyncMPClient(
                    config,
                    location,
                    draft_location,
                    self._frontend,
                    self.interrupts,
                    core_module=core_module,
                    core_options=core_options,
                )
            else:
                from trioengine.runtime.build import build_engine_core  # Imports torch, where it is needed.

                built = build_engine_core(config, location, draft_location=draft_location)
                self._client = InprocClient(built, self._frontend, self.interrupts)
        except BaseException:
            for each in self._stat_loggers:
                each.close()
            raise
        # Also when this is dropped, and when the interpreter ends.
        self._finalizer = weakref.finalize(
            self, _close, os.getpid(), self._client, self._frontend, self.interrupts, self._stat_loggers
        )
        self._input_processor = InputProcessor(self._tokenizer, self._client.ready.model, random.Random(config.seed))
        self._news = News()
        self._outputs: list[RequestOutput | PoolingRequestOutput] = []
        """Those that `step` has not returned yet."""
        self._errors: deque[tuple[str, TrioEngineError]] = deque()
        """Of requests, raised by `step` when there is nothing to return."""

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs | EngineConfig, *, stat_loggers: Sequence[StatLoggerFactory] = (), **options: Any
    ) -> "LLMEngine":
        """An engine with vLLM's options, or ours. `options` are the constructor's."""
        config = engine_args.config if isinstance(engine_args, EngineArgs) else engine_args
        return cls(config, stat_loggers=stat_loggers, **options)

    # What it is

    @property
    def config(self) -> EngineConfig:
        """What the engine was opened with."""
        return self._config

    @property
    def model_config(self) -> ModelFacts:
        """Context length, vocabulary size, end tokens, and what the model can do."""
        return self._client.ready.model

    @property
    def ready(self) -> Ready:
        """What the first core said when it was ready: its sizes, and the reasons for them."""
        return self._client.ready

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The same."""
        return self._tokenizer

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """What the model's authors recommend. Nothing here applies it by itself."""
        return self._generation_defaults

    @property
    def engine_core(self) -> BlockingClient:
        """The way to the core."""
        return self._client

    @property
    def model_executor(self) -> Executor:
        """What computes the model, where the core is in this process.

        Raises:
            AttributeError: it is in another.
        """
        if not isinstance(self._client, InprocClient):
            raise AttributeError("The core is in another process (multiprocess).")
        return self._client.model_executor

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        *,
        data_parallel_rank: int | None = None,
        deadlines: Deadlines | None = None,
    ) -> str:
        """Check a request and send it to a core. `step` returns its outputs.

        Args:
            request_id: the caller's name for it; two requests of one name are told apart by nothing.
            prompt: a text, token ids, or a dictionary as vLLM takes it.
            params: sampling for a text, `PoolingParams` for vectors.
            arrival_time: `time.time()` when it came, if that was before now.
            lora_request: read from its folder when it is not there.
            tokenization_kwargs, trace_headers, priority, data_parallel_rank, deadlines: as `GenerateRequest`'s.

        Returns:
            The request's id.

        Raises:
            RequestError: nothing was sent.
        """
        checked = to_prompt(prompt, "prompt")
        if isinstance(params, DefaultSamplingParams):
            params = params.plain()
        common: dict[str, Any] = {
            "request_id": request_id,
            "cache_salt": cache_salt_of(prompt),
            "lora": None if lora_request is None else lora_request.lora_name,
            "trace_headers": trace_headers,
            "priority": priority,
            "data_parallel_rank": data_parallel_rank,
            "deadlines": deadlines or Deadlines(),
        }
        if isinstance(params, PoolingParams):
            truncate = cast("int | None", (tokenization_kwargs or {}).get("truncate_prompt_tokens"))
            request = EncodeRequest(checked, params, truncate_prompt_tokens=truncate, **common)
        else:
            request = GenerateRequest(cast(Prompt, checked), params, tokenization_kwargs=tokenization_kwargs, **common)
        waited_s = 0.0 if arrival_time is None else max(0.0, time.time() - arrival_time)
        with self.interrupts:
            processed = self.process(request)
            if lora_request is not None:
                self.load_lora(lora_request)
            return self.start(processed, lora_request, waited_s=waited_s)

    def process(self, request: GenerateRequest | EncodeRequest) -> ProcessedRequest | ProcessedEncodeRequest:
        """Check and tokenize a request; nothing is sent.

        Raises:
            RequestError: naming the field at fault.
        """
        if isinstance(request, EncodeRequest):
            return self._input_processor.process_encode(request)
        return self._input_processor.process(request)

    def start(
        self,
        processed: ProcessedRequest | ProcessedEncodeRequest,
        lora_request: LoRARequest | None = None,
        *,
        waited_s: float = 0.0,
    ) -> str:
        """Send a request that was processed; its id. `load_lora` has seen to its adapter."""
        with self.interrupts:
            self._check_health()
            if isinstance(processed, ProcessedRequest):
                open_request = OpenRequest(processed, lora_request, self._news)
                added = self._frontend.add(processed, open_request, waited_s=waited_s)
            else:
                open_request = OpenEncodeRequest(processed, self._news)
                added = self._frontend.add_encode(processed, open_request, waited_s=waited_s)
            open_request.state = added.state
            self._news.open.setdefault(processed.external_id, {})[open_request] = None
            self._send(added)
        return processed.external_id

    def step(
        self, on_error: Callable[[str, TrioEngineError], None] | None = None
    ) -> list[RequestOutput | PoolingRequestOutput]:
        """Let the core compute, and return what is new. May wait a second for something to come, and return nothing.

        Args:
            on_error: called with the id of a request that has failed, and why. None raises that.

        Raises:
            TrioEngineError: why one request failed, once; a note names it. The other requests go on.
        """
        with self.interrupts:
            self._collect()
            if not (self._outputs or self._errors) and self.has_unfinished_requests():
                self._advance()
                self._collect()
            self._log_when_due()
        outputs, self._outputs = self._outputs, []
        while self._errors and (on_error is not None or not outputs):
            request_id, error = self._errors.popleft()
            if on_error is None:
                raise error
            on_error(request_id, error)
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End all requests of these names. No output of theirs comes any more. Unknown ones are ignored."""
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self.interrupts:
            for name in names:
                for request in self._news.open.pop(name, {}):
                    self._news.changed.pop(request, None)
                    self._frontend.drop(request.parent)
            gone = set(names)
            self._collect()
            self._outputs = [output for output in self._outputs if output.request_id not in gone]
            self._errors = deque(each for each in self._errors if each[0] not in gone)
            self._client.flush()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to return, now or later."""
        return bool(self._news.open or self._outputs or self._errors)

    def get_num_unfinished_requests(self) -> int:
        """Requests whose last output has not been made."""
        return sum(map(len, self._news.open.values()))

    # Operations

    def call(self, call: Call[R]) -> R:
        """Run an operation on all cores and return its typed reply: `Call.combine` of theirs.

        Requests go on meanwhile.

        Raises:
            EngineDeadError: the engine died before the reply.
            TrioEngineError: the operation failed; its message says why.
        """
        with self.interrupts:
            self._check_health()
            cores = self._frontend.cores_of(call)
            if isinstance(call, AddLoRA) and len(cores) > 1:
                self._add_lora(call)
                return call.combine([None])
            return call.combine([reply.value() for reply in self._replies([(core, call) for core in cores])])

    def _replies(self, calls: Sequence[tuple[int, Call[R]]]) -> "Sequence[_Reply[R]]":
        """Send each to a core and wait for its reply."""
        replies = [_Reply[R]() for _ in calls]
        for (core, call), reply in zip(calls, replies, strict=True):
            pending = PendingCall(type(call), reply.set_value, reply.set_error)
            self._client.send(core, self._frontend.add_call(call, pending, core))
        while not all(reply.is_set for reply in replies):
            self._advance()
        return replies

    def _add_lora(self, call: AddLoRA) -> None:
        """Add an adapter to all cores, or to none. What one of them has forgotten for it, all forget."""
        cores = range(self._frontend.num_cores)
        added = self._replies([(core, call) for core in cores])
        lists = [reply.value() for reply in self._replies([(core, ListLoRAs()) for core in cores])]
        self._replies([(core, RemoveLoRA(name)) for core, name in odd_loras(lists)])
        for reply in added:
            reply.value()

    # Statistics and health

    @property
    def stat_loggers(self) -> Sequence[StatLogger]:
        """Who takes the statistics."""
        return self._stat_loggers

    def do_log_stats(self) -> None:
        """Let the loggers of statistics say now what happened since they last did."""
        for each in self._stat_loggers:
            each.log()

    def check_health(self) -> None:
        """Return while all cores live and make progress.

        Raises:
            EngineDeadError: one has died, or hangs.
            EngineClosedError: the engine was closed.
        """
        with self.interrupts:
            self._client.check_health()

    # The end

    def close(self) -> None:
        """End the cores and give their memory back; requests that are open get no more outputs. May be called again."""
        self._finalizer()

    shutdown = close

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_health(self) -> None:
        if self._frontend.dead_error is not None:
            raise attrs.evolve(self._frontend.dead_error)

    def _send(self, added: AddedRequest) -> None:
        for message in added.messages:
            self._client.send(added.rank, message)
        for core in added.wakes:
            self._client.send(core, StartWave())

    def _advance(self) -> None:
        """Let something happen, or wait a moment for it."""
        self.interrupts.check()
        next_s = self._frontend.next_deadline_s
        left_s = HEALTH_INTERVAL_S if next_s is None else max(0.0, next_s - time.monotonic())
        self._client.receive(min(left_s, HEALTH_INTERVAL_S))
        if next_s is not None:
            self._frontend.expire(time.monotonic())
            self._client.flush()

    def _collect(self) -> None:
        """Make outputs of what has come."""
        changed, self._news.changed = self._news.changed, {}
        for request in changed:
            if request.is_over:
                same_name = self._news.open.get(request.request_id, {})
                same_name.pop(request, None)
                if not same_name:
                    self._news.open.pop(request.request_id, None)
            output = request.take_output()
            if output is not None:
                self._outputs.append(output)
            if request.error is not None:
                error = attrs.evolve(request.error)
                error.add_note(f"Request {request.request_id!r}")
                self._errors.append((request.request_id, error))

    def _log_when_due(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._stats_due_s:
            self._stats_due_s = now_s + self._config.log_stats_interval_s
            self.do_log_stats()


class _Reply(Generic[R]):
    """The place where one call's reply arrives."""

    def __init__(self) -> None:
        self.is_set = False
        self._value: R | None = None
        self._error: TrioEngineError | None = None

    def set_value(self, value: R) -> None:
        self._value, self.is_set = value, True

    def set_error(self, error: TrioEngineError) -> None:
        self._error, self.is_set = error, True

    def value(self) -> R:
        if self._error is not None:
            raise attrs.evolve(self._error)
        return cast(R, self._value)


def _find(model: str | None, revision: str | None = None) -> ModelLocation:
    return resolve_model(model, cache_dir=env.cache_dir(), revision=revision)


def _close(
    pid: int,
    client: BlockingClient,
    frontend: Frontend,
    interrupts: Interrupts,
    stat_loggers: Sequence[StatLogger],
) -> None:
    if os.getpid() != pid:
        return  # A copy that `fork` has made: the cores are its parent's.
    with interrupts.last():
        frontend.fail_all(EngineClosedError("The engine is closed."))
        client.close()
        for each in stat_loggers:
            each.close()
