"""`LocalExecutor`: the `core.executor.Executor` that computes in this process."""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import attrs
import numpy as np

from trioengine.config.engine import LogprobsMode
from trioengine.core.background import Job
from trioengine.core.executor import BlockCopy, KVCacheGroup, ScheduledSequence, StepPlan, StepResult
from trioengine.errors import RequestError, UnavailableError
from trioengine.models.lora import LoRA
from trioengine.tokenizer.bad_words import BadWordsRules
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import PoolingFacts, PoolingParams
from trioengine.worker.backend import AsyncBackend, Backend, Memory
from trioengine.worker.draft import DraftModel
from trioengine.worker.kv_offload import OffloadStore
from trioengine.worker.logits_processors import LogitsProcessors
from trioengine.worker.memory import return_freed_memory
from trioengine.worker.model_runner import ModelRunner
from trioengine.worker.profile import Profiler
from trioengine.worker.shared_operations import ModelInfo, SharedOperations
from trioengine.worker.weight_transfer import WeightTransfer

R = TypeVar("R")


class LocalExecutor(SharedOperations):
    """Computes each step when it is submitted, in the caller's thread.

    An asynchronous one computes in a thread of its own: `submit` returns at once, `result` waits and raises what the
    step raised, `close` waits for the steps submitted. Results are the same. An `AsyncBackend` is asynchronous without
    a thread: `submit` begins a step, and raises what is wrong with that; `result` waits for it.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        draft_model: DraftModel | None = None,
        offload_store: OffloadStore | None = None,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        logits_processors: LogitsProcessors | None = None,
        bad_words_rules: BadWordsRules | None = None,
        pooling: PoolingFacts | None = None,
        is_asynchronous: bool = False,
        read_lora: Callable[[str], LoRA] | None = None,
        weights: WeightTransfer | None = None,
        profile_dir: str | None = None,
        model_info: ModelInfo | None = None,
    ) -> None:
        """`pooling` says which vectors may be asked for; without there are none.

        `read_lora` reads an adapter, as `Executor.add_lora` says; without there are none. `weights` takes new weights
        for the backend's model; without they are refused. `profile_dir` is as `EngineConfig.profile_dir`, `model_info`
        what is told of the model.
        """
        self.kv_cache_groups: Sequence[KVCacheGroup] = backend.kv_cache_groups
        self.num_offload_blocks = 0 if offload_store is None else offload_store.num_slots
        self._backend: Backend | None = backend
        self._memories: Sequence[Memory] = (backend,) if draft_model is None else (backend, draft_model)
        self._offload_store = offload_store
        self.pooling = pooling
        self._logits_processors = logits_processors or LogitsProcessors({})
        self._logprobs_mode = logprobs_mode
        self._runner: ModelRunner | None = ModelRunner(
            backend,
            logprobs_mode=logprobs_mode,
            logits_processors=self._logits_processors,
            bad_words_rules=bad_words_rules,
            draft_model=draft_model,
        )
        self._is_launched = isinstance(backend, AsyncBackend)
        self._thread = _StepThread() if is_asynchronous and not self._is_launched else None
        self._profiler = Profiler(profile_dir)
        self._results: deque[StepResult] = deque()
        self._failed_loads: deque[Sequence[BlockCopy]] = deque()  # Of each step that is launched.
        self._read_lora = read_lora
        self._loras: dict[int, LoRA] = {}
        self._model_info = model_info
        self.weights = weights

    def check_sampling(self, sampling: SamplingParams) -> None:
        """As `Executor.check_sampling`."""
        if self.pooling is not None and self.pooling.labels:
            raise RequestError("This model generates no text; it says which label a text has.", param="model")
        if sampling.logprob_token_ids and self._logprobs_mode is LogprobsMode.PROCESSED_LOGPROBS:
            raise RequestError("logprob_token_ids needs logprobs_mode raw_logprobs.", param="logprob_token_ids")
        self._logits_processors.check(sampling)

    def add_lora(self, lora_id: int, path: str) -> None:
        """As `Executor.add_lora`. Read in the caller's thread; the steps submitted go on meanwhile."""
        assert self._read_lora is not None, "without adapters"
        self._loras[lora_id] = self._read_lora(path)

    def remove_lora(self, lora_id: int) -> None:
        """As `Executor.remove_lora`."""
        del self._loras[lora_id]

    def check_pooling(self, pooling: PoolingParams) -> None:
        """As `Executor.check_pooling`."""
        if self.pooling is None:
            raise RequestError("This engine gives no vectors.", param="model")
        if self.pooling.complete(pooling) != pooling:
            raise RequestError("The pooling parameters are not complete.", param="pooling")

    def sleep(self, level: int) -> None:
        """As `Executor.sleep`. The offload store is empty afterwards, too."""
        for memory in self._memories:
            memory.drop_kv_cache()
            if level > 1:
                memory.drop_weights()
        if self._offload_store is not None:
            self._offload_store.clear()
        return_freed_memory()

    def wake_up(self, tags: Sequence[str]) -> None:
        """As `Executor.wake_up`. What woke before an error stays awake."""
        try:
            for memory in self._memories:
                if "weights" in tags:
                    memory.load_weights()
                if "kv_cache" in tags:
                    memory.make_kv_cache()
        except MemoryError as error:
            raise UnavailableError("There is not enough memory to wake up.") from error

    def submit(self, plan: StepPlan) -> None:
        """Compute a step, or have it computed."""
        assert self._runner is not None, "closed"
        # Now, as the core may have removed them when the step is computed.
        loras = [(load.slot, self._loras[load.lora_id]) for load in plan.lora_loads]
        if self._is_launched:
            self._failed_loads.append(self._begin(plan, loras))
            with self._span(plan):
                self._runner.launch(plan)
        elif self._thread is None:
            self._results.append(self._run(plan, loras))
        else:
            # The core changes its `ScheduledSequence`s for the next plan; the rest it leaves alone.
            copied = attrs.evolve(plan, scheduled=[_copy(each) for each in plan.scheduled])
            self._thread.submit(partial(self._run, copied, loras))

    def result(self) -> StepResult:
        """What the oldest step not yet fetched sampled."""
        if self._is_launched:
            assert self._runner is not None, "closed"
            return _with_failed_loads(self._runner.finish(), self._failed_loads.popleft())
        return self._results.popleft() if self._thread is None else self._thread.result()

    def close(self) -> None:
        """Give weights and KV cache back. Idempotent."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self._is_launched and self._runner is not None:
            with contextlib.suppress(Exception):  # Nobody wants to know any more what the steps raise.
                self._runner.settle()
            with contextlib.suppress(Exception):  # A device that has failed does not even give memory back.
                # Now, as an engine that comes after this one in the same process looks for free memory.
                for memory in self._memories:
                    memory.drop_kv_cache()
                    memory.drop_weights()
        if self._offload_store is not None:
            self._offload_store.close()
            self._offload_store = None
        self._backend = self._runner = None
        self._memories = ()
        self._results.clear()
        self._loras.clear()

    def _between_steps(self, function: Callable[[], R]) -> R:
        if self._is_launched and self._runner is not None:
            self._runner.settle()
        return function() if self._thread is None else self._thread.call(function)

    @property
    def _computed(self) -> Backend:
        assert self._backend is not None, "closed"
        return self._backend

    def _run(self, plan: StepPlan, loras: Sequence[tuple[int, LoRA]]) -> StepResult:
        assert self._runner is not None
        failed_loads = self._begin(plan, loras)
        with self._span(plan):
            return _with_failed_loads(self._runner.run(plan), failed_loads)

    def _span(self, plan: StepPlan) -> contextlib.AbstractContextManager[object]:
        """Of a profile, where one is recorded."""
        return self._profiler.span("step", step=plan.step, tokens=plan.num_tokens, sequences=len(plan.scheduled))

    def _begin(self, plan: StepPlan, loras: Sequence[tuple[int, LoRA]]) -> Sequence[BlockCopy]:
        """Do what comes before a step's tokens; the loads that failed."""
        assert self._backend is not None
        for slot, lora in loras:
            self._backend.load_lora(slot, lora)
        return self._copy_blocks(plan) if plan.saves or plan.loads else ()

    def _copy_blocks(self, plan: StepPlan) -> Sequence[BlockCopy]:
        """Save and load what a plan says; the loads that failed."""
        backend, store = self._backend, self._offload_store
        assert backend is not None
        assert store is not None
        for copy in plan.saves:
            block = np.ascontiguousarray(backend.kv_block(copy.group, copy.block_id))
            store.write(copy.group, copy.offload_slot, block.reshape(-1).view(np.uint8))
        failed: list[BlockCopy] = []
        for copy in plan.loads:
            data = store.read(copy.group, copy.offload_slot)
            # Where it is lost: what an owner before left there is nobody's to read, and may be no numbers.
            backend.write_kv_block(copy.group, copy.block_id, data)
            if data is None:
                failed.append(copy)
        return failed


