"""`CoalescingChannel`: how one request's outputs reach its reader.

A trio memory channel of size one. While the reader has not taken the object sent last, new output is merged into that
object instead of being sent, so a slow reader gets one larger output, no token is lost, and memory stays bounded by
the output itself. Putting never waits.
"""

import contextlib
import sys
from collections.abc import Sequence

import trio

from trioengine.errors import TrioEngineError
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.frontend.pending_output import AnyPendingOutput, new_pending_output, next_pending_output
from trioengine.types.output import FinishReason


class CoalescingChannel:
    """One producer (it is a `frontend.sink.Sink`), one reader.

    "Not taken" covers two places: the channel's buffer, and the way to a reader that was asleep and has been handed
    the object but has not run yet. Merging is right in both, because the reader looks at the object only after it has
    marked it as taken, with no await between.
    """

    def __init__(self, *, n: int = 1, is_final_only: bool = False, interval: int = 1) -> None:
        """For a request of `n` answers, which end one by one.

        With `is_final_only` everything is held until the end, and the reader is woken once. With an `interval`, what
        follows the first output is held until there are so many tokens.
        """
        self._send, self._receive = trio.open_memory_channel[AnyPendingOutput](1)
        self._last = new_pending_output(n)
        self._is_delivered = False
        self._min_tokens = sys.maxsize if is_final_only else 0
        """Fewer tokens than this are held until there are as many; 0 holds nothing."""
        self._min_later_tokens = self._min_tokens if interval == 1 else max(interval, self._min_tokens)

    def put_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """Keep what became known of the prompt for the first output."""
        self._pending().put_prompt(num_cached_tokens, logprobs)

    def put_weight_version(self, version: str) -> None:
        """Keep whose weights compute what comes next."""
        self._pending().put_weight_version(version)

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
        self._pending().put(text, token_ids, finish_reason, stop_reason, logprobs, index)
        self._deliver()

    def fail(self, error: TrioEngineError) -> None:
        """Give the reader an error, after all output that it has not read yet."""
        self._pending().fail(error)
        self._deliver()

    async def receive(self) -> AnyPendingOutput:
        """Wait for output. A cancelled call takes nothing.

        Raises:
            trio.EndOfChannel: the last output was received before.
        """
        pending = await self._receive.receive()
        pending.is_taken = True
        return pending

    def close(self) -> None:
        """The reader leaves. Later output is dropped."""
        self._receive.close()

    def _pending(self) -> AnyPendingOutput:
        """The object that new output goes into: the one not taken yet, else a new one."""
        last = self._last
        if last.is_taken:
            self._last = last = next_pending_output(last)
            self._is_delivered = False
        return last

    def _deliver(self) -> None:
        """Send the newest object unless it is on its way already, or held because more follows."""
        last = self._last
        if not self._is_delivered and (not self._min_tokens or last.is_last or last.has_at_least(self._min_tokens)):
            self._is_delivered = True
            self._min_tokens = self._min_later_tokens
            # The object before was taken, so the buffer is empty: this never raises WouldBlock. A reader that has left
            # has its abort on the way.
            with contextlib.suppress(trio.BrokenResourceError):
                self._send.send_nowait(last)
        if last.is_last:
            self._send.close()
