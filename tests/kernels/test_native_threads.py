"""Threads of the native backend beside another process that takes a processor."""

import os
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
from trioengine_kernels.native.library import ThreadPool
from trioengine_kernels.native.program import KVCache, ProgramBuilder, StepArrays
from trioengine_kernels.native.tiles import TileKind, pack_float

SIZE, NUM_LAYERS, BLOCK_SIZE = 1024, 40, 16


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_two_threads_are_not_slower_than_one_when_a_processor_is_taken(library):
    """A spinning barrier would wait, at each of a step's many operations, for the thread that cannot run: that made
    steps a hundred times longer. The bound is far from both, as this machine may be busy otherwise."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((SIZE, SIZE), dtype=np.float32) / np.float32(SIZE**0.5)
    matrix = pack_float(library, weights, TileKind.INT4)
    builder = ProgramBuilder(library, max_tokens=1, max_logit_rows=1, num_kv_heads=1, head_dim=32, vocab_size=SIZE)
    x = builder.embedding(matrix)
    for _ in range(NUM_LAYERS):
        x = builder.linear(x, matrix)
    program = builder.build(builder.select_rows(x))
    cache = KVCache(num_layers=1, num_blocks=1, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=32)
    zero = np.zeros(1, np.int32)
    arrays = StepArrays(
        token_ids=zero,
        positions=zero,
        slots=zero[None],
        query_start=np.array([0, 1], np.int32),
        seq_lens=np.ones(1, np.int32),
        block_table=np.zeros((1, 1, 1), np.int32),
        logit_rows=zero,
    )
    processors = sorted(os.sched_getaffinity(0))[:2]
    pools = [ThreadPool(library, number) for number in (1, 2)]
    program_text = f"import os\nos.sched_setaffinity(0, [{processors[1]}])\nprint(flush=True)\nwhile True: pass"
    seconds: list[list[float]] = [[], []]
    with subprocess.Popen([sys.executable, "-c", program_text], stdout=subprocess.PIPE) as hog:
        try:
            assert hog.stdout is not None
            hog.stdout.readline()
            for _ in range(60):
                for pool, taken in zip(pools, seconds, strict=True):
                    started_s = time.perf_counter()
                    for _ in range(10):
                        program.run(arrays, [cache], pool)
                    taken.append(time.perf_counter() - started_s)
        finally:
            hog.kill()
    for pool in pools:
        pool.close()
    one, two = map(statistics.median, seconds)
    assert two < 2 * one
