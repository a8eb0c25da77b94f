"""`PendingOutput`: output of one request that nobody has read yet, and what makes a `RequestOutput` of it."""

from collections.abc import Sequence

import attrs

from trioengine.errors import TrioEngineError
from trioengine.frontend.input_processor import ProcessedRequest
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.types.output import CompletionOutput, FinishReason, PositionLogprobs, RequestOutput


@attrs.define(eq=False)
class PendingOutput:
    """Grows until its reader takes it. A `Sink`: what is put is merged into it."""

    texts: list[str] = attrs.field(factory=list[str])
    token_ids: list[int] = attrs.field(factory=list[int])
    logprobs: list[LogprobEntry] | None = None
    """One for each of `token_ids`, or none. No list where nobody asks, as one is made for every token."""
    num_cached_tokens: int = 0
    prompt_logprobs: list[LogprobEntry] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_version: str | None = None
    """Where it has changed."""
    error: TrioEngineError | None = None
    """Comes after the tokens beside it."""

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None

    @property
    def has_output(self) -> bool:
        """Whether there is something to read besides an error."""
        return bool(self.token_ids or self.texts)

    def has_at_least(self, num_tokens: int) -> bool:
        """Whether there are so many tokens to read."""
        return len(self.token_ids) >= num_tokens

    def put_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """Add what became known of the prompt."""
        self.num_cached_tokens = num_cached_tokens or self.num_cached_tokens
        if logprobs:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *logprobs]

    def put_weight_version(self, version: str) -> None:
        """The newest counts."""
        self.weight_version = version

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[LogprobEntry] = (),
        index: int = 0,
    ) -> None:
        """Add new text and tokens, and the ending if this is it. There is no other answer than the first."""
        del index
        if text:
            self.texts.append(text)
        self.token_ids.extend(token_ids)
        if logprobs:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(logprobs)
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def fail(self, error: TrioEngineError) -> None:
        """Add an error as the ending. The first one counts."""
        self.error = self.error or error


@attrs.define(eq=False)
class ParallelPendingOutput:
    """As `PendingOutput`, for a request of several answers."""

    num_open: int
    """Answers that have not ended, here or in what was taken before."""
    answers: dict[int, PendingOutput] = attrs.field(factory=dict[int, PendingOutput])
    """Those with something new, by index."""
    num_cached_tokens: int = 0
    prompt_logprobs: list[LogprobEntry] = attrs.field(factory=list[LogprobEntry])
    weight_version: str | None = None
    error: TrioEngineError | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.num_open == 0 or self.error is not None

    @property
    def has_output(self) -> bool:
        """Whether there is something to read besides an error."""
        return bool(self.answers)

    def has_at_least(self, num_tokens: int) -> bool:
        """Whether there are so many tokens of one answer to read, or the end of one."""
        return any(answer.is_last or len(answer.token_ids) >= num_tokens for answer in self.answers.values())

    def put_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """Add what became known of the prompt."""
        self.num_cached_tokens = num_cached_tokens or self.num_cached_tokens
        self.prompt_logprobs.extend(logprobs)

    def put_weight_version(self, version: str) -> None:
        """The newest counts."""
        self.weight_version = version

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[LogprobEntry] = (),
        index: int = 0,
    ) -> None:
        """Add new text and tokens of one answer, and its ending if this is it."""
        answer = self.answers.get(index)
        if answer is None:
            self.answers[index] = answer = PendingOutput()
        answer.put(text, token_ids, finish_reason, stop_reason, logprobs)
        if finish_reason is not None:
            self.num_open -= 1

    def fail(self, error: TrioEngineError) -> None:
        """Add an error as the ending of all. The first one counts."""
        self.error = self.error or error


AnyPendingOutput = PendingOutput | ParallelPendingOutput


def new_pending_output(n: int) -> AnyPendingOutput:
    """An empty one for a request of so many answers."""
    return PendingOutput() if n == 1 else ParallelPendingOutput(n)


def next_pending_output(before: AnyPendingOutput) -> AnyPendingOutput:
    """An empty one for what comes after `before`."""
    return PendingOutput() if isinstance(before, PendingOutput) else ParallelPendingOutput(before.num_open)


