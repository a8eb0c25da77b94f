"""What a stream costs while nothing happens on it."""

import gc
import tracemalloc

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import open_scripted_engine
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest

NUM_STREAMS = 500
MAX_BYTES_PER_STREAM = 30 * 1024


async def test_an_idle_stream_takes_little_memory(mock_clock: MockClock) -> None:
    """Its task, its state and what it has been promised: with one core, a stop string and a prompt of 100 tokens."""
    sampling = SamplingParams(max_tokens=1000, stop="never", output_kind=RequestOutputKind.DELTA)
    num_begun = 0

    async def read() -> None:
        nonlocal num_begun
        async with scripted.engine.generate(GenerateRequest("a" * 100, sampling)) as stream:
            async for _ in stream:
                num_begun += 1

    async with open_scripted_engine(Script(pace_s=1000.0)) as scripted, trio.open_nursery() as nursery:
        nursery.start_soon(read)  # Whatever the first request makes that stays.
        await wait_all_tasks_blocked()
        tracemalloc.start()
        try:
            for _ in range(NUM_STREAMS):
                nursery.start_soon(read)
            await wait_all_tasks_blocked()
            while num_begun <= NUM_STREAMS:  # In several slices of the output handler, and steps of the core.
                mock_clock.jump(1000.0)
                await wait_all_tasks_blocked()
            gc.collect()
            num_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert num_bytes < MAX_BYTES_PER_STREAM * NUM_STREAMS, num_bytes / NUM_STREAMS
        nursery.cancel_scope.cancel()
