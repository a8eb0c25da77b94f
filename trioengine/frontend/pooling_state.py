"""One request for vectors as the front end sees it: it ends once, with vectors or with an error."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trioengine.errors import EngineGenerateError, TrioEngineError
from trioengine.frontend.input_processor import ProcessedEncodeRequest
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.frontend.parent_request import ParentRequest
from trioengine.types.messages import Finished, PooledOutput, unpack_int32
from trioengine.types.output import FinishReason
from trioengine.types.pooling import PoolingOutput


class PoolingSink(Protocol):
    """Receives what came of one request for vectors: one of the two, once. No method waits or raises."""

    def put(self, output: PoolingOutput) -> None:
        """Take the vectors."""
        ...

    def fail(self, error: TrioEngineError) -> None:
        """Take the reason why there are none."""
        ...


class PoolingState:
    """As `RequestState`, for vectors."""

    __slots__ = (
        "_data",
        "_num_cached_tokens",
        "_processed",
        "_sink",
        "is_queued",
        "is_registered",
        "last_row_s",
        "num_tokens",
        "parent",
        "slot",
    )

    def __init__(self, processed: ProcessedEncodeRequest, parent: ParentRequest, sink: PoolingSink) -> None:
        self.slot = -1  # `Frontend` gives it one.
        self.parent = parent
        self.num_tokens = 0
        self.last_row_s: float | None = None
        self.is_registered = True
        self.is_queued = True
        self._processed = processed
        self._sink: PoolingSink | None = sink
        self._data: NDArray[np.float32] | None = None
        self._num_cached_tokens = 0

    @property
    def is_open(self) -> bool:
        """Whether anyone still waits."""
        return self._sink is not None

    def receive_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """Take what became known of the prompt."""
        del logprobs  # Nobody can ask for them.
        self._num_cached_tokens = num_cached_tokens

    def receive_logprobs(self, logprobs: Sequence[LogprobEntry]) -> None:
        """None come."""

    def receive_weight_version(self, version: str) -> None:
        """Vectors do not say it."""

    def receive_pooled(self, data: NDArray[np.float32]) -> None:
        """Take the vectors, which the request's end follows."""
        self._data = data

    def receive(self, token_ids: Sequence[int], finished: Finished | None) -> bool:
        """Take the core's last word. As `RequestState.receive`."""
        if finished is None or self._sink is None:
            return False
        if finished.reason is FinishReason.ABORT:
            self.end(FinishReason.ABORT)
        elif self._data is None:
            raise ValueError("it ended without a vector")
        else:
            sink, self._sink = self._sink, None
            processed = self._processed
            sink.put(
                PoolingOutput(processed.external_id, processed.prompt_token_ids, self._data, self._num_cached_tokens)
            )
        return False

    def end(self, reason: FinishReason) -> None:
        """End without the core: whoever waits hears that nothing will come."""
        self.fail(EngineGenerateError(f"The request has ended without a vector: {reason.value}."))

    def fail(self, error: TrioEngineError) -> None:
        """End with an error."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.fail(error)

    def drop(self) -> None:
        """End because nobody waits any more."""
        self._sink = None

    def give_up(self) -> None:
        """It is the only one, so this never happens."""
        self._sink = None


def vectors_by_slot(pooled: PooledOutput) -> Sequence[tuple[int, NDArray[np.float32]]]:
    """The slots of a message and their vectors, which share its memory and cannot be written."""
    values = np.frombuffer(pooled.values, np.float32)
    entries: list[tuple[int, NDArray[np.float32]]] = []
    start = 0
    columns = (unpack_int32(column) for column in (pooled.slots, pooled.num_rows, pooled.widths))
    for slot, num_rows, width in zip(*columns, strict=True):
        end = start + max(num_rows, 1 if num_rows < 0 else 0) * width
        part = values[start:end]
        entries.append((slot, part if num_rows < 0 else part.reshape(num_rows, width)))
        start = end
    return entries
