"""`PendingOutput`: output of one request that nobody has read yet."""

from collections.abc import Sequence

import attrs

from trioengine.errors import TrioEngineError
from trioengine.frontend.input_processor import ProcessedRequest
from trioengine.types.output import CompletionOutput, FinishReason, RequestOutput


@attrs.define(eq=False)
class PendingOutput:
    """Grows until it is taken, and is then its reader's alone. A `Sink`: what is put is merged into it."""

    texts: list[str] = attrs.field(factory=list[str])
    token_ids: list[int] = attrs.field(factory=list[int])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: TrioEngineError | None = None
    """Comes after the tokens beside it."""
    is_taken: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        """Add new text and tokens, and the ending if this is it."""
        if text:
            self.texts.append(text)
        self.token_ids.extend(token_ids)
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def fail(self, error: TrioEngineError) -> None:
        """Add an error as the ending."""
        self.error = error


class OutputBuilder:
    """Makes the outputs of one request: whole texts for CUMULATIVE, what is new otherwise."""

    __slots__ = ("_is_cumulative", "_num_generated_tokens", "_processed", "_texts", "_token_ids")

    def __init__(self, processed: ProcessedRequest, *, is_cumulative: bool) -> None:
        self._processed = processed
        self._is_cumulative = is_cumulative
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._num_generated_tokens = 0

    def build(self, pending: PendingOutput) -> RequestOutput:
        """The next output, which shares nothing that still changes."""
        self._num_generated_tokens += len(pending.token_ids)
        texts, token_ids = pending.texts, pending.token_ids
        if self._is_cumulative:
            self._texts.extend(texts)
            self._token_ids.extend(token_ids)
            texts, token_ids = self._texts, self._token_ids
        output = CompletionOutput(
            index=0,
            text="".join(texts),
            token_ids=tuple(token_ids),
            finish_reason=pending.finish_reason,
            stop_reason=pending.stop_reason,
        )
        return RequestOutput(
            request_id=self._processed.external_id,
            prompt_token_ids=self._processed.prompt_token_ids,
            outputs=(output,),
            finished=pending.finish_reason is not None,
            num_generated_tokens=self._num_generated_tokens,
        )
