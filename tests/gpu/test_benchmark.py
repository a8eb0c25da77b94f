"""The benchmark on a card: every operation is right, is recorded in a graph, and takes time."""

import attrs
import pytest
import torch
from trioengine_kernels.benchmark import measure
from trioengine_kernels.benchmark.cases import OPS, ModelSizes
from trioengine_kernels.benchmark.machine import open_suite, open_timer

SIZES = ModelSizes(
    name="small",
    hidden_size=256,
    intermediate_size=128,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
    has_tied_embeddings=True,
)
MIXTURE = attrs.evolve(SIZES, name="mixture", num_experts=8, num_experts_per_token=2)


@pytest.mark.parametrize("op", OPS)
def test_operations_are_measured(op: str) -> None:
    suite = attrs.evolve(
        open_suite("cuda"),
        models=[MIXTURE if op == "experts" else SIZES],
        cached_bytes=1 << 20,
        batch_sizes=[1, 9],
        prompt_tokens=70,
        context_tokens=100,
        long_contexts=[(2, 3000)],
    )
    rates = list(measure.measure(suite, open_timer("cuda"), [op]))
    assert rates
    assert {(rate.shape, rate.config): rate.failure for rate in rates if rate.failure} == {}
    assert all(rate.seconds is not None and rate.seconds > 0 for rate in rates)


def test_the_card_s_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 24)
    monkeypatch.setattr(measure, "MATRIX_SIZE", 1024)
    ceilings = measure.measure_ceilings("cuda", torch.bfloat16, open_timer("cuda"))
    assert ceilings.copy_bytes_per_s > 1e9
    assert ceilings.flops_per_s["bfloat16"] > 1e12
