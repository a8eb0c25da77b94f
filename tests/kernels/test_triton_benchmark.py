"""The benchmark of the card's kernels: what it would do with a card. How fast anything is, is not asserted."""

import io
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import attrs
import pytest
import torch
from trioengine_kernels.benchmark import machine, measure, timers
from trioengine_kernels.benchmark.cases import OPS, ModelSizes, PoisonedMemory, Suite, relative_error
from trioengine_kernels.benchmark.rates import FIGURES, Ceilings, CsvTable, OpRate, RunFacts
from trioengine_kernels.kernel_set import reference_kernels, triton_kernels

# What the interpreter's numpy says of minus infinity and of what masks cut off.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DENSE = ModelSizes(
    name="dense",
    hidden_size=64,
    intermediate_size=32,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=150,
    has_tied_embeddings=True,
)
MIXTURE = attrs.evolve(DENSE, name="mixture", num_experts=4, num_experts_per_token=2)
CEILINGS = Ceilings(copy_bytes_per_s=1e12, flops_per_s={"bfloat16": 1e14})
FACTS = RunFacts(card="A card", commit="abc1234", torch="2.13.0", triton="3.7.1")


class FakeTimer:
    """Runs every call once; each takes a millisecond."""

    def __init__(self) -> None:
        self.num_calls: list[int] = []

    def seconds(self, calls: Sequence[Callable[[], object]], *, is_recordable: bool) -> float:
        self.num_calls.append(len(calls))
        for call in calls:
            call()
        return 1e-3


def small_suite(**changes: object) -> Suite:
    torch.manual_seed(0)
    suite = Suite(
        kernels=reference_kernels(),
        reference=reference_kernels(),
        device=torch.device("cpu"),
        cached_bytes=1,
        dtype=torch.float16,
        models=[DENSE, MIXTURE],
        batch_sizes=[1, 3],
        prompt_tokens=18,
        context_tokens=20,
        long_contexts=[(2, 35)],
        fp8_kv_batch_size=2,
        lora_rank=16,
        num_loras=2,
    )
    return attrs.evolve(suite, **changes)


# Rates


def test_a_rate_is_compared_with_what_the_card_needs_at_least() -> None:
    rate = OpRate(op="x", shape="s", dtype="bfloat16", config="c", error=0.00123456, seconds=1e-3)
    moved = attrs.evolve(rate, num_bytes=500_000_000, num_flops=10_000_000_000).row(CEILINGS)
    assert moved == {
        "op": "x",
        "shape": "s",
        "dtype": "bfloat16",
        "config": "c",
        "us": 1000.0,
        "gb_per_s": 500.0,
        "tflop_per_s": 10.0,
        "fraction": 0.5,
        "roofline": "memory",
        "error": 0.00123,
        "failure": None,
    }
    computed = attrs.evolve(rate, num_bytes=1000, num_flops=80_000_000_000).row(CEILINGS)
    assert (computed["fraction"], computed["roofline"]) == (0.8, "matrix")


def test_what_failed_has_no_speed() -> None:
    row = OpRate(op="x", shape="s", dtype="bfloat16", config="c", error=0.5, failure="wrong").row(CEILINGS)
    assert row["failure"] == "wrong"
    assert row["us"] is row["gb_per_s"] is row["fraction"] is None


def test_ceilings_are_rates_too() -> None:
    rows = [rate.row(CEILINGS) for rate in CEILINGS.rates()]
    assert [row["op"] for row in rows] == ["copy", "matmul"]
    assert (rows[0]["gb_per_s"], rows[0]["fraction"]) == (1000.0, 1.0)
    assert (rows[1]["tflop_per_s"], rows[1]["fraction"]) == (100.0, 1.0)


def test_runs_share_a_table_with_one_header() -> None:
    file = io.StringIO()
    for us in (1.5, 2.5):
        CsvTable(file, ["op", "us"], FACTS).add({"op": "x", "us": us})
    assert file.getvalue().splitlines() == [
        "op,us,card,commit,torch,triton",
        "x,1.5,A card,abc1234,2.13.0,3.7.1",
        "x,2.5,A card,abc1234,2.13.0,3.7.1",
    ]


# Checks


def test_errors_are_relative_and_no_number_never_passes() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, float("nan")]), expected) == float("inf")
    assert relative_error(torch.tensor([3.0]), expected) == float("inf")
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0.5


def test_new_tensors_are_poisoned() -> None:
    with PoisonedMemory():
        made = torch.empty(2), torch.empty_like(torch.ones(2)), torch.ones(2).new_empty(2)
        numbers = torch.empty(2, dtype=torch.int32)
    assert all(tensor.isnan().all() for tensor in made)
    assert numbers.shape == (2,)


def test_a_wrong_operation_has_no_speed_and_costs_the_others_nothing() -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("no such shape")

    kernels = attrs.evolve(
        reference_kernels(), silu_and_mul=lambda gate_up: torch.empty(len(gate_up), DENSE.intermediate_size), lora=fails
    )
    timer = FakeTimer()
    ops = ["silu_and_mul", "lora", "add_rms_norm"]
    rates = list(measure.measure(small_suite(kernels=kernels, models=[DENSE]), timer, ops))
    of = {op: [rate for rate in rates if rate.op == op] for op in ops}
    assert all(rate.seconds is None and rate.error == float("inf") for rate in of["silu_and_mul"])
    assert all(rate.failure == "ValueError: no such shape" for rate in of["lora"])
    assert all(rate.seconds == 1e-3 and rate.failure is None for rate in of["add_rms_norm"])
    assert len(timer.num_calls) == len(of["add_rms_norm"]) == 3


