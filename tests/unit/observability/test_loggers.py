"""Who takes statistics, what stands in the log, and that a plug-in harms nobody."""

import importlib.metadata
import logging
from collections.abc import Callable, Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.config import EngineConfig
from trioengine.errors import ConfigError
from trioengine.observability import loggers as loggers_module
from trioengine.observability.loggers import ENTRY_POINT_GROUP, LoggingStatLogger, make_stat_loggers
from trioengine.observability.prometheus import PrometheusStatLogger
from trioengine.observability.request_log import RequestLogger
from trioengine.observability.stats import IterationStats, StatLogger
from trioengine.types.messages import SchedulerStats

IDLE = SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0, 0)


class Recorder:
    """A plug-in that remembers, and fails where it is told to."""

    def __init__(self, config: EngineConfig, *, num_cores: int, model_name: str, fails_in: str = "") -> None:
        self.made_with = (config, num_cores, model_name)
        self.calls: list[str] = []
        self._fails_in = fails_in
        if fails_in == "init":
            raise RuntimeError("no")

    def record(self, stats: IterationStats) -> None:
        self._take("record")

    def log(self) -> None:
        self._take("log")

    def close(self) -> None:
        self._take("close")

    def _take(self, call: str) -> None:
        self.calls.append(call)
        if call == self._fails_in:
            raise RuntimeError(f"broken {call}")


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(config: EngineConfig, made: list[Recorder] | None = None, fails_in: str = "") -> Sequence[StatLogger]:
    """The loggers of a configuration, with a recorder among them when there is a list for it."""

    def factory(config: EngineConfig, *, num_cores: int, model_name: str) -> StatLogger:
        recorder = Recorder(config, num_cores=num_cores, model_name=model_name, fails_in=fails_in)
        assert made is not None
        made.append(recorder)
        return recorder

    return make_stat_loggers(config, num_cores=2, model_name="m", extra=() if made is None else (factory,))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "trioengine.observability")
    return caplog


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make plug-ins of this module look installed."""
    points = [importlib.metadata.EntryPoint(name, f"{__name__}:{name}", ENTRY_POINT_GROUP) for name in names]

    def entry_points(*, group: str) -> Sequence[importlib.metadata.EntryPoint]:
        assert group == ENTRY_POINT_GROUP
        return points

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda point: globals()[point.attr])  # pyright: ignore


@pytest.mark.parametrize(
    ("config", "classes"),
    [
        (EngineConfig(), [LoggingStatLogger, PrometheusStatLogger]),
        (EngineConfig(disable_log_stats=True), []),
        (EngineConfig(disable_log_stats=True, enable_log_requests=True), [RequestLogger]),
    ],
)
def test_the_options_decide_who_takes_statistics(config: EngineConfig, classes: Sequence[type]) -> None:
    assert [type(stat_logger) for stat_logger in make(config)] == classes


def test_a_program_s_own_logger_re_enables_statistics() -> None:
    made: list[Recorder] = []
    config = EngineConfig(disable_log_stats=True)
    (stat_logger,) = make(config, made)
    stat_logger.record(IterationStats(0))
    stat_logger.log()
    stat_logger.close()
    assert made[0].calls == ["record", "log", "close"]
    assert made[0].made_with == (config, 2, "m")


def test_plug_ins_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    """One that cannot be imported is left out; the others work."""
    install(monkeypatch, "Recorder", "missing")
    (stat_logger,) = make(EngineConfig(disable_log_stats=True))
    stat_logger.record(IterationStats(0))
    assert lines(log) == ["The stat logger 'missing' cannot be made and is left out."]


@pytest.mark.parametrize("method", ["record", "log", "close"])
def test_a_faulty_plug_in_is_logged_once_and_dropped(method: str, log: pytest.LogCaptureFixture) -> None:
    """The engine's calls go through; the plug-in is still closed, as it may hold something."""
    made: list[Recorder] = []
    (stat_logger,) = make(EngineConfig(disable_log_stats=True), made, fails_in=method)
    for _ in range(2):
        stat_logger.record(IterationStats(0))
        stat_logger.log()
    stat_logger.close()
    assert made[0].calls.count(method) == 1
    assert made[0].calls[-1] == "close"
    assert len(log.records) == 1
    assert f"failed in {method}" in log.records[0].getMessage()
    assert log.records[0].exc_info is not None


def test_a_plug_in_that_cannot_be_made_is_left_out(log: pytest.LogCaptureFixture) -> None:
    assert make(EngineConfig(disable_log_stats=True), [], fails_in="init") == []
    assert len(log.records) == 1


def test_two_engines_share_no_logger() -> None:
    first, second = make(EngineConfig()), make(EngineConfig())
    assert not set(map(id, first)) & set(map(id, second))


