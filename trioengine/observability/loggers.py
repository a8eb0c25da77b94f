"""Who takes an engine's statistics: `make_stat_loggers`, the lines in the log, and plug-ins of other packages.

A package names a factory in the group `trioengine.stat_loggers`:

    [project.entry-points."trioengine.stat_loggers"]
    statsd = "my_package:StatsdLogger"

which is called as `StatLoggerFactory` says. Lines go to `logging`; no handler is installed.
"""

import importlib.metadata
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from trioengine.config.engine import EngineConfig
from trioengine.observability.prometheus import PrometheusStatLogger
from trioengine.observability.request_log import RequestLogger
from trioengine.observability.stats import IterationStats, StatLogger
from trioengine.observability.tracing import TracingStatLogger
from trioengine.types.messages import SchedulerStats

ENTRY_POINT_GROUP = "trioengine.stat_loggers"

logger = logging.getLogger(__name__)


class StatLoggerFactory(Protocol):
    """Makes a logger for one engine client: what an entry point names, or what a program gives itself."""

    def __call__(self, config: EngineConfig, *, num_cores: int, model_name: str) -> StatLogger:
        """A logger for an engine of so many cores that serves a model by this name."""
        ...


def make_stat_loggers(
    config: EngineConfig,
    *,
    num_cores: int,
    model_name: str,
    extra: Sequence[StatLoggerFactory] = (),
    api_server: int | None = None,
    metrics_folder: Path | None = None,
) -> Sequence[StatLogger]:
    """Who takes the statistics of one engine client; where this is empty, none need be made.

    `disable_log_stats` leaves out the lines in the log and the counters of `/metrics`. Plug-ins, the log of requests
    and spans have been asked for by themselves and stay. A plug-in that raises an exception is logged once and takes
    part no more; the engine goes on.

    Args:
        config: the engine's options.
        num_cores: its cores.
        model_name: the name that it serves.
        extra: factories of this program, besides those of installed packages.
        api_server: which of several API-server processes this is; None is the only one.
        metrics_folder: where these show each other what they count, for `/metrics`.

    Raises:
        ConfigError: spans are asked for and cannot be sent.
    """
    loggers: list[StatLogger] = []
    if config.otlp_traces_endpoint is not None:
        loggers.append(TracingStatLogger.to_endpoint(config.otlp_traces_endpoint, model_name=model_name))
    if config.enable_log_requests:
        loggers.append(RequestLogger())
    if not config.disable_log_stats:
        loggers.append(LoggingStatLogger(num_cores=num_cores))
        loggers.append(
            PrometheusStatLogger(
                config,
                num_cores=num_cores,
                model_name=model_name,
                api_server=api_server,
                metrics_folder=metrics_folder,
            )
        )
    for name, load in _plug_ins(extra):
        try:
            plug_in = load()(config, num_cores=num_cores, model_name=model_name)
        except Exception:  # Whatever another package's code raises must not end the engine.
            logger.exception("The stat logger %s cannot be made and is left out.", name)
        else:
            loggers.append(_PlugIn(name, plug_in))
    return loggers


def _plug_ins(extra: Sequence[StatLoggerFactory]) -> Sequence[tuple[str, Callable[[], StatLoggerFactory]]]:
    """Names of factories, and what loads each."""
    installed = [
        (repr(entry_point.name), entry_point.load)
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    ]
    return [*installed, *((repr(factory), lambda factory=factory: factory) for factory in extra)]


class _PlugIn:
    """A logger that others wrote. Its first exception is its last call, but for `close`."""

    def __init__(self, name: str, plug_in: StatLogger) -> None:
        self._name = name
        self._plug_in = plug_in
        self._is_dropped = False

    def record(self, stats: IterationStats) -> None:
        if self._is_dropped:
            return
        try:
            self._plug_in.record(stats)
        except Exception:  # Another package's code; the engine goes on without it.
            self._drop("record")

    def log(self) -> None:
        if self._is_dropped:
            return
        try:
            self._plug_in.log()
        except Exception:  # Another package's code; the engine goes on without it.
            self._drop("log")

    def close(self) -> None:
        try:
            self._plug_in.close()
        except Exception:  # Another package's code; what else is to be closed is closed.
            if not self._is_dropped:
                self._drop("close")

    def _drop(self, method: str) -> None:
        self._is_dropped = True
        logger.exception("The stat logger %s failed in %s and takes part no more.", self._name, method)


