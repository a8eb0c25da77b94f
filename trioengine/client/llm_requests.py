"""The requests of an `LLMEngine`: sinks of the front end that make outputs of what they were given, when asked."""

import time
from collections.abc import Sequence
from typing import Any

import attrs

from trioengine.client.llm_inputs import LoRARequest
from trioengine.client.llm_outputs import PoolingRequestOutput, RequestOutput, pooling_request_output, request_output
from trioengine.errors import TrioEngineError
from trioengine.frontend.input_processor import ProcessedEncodeRequest, ProcessedRequest
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.frontend.parent_request import ParentRequest
from trioengine.frontend.pending_output import new_pending_output, next_pending_output, output_builder
from trioengine.observability.stats import FinishedRequestStats
from trioengine.types.output import FinishReason
from trioengine.types.params import RequestOutputKind
from trioengine.types.pooling import PoolingOutput


@attrs.define(eq=False)
class News:
    """What requests tell their engine, which they do not know: dropping it is the end of it at once."""

    open: dict[str, dict["OpenRequest | OpenEncodeRequest", None]] = attrs.field(factory=dict)  # pyright: ignore[reportUnknownVariableType]
    """Those without a last output, by the caller's id."""
    changed: dict["OpenRequest | OpenEncodeRequest", None] = attrs.field(factory=dict)  # pyright: ignore[reportUnknownVariableType]
    """Those with something new, in the order in which it came."""


class OpenRequest:
    """A request for text: a `frontend.sink.Sink` that makes outputs of what it was given."""

    def __init__(self, processed: ProcessedRequest, lora_request: LoRARequest | None, news: News) -> None:
        sampling = processed.sampling
        kind = sampling.output_kind
        self.request_id = processed.external_id
        self.state: ParentRequest | None = None
        self.error: TrioEngineError | None = None
        self.is_over = False
        self._prompt = processed.prompt_text
        self._lora_request = lora_request
        self._news = news
        self._is_final_only = kind is RequestOutputKind.FINAL_ONLY
        self._interval = 0  # The first output comes at once.
        self._next_interval = sampling.stream_interval or 1
        self._builder = output_builder(processed, is_cumulative=kind is RequestOutputKind.CUMULATIVE)
        self._pending = new_pending_output(sampling.n)

    @property
    def parent(self) -> ParentRequest:
        """The front end's side of it."""
        assert self.state is not None
        return self.state

    def put_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """As `Sink`."""
        self._pending.put_prompt(num_cached_tokens, logprobs)

    def put_weight_version(self, version: str) -> None:
        """As `Sink`."""
        self._pending.put_weight_version(version)

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[LogprobEntry] = (),
        index: int = 0,
    ) -> None:
        """As `Sink`."""
        self._pending.put(text, token_ids, finish_reason, stop_reason, logprobs, index)
        self.is_over = self.is_over or (finish_reason is not None and self._pending.is_last)
        if self.is_over or not self._is_final_only:
            self._news.changed[self] = None

    def fail(self, error: TrioEngineError) -> None:
        """As `Sink`."""
        if not self.is_over:
            self.error, self.is_over = error, True
            self._news.changed[self] = None

    def take_output(self) -> RequestOutput | None:
        """What is new, if it is enough for an output."""
        pending = self._pending
        if not pending.has_output and (self.error is not None or not self.is_over):
            return None
        if not self.is_over and not pending.has_at_least(self._interval):
            return None
        self._interval = self._next_interval
        self._pending = next_pending_output(pending)
        metrics: FinishedRequestStats | None = None
        output = self._builder.build(pending)
        if output.finished:
            metrics = self.parent.finished_stats(_reason(output.outputs), time.monotonic())
        return request_output(output, self._prompt, metrics, self._lora_request)


class OpenEncodeRequest:
    """A request for vectors."""

    def __init__(self, processed: ProcessedEncodeRequest, news: News) -> None:
        self.request_id = processed.external_id
        self.state: ParentRequest | None = None
        self.error: TrioEngineError | None = None
        self.is_over = False
        self._task = processed.pooling.task
        self._news = news
        self._output: PoolingOutput | None = None

    @property
    def parent(self) -> ParentRequest:
        """The front end's side of it."""
        assert self.state is not None
        return self.state

    def put(self, output: PoolingOutput) -> None:
        """As `PoolingSink`."""
        self._output, self.is_over = output, True
        self._news.changed[self] = None

    def fail(self, error: TrioEngineError) -> None:
        """As `Sink`."""
        self.error, self.is_over = error, True
        self._news.changed[self] = None

    def take_output(self) -> PoolingRequestOutput | None:
        """The vectors, if they have come."""
        return None if self._output is None else pooling_request_output(self._output, self._task)


def _reason(outputs: Sequence[Any]) -> str:
    return next((str(output.finish_reason) for output in outputs if output.finish_reason is not None), "stop")
