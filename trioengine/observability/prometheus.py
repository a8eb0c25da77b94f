"""Statistics as Prometheus reads them: counters, gauges and histograms of one engine client, written out on request.

Every `PrometheusStatLogger` is a registry of its own; none is global, so engines in one process never meet. Names are
vLLM's with another prefix (a table is in docs/observability.md). Taking statistics in is cheap, as it happens for each
message of a core: values for histograms are only kept, and sorted into buckets many at once. Writing out needs no
package. In a program that has a `prometheus_client` registry already, the logger is a collector for it.

Formats: Prometheus text 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats) and OpenMetrics 1.0.
"""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np

from trioengine.config.engine import EngineConfig
from trioengine.observability.shared_metrics import SharedMetrics
from trioengine.observability.stats import FinishedRequestStats, IterationStats
from trioengine.types.messages import SchedulerStats

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIX = "trioengine:"
TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_MEDIA_TYPE = "application/openmetrics-text"

FINISH_REASONS = ("stop", "length", "abort", "error")
MAX_ADAPTERS = 256
"""Adapters with a series of their own; all later ones share `OTHER_ADAPTERS`, so that no caller can fill the memory."""
OTHER_ADAPTERS = "other"

MAX_KEPT_VALUES = 1024
"""Values that a histogram keeps before it sorts them into its buckets."""

# Every bound of vLLM's stands here too, so that its dashboards' queries keep their meaning; more are below them.
INTER_TOKEN_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
LATENCY_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKEN_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
ITERATION_BOUNDS = (1.0, *(float(2**power) for power in range(3, 15)))
N_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)


class Kind(enum.StrEnum):
    """Of a metric, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@attrs.frozen(eq=False)
class Family:
    """One metric: its name without prefix and suffix, and what it says."""

    name: str
    kind: Kind
    help: str

    @property
    def is_of_core(self) -> bool:
        """Whether a core tells the same to each API-server process, so that none adds to another's."""
        return self in _GAUGES or self in _CORE_COUNTERS or self is _CACHE_CONFIG


_GAUGES: Mapping[Family, Callable[[SchedulerStats], float]] = {
    Family("num_requests_running", Kind.GAUGE, "Sequences that are computed."): lambda stats: stats.running,
    Family("num_requests_waiting", Kind.GAUGE, "Requests that wait in the core."): lambda stats: stats.waiting,
    Family("kv_cache_usage_perc", Kind.GAUGE, "Share of the KV cache in use, 0 to 1."): (
        lambda stats: stats.kv_cache_usage
    ),
}

_CORE_COUNTERS: Mapping[Family, Callable[[SchedulerStats], int]] = {
    Family("engine_steps", Kind.COUNTER, "Steps of the core."): lambda stats: stats.num_steps,
    Family("prefix_cache_queries", Kind.COUNTER, "Tokens looked up in the prefix cache."): (
        lambda stats: stats.num_prefix_cache_queries
    ),
    Family("prefix_cache_hits", Kind.COUNTER, "Tokens found in the prefix cache."): (
        lambda stats: stats.num_prefix_cache_hits
    ),
    Family("spec_decode_num_draft_tokens", Kind.COUNTER, "Drafts that were checked."): (
        lambda stats: stats.num_draft_tokens
    ),
    Family("spec_decode_num_accepted_tokens", Kind.COUNTER, "Drafts that were accepted."): (
        lambda stats: stats.num_accepted_tokens
    ),
}

_COUNTERS: Mapping[Family, Callable[[IterationStats], int]] = {
    Family("num_preemptions", Kind.COUNTER, "Times that requests lost their blocks."): (
        lambda stats: stats.num_preemptions
    ),
    Family("prompt_tokens", Kind.COUNTER, "Tokens of prompts whose first token came."): (
        lambda stats: stats.num_prompt_tokens
    ),
    Family("prompt_tokens_cached", Kind.COUNTER, "Of these, tokens found in the prefix cache."): (
        lambda stats: stats.num_cached_tokens
    ),
    Family("generation_tokens", Kind.COUNTER, "Generated tokens."): lambda stats: stats.num_generated_tokens,
}

