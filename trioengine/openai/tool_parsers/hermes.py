"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3 and many others."""

from collections.abc import Sequence

from trioengine.openai.tool_parsers.base import (
    BufferedParser,
    CallObjectReader,
    ToolEvent,
)

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_SPACE = " \t\n\r"


class HermesParser(BufferedParser):
    """Text, and calls between markers; see `ToolParser`."""

    def __init__(self) -> None:
        super().__init__()
        self._call: CallObjectReader | None = None
        """As long as it has not started, the buffer holds all from behind its marker on."""
        self._is_behind_call = False
        """Whether a closing marker may come."""

    def finish(self) -> Sequence[ToolEvent]:
        """What was still held back, at the end of the text."""
        while self._call is not None and not self._call.has_started:
            self._give_up()
            self._take_steps()
        if self._call is not None:
            self._call.finish()
        elif not (self._is_behind_call and CLOSE.startswith(self._buffer.lstrip(_SPACE))):
            self._plain.add(self._buffer)
        self._plain.finish()
        return self._events.take()

    def _step(self) -> bool:
        if self._call is not None:
            return self._step_call(self._call)
        return self._step_behind_call() if self._is_behind_call else self._step_text()

    def _step_text(self) -> bool:
        if not self._take_text(OPEN):
            return False
        self._place, self._call = 0, CallObjectReader(self._events)
        return True

    def _step_call(self, call: CallObjectReader) -> bool:
        if not self._read_call(call):
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
