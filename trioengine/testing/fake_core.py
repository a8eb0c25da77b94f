"""A core process with everything but a model: `EngineCore` over a `FakeExecutor`, and a thread for slow work.

`python -P -m trioengine.testing.fake_core FD`. `CoreLaunch.options`: `pace_s`, the least time of a step; `num_blocks`,
so few that requests are preempted; `async_scheduling`, with any value; `embeds`, with any value, gives vectors too.
"""

import sys
import time

import attrs

from trioengine.core.background import Background
from trioengine.core.config import CoreConfig
from trioengine.core.engine_core import EngineCore
from trioengine.core.executor import StepPlan
from trioengine.runtime.core_process import BuiltCore, ReportProgress, main
from trioengine.runtime.launch import CoreLaunch
from trioengine.testing.fake_executor import FakeExecutor
from trioengine.transport.zmq_blocking import Waker
from trioengine.types.messages import ModelFacts, Ready
from trioengine.types.pooling import PoolingFacts, PoolingTask, PoolingType

MODULE = "trioengine.testing.fake_core"
VOCAB_SIZE = 257
"""`FakeTokenizer`'s: the bytes, and the end."""
NUM_BLOCKS = 1 << 16
BLOCK_SIZE = 4
MAX_MODEL_LEN = NUM_BLOCKS * BLOCK_SIZE // 2
MAX_LORAS = 2
EMBEDDING = PoolingFacts((PoolingTask.EMBED,), PoolingType.LAST, normalize=False, embedding_size=4)
"""What `embeds` makes it do: the vectors are those of `fake_executor.pooled_alone`."""


def fake_core_config() -> CoreConfig:
    """The limits of a fake core."""
    return CoreConfig(
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        enable_prefix_caching=True,
        max_loras=MAX_LORAS,
        max_cpu_loras=MAX_LORAS,
    )


def fake_ready() -> Ready:
    """What a fake core says when it is ready: no end tokens, so that every request has its full length."""
    return Ready(ModelFacts(MAX_MODEL_LEN, VOCAB_SIZE, ()), NUM_BLOCKS, BLOCK_SIZE, {})


def build_fake_core(launch: CoreLaunch, progress: ReportProgress) -> BuiltCore:
    """A core for `runtime.core_process.main`."""
    options = launch.options
    pace_s = float(options.get("pace_s", "0"))
    num_blocks = int(options.get("num_blocks", NUM_BLOCKS))
    max_model_len = num_blocks * BLOCK_SIZE // 2
    progress("pretending", 0.5)

    def wait(_: StepPlan) -> None:
        time.sleep(pace_s)

    executor = FakeExecutor(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        before_step=wait if pace_s else None,
        max_loras=MAX_LORAS,
    )
    waker = Waker()
    background = Background(waker.wake)
    config = attrs.evolve(
        fake_core_config(),
        max_model_len=max_model_len,
        async_scheduling="async_scheduling" in options,
        enable_kv_cache_events=launch.config.enable_kv_cache_events,
    )
    core = EngineCore(config, executor, background=background)
    facts = ModelFacts(max_model_len, VOCAB_SIZE, (), pooling=EMBEDDING if "embeds" in options else None)
    ready = attrs.evolve(fake_ready(), model=facts, num_blocks=num_blocks)

    def close() -> None:
        background.close()
        executor.close()
        waker.close()

    return BuiltCore(core, ready, close, waker)


if __name__ == "__main__":
    sys.exit(main(build_fake_core))