_FIRST_TOKEN = Family("time_to_first_token_seconds", Kind.HISTOGRAM, "From arrival to the first token.")
_INTER_TOKEN = Family("inter_token_latency_seconds", Kind.HISTOGRAM, "From one token to the next.")
_ITERATION = Family(
    "iteration_tokens_total", Kind.HISTOGRAM, "Tokens, of prompts and answers, in one message of the core."
)
_ITERATION_HISTOGRAMS: Mapping[Family, Sequence[float]] = {
    _ITERATION: ITERATION_BOUNDS,
    _FIRST_TOKEN: FIRST_TOKEN_BOUNDS,
    _INTER_TOKEN: INTER_TOKEN_BOUNDS,
}

_RequestValue: TypeAlias = Callable[[FinishedRequestStats], float | None]


def _request_family(name: str, help: str) -> Family:
    return Family(name, Kind.HISTOGRAM, help)


_REQUEST_HISTOGRAMS: Mapping[Family, tuple[Sequence[float], _RequestValue]] = {
    _request_family("e2e_request_latency_seconds", "From arrival to end."): (
        LATENCY_BOUNDS,
        lambda request: request.e2e_latency_s,
    ),
    _request_family("request_queue_time_seconds", "Until the core began to compute it."): (
        LATENCY_BOUNDS,
        lambda request: request.queue_s,
    ),
    _request_family("request_prefill_time_seconds", "From then to the first token."): (
        LATENCY_BOUNDS,
        lambda request: request.prefill_s,
    ),
    _request_family("request_decode_time_seconds", "From the first token to the last."): (
        LATENCY_BOUNDS,
        lambda request: request.decode_s,
    ),
    _request_family("request_inference_time_seconds", "From when the core began to compute it to the end."): (
        LATENCY_BOUNDS,
        lambda request: request.inference_s,
    ),
    _request_family("request_time_per_output_token_seconds", "Decode time by later tokens of an answer."): (
        INTER_TOKEN_BOUNDS,
        lambda request: request.time_per_output_token_s,
    ),
    _request_family("request_prompt_tokens", "Tokens of a prompt."): (
        TOKEN_BOUNDS,
        lambda request: request.num_prompt_tokens,
    ),
    _request_family("request_prefill_kv_computed_tokens", "Tokens of a prompt that were not cached."): (
        TOKEN_BOUNDS,
        lambda request: request.num_prompt_tokens - request.num_cached_tokens,
    ),
    _request_family("request_generation_tokens", "Generated tokens, over all answers."): (
        TOKEN_BOUNDS,
        lambda request: request.num_generated_tokens,
    ),
    _request_family("request_params_n", "Answers that were asked for."): (N_BOUNDS, lambda request: request.n),
    _request_family("request_params_max_tokens", "max_tokens, where it was given."): (
        TOKEN_BOUNDS,
        lambda request: request.max_tokens,
    ),
}

_SUCCESS = Family("request_success", Kind.COUNTER, "Requests that ended, by how.")
_ADAPTERS = Family("lora_requests", Kind.COUNTER, "Requests that ended, by adapter.")
_CACHE_CONFIG = Family("cache_config_info", Kind.GAUGE, "The engine's KV cache; always 1.")


