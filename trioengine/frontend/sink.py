"""Where a request's outputs go: the one thing that `Frontend` asks of the shell around it."""

from collections.abc import Sequence
from typing import Protocol

from trioengine.errors import TrioEngineError
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.types.output import FinishReason


class Sink(Protocol):
    """Receives what is new for one request. No method waits or raises."""

    def put_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """Take what became known of the prompt: it belongs to the first output, and is none by itself.

        Args:
            num_cached_tokens: of the prompt, found in the prefix cache; counts when it is not 0.
            logprobs: of the prompt's next tokens, from its second on.
        """
        ...

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[LogprobEntry] = (),
    ) -> None:
        """Take new text and tokens, and one of `logprobs` for each where they were asked for.

        With a `finish_reason` it is the last call.
        """
        ...

    def fail(self, error: TrioEngineError) -> None:
        """End the request with an error. What was put before stays readable."""
        ...
