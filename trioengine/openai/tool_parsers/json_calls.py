"""Calls that are the whole answer as JSON, without markup: one object, a list of them, or several in a row.

Llama 3 writes `{"name": ..., "parameters": {...}}`, also behind `<|python_tag|>` and with semicolons between calls.
"""

from collections.abc import Collection, Sequence

from trioengine.openai.tool_parsers.base import (
    BufferedParser,
    CallObjectReader,
    ToolEvent,
)

PYTHON_TAG = "<|python_tag|>"
_BETWEEN = " \t\n\r,;"
_SPACE = " \t\n\r"


class JsonCallsParser(BufferedParser):
    """Calls if the answer begins with one, and text from where no call follows; see `ToolParser`."""

    def __init__(self, names: Collection[str], prefixes: Collection[str] = ()) -> None:
        """Start with no text.

        Args:
            names: of the tools; JSON with another name is text.
            prefixes: markers that may stand before a call.
        """
        super().__init__()
        self._names = names
        self._prefixes = prefixes
        self._call: CallObjectReader | None = None
        """As long as it has not started, the buffer holds all from behind the call before it."""
        self._is_text = False
        self._is_list = False

    def finish(self) -> Sequence[ToolEvent]:
        """What was still held back, at the end of the text."""
        if self._call is not None and self._call.has_started:
            self._call.finish()
        else:
            self._plain.add(self._between_stripped() if self._call is None else self._buffer)
        self._plain.finish()
        return self._events.take()

    def _step(self) -> bool:
        if self._is_text:
            self._plain.add(self._buffer)
            self._buffer = ""
            return False
        return self._step_before_call() if self._call is None else self._step_call(self._call)

    def _step_before_call(self) -> bool:
        rest = self._buffer.lstrip(_BETWEEN if self._events.num_calls else _SPACE)
        for prefix in self._prefixes:
            if prefix.startswith(rest):
                return False
            if rest.startswith(prefix):
                rest = rest[len(prefix) :].lstrip(_SPACE)
        if not rest:
            return False
        if rest[0] == "[" and not self._events.num_calls:
            if not (rest := rest[1:].lstrip(_SPACE)):
                return False
            self._is_list = True
        if rest[0] == "{":
            self._place = len(self._buffer) - len(rest)
            self._call = CallObjectReader(self._events, self._names)
        else:
            self._be_text()
        return True

    def _step_call(self, call: CallObjectReader) -> bool:
        if not self._read_call(call):
            return False
        if call.has_started:
            self._call = None
        else:
            self._be_text()
        return True

    def _be_text(self) -> None:
        self._call, self._is_text = None, True
        self._buffer = self._between_stripped()

    def _between_stripped(self) -> str:
        """The text behind calls, without the end of their list."""
        if not self._events.num_calls:
            return self._buffer
        rest = self._buffer.lstrip(_SPACE)
        if self._is_list:
            rest = rest.removeprefix("]")
        return rest if rest.strip(_BETWEEN) else ""
