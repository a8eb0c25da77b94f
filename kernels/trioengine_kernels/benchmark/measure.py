# pyright: basic
"""Checks and times the cases of a suite, one after the other."""

from collections.abc import Iterator, Sequence
from functools import partial

import attrs
import torch

from trioengine_kernels.benchmark.cases import Case, Suite
from trioengine_kernels.benchmark.rates import Ceilings, OpRate
from trioengine_kernels.benchmark.timers import Timer

COPY_BYTES = 1 << 30
MATRIX_SIZE = 8192


def measure_ceilings(device: str, dtype: torch.dtype, timer: Timer) -> Ceilings:
    """What "cuda" or "cpu" gives: a large copy, and a large product of random numbers (of zeros it would be faster)."""
    pairs = [[torch.ones(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)] for _ in range(2)]
    copy_s = timer.seconds([partial(target.copy_, source) for target, source in pairs], is_recordable=True)
    del pairs
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device).to(dtype) for _ in range(2))
    matrix_s = timer.seconds([partial(torch.mm, a, b)], is_recordable=True)
    return Ceilings(
        copy_bytes_per_s=2 * COPY_BYTES / copy_s, flops_per_s={name_of(dtype): 2 * MATRIX_SIZE**3 / matrix_s}
    )


def measure(suite: Suite, timer: Timer, ops: Sequence[str] = ()) -> Iterator[OpRate]:
    """The rates of these operations, of all where none is named. One that fails is reported as such."""
    for case in suite.cases(ops):
        rate = OpRate(op=case.op, shape=case.shape, dtype=name_of(case.dtype), config=case.config)
        try:
            yield _measured(case, rate, timer)
        # A border: what one operation does wrong must not cost the figures of the others.
        except Exception as error:
            yield attrs.evolve(rate, failure=f"{type(error).__name__}: {error}"[:500])


def _measured(case: Case, rate: OpRate, timer: Timer) -> OpRate:
    problem = case.build()
    error = problem.error()
    rate = attrs.evolve(rate, error=error, num_bytes=problem.num_bytes, num_flops=problem.num_flops)
    if error > case.tolerance:
        return attrs.evolve(rate, failure=f"the error is above {case.tolerance:g}")
    return attrs.evolve(rate, seconds=timer.seconds(problem.calls, is_recordable=case.is_recordable))


def name_of(dtype: torch.dtype) -> str:
    """Like "bfloat16"."""
    return str(dtype).removeprefix("torch.")
