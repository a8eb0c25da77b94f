"""What all parsers of tool calls share: the events they give, how text is held back, and how a call's JSON is read.

A parser is fed a model's text in pieces and tells text from calls. However the text is split, the events joined are
the same: what is decided depends on the text only, never on where a piece ends. Nothing is lost: markup that turns out
to be none is text, save white space around calls. Nothing is invented: arguments are what the model wrote, also where
its text was cut.
"""

import enum
import json
import re
from collections.abc import Collection, Sequence
from typing import Protocol, TypeAlias

import attrs


@attrs.frozen
class TextDelta:
    """More of the answer's text."""

    text: str


@attrs.frozen
class CallStart:
    """A call begins. Its arguments follow, in one piece or several."""

    index: int
    """Its place among the calls of the answer."""
    name: str


@attrs.frozen
class ArgumentsDelta:
    """More of the arguments of the call that was started last, which are the text of a JSON object."""

    index: int
    text: str


ToolEvent: TypeAlias = TextDelta | CallStart | ArgumentsDelta


class ToolParser(Protocol):
    """Tells text from calls."""

    def feed(self, text: str) -> Sequence[ToolEvent]:
        """What is certain after this piece."""
        ...

    def finish(self) -> Sequence[ToolEvent]:
        """What was still held back, at the end of the text."""
        ...


class ToolEvents:
    """Collects events, and numbers calls."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._events: list[ToolEvent] = []

    def text(self, text: str) -> None:
        """Add text, if there is any."""
        if text:
            self._events.append(TextDelta(text))

    def start(self, name: str) -> None:
        """Add the start of a call."""
        self._events.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        if text:
            self._events.append(ArgumentsDelta(self.num_calls - 1, text))

    def take(self) -> list[ToolEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


class PlainText:
    """Text that stands before, between and behind calls: white space around calls is left out."""

    def __init__(self, events: ToolEvents) -> None:
        self._events = events
        self._held_space = ""
        self._follows_call = False

    def add(self, text: str) -> None:
        """Add text; white space at its end waits for what follows."""
        text = self._held_space + text
        if self._follows_call:
            text = text.lstrip()
        stripped = text.rstrip()
        self._held_space = text[len(stripped) :]
        if stripped:
            self._events.text(stripped)
            self._follows_call = False

    def at_call(self) -> None:
        """A call has begun here."""
        self._held_space = ""
        self._follows_call = True

    def finish(self) -> None:
        """The end: white space that followed text is text."""
        if not self._follows_call:
            self._events.text(self._held_space)
        self._held_space = ""


def held_length(text: str, markers: Collection[str]) -> int:
    """How long the longest end of `text` is with which one of the markers could begin; not a whole marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - length :]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0


class ReadState(enum.Enum):
    """How far a value has been read."""

    OPEN = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()
    """It is none; what was consumed last is the last that could belong to one."""


_SPACE = " \t\n\r"
_STRING_END = re.compile(r'["\\]')
_OUTSIDE_STRINGS = re.compile(r"[\s0-9A-Za-z+\-.,:]*")
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")


class JsonValueReader:
    """Finds the end of a JSON value, of which it checks strings and brackets only."""

    def __init__(self) -> None:
        self.state = ReadState.OPEN
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False

    def feed(self, text: str, start: int) -> int:
        """Read on from `start`; the place in `text` up to which it belongs to the value."""
        place, end = start, len(text)
        while place < end and self.state is ReadState.OPEN:
            if self._is_escaped:
                self._is_escaped = False
                place += 1
            elif self._in_string:
                place = self._read_string(text, place)
            elif self._is_scalar:
                place = _match_end(_SCALAR, text, place)
                if place < end:
                    self.state = ReadState.DONE
            else:
                place = self._read_outside(text, place)
        return place

    def _read_string(self, text: str, place: int) -> int:
        found = _STRING_END.search(text, place)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            if self._depth == 0:
                self.state = ReadState.DONE
        return found.end()

    def _read_outside(self, text: str, place: int) -> int:
        character = text[place]
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            if self._depth == 0:
                self.state = ReadState.DONE
        elif self._depth:
            stop = _match_end(_OUTSIDE_STRINGS, text, place)
            if stop == place:
                self.state = ReadState.BROKEN
            return stop
        elif _match_end(_SCALAR, text, place) > place:
            self._is_scalar = True
            return place
        else:
            self.state = ReadState.BROKEN
            return place
        return place + 1


