"""Spans of requests: what is in them, whose children they are, and that sending them holds nobody up."""

import builtins
import http.server
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from trioengine.config import EngineConfig
from trioengine.errors import ConfigError
from trioengine.observability import tracing
from trioengine.observability.loggers import make_stat_loggers
from trioengine.observability.stats import FinishedRequestStats, IterationStats
from trioengine.observability.tracing import TracingStatLogger

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"

FINISHED = FinishedRequestStats(
    request_id="chat-1",
    finish_reason="stop",
    num_prompt_tokens=100,
    num_cached_tokens=64,
    num_generated_tokens=16,
    num_preemptions=2,
    n=1,
    max_tokens=32,
    e2e_latency_s=1.5,
    queue_s=0.125,
    time_to_first_token_s=0.25,
    decode_s=1.0,
    session_id="talk",
)


def spans_of(*requests: FinishedRequestStats) -> Sequence[ReadableSpan]:
    exporter = InMemorySpanExporter()
    stat_logger = TracingStatLogger(exporter, model_name="m")
    stat_logger.record(IterationStats(1, finished=list(requests)))
    stat_logger.log()
    stat_logger.close()
    return exporter.get_finished_spans()


def test_a_span_has_the_request_s_numbers() -> None:
    (span,) = spans_of(FINISHED)
    assert span.name == "llm_request"
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 1_500_000_000
    assert span.status.status_code is StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "trioengine"
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "trioengine",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.request.id": "chat-1",
        "gen_ai.conversation.id": "talk",
        "gen_ai.request.max_tokens": 32,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.n": 1,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 16,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.usage.prompt_tokens": 100,
        "gen_ai.usage.completion_tokens": 16,
        "gen_ai.latency.e2e": 1.5,
        "gen_ai.latency.time_in_queue": 0.125,
        "gen_ai.latency.time_to_first_token": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.125,
        "gen_ai.latency.time_in_model_decode": 1.0,
        "gen_ai.latency.time_in_model_inference": 1.375,
        "trioengine.engine": 1,
        "trioengine.num_preemptions": 2,
    }


@pytest.mark.parametrize("name", ["traceparent", "Traceparent"])
def test_trace_headers_name_the_parent(name: str) -> None:
    headers = {name: f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
    (span,) = spans_of(attrs.evolve(FINISHED, trace_headers=headers))
    assert span.parent is not None
    assert span.parent.is_remote
    assert f"{span.parent.span_id:016x}" == SPAN_ID
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.context.trace_state["vendor"] == "1"


def test_a_parent_that_is_not_sampled_makes_no_span() -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}
    assert spans_of(attrs.evolve(FINISHED, trace_headers=headers)) == ()


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"tracestate": "a=b"}, {"traceparent": ""}])
def test_headers_that_name_no_parent_begin_a_trace(headers: Mapping[str, str]) -> None:
    first, second = spans_of(*[attrs.evolve(FINISHED, trace_headers=headers)] * 2)
    assert first.parent is None
    assert first.context is not None
    assert second.context is not None
    assert first.context.trace_id != second.context.trace_id


def test_a_failed_request_is_a_failed_span() -> None:
    (span,) = spans_of(attrs.evolve(FINISHED, finish_reason="error", queue_s=None, time_to_first_token_s=None))
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert "gen_ai.latency.time_in_queue" not in span.attributes


def test_nothing_global_is_set_or_read() -> None:
    """A host's current span is no parent of requests, whose ends come at any moment."""
    before = trace.get_tracer_provider()
    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False))):
        (span,) = spans_of(FINISHED)
    assert span.parent is None
    assert trace.get_tracer_provider() is before


class StuckExporter(SpanExporter):
    """A collector that does not answer until one gives up."""

    def __init__(self) -> None:
        self.is_exporting = threading.Event()
        self.has_given_up = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_exporting.set()
        self.has_given_up.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.has_given_up.set()


def test_a_collector_that_does_not_answer_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing waits for a bounded time, says what is lost, and leaves no thread behind."""
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.01)
    before = set(threading.enumerate())
    exporter = StuckExporter()
    stat_logger = TracingStatLogger(exporter, model_name="m")
    stat_logger.record(IterationStats(0, finished=[FINISHED]))
    stat_logger.close()
    stat_logger.close()
    assert exporter.is_exporting.is_set()
    assert "the last spans are lost" in caplog.text
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_spans_are_recorded_when_an_endpoint_is_given() -> None:
    """Also without other statistics. Nobody listens at the endpoint, and nothing is sent without a request."""
    config = EngineConfig(otlp_traces_endpoint="http://127.0.0.1:9", disable_log_stats=True)
    (stat_logger,) = make_stat_loggers(config, num_cores=1, model_name="m")
    assert isinstance(stat_logger, TracingStatLogger)
    stat_logger.close()


def test_spans_reach_a_collector_over_http() -> None:
    """An endpoint without a path is OTLP's; what waits when the engine closes is sent."""
    received: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            stat_logger = TracingStatLogger.to_endpoint(f"http://127.0.0.1:{server.server_port}", model_name="m")
            stat_logger.record(IterationStats(0, finished=[FINISHED]))
            stat_logger.close()
        finally:
            server.shutdown()
            thread.join()
    ((path, body),) = received
    assert path == "/v1/traces"
    (resource_spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert [span.name for span in resource_spans.scope_spans[0].spans] == ["llm_request"]


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def import_without_opentelemetry(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without_opentelemetry)
    config = EngineConfig(otlp_traces_endpoint="http://localhost:4318")
    with pytest.raises(ConfigError, match=r"trioengine\[tracing\]") as caught:
        make_stat_loggers(config, num_cores=1, model_name="m")
    assert caught.value.option == "otlp_traces_endpoint"
