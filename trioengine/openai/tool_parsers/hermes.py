"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3 and many others."""

from collections.abc import Sequence

from trioengine.openai.tool_parsers.base import (
    CallObjectReader,
    PlainText,
    ReadState,
    ToolEvent,
    ToolEvents,
    held_length,
)

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_SPACE = " \t\n\r"


class HermesParser:
    """Text, and calls between markers; see `ToolParser`."""

    def __init__(self) -> None:
        self._events = ToolEvents()
        self._plain = PlainText(self._events)
        self._call: CallObjectReader | None = None
        self._buffer = ""
        """What is not decided yet. In a call that has not started: all of it, from behind its marker on."""
        self._place = 0
        """How much of the buffer the call has read."""
        self._is_behind_call = False
        """Whether a closing marker may come."""

    def feed(self, text: str) -> Sequence[ToolEvent]:
        """What is certain after this piece."""
        self._buffer += text
        while self._step():
            pass
        return self._events.take()

    def finish(self) -> Sequence[ToolEvent]:
        """What was still held back, at the end of the text."""
        while self._call is not None and not self._call.has_started:
            self._give_up()
            while self._step():
                pass
        if self._call is not None:
            self._call.finish()
        elif not (self._is_behind_call and CLOSE.startswith(self._buffer.lstrip(_SPACE))):
            self._plain.add(self._buffer)
        self._plain.finish()
        return self._events.take()

    def _step(self) -> bool:
        """Take something from the buffer; whether there may be more to take."""
        if self._call is not None:
            return self._step_call(self._call)
        return self._step_behind_call() if self._is_behind_call else self._step_text()

    def _step_text(self) -> bool:
        before, marker, after = self._buffer.partition(OPEN)
        if marker:
            self._plain.add(before)
            self._buffer, self._place, self._call = after, 0, CallObjectReader(self._events)
            return True
        held = held_length(self._buffer, (OPEN,))
        self._plain.add(self._buffer[: len(self._buffer) - held])
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _step_call(self, call: CallObjectReader) -> bool:
        was_started = call.has_started
        self._place = call.feed(self._buffer, self._place)
        if call.has_started:
            if not was_started:
                self._plain.at_call()
            self._buffer, self._place = self._buffer[self._place :], 0
        if call.state is ReadState.OPEN:
            return False
        if call.has_started:
            self._call, self._is_behind_call = None, True
        else:
            self._give_up()
        return True

    def _step_behind_call(self) -> bool:
        """After a call comes its closing marker, another call's object, or text."""
        rest = self._buffer.lstrip(_SPACE)
        if rest.startswith(CLOSE):
            self._buffer = rest[len(CLOSE) :]
        elif CLOSE.startswith(rest):
            return False
        self._is_behind_call = False
        return True

    def _give_up(self) -> None:
        """The marker was text."""
        self._plain.add(OPEN)
        self._call = None
