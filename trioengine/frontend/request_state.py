"""One request as the front end sees it: tokens in, text and an ending out, into its sink."""

from collections.abc import Sequence

from trioengine.errors import TrioEngineError
from trioengine.frontend.input_processor import ProcessedRequest
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.frontend.parent_request import ParentRequest
from trioengine.frontend.sink import Sink
from trioengine.tokenizer.detokenizer import IncrementalDetokenizer
from trioengine.tokenizer.stop_matcher import StopMatcher
from trioengine.types.messages import Finished
from trioengine.types.output import FinishReason


class RequestState:
    """One answer: detokenizes its tokens, finds its stop strings and tells its sink (a `parent_request.Child`)."""

    __slots__ = (
        "_detokenizer",
        "_hides_end_token",
        "_logprobs",
        "_num_untested_tokens",
        "_sink",
        "_stop_matcher",
        "_stops",
        "is_queued",
        "is_registered",
        "last_row_s",
        "num_tokens",
        "parent",
        "slot",
    )

    def __init__(
        self, processed: ProcessedRequest, parent: ParentRequest, sink: Sink, first: "RequestState | None" = None
    ) -> None:
        """`first` is the first of the request's answers, for those behind it."""
        sampling = processed.sampling
        self.slot = -1  # `Frontend` gives it one.
        self.parent = parent
        self.num_tokens = 0
        self.last_row_s: float | None = None
        self.is_registered = True
        self.is_queued = True
        self._sink: Sink | None = sink
        self._detokenizer: IncrementalDetokenizer | None = None
        if sampling.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                processed.tokenizer, processed.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
            )
        self._stops = sampling.stop
        self._stop_matcher: StopMatcher | None = None
        if first is not None and first._stop_matcher is not None:
            self._stop_matcher = first._stop_matcher.another()
        elif sampling.stop:
            self._stop_matcher = StopMatcher(
                sampling.stop, include_stop_str_in_output=sampling.include_stop_str_in_output
            )
        self._logprobs: list[LogprobEntry] | None = None if sampling.logprobs is None else []
        """Of tokens that come next; None where none were asked for."""
        # The token that reaches `min_tokens` is the first whose text may hold a stop string.
        self._num_untested_tokens = max(0, sampling.min_tokens - 1)
        self._hides_end_token = not sampling.include_stop_str_in_output

    @property
    def is_open(self) -> bool:
        """Whether anyone still waits for outputs."""
        return self._sink is not None

    def receive_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """Take what became known of the prompt."""
        if self._sink is not None:
            self._sink.put_prompt(num_cached_tokens, logprobs)

    def receive_logprobs(self, logprobs: Sequence[LogprobEntry]) -> None:
        """Take log probabilities of the tokens that come next, before these."""
        if self._logprobs is not None:
            self._logprobs.extend(logprobs)

    def receive_weight_version(self, version: str) -> None:
        """What comes from now on was computed with these weights."""
        if self._sink is not None:
            self._sink.put_weight_version(version)

    def receive(self, token_ids: Sequence[int], finished: Finished | None) -> bool:
        """Take the tokens of one row, and the core's last word if it came with them.

        Returns:
            Whether a stop string ended it: the core must be told, unless it has ended it too.

        Raises:
            ValueError: log probabilities of a token were asked for and are not there. Nothing was shown.
        """
        sink = self._sink
        if sink is None:
            return False
        logprobs = () if self._logprobs is None else self._take_logprobs(len(token_ids))
        last_shown = len(token_ids)
        has_end_token = finished is not None and finished.reason is FinishReason.STOP and not finished.ends_with_text
        if has_end_token and self._hides_end_token:
            last_shown -= 1  # The end token is reported, but its text is not shown.
        parts: list[str] = []
        num_tokens = self.num_tokens
        self.num_tokens = num_tokens + len(token_ids)
        for position, token_id in enumerate(token_ids):
            stop = self._feed(token_id, num_tokens + position, parts) if position < last_shown else None
            if stop is not None:
                self._sink = None
                end = position + 1
                self.num_tokens = num_tokens + end
                sink.put("".join(parts), token_ids[:end], FinishReason.STOP, stop, logprobs[:end])
                return True
        if finished is None:
            sink.put("".join(parts), token_ids, None, None, logprobs)
            return False
        rest, stop = self._flush()
        self._sink = None
        parts.append(rest)
        reason, stop_reason = (FinishReason.STOP, stop) if stop is not None else _ending(finished)
        sink.put("".join(parts), token_ids, reason, stop_reason, logprobs)
        return stop is not None

    def end(self, reason: FinishReason) -> None:
        """End without the core: whoever waits gets the text held back, and this reason."""
        sink = self._sink
        if sink is not None:
            rest = self._flush()[0]
            self._sink = None
            sink.put(rest, (), reason)

    def fail(self, error: TrioEngineError) -> None:
        """End with an error, which comes after the text held back for a stop string."""
        sink = self._sink
        if sink is not None:
            self.give_up()
            sink.fail(error)

    def give_up(self) -> None:
        """End because another answer has failed, which tells the reader; text held back is shown before."""
        sink, self._sink = self._sink, None
        # The detokenizer is not asked: it may be what failed.
        held = self._stop_matcher.flush() if self._stop_matcher is not None else ""
        if held and sink is not None:
            sink.put(held, ())

    def drop(self) -> None:
        """End because nobody waits any more."""
        self._sink = None

    def _feed(self, token_id: int, num_before: int, parts: list[str]) -> str | None:
        """Add the text of one token that may be shown to `parts`; the stop string it completes, if one."""
        if self._detokenizer is None:
            return None
        text = self._detokenizer.feed(token_id)
        if self._stop_matcher is None or num_before < self._num_untested_tokens:
            parts.append(text)
            return None
        result = self._stop_matcher.feed(text)
        parts.append(result.emit)
        return None if result.matched is None else self._stops[result.matched]

    def _take_logprobs(self, num_tokens: int) -> Sequence[LogprobEntry]:
        assert self._logprobs is not None
        taken, self._logprobs = self._logprobs[:num_tokens], self._logprobs[num_tokens:]
        if len(taken) < num_tokens:
            raise ValueError(f"{num_tokens} tokens came with log probabilities of {len(taken)}")
        return taken

    def _flush(self) -> "tuple[str, str | None]":
        """The text held back, now that no more follows, and the stop string that an incomplete character completes."""
        if self._detokenizer is None:
            return "", None
        rest = self._detokenizer.flush()
        if self._stop_matcher is None:
            return rest, None
        result = self._stop_matcher.feed(rest)
        if result.matched is not None:
            return result.emit, self._stops[result.matched]
        return result.emit + self._stop_matcher.flush(), None


def _ending(finished: Finished) -> tuple[FinishReason, int | str | None]:
    """Why the core ended it, and what is known besides, in vLLM's words."""
    is_repetition = finished.reason is FinishReason.REPETITION
    return finished.reason, "repetition_detected" if is_repetition else finished.stop_token_id
