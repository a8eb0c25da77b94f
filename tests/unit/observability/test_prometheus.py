"""What `/metrics` says: equal to a naive count of what was recorded, in both formats, and for other registries."""

import itertools
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from trioengine.config import EngineConfig
from trioengine.observability import prometheus
from trioengine.observability.prometheus import (
    LATENCY_BOUNDS,
    MAX_ADAPTERS,
    MAX_KEPT_VALUES,
    OTHER_ADAPTERS,
    TOKEN_BOUNDS,
    Histogram,
    PrometheusStatLogger,
)
from trioengine.observability.stats import FinishedRequestStats, IterationStats
from trioengine.types.messages import SchedulerStats

Samples: TypeAlias = Mapping[tuple[str, frozenset[tuple[str, str]]], float]

FINISHED = FinishedRequestStats(
    request_id="a",
    finish_reason="stop",
    num_prompt_tokens=100,
    num_cached_tokens=64,
    num_generated_tokens=21,
    num_preemptions=0,
    n=1,
    max_tokens=32,
    e2e_latency_s=3.0,
    queue_s=0.25,
    time_to_first_token_s=0.75,
    decode_s=2.0,
)

SCHEDULER = SchedulerStats(3, 2, 0.5, 7, 1, 10, 8, 6, 4)

few_examples = settings(max_examples=25)
"""A page has some 600 lines, and is parsed in each example."""

seconds = st.floats(0, 10_000, allow_nan=False)
counts = st.integers(0, 100_000)
optional_seconds = st.none() | seconds
finished = st.builds(
    FinishedRequestStats,
    request_id=st.just("a"),
    finish_reason=st.sampled_from(prometheus.FINISH_REASONS),
    num_prompt_tokens=counts,
    num_cached_tokens=st.just(0),
    num_generated_tokens=counts,
    num_preemptions=counts,
    n=st.integers(1, 30),
    max_tokens=st.none() | counts,
    e2e_latency_s=seconds,
    queue_s=optional_seconds,
    time_to_first_token_s=optional_seconds,
    decode_s=optional_seconds,
    lora=st.none() | st.sampled_from(["one", 'two "quoted"\nlines\\']),
)
iterations = st.lists(
    st.builds(
        IterationStats,
        engine=st.integers(0, 1),
        scheduler=st.none()
        | st.builds(SchedulerStats, counts, counts, st.floats(0, 1), counts, counts, counts, counts, counts, counts),
        num_prompt_tokens=counts,
        num_cached_tokens=counts,
        num_generated_tokens=counts,
        num_preemptions=counts,
        times_to_first_token_s=st.lists(seconds, max_size=5),
        inter_token_latencies_s=st.lists(st.sampled_from(prometheus.INTER_TOKEN_BOUNDS) | seconds, max_size=40),
        finished=st.lists(finished, max_size=5),
    ),
    max_size=8,
)


def make_logger(num_cores: int = 2, model_name: str = "m", api_server: int | None = None) -> PrometheusStatLogger:
    return PrometheusStatLogger(EngineConfig(), num_cores=num_cores, model_name=model_name, api_server=api_server)


def samples_of(logger: PrometheusStatLogger, accept: str | None = None) -> Samples:
    """The page, as prometheus-client's parser reads it."""
    parse = parse_openmetrics if accept is not None else parse_text
    families = list(parse(logger.render(accept).body.decode()))
    return {(sample.name, frozenset(sample.labels.items())): sample.value for f in families for sample in f.samples}


def value(samples: Samples, name: str, engine: int = 0, **labels: str) -> float:
    own = {"model_name": "m", "engine": str(engine)}
    return samples["trioengine:" + name, frozenset((own | labels).items())]


