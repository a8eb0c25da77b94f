"""A span for each request, when it ends, sent by OpenTelemetry to a collector (OTLP over HTTP).

Spans come from a provider of their own: none is global, no context of the host program is read, and OpenTelemetry's
variables (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS`, …) count as its manual says. One
thread of OpenTelemetry's sends them, so a slow collector delays no request; when too many wait, it drops some.

Attributes have the names of OpenTelemetry's semantic conventions for generative AI, and beside them those that vLLM
gives its spans, whose dashboards go by them. Spans have numbers, never texts.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trioengine.errors import ConfigError
from trioengine.observability.stats import FinishedRequestStats, IterationStats

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
TRACES_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5.0
"""Of one request to the collector."""
CLOSE_TIMEOUT_S = 1.0
"""How long closing waits for the last spans to be sent; what is left then is lost."""
MAX_NAME_CHARS = 256
NS_PER_S = 1_000_000_000

logger = logging.getLogger(__name__)


class TracingStatLogger:
    """Makes a span of each request that has ended, a child of the span that its trace headers name."""

    def __init__(self, exporter: "SpanExporter", *, model_name: str) -> None:
        """Send spans to `exporter`, from a thread. Needs the package opentelemetry-sdk."""
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model_name = model_name
        self._exporter = exporter
        self._is_closed = False
        # What the environment says wins.
        resource = Resource({SERVICE_NAME: "trioengine"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("trioengine")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_endpoint(cls, endpoint: str, *, model_name: str) -> "TracingStatLogger":
        """Send spans to the collector at this URL; one without a path gets OTLP's, `/v1/traces`.

        Raises:
            ConfigError: it is no URL, or the packages are not installed.
        """
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ConfigError(
                f"otlp_traces_endpoint must be a URL as http://localhost:4318, not {endpoint!r}.",
                option="otlp_traces_endpoint",
            )
        if not url.path.strip("/"):
            url = url._replace(path=TRACES_PATH)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=url.geturl(), timeout=EXPORT_TIMEOUT_S)
            return cls(exporter, model_name=model_name)
        except ImportError as error:
            raise ConfigError(
                "otlp_traces_endpoint needs the packages of the extra `tracing`: pip install 'trioengine[tracing]'"
                f" ({error}).",
                option="otlp_traces_endpoint",
            ) from error

    def record(self, stats: IterationStats) -> None:
        """Make spans of the requests that have ended."""
        for request in stats.finished:
            self._make_span(request, stats.engine)

    def log(self) -> None:
        """Nothing: spans are sent as they come."""

    def close(self) -> None:
        """Send what waits. Blocks for at most `CLOSE_TIMEOUT_S`, usually for milliseconds."""
        if self._is_closed:
            return
        self._is_closed = True
        # OpenTelemetry's own shutdown has no limit that one may set: it may wait for 30 s.
        shutdown = threading.Thread(target=self._provider.shutdown, name="trioengine-spans-shutdown", daemon=True)
        shutdown.start()
        shutdown.join(CLOSE_TIMEOUT_S)
        if shutdown.is_alive():
            logger.warning("The collector of spans does not answer; the last spans are lost.")
            self._exporter.shutdown()  # Ends its attempts to send, and with them both threads.

    def _make_span(self, request: FinishedRequestStats, engine: int) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns = time.time_ns()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._parent(request.trace_headers),
            kind=SpanKind.SERVER,
            start_time=end_ns - int(request.e2e_latency_s * NS_PER_S),
            attributes=_attributes(request, self._model_name, engine),
        )
        if request.finish_reason == "error":
            span.set_attribute("error.type", "error")
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def _parent(self, trace_headers: Mapping[str, str] | None) -> "Context":
        """The context that the headers name; the empty one, of a new trace, where there are none or they are wrong."""
        from opentelemetry.context import Context

        if not trace_headers:
            return Context()
        headers = {name.lower(): value for name, value in trace_headers.items()}
        return self._propagator.extract(headers, context=Context())


def _attributes(
    request: FinishedRequestStats, model_name: str, engine: int
) -> Mapping[str, str | int | float | tuple[str, ...]]:
    attributes: dict[str, str | int | float | tuple[str, ...] | None] = {
        # At the engine's border every prompt is a text to continue.
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "trioengine",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": request.request_id[:MAX_NAME_CHARS],
        "gen_ai.conversation.id": None if request.session_id is None else request.session_id[:MAX_NAME_CHARS],
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.n": request.n,
        "gen_ai.response.finish_reasons": (request.finish_reason,),
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": request.num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": request.num_generated_tokens,
        "gen_ai.latency.e2e": request.e2e_latency_s,
        "gen_ai.latency.time_in_queue": request.queue_s,
        "gen_ai.latency.time_to_first_token": request.time_to_first_token_s,
        "gen_ai.latency.time_in_model_prefill": request.prefill_s,
        "gen_ai.latency.time_in_model_decode": request.decode_s,
        "gen_ai.latency.time_in_model_inference": request.inference_s,
        "trioengine.engine": engine,
        "trioengine.num_preemptions": request.num_preemptions,
        "trioengine.lora": None if request.lora is None else request.lora[:MAX_NAME_CHARS],
    }
    return {name: value for name, value in attributes.items() if value is not None}
