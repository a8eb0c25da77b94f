"""Where a request's outputs go: the one thing that `Frontend` asks of the shell around it."""

from collections.abc import Sequence
from typing import Protocol

from trioengine.errors import TrioEngineError
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.types.output import FinishReason


class Sink(Protocol):
    """Receives what is new for one request. No method waits or raises."""

    def put_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """Take what became known of the prompt: it belongs to the output that comes next, and is none by itself.

        Args:
            num_cached_tokens: of the prompt, found in the prefix cache; counts when it is not 0.
            logprobs: of the prompt's next tokens, from its second on.
        """
        ...

    def put_weight_version(self, version: str) -> None:
        """What comes from now on was computed with these weights. No output by itself."""
        ...

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[LogprobEntry] = (),
        index: int = 0,
    ) -> None:
        """Take new text and tokens of one answer, and one of `logprobs` for each token where they were asked for.

        With a `finish_reason` it is the last call for this `index`.
        """
        ...

    def fail(self, error: TrioEngineError) -> None:
        """End the request with an error. What was put before stays readable."""
        ...


class ChildSink:
    """What one of several answers puts, with its index. The prompt, which all share, is the first one's to tell."""

    __slots__ = ("_index", "_sink")

    def __init__(self, sink: Sink, index: int) -> None:
        self._sink = sink
        self._index = index

    def put_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """As `Sink`."""
        if self._index == 0:
            self._sink.put_prompt(num_cached_tokens, logprobs)

    def put_weight_version(self, version: str) -> None:
        """As `Sink`."""
        self._sink.put_weight_version(version)

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[LogprobEntry] = (),
        index: int = 0,
    ) -> None:
        """As `Sink`; its own index counts."""
        del index
        self._sink.put(text, token_ids, finish_reason, stop_reason, logprobs, self._index)

    def fail(self, error: TrioEngineError) -> None:
        """As `Sink`: of all answers."""
        self._sink.fail(error)