class OutputBuilder:
    """Makes the outputs of one request of one answer: whole texts for CUMULATIVE, what is new otherwise."""

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
        "_weight_version",
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
        self._weight_version: str | None = None

    def build(self, pending: AnyPendingOutput) -> RequestOutput:
        """The next output, which shares nothing that still changes."""
        assert isinstance(pending, PendingOutput)
        if self._num_generated_tokens == 0:
            self._read_prompt(pending)
        if pending.weight_version is not None:
            self._weight_version = pending.weight_version
        output = self.build_answer(pending, 0)
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
            self._weight_version,
        )

    def build_answer(self, pending: PendingOutput, index: int) -> CompletionOutput:
        """What is new in one answer, or all of it."""
        texts, token_ids = pending.texts, pending.token_ids
        self._num_generated_tokens += len(token_ids)
        if self._is_cumulative:
            self._texts.extend(texts)
            self._token_ids.extend(token_ids)
            texts, token_ids = self._texts, self._token_ids
        # By place, which is faster: this runs for every token.
        return CompletionOutput(
            index,
            "".join(texts),
            tuple(token_ids),
            pending.finish_reason,
            pending.stop_reason,
            self._next_logprobs(pending) if self._has_logprobs else None,
        )

    def _read_prompt(self, pending: PendingOutput) -> None:
        """Keep what the first output says of the prompt."""
        self._num_cached_tokens = pending.num_cached_tokens
        if self._processed.sampling.prompt_logprobs is not None:
            self._prompt_logprobs = _positions(self._processed, pending.prompt_logprobs or ())

    def _next_logprobs(self, pending: PendingOutput) -> tuple[PositionLogprobs, ...]:
        has_ranks = self._processed.sampling.logprob_token_ids is None
        new = [entry.to_position(self._processed.tokenizer, has_ranks=has_ranks) for entry in pending.logprobs or ()]
        if not self._is_cumulative:
            return tuple(new)
        self._logprobs.extend(new)
        return tuple(self._logprobs)


class ParallelOutputBuilder:
    """As `OutputBuilder`, for a request of several answers.

    An output has the answers with something new, in their order; for CUMULATIVE, all that have begun, and those that
    have ended keep their reason. What belongs to the prompt comes with the first answer's first output.
    """

    def __init__(self, processed: ProcessedRequest, *, is_cumulative: bool) -> None:
        self._processed = processed
        self._is_cumulative = is_cumulative
        self._builders = [OutputBuilder(processed, is_cumulative=is_cumulative) for _ in range(processed.sampling.n)]
        self._newest: dict[int, CompletionOutput] = {}
        self._prompt_entries: list[LogprobEntry] = []
        self._prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
        self._has_begun = False
        """The first answer."""
        self._num_generated_tokens = 0
        self._num_cached_tokens = 0
        self._weight_version: str | None = None

    def build(self, pending: AnyPendingOutput) -> RequestOutput:
        """The next output, which shares nothing that still changes."""
        assert isinstance(pending, ParallelPendingOutput)
        self._read_prompt(pending)
        if pending.weight_version is not None:
            self._weight_version = pending.weight_version
        if not self._is_cumulative:
            self._newest = {}
        for index, answer in pending.answers.items():
            self._newest[index] = self._builders[index].build_answer(answer, index)
            self._num_generated_tokens += len(answer.token_ids)
        prompt_logprobs = self._prompt_logprobs
        if not self._is_cumulative:
            self._prompt_logprobs = None
        return RequestOutput(
            self._processed.external_id,
            self._processed.prompt_token_ids,
            tuple(self._newest[index] for index in sorted(self._newest)),
            pending.num_open == 0,
            self._num_generated_tokens,
            self._num_cached_tokens,
            prompt_logprobs,
            self._weight_version,
        )

    def _read_prompt(self, pending: ParallelPendingOutput) -> None:
        self._num_cached_tokens = pending.num_cached_tokens or self._num_cached_tokens
        if self._processed.sampling.prompt_logprobs is None or self._has_begun:
            return
        self._prompt_entries.extend(pending.prompt_logprobs)
        if 0 in pending.answers:
            self._has_begun = True
            self._prompt_logprobs = _positions(self._processed, self._prompt_entries)


def output_builder(processed: ProcessedRequest, *, is_cumulative: bool) -> OutputBuilder | ParallelOutputBuilder:
    """What makes a request's outputs."""
    builder_class = OutputBuilder if processed.sampling.n == 1 else ParallelOutputBuilder
    return builder_class(processed, is_cumulative=is_cumulative)


def _positions(processed: ProcessedRequest, entries: Sequence[LogprobEntry]) -> tuple[PositionLogprobs | None, ...]:
    """Log probabilities of the prompt; none for its first token."""
    return (None, *(entry.to_position(processed.tokenizer) for entry in entries))
