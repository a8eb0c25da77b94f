"""`PendingOutput`: output of one request that nobody has read yet."""

from collections.abc import Sequence

import attrs

from trioengine.errors import TrioEngineError
from trioengine.frontend.input_processor import ProcessedRequest
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.types.output import CompletionOutput, FinishReason, PositionLogprobs, RequestOutput


@attrs.define(eq=False)
class PendingOutput:
    """Grows until it is taken, and is then its reader's alone. A `Sink`: what is put is merged into it."""

    texts: list[str] = attrs.field(factory=list[str])
    token_ids: list[int] = attrs.field(factory=list[int])
    logprobs: list[LogprobEntry] = attrs.field(factory=list[LogprobEntry])
    """One for each of `token_ids`, or none."""
    num_cached_tokens: int = 0
    prompt_logprobs: list[LogprobEntry] = attrs.field(factory=list[LogprobEntry])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: TrioEngineError | None = None
    """Comes after the tokens beside it."""
    is_taken: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None

    def put_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """Add what became known of the prompt."""
        self.num_cached_tokens = num_cached_tokens or self.num_cached_tokens
        self.prompt_logprobs.extend(logprobs)

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[LogprobEntry] = (),
    ) -> None:
        """Add new text and tokens, and the ending if this is it."""
        if text:
            self.texts.append(text)
        self.token_ids.extend(token_ids)
        if logprobs:
            self.logprobs.extend(logprobs)
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def fail(self, error: TrioEngineError) -> None:
        """Add an error as the ending."""
        self.error = error


class OutputBuilder:
    """Makes the outputs of one request: whole texts for CUMULATIVE, what is new otherwise."""

    __slots__ = (
        "_has_logprobs",
        "_is_cumulative",
        "_logprobs",
        "_num_cached_tokens",
        "_num_generated_tokens",
        "_processed",
        "_prompt_logprobs",
        "_texts",
        "_token_ids",
    )

    def __init__(self, processed: ProcessedRequest, *, is_cumulative: bool) -> None:
        self._processed = processed
        self._is_cumulative = is_cumulative
        self._has_logprobs = processed.sampling.logprobs is not None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
        self._num_generated_tokens = 0
        self._num_cached_tokens = 0

    def build(self, pending: PendingOutput) -> RequestOutput:
        """The next output, which shares nothing that still changes."""
        if self._num_generated_tokens == 0:
            self._read_prompt(pending)
        texts, token_ids = pending.texts, pending.token_ids
        self._num_generated_tokens += len(token_ids)
        if self._is_cumulative:
            self._texts.extend(texts)
            self._token_ids.extend(token_ids)
            texts, token_ids = self._texts, self._token_ids
        # By place, which is faster: this runs for every token.
        output = CompletionOutput(
            0,
            "".join(texts),
            tuple(token_ids),
            pending.finish_reason,
            pending.stop_reason,
            self._next_logprobs(pending) if self._has_logprobs else None,
        )
        prompt_logprobs = self._prompt_logprobs
        if not self._is_cumulative:
            self._prompt_logprobs = None
        return RequestOutput(
            self._processed.external_id,
            self._processed.prompt_token_ids,
            (output,),
            pending.finish_reason is not None,
            self._num_generated_tokens,
            self._num_cached_tokens,
            prompt_logprobs,
        )

    def _read_prompt(self, pending: PendingOutput) -> None:
        """Keep what the first output says of the prompt."""
        self._num_cached_tokens = pending.num_cached_tokens
        if self._processed.sampling.prompt_logprobs is not None:
            tokenizer = self._processed.tokenizer
            self._prompt_logprobs = (None, *(entry.to_position(tokenizer) for entry in pending.prompt_logprobs))

    def _next_logprobs(self, pending: PendingOutput) -> tuple[PositionLogprobs, ...]:
        new = [entry.to_position(self._processed.tokenizer) for entry in pending.logprobs]
        if not self._is_cumulative:
            return tuple(new)
        self._logprobs.extend(new)
        return tuple(self._logprobs)
