"""`[f(a=1, b="x"), g()]`: calls as Python writes them, in a list that is the whole answer (Llama 3.2 and 4, Olmo)."""

import json
import re
from collections.abc import Collection, Sequence

import attrs

from trioengine.openai.tool_parsers.base import BufferedParser, ToolEvent

PYTHON_START = "<|python_start|>"
PYTHON_END = "<|python_end|>"
MAX_DEPTH = 64
_SPACE = " \t\n\r"
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_STRUCTURE = re.compile(r"""["'()\[\]{}]""")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class PythonicParser(BufferedParser):
    """Calls if the answer is a list of them, and text from where no call follows; see `ToolParser`.

    A call's arguments come in one piece, when the call is whole: they are translated to JSON.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Start with no text. `names` are those of the tools; a call of another function is text."""
        super().__init__()
        self._names = names
        self._scan: _CallScan | None = None
        self._is_text = False

    def finish(self) -> Sequence[ToolEvent]:
        """What was still held back, at the end of the text."""
        rest = self._buffer
        if self._events.num_calls and not self._is_text:
            # What is left of the list's own signs is no text.
            end = rest.lstrip(_SPACE).removeprefix("]").lstrip(_SPACE)
            if not end or PYTHON_END.startswith(end) or end.rstrip() == ",":
                rest = ""
        self._plain.add(rest)
        self._plain.finish()
        return self._events.take()

    def _step(self) -> bool:
        if self._is_text:
            self._plain.add(self._buffer)
            self._buffer = ""
            return False
        if self._scan is not None:
            return self._step_call(self._scan)
        return self._step_between() if self._events.num_calls else self._step_start()

    def _step_start(self) -> bool:
        rest = self._buffer.lstrip(_SPACE)
        if PYTHON_START.startswith(rest):
            return False
        rest = rest.removeprefix(PYTHON_START).lstrip(_SPACE)
        return self._step_sign(rest, "[")

    def _step_between(self) -> bool:
        rest = self._buffer.lstrip(_SPACE)
        if not rest.startswith("]"):
            return self._step_sign(rest, ",")
        rest = rest[1:].lstrip(_SPACE)
        if PYTHON_END.startswith(rest):
            return False
        self._buffer = rest.removeprefix(PYTHON_END)
        self._is_text = True
        return True

    def _step_sign(self, rest: str, sign: str) -> bool:
        """Behind this sign comes a call."""
        if not rest:
            return False
        if rest[0] != sign:
            self._is_text = True
            return True
        call = rest[1:].lstrip(_SPACE)
        if call:
            self._scan = _CallScan(len(self._buffer) - len(call))
        return bool(call)

    def _step_call(self, scan: "_CallScan") -> bool:
        end = scan.read(self._buffer)
        if end is None and not scan.is_broken:
            return False
        self._scan = None
        call = None if end is None else _read_call(self._buffer[scan.start : end])
        if call is None or call.name not in self._names:
            self._is_text = True
            return True
        self._plain.at_call()
        self._events.start(call.name)
        self._events.arguments(call.arguments)
        self._buffer = self._buffer[end:]
        return True