def _match_end(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    assert found is not None, "it matches nothing too"
    return found.end()


class _Expects(enum.Enum):
    """What comes next in an object of a call, white space left out."""

    OBJECT = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


_NAME_KEY = "name"
_ARGUMENTS_KEYS = ("arguments", "parameters")


class CallObjectReader:
    """Reads `{"name": "...", "arguments": {...}}`, whose keys may come in any order, and reports it as a call.

    The call starts when the name is known and the arguments have begun, or when the object ends. Until then nothing is
    reported, so that the text can still be taken for something else.
    """

    def __init__(self, events: ToolEvents, names: Collection[str] | None = None) -> None:
        """Start before the object.

        Args:
            events: where the call is reported.
            names: an object with another name is no call. None takes any.
        """
        self.state = ReadState.OPEN
        self.has_started = False
        self._events = events
        self._names = names
        self._expects = _Expects.OBJECT
        self._key = ""
        self._value: JsonValueReader | None = None
        self._read = ""
        """The key or value so far, where it is not passed on at once."""
        self._name: str | None = None
        self._arguments: str | None = None
        """What was read of them before the name."""
        self._has_arguments = False
        self._passes_on = False

    def feed(self, text: str, start: int) -> int:
        """Read on from `start`; the place in `text` up to which it belongs to the object."""
        place = start
        while place < len(text) and self.state is ReadState.OPEN:
            if self._value is not None:
                place = self._feed_value(text, place)
            elif text[place] in _SPACE:
                place += 1
            elif self._expects in (_Expects.FIRST_KEY, _Expects.KEY) and text[place] == '"':
                self._begin_value()
            elif self._expects is _Expects.VALUE:
                self._expects = _Expects.COMMA
                self._begin_value()
                self._begin_arguments(text[place])
            else:
                place += self._take_mark(text[place])
        return place

    def finish(self) -> None:
        """The text was cut: what was held of the arguments of a started call is passed on."""
        is_in_arguments = self._expects is _Expects.COMMA and self._key in _ARGUMENTS_KEYS and self._value is not None
        if self.has_started and is_in_arguments and not self._has_arguments and not self._passes_on:
            self._events.arguments(self._read)

    def _take_mark(self, mark: str) -> int:
        match self._expects, mark:
            case _Expects.OBJECT, "{":
                self._expects = _Expects.FIRST_KEY
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case _Expects.COMMA, ",":
                self._expects = _Expects.KEY
            case ((_Expects.COMMA | _Expects.FIRST_KEY), "}"):
                self._end()
                return 1 if self.state is ReadState.DONE else 0
            case _:
                self.state = ReadState.BROKEN
                return 0
        return 1

    def _begin_value(self) -> None:
        self._value = JsonValueReader()
        self._read = ""
        self._passes_on = False

    def _begin_arguments(self, first: str) -> None:
        if self._key in _ARGUMENTS_KEYS and not self._has_arguments and self._name is not None:
            self._start()
            # A string holds the text of the object, so it is passed on when it is whole.
            self._passes_on = first != '"'

    def _feed_value(self, text: str, place: int) -> int:
        value = self._value
        assert value is not None
        stop = value.feed(text, place)
        if self._passes_on:
            self._events.arguments(text[place:stop])
        else:
            self._read += text[place:stop]
        if value.state is ReadState.BROKEN:
            self.state = ReadState.BROKEN
        elif value.state is ReadState.DONE:
            self._value = None
            self._take_value()
        return stop

    def _take_value(self) -> None:
        if self._expects in (_Expects.FIRST_KEY, _Expects.KEY):
            key = _string(self._read)
            self._key, self._expects = key or "", _Expects.COLON
            if key is None:
                self.state = ReadState.BROKEN
        elif self._key == _NAME_KEY and self._name is None:
            self._take_name()
        elif self._key in _ARGUMENTS_KEYS and not self._has_arguments:
            self._has_arguments = True
            if self.has_started:
                if not self._passes_on:
                    self._events.arguments(_unquoted(self._read))
            else:
                self._arguments = _unquoted(self._read)

    def _take_name(self) -> None:
        name = _string(self._read)
        if not name or (self._names is not None and name not in self._names):
            self.state = ReadState.BROKEN
            return
        self._name = name
        if self._arguments is not None:
            self._start()
            self._events.arguments(self._arguments)

    def _start(self) -> None:
        assert self._name is not None
        self.has_started = True
        self._events.start(self._name)

    def _end(self) -> None:
        if self._name is None:
            self.state = ReadState.BROKEN
            return
        self.state = ReadState.DONE
        if not self.has_started:
            self._start()
            self._events.arguments("{}")


class BufferedParser:
    """The part that all parsers share: what is not decided yet, and steps that take from it."""

    def __init__(self) -> None:
        self._events = ToolEvents()
        self._plain = PlainText(self._events)
        self._buffer = ""
        """What is not decided yet."""
        self._place = 0
        """How much of the buffer a call has read."""

    def feed(self, text: str) -> Sequence[ToolEvent]:
        """What is certain after this piece."""
        self._buffer += text
        self._take_steps()
        return self._events.take()

    def _take_steps(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Take something from the buffer; whether there may be more to take."""
        raise NotImplementedError

    def _take_text(self, marker: str) -> bool:
        """Take text, and the marker behind it; whether it is there. What may be its beginning is held back."""
        before, found, after = self._buffer.partition(marker)
        if found:
            self._plain.add(before)
            self._buffer = after
            return True
        end = len(self._buffer) - held_length(self._buffer, (marker,))
        self._plain.add(self._buffer[:end])
        self._buffer = self._buffer[end:]
        return False

    def _read_call(self, call: CallObjectReader) -> bool:
        """Let a call read on; whether it has ended. Until it has started, all of it stays in the buffer."""
        was_started = call.has_started
        self._place = call.feed(self._buffer, self._place)
        if call.has_started:
            if not was_started:
                self._plain.at_call()
            self._buffer, self._place = self._buffer[self._place :], 0
        return call.state is not ReadState.OPEN


def _string(text: str) -> str | None:
    """The string that a JSON text is of; None where it is none."""
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) and value.isprintable() else None


def _unquoted(text: str) -> str:
    """Arguments that were written as a string, which holds their JSON; others as they are."""
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text)) or "{}"
    except ValueError:
        return text
