"""`CoalescingChannel`: how one request's outputs reach its reader.

A trio memory channel of size one. While the reader has not taken the object sent last, new output is merged into that
object instead of being sent, so a slow reader gets one larger output, no token is lost, and memory stays bounded by
the output itself. Putting never waits.
"""

import contextlib
from collections.abc import Sequence

import attrs
import trio

from trioengine.errors import TrioEngineError
from trioengine.types.output import FinishReason


@attrs.define(eq=False)
class PendingOutput:
    """What is new for a reader: grows until it is taken, and is then the reader's alone."""

    texts: list[str]
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: TrioEngineError | None = None
    """Comes after the tokens beside it."""
    is_taken: bool = False


class CoalescingChannel:
    """One producer (it is a `frontend.sink.Sink`), one reader.

    "Not taken" covers two places: the channel's buffer, and the way to a reader that was asleep and has been handed
    the object but has not run yet. Merging is right in both, because the reader looks at the object only after it has
    marked it as taken, with no await between.
    """

    def __init__(self, *, is_final_only: bool = False) -> None:
        """With `is_final_only` everything is held until the end, and the reader is woken once."""
        self._send, self._receive = trio.open_memory_channel[PendingOutput](1)
        self._last: PendingOutput | None = None
        self._is_final_only = is_final_only

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        """Give the reader new output; with a `finish_reason`, the last."""
        last = self._last
        if last is not None and not last.is_taken:
            if text:
                last.texts.append(text)
            last.token_ids.extend(token_ids)
            if finish_reason is not None:
                last.finish_reason, last.stop_reason = finish_reason, stop_reason
                self._finish(last)
            return
        pending = PendingOutput([text], list(token_ids), finish_reason, stop_reason)
        self._add(pending, is_last=finish_reason is not None)

    def fail(self, error: TrioEngineError) -> None:
        """Give the reader an error, after all output that it has not read yet."""
        last = self._last
        if last is not None and not last.is_taken:
            last.error = error
            self._finish(last)
        else:
            self._add(PendingOutput([], [], error=error), is_last=True)

    async def receive(self) -> PendingOutput:
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

    def _add(self, pending: PendingOutput, *, is_last: bool) -> None:
        self._last = pending
        if is_last:
            self._deliver(pending)
            self._send.close()
        elif not self._is_final_only:
            self._deliver(pending)

    def _finish(self, last: PendingOutput) -> None:
        if self._is_final_only:
            self._deliver(last)
        self._send.close()

    def _deliver(self, pending: PendingOutput) -> None:
        # The object before was taken, so the buffer is empty: this never raises WouldBlock. A reader that has left has
        # its abort on the way.
        with contextlib.suppress(trio.BrokenResourceError):
            self._send.send_nowait(pending)