class _CallScan:
    """Looks for the end of a call: the parenthesis that closes its first one."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.is_broken = False
        self._place = start
        self._open: list[str] = []
        self._quote = ""
        self._has_name = False

    def read(self, text: str) -> int | None:
        """The place behind the call; None when it is not whole, or none."""
        if not self._has_name:
            if not self._read_name(text):
                return None
            self._has_name = True
        while self._place < len(text):
            if self._quote:
                if not self._read_string(text):
                    return None
                continue
            found = _STRUCTURE.search(text, self._place)
            if found is None:
                self._place = len(text)
                return None
            self._place = found.end()
            if self._take(found[0]):
                return self._place
            if self.is_broken:
                return None
        return None

    def _read_name(self, text: str) -> bool:
        name = _NAME.match(text, self.start)
        if name is None:
            self.is_broken = True
            return False
        if name.end() == len(text):
            return False
        self.is_broken = text[name.end()] != "("
        self._place = name.end()
        return not self.is_broken

    def _read_string(self, text: str) -> bool:
        """Whether the string ends in `text`; what is left of it is read later."""
        place = self._place
        while place < len(text):
            if text[place] == "\\":
                if place + 1 == len(text):
                    break
                place += 2
            elif text[place] == self._quote:
                self._quote = ""
                self._place = place + 1
                return True
            else:
                place += 1
        self._place = place
        return False

    def _take(self, sign: str) -> bool:
        """Whether this sign ends the call."""
        if sign in "\"'":
            self._quote = sign
        elif sign in _CLOSING:
            self._open.append(_CLOSING[sign])
            self.is_broken = len(self._open) > MAX_DEPTH
        elif self._open and self._open[-1] == sign:
            self._open.pop()
            return not self._open
        else:
            self.is_broken = True
        return False


@attrs.frozen
class _Call:
    name: str
    arguments: str


def _read_call(text: str) -> _Call | None:
    """The call that `text` is; None where its arguments are not names with literals."""
    name = _NAME.match(text)
    assert name is not None, "the scan has seen it"
    reader = _LiteralReader(text[name.end() + 1 : -1])
    try:
        return _Call(name[0], json.dumps(reader.keyword_arguments(), ensure_ascii=False))
    except (_NotALiteralError, ValueError):
        return None


class _NotALiteralError(Exception):
    """The text is none."""


_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_KEYWORD = re.compile(r"([^\W\d]\w*)\s*=")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_SIMPLE_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "/": "/",
    "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip


class _LiteralReader:
    """Reads literals of Python, and of JSON where they differ."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._depth = 0

    def keyword_arguments(self) -> dict[str, object]:
        """`a=1, b=[2]`, to the end."""
        arguments: dict[str, object] = {}
        while self._peek():
            found = _KEYWORD.match(self._text, self._place)
            if found is None or found[1] in arguments:
                raise _NotALiteralError
            self._place = found.end()
            arguments[found[1]] = self._value()
            if self._peek() and not self._took(","):
                raise _NotALiteralError
        return arguments

    def _value(self) -> object:
        sign = self._peek()
        if sign in ('"', "'"):
            return self._strings()
        if sign in ("[", "("):
            return self._list("]" if sign == "[" else ")")
        if sign == "{":
            return self._dictionary()
        if (word := _WORD.match(self._text, self._place)) is not None and word[0] in _WORDS:
            self._place = word.end()
            return _WORDS[word[0]]
        return self._number()

    def _number(self) -> int | float:
        found = _NUMBER.match(self._text, self._place)
        if found is None or len(found[0]) > 300:
            raise _NotALiteralError
        self._place = found.end()
        digits = found[0].replace("_", "")
        number = float(digits) if any(sign in digits for sign in ".eE") else int(digits)
        if number in (float("inf"), float("-inf")):
            raise _NotALiteralError
        return number

    def _strings(self) -> str:
        """A string, or several in a row, which are one."""
        text = ""
        while (quote := self._peek()) in ('"', "'") and quote:
            start = place = self._place + 1
            while self._text[place : place + 1] != quote:
                place += 2 if self._text[place : place + 1] == "\\" else 1
                if place >= len(self._text):
                    raise _NotALiteralError
            text += _ESCAPE.sub(_unescaped, self._text[start:place])
            self._place = place + 1
        # Halves of a surrogate pair, as JSON writes large characters, are one character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _list(self, end: str) -> list[object]:
        items: list[object] = []
        self._enter()
        while not self._took(end):
            items.append(self._value())
            if self._peek() != end and not self._took(","):
                raise _NotALiteralError
        self._depth -= 1
        return items

    def _dictionary(self) -> dict[str, object]:
        items: dict[str, object] = {}
        self._enter()
        while not self._took("}"):
            key = self._value()
            if not isinstance(key, str) or not self._took(":"):
                raise _NotALiteralError
            items[key] = self._value()
            if self._peek() != "}" and not self._took(","):
                raise _NotALiteralError
        self._depth -= 1
        return items

    def _enter(self) -> None:
        self._place += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NotALiteralError

    def _peek(self) -> str:
        """The next sign that is no white space; empty at the end."""
        while self._place < len(self._text) and self._text[self._place] in _SPACE:
            self._place += 1
        return self._text[self._place : self._place + 1]

    def _took(self, sign: str) -> bool:
        if self._peek() != sign:
            return False
        self._place += 1
        return True


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    if code in _SIMPLE_ESCAPES:
        return _SIMPLE_ESCAPES[code]
    if code[0] in "uUx":
        number = int(code[1:], 16) if len(code) > 1 else None
    else:
        number = int(code, 8) if code[0] in "01234567" else None
    if number is None or number > 0x10FFFF:
        return escape[0]
    return chr(number)