@few_examples
@given(iterations)
def test_counters_are_the_sums_of_what_was_recorded(recorded: Sequence[IterationStats]) -> None:
    logger = make_logger()
    for stats in recorded:
        logger.record(stats)
    samples = samples_of(logger)
    for engine in (0, 1):
        own = [stats for stats in recorded if stats.engine == engine]
        ended = [request for stats in own for request in stats.finished]
        assert value(samples, "prompt_tokens_total", engine) == sum(stats.num_prompt_tokens for stats in own)
        assert value(samples, "prompt_tokens_cached_total", engine) == sum(stats.num_cached_tokens for stats in own)
        assert value(samples, "generation_tokens_total", engine) == sum(stats.num_generated_tokens for stats in own)
        assert value(samples, "num_preemptions_total", engine) == sum(stats.num_preemptions for stats in own)
        for reason in prometheus.FINISH_REASONS:
            counted = value(samples, "request_success_total", engine, finished_reason=reason)
            assert counted == sum(request.finish_reason == reason for request in ended)
        for lora in {request.lora for request in ended if request.lora is not None}:
            counted = value(samples, "lora_requests_total", engine, lora_name=lora)
            assert counted == sum(request.lora == lora for request in ended)


def prefill_s(request: FinishedRequestStats) -> float | None:
    if request.queue_s is None or request.time_to_first_token_s is None:
        return None
    return max(0.0, request.time_to_first_token_s - request.queue_s)


HISTOGRAMS: Mapping[str, tuple[Sequence[float], Callable[[IterationStats], Sequence[float | None]]]] = {
    "inter_token_latency_seconds": (prometheus.INTER_TOKEN_BOUNDS, lambda stats: stats.inter_token_latencies_s),
    "time_to_first_token_seconds": (prometheus.FIRST_TOKEN_BOUNDS, lambda stats: stats.times_to_first_token_s),
    "iteration_tokens_total": (
        prometheus.ITERATION_BOUNDS,
        lambda stats: [n] if (n := stats.num_prompt_tokens + stats.num_generated_tokens) else [],
    ),
    "e2e_request_latency_seconds": (LATENCY_BOUNDS, lambda stats: [r.e2e_latency_s for r in stats.finished]),
    "request_queue_time_seconds": (LATENCY_BOUNDS, lambda stats: [r.queue_s for r in stats.finished]),
    "request_prefill_time_seconds": (LATENCY_BOUNDS, lambda stats: [prefill_s(r) for r in stats.finished]),
    "request_decode_time_seconds": (LATENCY_BOUNDS, lambda stats: [r.decode_s for r in stats.finished]),
    "request_params_n": (prometheus.N_BOUNDS, lambda stats: [r.n for r in stats.finished]),
    "request_params_max_tokens": (TOKEN_BOUNDS, lambda stats: [r.max_tokens for r in stats.finished]),
    "request_prompt_tokens": (TOKEN_BOUNDS, lambda stats: [r.num_prompt_tokens for r in stats.finished]),
}


@few_examples
@given(iterations)
def test_histograms_equal_a_naive_count(recorded: Sequence[IterationStats]) -> None:
    """Each bucket has the values that are at most its bound; values that are None count nowhere."""
    logger = make_logger()
    for stats in recorded:
        logger.record(stats)
    samples = samples_of(logger)
    for engine, (name, (bounds, values_of)) in itertools.product((0, 1), HISTOGRAMS.items()):
        values = [v for stats in recorded if stats.engine == engine for v in values_of(stats) if v is not None]
        for bound in bounds:
            assert value(samples, f"{name}_bucket", engine, le=repr(bound)) == sum(v <= bound for v in values)
        assert value(samples, f"{name}_bucket", engine, le="+Inf") == len(values)
        assert value(samples, f"{name}_count", engine) == len(values)
        assert value(samples, f"{name}_sum", engine) == pytest.approx(math.fsum(values))


