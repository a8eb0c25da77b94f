"""Every operation that is measured, in the shapes of real models, against its reference in float32."""

from collections.abc import Iterator

import attrs
import pytest
import torch
from trioengine_kernels.benchmark.cases import MODELS, Case
from trioengine_kernels.benchmark.machine import open_suite

SMALLEST = "smollm2-135m"


def cases() -> Iterator[Case]:
    """In bfloat16 those of all models; in float16 and float32, which have few instructions of their own, of one."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        models = [model for model in MODELS if dtype is torch.bfloat16 or model.name == SMALLEST]
        suite = attrs.evolve(
            open_suite("cuda", dtype),
            models=models,
            cached_bytes=0,
            batch_sizes=(1, 5, 64),
            prompt_tokens=515,
            context_tokens=700,
            long_contexts=((1, 9001),),
        )
        yield from (case for case in suite.cases() if case.config.startswith("triton"))


def name(case: Case) -> str:
    return f"{case.op}-{case.shape}-{case.config}-{case.dtype}".replace(" ", "_")


@pytest.mark.parametrize("case", list(cases()), ids=name)
def test_the_result_is_right(case: Case) -> None:
    torch.manual_seed(0)
    assert case.build().error() <= case.tolerance
