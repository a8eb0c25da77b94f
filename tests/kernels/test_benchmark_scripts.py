"""The programs in kernels/benchmarks, tried out on a CPU with models of a few thousand weights."""

import csv
import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import attrs
import pytest
import torch
from trioengine_kernels.benchmark import measure
from trioengine_kernels.benchmark.cases import Suite
from trioengine_kernels.benchmark.rates import Ceilings, RunFacts
from trioengine_kernels.kernel_set import reference_kernels

from trioengine.runtime.build import build_engine_core
from trioengine.testing.device_computer import device_computer
from trioengine.testing.fake_device import FakeDevice
from trioengine.testing.random_folder import TINY_SIZES, write_random_folder


def load_script(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "kernels" / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_script_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run, model = load_script("run"), load_script("model")


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "MATRIX_SIZE", 16)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def cpu_suite(device: str, dtype: torch.dtype) -> Suite:
    return Suite(
        kernels=reference_kernels(),
        reference=reference_kernels(),
        device=torch.device(device),
        cached_bytes=0,
        dtype=dtype,
        batch_sizes=[2],
        prompt_tokens=5,
    )


def test_operations_become_lines_of_csv(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "open_suite", cpu_suite)
    monkeypatch.setattr(run, "MODELS", [TINY_SIZES])
    path = tmp_path / "new" / "results.csv"
    arguments = ["--device", "cpu", "--dtype", "float16", "--op", "silu_and_mul", "--output", str(path)]
    assert run.main([*arguments, "--commit", "abc1234"]) == 0
    rows = rows_of(path)
    assert [row["op"] for row in rows] == ["copy", "matmul", "silu_and_mul", "silu_and_mul"]
    assert {row["commit"] for row in rows} == {"abc1234"}
    assert [row["shape"] for row in rows[2:]] == ["tiny 2", "tiny 5"]
    assert all(float(row["us"]) > 0 and row["card"] == "cpu" for row in rows)
    assert "op=silu_and_mul  shape=tiny 2" in capsys.readouterr().out
    assert run.main([*arguments, "--commit", "abc1235"]) == 0
    assert [row["commit"] for row in rows_of(path)] == ["abc1234"] * 4 + ["abc1235"] * 4


def test_a_failure_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong_suite(device: str, dtype: torch.dtype) -> Suite:
        kernels = attrs.evolve(reference_kernels(), silu_and_mul=lambda gate_up: gate_up[:, ::2])
        return attrs.evolve(cpu_suite(device, dtype), kernels=kernels)

    monkeypatch.setattr(run, "open_suite", wrong_suite)
    monkeypatch.setattr(run, "MODELS", [TINY_SIZES])
    path = tmp_path / "results.csv"
    assert run.main(["--device", "cpu", "--op", "silu_and_mul", "--output", str(path)]) == 1
    assert [row["us"] == "" for row in rows_of(path)] == [False, False, True, True]
    assert "2 failed" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_programs_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["--output", str(tmp_path / "results.csv")]
    assert run.main(output) == 2
    assert model.main(["--engine", "trioengine", "--model", "llama-3-8b", *output]) == 2
    assert capsys.readouterr().err.count("no NVIDIA card") == 2
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_named_after_card_and_commit() -> None:
    facts = RunFacts(card="NVIDIA H200", commit="abc1234-dirty", torch="2.13.0", triton="3.7.1")
    assert run.slug_of(facts) == "nvidia-h200-abc1234-dirty"


@pytest.mark.parametrize(
    "engine",
    ["trioengine", *(pytest.param(name, marks=pytest.mark.slow) for name in ("generate", "continuous"))],
)
def test_engines_decode_and_prefill(engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model, "MODELS", [TINY_SIZES])
    path = tmp_path / "results.csv"
    arguments = ["--engine", engine, "--model", "tiny", "--device", "cpu", "--dtype", "float32"]
    arguments += ["--batch", "1", "3", "--prompt-tokens", "5", "--output-tokens", "6", "--prefill-tokens", "20"]
    arguments += ["--prefill-prompts", "2", "--output", str(path), "--models", str(tmp_path / "models")]
    assert model.main(arguments) == 0
    rows = rows_of(path)
    assert [(row["phase"], row["batch"]) for row in rows] == [
        ("decode", "1"),
        ("decode", "3"),
        ("prefill", "1"),
        ("prefill", "2"),
    ]
    assert all(row["engine"] == engine and float(row["tokens_per_s"]) > 0 for row in rows)
    assert all(float(row["roofline_tokens_per_s"]) > 0 for row in rows)


