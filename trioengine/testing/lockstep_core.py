"""The core of `testing.fake_core` with an executor that is spread over all ranks: its steps need those of the others.

`python -P -m trioengine.testing.lockstep_core FD`. Each step begins with a barrier of torch's gloo. The ranks find each
other by a file: the path `store` of `CoreLaunch.options`.
"""

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import attrs
import torch
import torch.distributed

from trioengine.core.engine_core import EngineCore
from trioengine.core.executor import StepPlan
from trioengine.runtime.core_process import BuiltCore, ReportProgress, main
from trioengine.runtime.launch import CoreLaunch
from trioengine.testing.fake_core import BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE, fake_core_config, fake_ready
from trioengine.testing.fake_executor import FakeExecutor

TIMEOUT = timedelta(seconds=30)
"""A rank that waits longer for another fails, and its core with it."""

dist = cast(Any, torch.distributed)  # It has types in part only.


class GlooExecutor(FakeExecutor):
    """A `FakeExecutor` that is a `core.lockstep.Lockstep`."""

    def submit(self, plan: StepPlan) -> None:
        """A step, once every rank is in one."""
        if plan.scheduled:
            dist.barrier()
        super().submit(plan)

    def execute_dummy(self) -> None:
        """As `Lockstep.execute_dummy`."""
        dist.barrier()

    def maximum(self, values: Sequence[int]) -> Sequence[int]:
        """As `Lockstep.maximum`."""
        tensor = torch.tensor(values)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [int(value) for value in tensor]

    def close(self) -> None:
        """Leave the group."""
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()


def build_lockstep_core(launch: CoreLaunch, progress: ReportProgress) -> BuiltCore:
    """A core for `runtime.core_process.main`, when all ranks are here."""
    progress("meeting the other ranks", 0.0)
    world_size = launch.config.data_parallel_size
    store = dist.FileStore(launch.options["store"], world_size)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=world_size, timeout=TIMEOUT)
    executor = GlooExecutor(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE)
    core = EngineCore(attrs.evolve(fake_core_config(), max_loras=0, max_cpu_loras=0), executor)
    return BuiltCore(core, attrs.evolve(fake_ready(), needs_lockstep=core.needs_lockstep), executor.close)


if __name__ == "__main__":
    sys.exit(main(build_lockstep_core))
