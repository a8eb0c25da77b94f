"""`bench core`: what planning a step, taking in its result and emitting its output cost, with a device that takes no
time: requests in the middle of their answers, one token each in every step, and nothing else."""

import itertools
import json
import statistics
import time
from collections.abc import Sequence

import attrs

from trioengine.cli.bench.statistics import percentile
from trioengine.core.config import CoreConfig
from trioengine.core.engine_core import EngineCore
from trioengine.core.executor import KVCacheGroup, StepPlan, StepResult
from trioengine.runtime.collector import tune_garbage_collector
from trioengine.types.messages import EngineCoreRequest, UpdateWeights, pack_int32
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import PoolingParams

BLOCK_SIZE = 16
MAX_PROMPT_TOKENS = 2 * BLOCK_SIZE
NUM_WARM_UP_STEPS = 32
VOCAB_SIZE = 1000


@attrs.frozen(kw_only=True)
class CoreFigures:
    """What steps cost in one setting: time of the processor, so that other programs do not count."""

    prefix_caching: bool
    async_scheduling: bool
    mean_us: float
    p50_us: float
    p99_us: float


@attrs.frozen
class CoreReport:
    """What steps cost."""

    num_seqs: int
    num_steps: int
    settings: Sequence[CoreFigures]

    def to_json(self) -> str:
        """One JSON object, on one line."""
        settings = [
            {name: round(value, 1) if isinstance(value, float) else value for name, value in attrs.asdict(each).items()}
            for each in self.settings
        ]
        return json.dumps({"num_seqs": self.num_seqs, "num_steps": self.num_steps, "settings": settings})

    def to_table(self) -> str:
        """A line for each setting."""
        lines = [
            f"{self.num_seqs} sequences, {self.num_steps} steps; µs of CPU for each step",
            f"{'prefix caching':<16}{'async':<8}{'mean':>8}{'p50':>8}{'p99':>8}",
        ]
        for each in self.settings:
            caching, ahead = ("on" if is_on else "off" for is_on in (each.prefix_caching, each.async_scheduling))
            lines.append(f"{caching:<16}{ahead:<8}{each.mean_us:>8.1f}{each.p50_us:>8.1f}{each.p99_us:>8.1f}")
        return "\n".join(lines)


@attrs.frozen(kw_only=True)
class CoreBench:
    """So many requests that decode for so many steps, with prefix caching and asynchronous scheduling off and on."""

    num_seqs: int
    num_steps: int

    async def run(self) -> CoreReport:
        """Measure. Blocks for well under a minute."""
        tune_garbage_collector()
        settings = [self._measure(*is_on) for is_on in itertools.product((False, True), repeat=2)]
        return CoreReport(self.num_seqs, self.num_steps, settings)

    def _measure(self, prefix_caching: bool, async_scheduling: bool) -> CoreFigures:
        # Two steps more than are measured, so that nobody ends while the clock runs.
        num_tokens = MAX_PROMPT_TOKENS + NUM_WARM_UP_STEPS + self.num_steps + 2
        config = CoreConfig(
            max_num_seqs=self.num_seqs,
            max_num_batched_tokens=self.num_seqs * MAX_PROMPT_TOKENS,
            max_model_len=num_tokens,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            enable_prefix_caching=prefix_caching,
            async_scheduling=async_scheduling,
        )
        core = EngineCore(config, IdleExecutor(self.num_seqs * (num_tokens // BLOCK_SIZE + 1)))
        for slot in range(self.num_seqs):
            # Each step fills the blocks of as many requests.
            prompt = pack_int32([slot % VOCAB_SIZE] * (MAX_PROMPT_TOKENS - slot % BLOCK_SIZE))
            core.handle(0, EngineCoreRequest(slot, str(slot), prompt, SamplingParams(max_tokens=None), seed=0))
        for _ in range(NUM_WARM_UP_STEPS):
            core.step()
        core.take_output(0)
        steps_us: list[float] = []
        for _ in range(self.num_steps):
            start_s = time.thread_time()
            core.step()
            steps_us.append((time.thread_time() - start_s) * 1e6)
            core.take_output(0)
        return CoreFigures(
            prefix_caching=prefix_caching,
            async_scheduling=async_scheduling,
            mean_us=statistics.fmean(steps_us),
            p50_us=percentile(steps_us, 50) or 0.0,
            p99_us=percentile(steps_us, 99) or 0.0,
        )


class IdleExecutor:
    """Samples token 1 for everyone, at once."""

    num_offload_blocks = 0

    def __init__(self, num_blocks: int) -> None:
        self.kv_cache_groups = (KVCacheGroup(num_blocks),)
        self._results: list[StepResult] = []

    def add_lora(self, lora_id: int, path: str) -> None:
        """As `Executor.add_lora`: there are none."""

    def remove_lora(self, lora_id: int) -> None:
        """As `Executor.remove_lora`."""

    def check_sampling(self, sampling: SamplingParams) -> None:
        """All are fine."""

    def check_pooling(self, pooling: PoolingParams) -> None:
        """All are fine."""

    def submit(self, plan: StepPlan) -> None:
        """Every prompt is complete in its first step."""
        self._results.append(StepResult(plan.step, [1] * len(plan.scheduled)))

    def result(self) -> StepResult:
        """The oldest step's."""
        return self._results.pop(0)

    def update_weights(self, update: UpdateWeights) -> None:
        """There are none."""

    def discard_weights(self) -> None:
        """There are none."""

    def prepare_weights(self) -> None:
        """There are none."""

    def apply_weights(self) -> None:
        """There are none."""

    def start_profile(self, prefix: str | None) -> None:
        """Nothing is computed."""

    def stop_profile(self) -> str:
        """Nothing was."""
        return ""

    def collective_rpc(self, method: str, arguments: str) -> Sequence[str]:
        """There is no worker."""
        return ()

    def sleep(self, level: int) -> None:
        """There is no memory to give back."""

    def wake_up(self, tags: Sequence[str]) -> None:
        """There is no memory to take."""

    def close(self) -> None:
        """There is nothing to close."""