@attrs.define
class _Totals:
    """Counts of one core, or of several."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def minus(self, earlier: "_Totals") -> "_Totals":
        """What was counted since then. Never negative: a core that was started anew counts from 0."""
        return _Totals(
            *(max(0, now - then) for now, then in zip(attrs.astuple(self), attrs.astuple(earlier), strict=True))
        )


class LoggingStatLogger:
    """Says in the log how an engine does: one line for each call of `log`, over all cores.

    An engine that has nothing to do says so once, and then nothing until it has.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, num_cores: int = 1) -> None:
        """`num_cores`: those that have said nothing yet count, too."""
        self._clock = clock
        self._num_cores = num_cores
        self._said_at_s = clock()
        self._schedulers: dict[int, SchedulerStats] = {}
        self._own = _Totals()
        self._said = _Totals()
        self._was_idle = False

    def record(self, stats: IterationStats) -> None:
        """Count what happened."""
        own = self._own
        own.num_prompt_tokens += stats.num_prompt_tokens
        own.num_generated_tokens += stats.num_generated_tokens
        own.num_preemptions += stats.num_preemptions
        own.num_finished += len(stats.finished)
        if stats.scheduler is not None:
            self._schedulers[stats.engine] = stats.scheduler

    def log(self) -> None:
        """Say what happened since the last call, unless nothing did then and nothing does now."""
        now_s = self._clock()
        elapsed_s = now_s - self._said_at_s
        if elapsed_s <= 0:
            return
        totals = self._totals()
        new = totals.minus(self._said)
        self._said_at_s, self._said = now_s, totals
        num_running = sum(scheduler.running for scheduler in self._schedulers.values())
        num_waiting = sum(scheduler.waiting for scheduler in self._schedulers.values())
        is_idle = new == _Totals() and num_running == num_waiting == 0
        if not (is_idle and self._was_idle):
            logger.info(
                "%s: prompt %.1f tok/s, generation %.1f tok/s, %d running, %d waiting, KV cache %.1f%%%s",
                self._subject(),
                new.num_prompt_tokens / elapsed_s,
                new.num_generated_tokens / elapsed_s,
                num_running,
                num_waiting,
                self._kv_cache_percent(),
                _details(new),
            )
        self._was_idle = is_idle

    def close(self) -> None:
        """Nothing."""

    def _totals(self) -> _Totals:
        schedulers = self._schedulers.values()
        return attrs.evolve(
            self._own,
            num_prefix_cache_queries=sum(scheduler.num_prefix_cache_queries for scheduler in schedulers),
            num_prefix_cache_hits=sum(scheduler.num_prefix_cache_hits for scheduler in schedulers),
            num_draft_tokens=sum(scheduler.num_draft_tokens for scheduler in schedulers),
            num_accepted_tokens=sum(scheduler.num_accepted_tokens for scheduler in schedulers),
        )

    def _subject(self) -> str:
        ranks = list(self._schedulers)
        num_cores = max(self._num_cores, len(ranks))
        return f"{num_cores} engines" if num_cores > 1 else f"Engine {ranks[0] if ranks else 0}"

    def _kv_cache_percent(self) -> float:
        """The mean of all cores."""
        schedulers = self._schedulers.values()
        return 100 * sum(scheduler.kv_cache_usage for scheduler in schedulers) / max(self._num_cores, len(schedulers))


def _details(new: _Totals) -> str:
    """What is said only where there is something to say."""
    text = ""
    if new.num_prefix_cache_queries:
        text += f", prefix cache hits {100 * new.num_prefix_cache_hits / new.num_prefix_cache_queries:.1f}%"
    if new.num_draft_tokens:
        text += f", drafts accepted {100 * new.num_accepted_tokens / new.num_draft_tokens:.1f}%"
    if new.num_preemptions:
        text += f", {new.num_preemptions} preemptions"
    return text