def _with_failed_loads(result: StepResult, failed_loads: Sequence[BlockCopy]) -> StepResult:
    return attrs.evolve(result, failed_loads=failed_loads) if failed_loads else result


class _StepThread:
    """Does what it is given one after another, in the order in which it comes: steps, and what is between them."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._has_failed = False
        # A daemon: a step that never ends must not keep a process alive that wants to end.
        self._thread = threading.Thread(target=self._loop, name="trioengine-step", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], StepResult]) -> None:
        """Have a step computed, unless one before it has failed."""

        def job() -> None:
            if self._has_failed:
                return
            try:
                self._results.put(run())
            except BaseException as error:  # It belongs to whoever fetches the result.
                self._has_failed = True
                self._results.put(error)

        self._jobs.put(job)

    def result(self) -> StepResult:
        result = self._results.get()
        if isinstance(result, BaseException):
            # Later steps stand on this one.
            self._results.put(result)
            raise result
        return result

    def call(self, function: Callable[[], R]) -> R:
        """Call a function behind the steps that were submitted, and wait for it."""
        done: Job[R] = Job(function)
        is_over = threading.Event()

        def job() -> None:
            done.run()
            is_over.set()

        self._jobs.put(job)
        is_over.wait()
        return done.result()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _copy(work: ScheduledSequence) -> ScheduledSequence:
    return ScheduledSequence(
        work.sequence_id,
        work.num_computed_tokens,
        work.num_tokens,
        work.new_block_ids,
        work.draft_token_ids,
        work.max_new_drafts,
    )
