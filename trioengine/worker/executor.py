"""`LocalExecutor`: the `core.executor.Executor` that computes in this process, on the CPU."""

from collections import deque
from collections.abc import Sequence

from trioengine.core.executor import KVCacheGroup, StepPlan, StepResult
from trioengine.types.params import SamplingParams
from trioengine.worker.backend import Backend
from trioengine.worker.model_runner import ModelRunner


class LocalExecutor:
    """Computes each step when it is submitted, in the caller's thread."""

    def __init__(self, backend: Backend, *, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._runner: ModelRunner | None = ModelRunner(backend, num_blocks=num_blocks, block_size=block_size)
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

    def sleep(self, level: int) -> None:
        """As `Executor.sleep`."""

    def wake_up(self, tags: Sequence[str]) -> None:
        """As `Executor.wake_up`."""

    def submit(self, plan: StepPlan) -> None:
        """Compute a step."""
        assert self._runner is not None, "closed"
        self._results.append(self._runner.run(plan))

    def result(self) -> StepResult:
        """What the oldest step not yet fetched sampled."""
        return self._results.popleft()

    def close(self) -> None:
        """Give weights and KV cache back. Idempotent."""
        self._runner = None
        self._results.clear()