def _label_text(labels: Sequence[tuple[str, str]]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@attrs.frozen
class _Series:
    """What tells the lines of one family and core apart: the name's suffix, and labels beside the logger's own."""

    suffix: str
    labels: tuple[tuple[str, str], ...] = ()
    text: str = attrs.field(init=False, default=attrs.Factory(lambda self: _label_text(self.labels), takes_self=True))
    """The labels, written once."""


_GAUGE_SERIES = (_Series(""),)
_COUNTER_SERIES = (_Series("_total"),)


class Histogram:
    """Values sorted into buckets, lazily: taking one in costs an append."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the largest value of each bucket, rising; one bucket more has what is above them."""
        self.series = (
            *(_Series("_bucket", (("le", repr(bound)),)) for bound in bounds),
            _Series("_bucket", (("le", "+Inf"),)),
            _Series("_sum"),
            _Series("_count"),
        )
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._kept: list[float] = []

    def observe(self, value: float) -> None:
        """Take a value in."""
        self._kept.append(value)
        if len(self._kept) >= MAX_KEPT_VALUES:
            self._sort()

    def observe_all(self, values: Sequence[float]) -> None:
        """Take values in."""
        self._kept.extend(values)
        if len(self._kept) >= MAX_KEPT_VALUES:
            self._sort()

    @property
    def num_kept(self) -> int:
        """Values that are not yet in a bucket."""
        return len(self._kept)

    def values(self) -> Sequence[float]:
        """A value for each of `series`: how many are at most each bound, how many in all, their sum, and the count."""
        self._sort()
        counts: list[float] = np.cumsum(self._counts).tolist()
        return [*counts, self._sum, counts[-1]]

    def _sort(self) -> None:
        if not self._kept:
            return
        values = np.array(self._kept, np.float64)
        self._kept.clear()
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        self._sum += float(values.sum())


class _EngineMetrics:
    """The numbers of one core. Values by family, in the order of the tables above."""

    def __init__(self) -> None:
        self.scheduler: SchedulerStats | None = None
        self.counters: dict[Family, int] = dict.fromkeys(_COUNTERS, 0)
        self.num_finished: dict[str, int] = dict.fromkeys(FINISH_REASONS, 0)
        self.num_by_adapter: dict[str, int] = {}
        self.histograms: dict[Family, Histogram] = {
            family: Histogram(bounds) for family, bounds in _ITERATION_HISTOGRAMS.items()
        }
        for family, (bounds, _) in _REQUEST_HISTOGRAMS.items():
            self.histograms[family] = Histogram(bounds)

    def record(self, stats: IterationStats) -> None:
        if stats.scheduler is not None:
            self.scheduler = stats.scheduler
        counters = self.counters
        for family, value_of in _COUNTERS.items():
            counters[family] += value_of(stats)
        histograms = self.histograms
        if num_tokens := stats.num_prompt_tokens + stats.num_generated_tokens:
            histograms[_ITERATION].observe(num_tokens)
        if stats.inter_token_latencies_s:
            histograms[_INTER_TOKEN].observe_all(stats.inter_token_latencies_s)
        if stats.times_to_first_token_s:
            histograms[_FIRST_TOKEN].observe_all(stats.times_to_first_token_s)
        for request in stats.finished:
            self._record_finished(request)

    def _record_finished(self, request: FinishedRequestStats) -> None:
        self.num_finished[request.finish_reason] = self.num_finished.get(request.finish_reason, 0) + 1
        if request.lora is not None:
            is_known = request.lora in self.num_by_adapter or len(self.num_by_adapter) < MAX_ADAPTERS
            name = request.lora if is_known else OTHER_ADAPTERS
            self.num_by_adapter[name] = self.num_by_adapter.get(name, 0) + 1
        for family, (_, value_of) in _REQUEST_HISTOGRAMS.items():
            value = value_of(request)
            if value is not None:
                self.histograms[family].observe(value)


@attrs.frozen
class MetricsPage:
    """The answer to a scrape."""

    body: bytes
    content_type: str


@attrs.frozen
class _Part:
    """A core's lines of one family."""

    rank: int
    series: Sequence[_Series]
    values: Sequence[float]


class PrometheusStatLogger:
    """Counts what an engine client tells, and writes it out when it is asked for."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_cores: int,
        model_name: str,
        api_server: int | None = None,
        metrics_folder: Path | None = None,
    ) -> None:
        """Count from zero.

        Args:
            config: the engine's options.
            num_cores: its cores, whose ranks count from `config.data_parallel_rank`, or 0. Others are taken as they
                come.
            model_name: the label of all.
            api_server: which of several API-server processes this is; a label then. None is the only one.
            metrics_folder: where these processes show each other what they count.
        """
        first_rank = config.data_parallel_rank or 0
        self._engines = {rank: _EngineMetrics() for rank in range(first_rank, first_rank + num_cores)}
        self._model_name = model_name
        self._api_server = api_server
        self._shared: SharedMetrics | None = None
        if api_server is not None and metrics_folder is not None:
            self._shared = SharedMetrics(metrics_folder, api_server)
        self._cache_config = (
            ("block_size", str(config.block_size)),
            ("enable_prefix_caching", str(config.enable_prefix_caching)),
            ("kv_cache_memory_bytes", str(config.kv_cache_memory_bytes)),
            ("kv_offload_bytes", str(config.kv_offload_bytes)),
        )

    def record(self, stats: IterationStats) -> None:
        """Count what happened."""
        engine = self._engines.get(stats.engine)
        if engine is None:
            engine = self._engines[stats.engine] = _EngineMetrics()
        engine.record(stats)

    def log(self) -> None:
        """Let other API-server processes see what was counted; otherwise this is read, not said."""
        if self._shared is not None:
            own = [(family, parts) for family, parts in self._families() if not family.is_of_core]
            self._shared.leave({family.name: self._lines(family, parts) for family, parts in own})

    def close(self) -> None:
        """Nothing: what was counted can still be read."""

    def render(self, accept: str | None = None, /) -> MetricsPage:
        """Everything that was counted, as text; also what other API-server processes have counted.

        Args:
            accept: the scraper's header of this name. OpenMetrics where it names that, else Prometheus text.
        """
        is_openmetrics = OPENMETRICS_MEDIA_TYPE in (accept or "").lower()
        self.log()  # A scraper that reaches another process next must not find less there.
        others: Sequence[Mapping[str, str]] = () if self._shared is None else self._shared.others()
        text: list[str] = []
        for family, parts in self._families():
            name = PREFIX + family.name
            # A counter's samples end in _total. In OpenMetrics its family does not, in the older format it does too.
            is_counter = family.kind is Kind.COUNTER
            family_name = name + "_total" if is_counter and not is_openmetrics else name
            text.append(f"# HELP {family_name} {family.help}\n# TYPE {family_name} {family.kind}\n")
            text.append(self._lines(family, parts))
            if not family.is_of_core:
                text += [lines.get(family.name, "") for lines in others]
        if is_openmetrics:
            text.append("# EOF\n")
        return MetricsPage(
            "".join(text).encode(errors="replace"), OPENMETRICS_CONTENT_TYPE if is_openmetrics else TEXT_CONTENT_TYPE
        )

    def collect(self) -> "Iterator[Metric]":
        """The same for a registry of the package prometheus-client: `registry.register(logger)`."""
        from prometheus_client.metrics_core import Metric

        for family, parts in self._families():
            metric = Metric(PREFIX + family.name, family.help, family.kind)
            for part in parts:
                own = dict(self._labels(family, part.rank))
                for series, value in zip(part.series, part.values, strict=True):
                    metric.add_sample(metric.name + series.suffix, own | dict(series.labels), float(value))
            yield metric

    def _families(self) -> Iterator[tuple[Family, Sequence[_Part]]]:
        """All families, each with the lines of all cores. Of a core that has said nothing yet some are missing."""
        engines = self._engines.items()
        known = [(rank, engine.scheduler) for rank, engine in engines if engine.scheduler is not None]
        for family, gauge_of in _GAUGES.items():
            yield family, [_Part(rank, _GAUGE_SERIES, (gauge_of(scheduler),)) for rank, scheduler in known]
        for family, count_of in _CORE_COUNTERS.items():
            yield family, [_Part(rank, _COUNTER_SERIES, (count_of(scheduler),)) for rank, scheduler in known]
        for family in _COUNTERS:
            yield family, [_Part(rank, _COUNTER_SERIES, (engine.counters[family],)) for rank, engine in engines]
        for family, label, counts_of in _LABELLED_COUNTERS:
            yield family, [_labelled_part(rank, label, counts_of(engine)) for rank, engine in engines]
        for family in (*_ITERATION_HISTOGRAMS, *_REQUEST_HISTOGRAMS):
            histograms = [(rank, engine.histograms[family]) for rank, engine in engines]
            yield family, [_Part(rank, histogram.series, histogram.values()) for rank, histogram in histograms]
        info = (_Series("", self._cache_config),)
        yield _CACHE_CONFIG, [_Part(rank, info, (1.0,)) for rank in self._engines]

    def _lines(self, family: Family, parts: Sequence[_Part]) -> str:
        """A family's samples as text, which is the same in both formats."""
        name = PREFIX + family.name
        lines: list[str] = []
        for part in parts:
            own = _label_text(self._labels(family, part.rank))
            lines += [
                f"{name}{series.suffix}{{{own}{',' if series.text else ''}{series.text}}} {float(value)!r}\n"
                for series, value in zip(part.series, part.values, strict=True)
            ]
        return "".join(lines)

    def _labels(self, family: Family, rank: int) -> Sequence[tuple[str, str]]:
        labels = [("model_name", self._model_name), ("engine", str(rank))]
        if self._api_server is not None and not family.is_of_core:
            labels.append(("api_server", str(self._api_server)))
        return labels


_LABELLED_COUNTERS: Sequence[tuple[Family, str, Callable[[_EngineMetrics], Mapping[str, int]]]] = (
    (_SUCCESS, "finished_reason", lambda engine: engine.num_finished),
    (_ADAPTERS, "lora_name", lambda engine: engine.num_by_adapter),
)


def _labelled_part(rank: int, label: str, counts: Mapping[str, int]) -> _Part:
    return _Part(rank, [_Series("_total", ((label, value),)) for value in counts], list(counts.values()))