# Cases


@pytest.mark.parametrize("op", OPS)
def test_references_measure_as_right(op: str) -> None:
    suite = small_suite(models=[MIXTURE if op == "experts" else DENSE])
    rates = list(measure.measure(suite, FakeTimer(), [op]))
    assert rates
    assert [rate.failure for rate in rates] == [None] * len(rates)
    assert all(rate.op == op and rate.num_bytes > 0 and rate.seconds == 1e-3 for rate in rates)


@pytest.mark.parametrize("op", OPS)
def test_the_kernels_measure_as_right(op: str) -> None:
    """Interpreted; also that no case of the table asks for what a kernel does not take."""
    models = [MIXTURE if op == "experts" else DENSE]
    suite = small_suite(kernels=triton_kernels(), models=models, batch_sizes=[3], other_attentions=())
    rates = list(measure.measure(suite, FakeTimer(), [op]))
    assert rates
    assert [rate.failure for rate in rates] == [None] * len(rates)


def test_bytes_and_operations_are_those_that_are_needed() -> None:
    cases = {(case.op, case.shape, case.config): case.build() for case in small_suite(models=[DENSE]).cases()}
    decode = cases["paged_attention", "dense 3x20", "triton"]
    assert decode.num_bytes == 3 * 20 * 2 * 16 * 2 * 2 + 2 * 3 * 6 * 16 * 2
    assert decode.num_flops == 4 * 3 * 20 * 6 * 16
    prefill = cases["paged_attention", "dense 1x18 prefill 18", "triton"]
    assert prefill.num_flops == 4 * (18 * 19 // 2) * 6 * 16
    int4 = cases["quantized_linear", "dense gate_up 3", "triton, int4"]
    assert int4.num_bytes == 64 * 64 // 2 + 64 * 2 * (2 + 2) + 3 * (64 + 64) * 2
    assert int4.num_flops == 2 * 3 * 64 * 64
    assert cases["add_rms_norm", "dense 3", "triton"].num_bytes == 4 * 3 * 64 * 2


def test_buffers_do_not_fit_into_the_cache() -> None:
    suite = small_suite(cached_bytes=1000)
    assert len(suite.buffers(list, 300)) == 4
    assert len(suite.buffers(list, 5000)) == 1
    assert len(suite.buffers(list, 1)) == 256


def test_each_model_has_its_operations() -> None:
    suite = small_suite()
    ops = {model.name: {case.op for case in attrs.evolve(suite, models=[model]).cases()} for model in suite.models}
    assert ops["dense"] == OPS.keys() - {"experts"}
    assert ops["mixture"] == OPS.keys() - {"linear", "quantized_linear", "lora", "silu_and_mul"}
    assert {case.op for case in suite.cases(["sample"])} == {"sample"}


# Timing


def test_the_card_s_timer_replays_a_graph_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for `torch.cuda` whose every replay takes 100 ms."""
    log: list[str] = []

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    class Context:
        def __init__(self, _: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda _: 100.0)
    stream = SimpleNamespace(wait_stream=lambda _: None)
    fake = SimpleNamespace(
        CUDAGraph=Graph,
        Event=lambda enable_timing: event,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=Context,
        graph=Context,
        synchronize=lambda: log.append("synchronize"),
    )
    assert all(hasattr(torch.cuda, name) for name in vars(fake))
    monkeypatch.setattr(timers, "torch", SimpleNamespace(cuda=fake))
    calls = [lambda: log.append("first"), lambda: log.append("second")]

    # A tenth of a second for each replay: only so many are worth it.
    assert timers.CudaTimer().seconds(calls, is_recordable=True) == pytest.approx(0.1 / timers.MIN_CALLS)
    assert log.count("replay") == 1 + 1 + timers.MIN_REPLAYS
    assert log[-1] == "synchronize"
    # To warm up, to warm up the other stream, and for the record.
    assert log.count("first") == log.count("second") == 1 + 2 * (timers.MIN_CALLS // 2)

    log.clear()
    assert timers.CudaTimer().seconds(calls, is_recordable=False) == pytest.approx(0.1 / 2)
    assert "replay" not in log
    assert log.count("first") == 1 + 1 + 1 + timers.MIN_REPLAYS


def test_ceilings_are_those_of_a_copy_and_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "COPY_BYTES", 1000)
    monkeypatch.setattr(measure, "MATRIX_SIZE", 10)
    ceilings = measure.measure_ceilings("cpu", torch.float16, FakeTimer())
    assert ceilings == Ceilings(copy_bytes_per_s=2e6, flops_per_s={"float16": 2e6})


def test_without_a_card_there_is_nothing_to_time() -> None:
    if torch.cuda.is_available():
        pytest.skip("There is a card.")
    with pytest.raises(machine.NoCardError):
        machine.open_timer("cuda")
    seconds = machine.open_timer("cpu").seconds([lambda: None], is_recordable=True)
    assert seconds >= 0


def test_figures_have_the_columns_that_are_promised() -> None:
    assert tuple(OpRate(op="x", shape="s", dtype="d", config="c").row(CEILINGS)) == tuple(FIGURES)
