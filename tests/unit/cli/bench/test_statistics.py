"""The numbers of a report, from measurements known in advance."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.cli.bench.report import BenchReport, StreamTimes, report_streams
from trioengine.cli.bench.statistics import covered_s, gaps, percentile, percentile_ms


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile(values, 100) == 100
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7
    assert percentile([], 50) is None
    assert percentile_ms([0.25], 50) == 250


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_bounds_its_share_of_the_values(values: list[float], percent: float) -> None:
    bound = percentile(values, percent)
    assert bound in values
    assert sum(value <= bound for value in values) * 100 >= percent * len(values) * (1 - 1e-9)


def test_time_that_two_intervals_share_counts_once() -> None:
    assert covered_s([(5, 6), (0, 2), (1, 3), (1.5, 2)]) == 4
    assert covered_s([]) == 0


def test_gaps() -> None:
    assert gaps([1.0, 1.5, 4.0]) == [0.5, 2.5]
    assert gaps([1.0]) == gaps([]) == []


def test_streams_become_throughput_and_latencies() -> None:
    streams = [
        StreamTimes(sent_s=0.0, outputs_s=[1.0, 1.5], num_prompt_tokens=100, num_output_tokens=2),
        StreamTimes(sent_s=2.0, outputs_s=[2.5, 3.0], num_prompt_tokens=50, num_output_tokens=2),
    ]
    report = report_streams(streams, wall_s=4.0)
    assert report.output_tokens_per_s == 1.0
    assert report.prefill_tokens_per_s == 100.0
    assert (report.ttft_p50_ms, report.ttft_p99_ms) == (500.0, 1000.0)
    assert (report.itl_p50_ms, report.itl_p99_ms) == (500.0, 500.0)


def test_a_report_shows_the_figures_it_has_and_no_others() -> None:
    report = BenchReport(output_tokens_per_s=12.3456, abort_ms=2.0)
    assert json.loads(report.to_json()) == {"output_tokens_per_s": 12.346, "abort_ms": 2.0}
    assert len(report.to_table().splitlines()) == 2


@pytest.mark.parametrize(("outputs_per_token", "num_lines"), [(0.94, 2), (0.95, 1), (1.0, 1)])
def test_merged_tokens_make_the_figures_void(outputs_per_token: float, num_lines: int) -> None:
    assert len(BenchReport(outputs_per_token=outputs_per_token).to_table().splitlines()) == num_lines
