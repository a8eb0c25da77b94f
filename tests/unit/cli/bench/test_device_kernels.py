"""The report of a card's kernels, and what is said where there is none."""

import json

import pytest
import torch
from trioengine_kernels.benchmark import machine, measure
from trioengine_kernels.benchmark.cases import Suite
from trioengine_kernels.benchmark.rates import Ceilings, OpRate, RunFacts
from trioengine_kernels.kernel_set import reference_kernels

from trioengine.cli import main as cli
from trioengine.cli.bench import device_kernels
from trioengine.cli.bench.device_kernels import DeviceKernelsBench, DeviceKernelsReport
from trioengine.errors import BenchError
from trioengine.testing.random_folder import TINY_SIZES

CEILINGS = Ceilings(copy_bytes_per_s=4e12, flops_per_s={"bfloat16": 8e14})
RATES = [
    OpRate(op="add_rms_norm", shape="m 64", dtype="bfloat16", config="triton", num_bytes=4_000_000, seconds=2e-6),
    OpRate(op="linear", shape="m 1", dtype="bfloat16", config="torch", failure="the error is above 0.01"),
]
REPORT = DeviceKernelsReport(
    RunFacts("A card", "abc1234", "2.13.0", "3.7.1"), CEILINGS, [rate.row(CEILINGS) for rate in RATES]
)


def test_programs_get_one_object() -> None:
    report = json.loads(REPORT.to_json())
    assert (report["card"], report["commit"], report["copy_gb_per_s"]) == ("A card", "abc1234", 4000.0)
    assert report["tflop_per_s"] == {"bfloat16": 800.0}
    assert [(row["op"], row["us"], row["fraction"]) for row in report["ops"]] == [
        ("add_rms_norm", 2.0, 0.5),
        ("linear", None, None),
    ]


def test_people_get_a_line_for_each_operation() -> None:
    lines = REPORT.to_table().splitlines()
    assert "4000 GB/s copied, 800 TFLOP/s bfloat16" in lines[0]
    assert lines[2].split() == ["add_rms_norm", "m", "64", "triton", "2.0", "2000.0", "50%", "mem"]
    assert lines[3].endswith("the error is above 0.01")


async def test_an_operation_that_is_not_there_is_named() -> None:
    with pytest.raises(BenchError, match="no operation 'softmax'; there are paged_attention"):
        await DeviceKernelsBench(ops=["softmax"]).run()


async def test_without_a_card_there_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BenchError, match="no NVIDIA card"):
        await DeviceKernelsBench().run()


async def test_all_that_it_does_is_tried_out_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = Suite(
        kernels=reference_kernels(),
        reference=reference_kernels(),
        device=torch.device("cpu"),
        cached_bytes=0,
        models=[TINY_SIZES],
        batch_sizes=[2],
        prompt_tokens=5,
    )
    monkeypatch.setattr(device_kernels, "_DEVICE", "cpu")
    monkeypatch.setattr(machine, "open_suite", lambda _: suite)
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "MATRIX_SIZE", 16)
    report = await DeviceKernelsBench(ops=["add_rms_norm"]).run()
    assert (report.facts.card, report.facts.torch) == ("cpu", torch.__version__)
    assert [(row["op"], row["shape"], row["failure"]) for row in report.rows] == [
        ("add_rms_norm", "tiny 2", None),
        ("add_rms_norm", "tiny 5", None),
    ]
    assert report.ceilings.flops_per_s.keys() == {"bfloat16"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--op", "linear"], "--op is for --device cuda"),
        (["--device", "cuda", "--cpu-threads", "2"], "--cpu-threads is for --device cpu"),
    ],
)
def test_options_of_the_other_device_are_refused(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "kernels", *options]) == 1
    assert complaint in capsys.readouterr().err
