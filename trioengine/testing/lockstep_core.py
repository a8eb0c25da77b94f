"""An engine core whose steps need those of other ranks, as an executor's would that is spread over them.

`python -P -m trioengine.testing.lockstep_core FD` is a real core process: an `EngineCore` over a `FakeExecutor`, every
step of which begins with a barrier of torch's gloo over all ranks. `CoreLaunch.options`: `world_size`, and `store`, a
file's path where they find each other.
"""

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed

from trioengine.core.config import CoreConfig
from trioengine.core.engine_core import EngineCore
from trioengine.core.executor import StepPlan
from trioengine.runtime.core_process import BuiltCore, ReportProgress, main
from trioengine.runtime.launch import CoreLaunch
from trioengine.testing.fake_executor import FakeExecutor
from trioengine.types.messages import ModelFacts, Ready

dist = cast(Any, torch.distributed)  # It has types in part only.
TIMEOUT = timedelta(seconds=30)
"""A rank that waits longer for another fails, and its core with it."""
NUM_BLOCKS = 1024
BLOCK_SIZE = 4
VOCAB_SIZE = 1000
MAX_MODEL_LEN = 256


class GlooExecutor(FakeExecutor):
    """A `FakeExecutor` that is a `core.lockstep.Lockstep`."""

    def __init__(self) -> None:
        super().__init__(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE)

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
    world_size = int(launch.options["world_size"])
    store = dist.FileStore(launch.options["store"], world_size)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=world_size, timeout=TIMEOUT)
    executor = GlooExecutor()
    config = CoreConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
    )
    core = EngineCore(config, executor)
    facts = ModelFacts(MAX_MODEL_LEN, VOCAB_SIZE, ())
    ready = Ready(facts, NUM_BLOCKS, BLOCK_SIZE, {}, needs_lockstep=core.needs_lockstep)
    return BuiltCore(core, ready, executor.close)


if __name__ == "__main__":
    sys.exit(main(build_lockstep_core))
