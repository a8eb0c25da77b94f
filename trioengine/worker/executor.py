"""`LocalExecutor`: the `core.executor.Executor` that computes in this process, on the CPU."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import attrs

from trioengine.config.engine import LogprobsMode
from trioengine.core.executor import KVCacheGroup, ScheduledSequence, StepPlan, StepResult
from trioengine.types.params import SamplingParams
from trioengine.worker.backend import Backend
from trioengine.worker.logits_processors import LogitsProcessors
from trioengine.worker.model_runner import ModelRunner


class LocalExecutor:
    """Computes each step when it is submitted, in the caller's thread.

    An asynchronous one computes in a thread of its own: `submit` returns at once, `result` waits and raises what the
    step raised, `close` waits for the steps submitted. Results are the same.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        logits_processors: LogitsProcessors | None = None,
        is_asynchronous: bool = False,
    ) -> None:
        self._num_blocks = num_blocks
        self._logits_processors = logits_processors or LogitsProcessors({})
        self._runner: ModelRunner | None = ModelRunner(
            backend,
            num_blocks=num_blocks,
            block_size=block_size,
            logprobs_mode=logprobs_mode,
            logits_processors=self._logits_processors,
        )
        self._thread = _StepThread(self._runner.run) if is_asynchronous else None
        self._results: deque[StepResult] = deque()

    @property
    def kv_cache_groups(self) -> Sequence[KVCacheGroup]:
        """One: all layers."""
        return (KVCacheGroup(self._num_blocks),)

    @property
    def num_offload_blocks(self) -> int:
        """None."""
        return 0

    def check_sampling(self, sampling: SamplingParams) -> None:
        """As `Executor.check_sampling`."""
        self._logits_processors.check(sampling)

    def sleep(self, level: int) -> None:
        """As `Executor.sleep`."""

    def wake_up(self, tags: Sequence[str]) -> None:
        """As `Executor.wake_up`."""

    def submit(self, plan: StepPlan) -> None:
        """Compute a step, or have it computed."""
        assert self._runner is not None, "closed"
        if self._thread is None:
            self._results.append(self._runner.run(plan))
        else:
            # The core changes its `ScheduledSequence`s for the next plan; the rest it leaves alone.
            self._thread.submit(attrs.evolve(plan, scheduled=[_copy(each) for each in plan.scheduled]))

    def result(self) -> StepResult:
        """What the oldest step not yet fetched sampled."""
        return self._results.popleft() if self._thread is None else self._thread.result()

    def close(self) -> None:
        """Give weights and KV cache back. Idempotent."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self._runner = None
        self._results.clear()


class _StepThread:
    """Computes steps one after another, in the order in which they come."""

    def __init__(self, run: Callable[[StepPlan], StepResult]) -> None:
        self._run = run
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        # A daemon: a step that never ends must not keep a process alive that wants to end.
        self._thread = threading.Thread(target=self._loop, name="trioengine-step", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def result(self) -> StepResult:
        result = self._results.get()
        if isinstance(result, BaseException):
            # Later steps stand on this one.
            self._results.put(result)
            raise result
        return result

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self._results.put(self._run(plan))
            except BaseException as error:  # It belongs to whoever fetches the result.
                self._results.put(error)
                return


def _copy(work: ScheduledSequence) -> ScheduledSequence:
    return ScheduledSequence(
        work.sequence_id,
        work.num_computed_tokens,
        work.num_tokens,
        work.new_block_ids,
        work.draft_token_ids,
        work.max_new_drafts,
    )
