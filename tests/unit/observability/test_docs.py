"""docs/observability.md: its tables are true and its programs run."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trioengine.config import EngineConfig
from trioengine.observability.loggers import StatLoggerFactory, make_stat_loggers
from trioengine.observability.prometheus import PREFIX, PrometheusStatLogger
from trioengine.observability.stats import FinishedRequestStats, IterationStats, StatLogger
from trioengine.types.messages import SchedulerStats

DOCS = (Path(__file__).parents[3] / "docs/observability.md").read_text("utf-8")
FINISHED = FinishedRequestStats("a", "stop", 9, 0, 3, 0, 1, 16, 1.0, 0.1, 0.2, 0.5, lora="poet")


def program(name: str) -> dict[str, object]:
    """What a program of the page defines; the one that defines this."""
    (text,) = (text for text in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL) if f"class {name}" in text)
    names: dict[str, object] = {}
    exec(textwrap.dedent(text), names)
    return names


def test_the_table_of_names_is_what_the_page_has() -> None:
    table = DOCS[DOCS.index("| ours") :].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)(?:\{(\w+)\})?` \| (\w+)", table, re.MULTILINE)
    assert len(rows) == table.count("\n") - 1
    logger = PrometheusStatLogger(EngineConfig(), num_cores=1, model_name="m")
    logger.record(IterationStats(0, SchedulerStats(1, 1, 0.5, 1, 1, 1, 1, 1, 1), finished=[FINISHED]))
    found: list[tuple[str, str, str]] = []
    for family in text_string_to_metric_families(logger.render().body.decode()):
        own = set(family.samples[0].labels) - {"model_name", "engine", "le"}
        label = own.pop() if family.type == "counter" and own else ""
        suffix = "_total" if family.type == "counter" else ""
        found.append((family.name.removeprefix(PREFIX) + suffix, label, family.type))
    assert found == rows


def test_the_table_of_options_has_their_defaults() -> None:
    config = EngineConfig()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", DOCS[: DOCS.index("## Lines")], re.MULTILINE)
    assert [name for name, _ in rows] == [
        "disable_log_stats",
        "log_stats_interval_s",
        "enable_log_requests",
        "otlp_traces_endpoint",
    ]
    defaults = {"off": False, "none": None, "10": 10.0}
    assert [attrs.asdict(config)[name] for name, _ in rows] == [defaults[default] for _, default in rows]


def test_the_plug_in_works(caplog: pytest.LogCaptureFixture) -> None:
    """One that failed would be dropped with a line in the log."""
    factory = program("StatsdLogger")["StatsdLogger"]
    (logger,) = _made(factory)  # pyright: ignore[reportArgumentType]
    logger.record(IterationStats(0, num_generated_tokens=5))
    logger.log()
    logger.close()
    assert not caplog.records


def test_the_host_s_registry_has_the_engine_s_metrics_until_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry(auto_describe=True)
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    factory = program("HostsMetrics")["HostsMetrics"]
    (logger,) = _made(factory)  # pyright: ignore[reportArgumentType]
    logger.record(IterationStats(0, num_generated_tokens=5))
    assert b'trioengine:generation_tokens_total{engine="0",model_name="m"} 5.0' in generate_latest(registry)
    logger.close()
    assert generate_latest(registry) == b""


def _made(factory: StatLoggerFactory) -> Sequence[StatLogger]:
    return make_stat_loggers(EngineConfig(disable_log_stats=True), num_cores=1, model_name="m", extra=[factory])