def test_the_gap_is_that_of_a_batch_under_the_profiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a device that pretends to be a card, with a profile whose every step is followed by 30 µs of nothing."""

    class Profile:
        def __init__(self, activities: list[object]) -> None: ...

        def __enter__(self) -> "Profile":
            return self

        def __exit__(self, *_: object) -> None: ...

        def events(self) -> list[SimpleNamespace]:
            cpu, cuda = torch.profiler.DeviceType.CPU, torch.profiler.DeviceType.CUDA
            busy = [SimpleNamespace(start=100.0 * step, end=100.0 * step + 70) for step in range(40)]
            return [
                SimpleNamespace(device_type=cpu, time_range=SimpleNamespace(start=0.0, end=1e6)),
                *(SimpleNamespace(device_type=cuda, time_range=time_range) for time_range in busy),
            ]

    monkeypatch.setattr(model, "NUM_PROFILED_STEPS", 8)
    device = FakeDevice()
    build = partial(build_engine_core, computer=device_computer(device))
    monkeypatch.setattr("trioengine.runtime.build.build_engine_core", build)
    monkeypatch.setattr("torch.profiler.profile", Profile)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    write_random_folder(tmp_path / "model", TINY_SIZES, "float32")
    options = {"max_num_seqs": 4, "max_model_len": 96, "cudagraph_capture_sizes": [1, 2]}
    engine = model.TrioEngine(tmp_path / "model", "cuda", "float32", options)
    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    decode = engine.decode(prompts, 6)
    assert decode.gap_us == 30.0
    assert decode.tokens_per_s > 0
    assert engine.prefill_s(prompts) > 0
    assert device.num_replays >= model.NUM_PROFILED_STEPS


def test_settings_are_options_of_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model, "MODELS", [TINY_SIZES])
    path = tmp_path / "results.csv"
    arguments = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--batch", "1", "--prompt-tokens", "3"]
    arguments += ["--output-tokens", "4", "--prefill-tokens", "5", "--prefill-prompts", "1"]
    arguments += [
        "--models",
        str(tmp_path),
        "--output",
        str(path),
        "--set",
        "quantization=int4",
        "--set",
        "block_size=32",
    ]
    assert model.main(["--engine", "trioengine", *arguments]) == 0
    assert {row["options"] for row in rows_of(path)} == {"quantization=int4 block_size=32"}
    with pytest.raises(SystemExit):
        model.main(["--engine", "generate", *arguments])


def test_the_rate_of_decoding_is_that_of_all_sequences_together() -> None:
    # The second begins at 3 s, the first ends at 6 s: three tokens of the one and one of the other lie between.
    assert model.decode_rate([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [3.0, 5.5, 7.0]]) == pytest.approx(4 / 3)
    with pytest.raises(ValueError, match="never decoded together"):
        model.decode_rate([[1.0, 2.0], [2.0, 3.0]])


def test_the_gap_between_steps_is_the_median_of_the_long_ones() -> None:
    # Two kernels a step, half a µs apart, one of them beside a copy; between steps 40, 50 and 60 µs.
    steps = [(0.0, 10.0), (60.0, 70.0), (110.0, 120.0), (180.0, 190.0)]
    intervals = [interval for begin, end in steps for interval in ((begin, begin + 4), (begin + 4.5, end))]
    assert model.gap_between_steps_us([*intervals, (2.0, 8.0)], len(steps)) == 50.0
    assert model.gap_between_steps_us([(0.0, 1.0)], 1) is None


def test_the_least_time_counts_each_weight_once() -> None:
    ceilings = Ceilings(copy_bytes_per_s=1e9, flops_per_s={"float16": 1e30})
    layer = (2 * 4 + 2 * 2) * 16 * 64 + 3 * 64 * 96
    weights = 2 * layer + 300 * 64
    kv = 3 * 10 * 2 * 2 * 2 * 16
    assert model.decode_step_s(TINY_SIZES, 3, 10, ceilings, "float16") == pytest.approx(2 * (weights + kv) / 1e9)
    computed = Ceilings(copy_bytes_per_s=1e30, flops_per_s={"float16": 1e9})
    pairs = 2 * (20 * 21 // 2)
    num_flops = 2 * 2 * (2 * layer * 20 + 300 * 64) + 4 * pairs * 2 * 4 * 16
    assert model.prefill_step_s(TINY_SIZES, 2, 20, computed, "float16") == pytest.approx(num_flops / 1e9)
