"""Where a request's outputs go: the one thing that `Frontend` asks of the shell around it."""

from collections.abc import Sequence
from typing import Protocol

from trioengine.errors import TrioEngineError
from trioengine.types.output import FinishReason


class Sink(Protocol):
    """Receives what is new for one request. Neither method waits or raises."""

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        """Take new text and tokens. With a `finish_reason` it is the last call."""
        ...

    def fail(self, error: TrioEngineError) -> None:
        """End the request with an error. What was put before stays readable."""
        ...