@few_examples
@given(st.lists(st.lists(st.floats(0, 10), max_size=2 * MAX_KEPT_VALUES // 10), max_size=15), st.booleans())
def test_a_histogram_keeps_no_more_than_its_limit(batches: Sequence[Sequence[float]], is_one_by_one: bool) -> None:
    histogram = Histogram([1.0, 5.0])
    for batch in batches:
        if is_one_by_one:
            for number in batch:
                histogram.observe(number)
        else:
            histogram.observe_all(batch)
        assert histogram.num_kept < MAX_KEPT_VALUES
    values = [number for batch in batches for number in batch]
    assert list(histogram.values()) == [
        sum(number <= 1 for number in values),
        sum(number <= 5 for number in values),
        len(values),
        pytest.approx(math.fsum(values)),
        len(values),
    ]


@settings(max_examples=8)  # Each reads four pages.
@given(iterations)
def test_both_formats_and_other_registries_say_the_same(recorded: Sequence[IterationStats]) -> None:
    """The page is checked against prometheus-client's own writer, over a registry that the logger is put into."""
    logger = make_logger()
    for stats in recorded:
        logger.record(stats)
    registry = CollectorRegistry()
    registry.register(logger)
    written = list(parse_text(generate_latest(registry).decode()))
    ours = list(parse_text(logger.render().body.decode()))
    assert ours == written
    assert samples_of(logger, "application/openmetrics-text") == samples_of(logger)


def test_the_core_s_own_counts_are_said_as_they_are() -> None:
    """`SchedulerStats` counts since the core's start, so the newest is the count; it is not added up."""
    logger = make_logger(num_cores=1)
    assert "trioengine:num_requests_running{" not in logger.render().body.decode()
    for num_queries in (10, 30):
        logger.record(IterationStats(0, SchedulerStats(3, 2, 0.5, 7, 1, num_queries, 8, 6, 4)))
    samples = samples_of(logger)
    assert value(samples, "num_requests_running") == 3
    assert value(samples, "num_requests_waiting") == 2
    assert value(samples, "kv_cache_usage_perc") == 0.5
    assert value(samples, "engine_steps_total") == 7
    assert value(samples, "prefix_cache_queries_total") == 30
    assert value(samples, "prefix_cache_hits_total") == 8
    assert value(samples, "spec_decode_num_draft_tokens_total") == 6
    assert value(samples, "spec_decode_num_accepted_tokens_total") == 4


def test_times_of_a_request_are_told_apart() -> None:
    logger = make_logger(num_cores=1)
    logger.record(IterationStats(0, finished=[FINISHED, attrs.evolve(FINISHED, queue_s=None, decode_s=None)]))
    samples = samples_of(logger)
    assert value(samples, "request_prefill_time_seconds_sum") == 0.5
    assert value(samples, "request_inference_time_seconds_sum") == 2.75
    assert value(samples, "request_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert value(samples, "request_time_per_output_token_seconds_count") == 1
    assert value(samples, "request_prefill_kv_computed_tokens_sum") == 72


def test_a_core_is_known_from_the_start_and_another_when_it_speaks() -> None:
    logger = PrometheusStatLogger(EngineConfig(data_parallel_rank=3), num_cores=1, model_name="m")
    assert value(samples_of(logger), "prompt_tokens_total", engine=3) == 0
    logger.record(IterationStats(5, num_prompt_tokens=2))
    assert value(samples_of(logger), "prompt_tokens_total", engine=5) == 2


def test_names_of_models_are_escaped_and_processes_told_apart() -> None:
    logger = make_logger(num_cores=1, model_name='a "model"\n\\', api_server=1)
    labels = {"model_name": 'a "model"\n\\', "engine": "0", "api_server": "1"}
    assert samples_of(logger)["trioengine:prompt_tokens_total", frozenset(labels.items())] == 0


def test_what_is_no_text_breaks_no_page() -> None:
    logger = make_logger(num_cores=1, model_name="\ud800")
    assert (
        samples_of(logger)["trioengine:prompt_tokens_total", frozenset({"model_name": "?", "engine": "0"}.items())] == 0
    )


def test_the_page_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_logger().render()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.metrics_core", None)
    assert make_logger().render() == expected


def test_names_of_adapters_are_bounded() -> None:
    """Whoever may load adapters cannot fill the memory with their names."""
    logger = make_logger(num_cores=1)
    requests = [attrs.evolve(FINISHED, lora=str(number)) for number in range(MAX_ADAPTERS + 10)]
    logger.record(IterationStats(0, finished=requests))
    samples = samples_of(logger)
    assert value(samples, "lora_requests_total", lora_name=OTHER_ADAPTERS) == 10
    assert sum(name == "trioengine:lora_requests_total" for name, _ in samples) == MAX_ADAPTERS + 1


def test_two_loggers_of_one_process_are_independent() -> None:
    first, second = make_logger(num_cores=1), make_logger(num_cores=1)
    first.record(IterationStats(0, num_generated_tokens=5))
    assert value(samples_of(first), "generation_tokens_total") == 5
    assert value(samples_of(second), "generation_tokens_total") == 0
    assert b"trioengine" not in generate_latest(REGISTRY)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, prometheus.TEXT_CONTENT_TYPE),
        ("*/*", prometheus.TEXT_CONTENT_TYPE),
        ("text/plain;version=0.0.4", prometheus.TEXT_CONTENT_TYPE),
        (
            "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
            prometheus.OPENMETRICS_CONTENT_TYPE,
        ),
    ],
)
def test_the_scraper_chooses_the_format(accept: str | None, content_type: str) -> None:
    page = make_logger().render(accept)
    assert page.content_type == content_type
    assert page.body.endswith(b"# EOF\n") is ("openmetrics" in content_type)


def processes(folder: Path, *numbers: int) -> Sequence[PrometheusStatLogger]:
    return [
        PrometheusStatLogger(EngineConfig(), num_cores=1, model_name="m", api_server=number, metrics_folder=folder)
        for number in numbers
    ]


@pytest.mark.parametrize("accept", [None, "application/openmetrics-text"])
def test_every_api_server_s_page_has_the_counts_of_all(tmp_path: Path, accept: str | None) -> None:
    """A scraper reaches any of the processes. Requests are counted by each, cores are the same to all.

    What one page has shown, the next has too: a counter that falls is taken for one that began anew.
    """
    first, second, third = loggers = processes(tmp_path, 0, 1, 10)
    for number, logger in enumerate(loggers, start=1):
        scheduler = attrs.evolve(SCHEDULER, running=number)
        logger.record(IterationStats(0, scheduler, num_generated_tokens=number, inter_token_latencies_s=[0.5] * number))
        logger.log()
    second.record(IterationStats(0, num_generated_tokens=100))
    for page, running, tokens in ((first, 1, [1, 2, 3]), (second, 2, [1, 102, 3]), (third, 3, [1, 102, 3])):
        samples = samples_of(page, accept)
        counted = [value(samples, "generation_tokens_total", api_server=number) for number in ("0", "1", "10")]
        assert counted == tokens
        assert value(samples, "inter_token_latency_seconds_count", api_server="10") == 3
        assert value(samples, "num_requests_running") == running
        assert sum(name == "trioengine:num_requests_running" for name, _ in samples) == 1


def test_other_api_servers_pages_may_be_missing_or_broken(tmp_path: Path) -> None:
    """The page then has what is there; a folder that is gone, as the server ends, harms nobody."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    first, second = processes(folder, 0, 1)
    assert b'api_server="1"' not in first.render().body
    second.log()
    assert b'api_server="1"' in first.render().body
    for broken in (b"{", b"[]", b'{"generation_tokens": 1}', b"\xff"):
        (folder / "metrics-1.json").write_bytes(broken)
        assert b'api_server="1"' not in first.render().body
    (folder / "metrics-note.json").write_text("{}")
    assert samples_of(first) == samples_of(processes(tmp_path, 0)[0])
    shutil.rmtree(folder)
    first.log()
    assert samples_of(first) == samples_of(processes(tmp_path, 0)[0])
