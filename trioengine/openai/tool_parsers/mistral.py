"""`[TOOL_CALLS]`, as Mistral's models write it: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` until 2024, and
`[TOOL_CALLS]name[ARGS]{...}` for each call since then.
"""

import re
from collections.abc import Sequence

import attrs

from trioengine.openai.tool_parsers.base import (
    BufferedParser,
    CallObjectReader,
    JsonValueReader,
    ReadState,
    ToolEvent,
)

MARKER = "[TOOL_CALLS]"
ARGUMENTS_MARKER = "[ARGS]"
_CALL_ID_MARKER = "[CALL_ID]"
_SPACE = " \t\n\r"
_NAME = re.compile(r"[\w.\-/:]+")
_CALL_ID = re.compile(r"\w*")


class MistralParser(BufferedParser):
    """Text, and calls behind markers; see `ToolParser`."""

    def __init__(self) -> None:
        super().__init__()
        self._is_behind_marker = False
        self._call: CallObjectReader | None = None
        """An object of a list."""
        self._is_in_list = False
        self._arguments: JsonValueReader | None = None
        """Of a call whose name stood before it."""

    def finish(self) -> Sequence[ToolEvent]:
        """What was still held back, at the end of the text."""
        while self._arguments is None and self._is_behind_marker and not (self._call and self._call.has_started):
            self._give_up()
            self._take_steps()
        if self._call is not None and self._call.has_started:
            self._call.finish()
        elif self._arguments is None:
            self._plain.add(self._buffer)
        self._plain.finish()
        return self._events.take()

    def _step(self) -> bool:
        if self._arguments is not None:
            return self._step_arguments(self._arguments)
        if self._call is not None:
            return self._step_object(self._call)
        if self._is_in_list:
            return self._step_between()
        return self._step_marker() if self._is_behind_marker else self._step_text()

    def _step_text(self) -> bool:
        if not self._take_text(MARKER):
            return False
        self._is_behind_marker = True
        return True

    def _step_marker(self) -> bool:
        """Behind a marker comes a list, or a name and arguments."""
        rest = self._buffer.lstrip(_SPACE)
        if rest.startswith("["):
            inside = rest[1:].lstrip(_SPACE)
            if not inside:
                return False
            if inside[0] == "{":
                self._place = len(self._buffer) - len(inside)
                self._call = CallObjectReader(self._events)
                return True
        else:
            head = _read_head(self._buffer)
            if isinstance(head, _Head):
                self._plain.at_call()
                self._events.start(head.name)
                self._buffer = self._buffer[head.length :]
                self._arguments = JsonValueReader()
                return True
            if head is ReadState.OPEN:
                return False
        self._give_up()
        return True

    def _step_arguments(self, arguments: JsonValueReader) -> bool:
        place = arguments.feed(self._buffer, 0)
        self._events.arguments(self._buffer[:place])
        self._buffer = self._buffer[place:]
        if arguments.state is ReadState.OPEN:
            return False
        self._arguments, self._is_behind_marker = None, False
        return True

    def _step_object(self, call: CallObjectReader) -> bool:
        if not self._read_call(call):
            return False
        if call.has_started:
            self._call, self._is_in_list, self._is_behind_marker = None, True, False
        else:
            self._give_up()
        return True

    def _step_between(self) -> bool:
        """Behind an object of a list comes another one, or the list's end."""
        rest = self._buffer.lstrip(_SPACE)
        if rest.startswith("]"):
            self._buffer, self._is_in_list = rest[1:], False
            return True
        inside = rest[1:].lstrip(_SPACE) if rest.startswith(",") else rest
        if not inside:
            return False
        if inside[0] == "{" and inside is not rest:
            self._place = len(self._buffer) - len(inside)
            self._call = CallObjectReader(self._events)
            return True
        self._is_in_list = False
        return True

    def _give_up(self) -> None:
        """What was taken for a call was text."""
        if self._is_behind_marker:
            self._plain.add(MARKER)
        self._call, self._is_behind_marker, self._is_in_list = None, False, False


@attrs.frozen
class _Head:
    """What stands before the arguments of a call."""

    name: str
    length: int


def _read_head(text: str) -> _Head | ReadState:
    """The head with which `text` begins. OPEN when it may be one, BROKEN when it is none."""
    place = _skip_space(text, 0)
    name = _NAME.match(text, place)
    if name is None:
        return ReadState.OPEN if place == len(text) else ReadState.BROKEN
    place = _skip_space(text, name.end())
    for marker in (_CALL_ID_MARKER, ARGUMENTS_MARKER):
        rest = text[place:]
        if marker.startswith(rest):
            return ReadState.OPEN
        if rest.startswith(marker):
            place = _skip_space(text, place + len(marker))
            if marker == _CALL_ID_MARKER and (call_id := _CALL_ID.match(text, place)) is not None:
                place = _skip_space(text, call_id.end())
    if place == len(text):
        return ReadState.OPEN
    return _Head(name[0], place) if text[place] == "{" else ReadState.BROKEN


def _skip_space(text: str, place: int) -> int:
    return len(text) - len(text[place:].lstrip(_SPACE))
