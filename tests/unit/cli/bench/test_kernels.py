"""The kernels' report: bandwidth, and rates beside it."""

import json

import pytest
from trioengine_kernels.native.benchmark import Bandwidth, OpRate
from trioengine_kernels.native.library import NativeUnavailableError

from trioengine.cli.bench import kernels
from trioengine.cli.bench.kernels import KernelsBench, KernelsReport
from trioengine.errors import BenchError

REPORT = KernelsReport(
    "AVX2",
    2,
    Bandwidth(read_bytes_per_s=20e9, copy_bytes_per_s=8e9),
    (OpRate("linear int4", 1, 1e-3, 10_000_000, 40_000_000), OpRate("rms_norm", 256, 5e-6, 0, 0)),
)


def test_programs_get_one_object() -> None:
    report = json.loads(REPORT.to_json())
    assert (report["kernels"], report["num_threads"], report["read_gb_per_s"]) == ("AVX2", 2, 20.0)
    assert report["ops"][0] == {
        "name": "linear int4",
        "num_tokens": 1,
        "us": 1000.0,
        "gb_per_s": 10.0,
        "share_of_read": 0.5,
        "gflop_per_s": 40.0,
    }
    assert report["ops"][1]["gb_per_s"] is None


def test_people_get_a_line_for_each_operation() -> None:
    lines = REPORT.to_table().splitlines()
    assert len(lines) == 4
    assert "20.0 GB/s read" in lines[0]
    assert lines[2].split() == ["linear", "int4", "1", "1000.0", "10.0", "50%", "40.0"]
    assert lines[3].split() == ["rms_norm", "256", "5.0"]


async def test_without_kernels_there_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(cache_dir: object) -> None:
        raise NativeUnavailableError("There is no C compiler.")

    monkeypatch.setattr(kernels, "load_library", no_library)
    with pytest.raises(BenchError, match="no C compiler"):
        await KernelsBench().run()


async def test_threads_that_there_cannot_be_are_one_clear_error() -> None:
    with pytest.raises(BenchError, match="--cpu-threads cannot be 9999"):
        await KernelsBench(num_threads=9999).run()