def test_nothing_but_lines_goes_to_logging() -> None:
    """A library installs no handlers and sets no levels."""
    make(EngineConfig(enable_log_requests=True))
    for name in ("", "trioengine", "trioengine.observability", loggers_module.__name__):
        logger = logging.getLogger(name)
        assert name == "" or (not logger.handlers and logger.level == logging.NOTSET)


def test_a_line_of_one_engine(log: pytest.LogCaptureFixture) -> None:
    """Rates are of the time since the line before; what there is nothing of is left out."""
    clock = Clock()
    stat_logger = LoggingStatLogger(clock)
    scheduler = SchedulerStats(12, 3, 0.456, 90, 0, 1000, 500, 0, 0)
    stat_logger.record(IterationStats(0, scheduler, num_prompt_tokens=1000, num_generated_tokens=200))
    clock.now_s += 10
    stat_logger.log()
    scheduler = SchedulerStats(11, 0, 0.5, 190, 3, 1400, 800, 100, 75)
    stat_logger.record(IterationStats(0, scheduler, num_generated_tokens=300, num_preemptions=2))
    clock.now_s += 5
    stat_logger.log()
    assert lines(log) == [
        "Engine 0: prompt 100.0 tok/s, generation 20.0 tok/s, 12 running, 3 waiting, KV cache 45.6%,"
        " prefix cache hits 50.0%",
        "Engine 0: prompt 0.0 tok/s, generation 60.0 tok/s, 11 running, 0 waiting, KV cache 50.0%,"
        " prefix cache hits 75.0%, drafts accepted 75.0%, 2 preemptions",
    ]


def test_an_engine_that_has_said_nothing_yet_counts(log: pytest.LogCaptureFixture) -> None:
    """The line is of both from the start, and the mean is not that of the one that works."""
    clock = Clock()
    stat_logger = LoggingStatLogger(clock, num_cores=2)
    clock.now_s += 10
    stat_logger.log()
    stat_logger.record(IterationStats(1, SchedulerStats(1, 0, 0.5, 1, 0, 0, 0, 0, 0)))
    clock.now_s += 10
    stat_logger.log()
    assert lines(log) == [
        "2 engines: prompt 0.0 tok/s, generation 0.0 tok/s, 0 running, 0 waiting, KV cache 0.0%",
        "2 engines: prompt 0.0 tok/s, generation 0.0 tok/s, 1 running, 0 waiting, KV cache 25.0%",
    ]


def test_several_engines_have_one_line(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stat_logger = LoggingStatLogger(clock)
    for rank in range(4):
        scheduler = SchedulerStats(rank, 1, rank / 10, 0, 0, 100, 10 * rank, 0, 0)
        stat_logger.record(IterationStats(rank, scheduler, num_generated_tokens=10))
    clock.now_s += 10
    stat_logger.log()
    assert lines(log) == [
        "4 engines: prompt 0.0 tok/s, generation 4.0 tok/s, 6 running, 4 waiting, KV cache 15.0%,"
        " prefix cache hits 15.0%"
    ]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 3))
def test_lines_add_up_to_what_was_recorded(intervals: Sequence[int], num_cores: int) -> None:
    """However messages fall on intervals, the tokens of all lines are those of all messages, and an engine that stays
    idle says so once."""
    clock = Clock()
    stat_logger = LoggingStatLogger(clock)
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append
    logger = logging.getLogger(loggers_module.__name__)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for num_messages in intervals:
            for rank in range(num_messages):
                stat_logger.record(IterationStats(rank % num_cores, IDLE, num_generated_tokens=7))
            clock.now_s += 1
            stat_logger.log()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    rates = [record.args[2] for record in said if isinstance(record.args, tuple)]
    assert rates == pytest.approx([7 * n for i, n in enumerate(intervals) if n or i == 0 or intervals[i - 1]])


def test_work_that_gives_no_tokens_is_not_idle(log: pytest.LogCaptureFixture) -> None:
    """A long prefill, or a queue that does not move, is worth a line each time."""
    clock = Clock()
    stat_logger = LoggingStatLogger(clock)
    for _ in range(3):
        stat_logger.record(IterationStats(0, attrs.evolve(IDLE, running=1)))
        clock.now_s += 10
        stat_logger.log()
    assert len(log.records) == 3


def test_two_calls_at_one_moment_say_one_line(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stat_logger = LoggingStatLogger(clock)
    stat_logger.record(IterationStats(0, IDLE, num_generated_tokens=5))
    clock.now_s += 1
    stat_logger.log()
    stat_logger.log()
    assert len(log.records) == 1


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(EngineConfig(otlp_traces_endpoint=endpoint))
    assert caught.value.option == "otlp_traces_endpoint"


missing: Callable[[], None]
"""Named by an entry point, and not there."""
