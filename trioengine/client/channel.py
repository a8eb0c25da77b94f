"""`CoalescingChannel`: how one request's outputs reach its reader.

A channel of size one. While the reader has not taken the object that waits, new output is merged into that object, so a
slow reader gets one larger output, no token is lost, and memory stays bounded by the output itself. Putting never
waits.
"""

from collections.abc import Sequence

import trio

from trioengine.errors import TrioEngineError
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.frontend.pending_output import AnyPendingOutput, new_pending_output, next_pending_output
from trioengine.types.output import FinishReason


class CoalescingChannel:
    """One producer (it is a `frontend.sink.Sink`), one reader.

    A reader that sleeps is woken, and takes what waits when it runs: what is put between the two is merged like
    everything else. A cancel reaches it before it is woken, when it has taken nothing, or after its next await.
    """

    __slots__ = (
        "_is_closed",
        "_is_final_only",
        "_is_over",
        "_is_ready",
        "_min_later_tokens",
        "_min_tokens",
        "_pending",
        "_reader",
    )

    def __init__(self, *, n: int = 1, is_final_only: bool = False, interval: int = 1) -> None:
        """For a request of `n` answers, which end one by one.

        With `is_final_only` everything is held until the end, and the reader is woken once. With an `interval`, what
        follows the first output is held until there are so many tokens.
        """
        self._pending = new_pending_output(n)
        self._is_ready = False
        """Whether the reader may take `_pending`."""
        self._is_over = False
        """Whether the last output was taken."""
        self._is_closed = False
        self._reader: trio.lowlevel.Task | None = None
        """Sleeps in `receive`."""
        self._is_final_only = is_final_only
        self._min_tokens = 1 if is_final_only else 0
        """Fewer tokens than this are held until there are as many; 0 holds nothing."""
        self._min_later_tokens = interval if interval > 1 else self._min_tokens

    def put_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """Keep what became known of the prompt for the first output."""
        self._pending.put_prompt(num_cached_tokens, logprobs)

    def put_weight_version(self, version: str) -> None:
        """Keep whose weights compute what comes next."""
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
        """Give the reader new output; with a `finish_reason`, the last of this answer."""
        pending = self._pending
        pending.put(text, token_ids, finish_reason, stop_reason, logprobs, index)
        if not self._min_tokens or pending.is_last or self._has_enough(pending):
            self._wake()

    def fail(self, error: TrioEngineError) -> None:
        """Give the reader an error, after all output that it has not read yet."""
        self._pending.fail(error)
        self._wake()

    async def receive(self) -> AnyPendingOutput:
        """Wait for output. A cancelled call takes nothing.

        Raises:
            trio.EndOfChannel: the last output was received before.
            trio.ClosedResourceError: the reader has left.
            trio.BusyResourceError: another task reads.
        """
        if self._is_ready or self._is_over or self._is_closed:
            await trio.lowlevel.checkpoint()
        elif self._reader is not None:
            raise trio.BusyResourceError("another task reads")
        else:
            self._reader = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._stop_waiting)
        if self._is_closed:
            raise trio.ClosedResourceError
        if self._is_over:
            raise trio.EndOfChannel
        pending = self._pending
        self._is_ready = False
        self._is_over = pending.is_last
        self._pending = next_pending_output(pending)
        self._min_tokens = self._min_later_tokens
        return pending

    def close(self) -> None:
        """The reader leaves. Later output is dropped."""
        self._is_closed = True
        self._wake()

    def _has_enough(self, pending: AnyPendingOutput) -> bool:
        return not self._is_final_only and pending.has_at_least(self._min_tokens)

    def _wake(self) -> None:
        self._is_ready = True
        reader = self._reader
        if reader is not None:
            self._reader = None
            trio.lowlevel.reschedule(reader)

    def _stop_waiting(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED
