"""Patterns of JSON schemas: JavaScript's notation, checked, and turned into that of the compiler, which is Rust's."""

import re
from collections.abc import Mapping

_HEX = r"[0-9A-Fa-f]"
_PATTERN_TOKEN = re.compile(
    rf"\\[pP](?:\{{[^}}]*\}}|.)|\\[xuU]\{{{_HEX}{{1,8}}\}}|\\x{_HEX}{{2}}|\\u{_HEX}{{4}}|\\U{_HEX}{{8}}|\\.|.",
    re.DOTALL,
)
_SPACES = r"\t\n\x0b\x0c\r \xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_IN_RUST: Mapping[str, str] = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}
"""What JavaScript's escapes mean, in or outside of a class."""
_ESCAPE = re.compile(
    rf"\\(?:[dDwWsSbBnrtfvck0-9]|[pP](?:\{{[^}}]*\}}|.)|x{_HEX}{{2}}|u{_HEX}{{4}}|u\{{{_HEX}{{1,8}}\}}|[^A-Za-z<>])",
    re.DOTALL,
)
_FLAGS = re.compile(r"\(\?[a-zA-Z-]+[:)]")
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_NO_LITERAL = frozenset([r"\b", r"\B", r"\k", *(rf"\{digit}" for digit in range(1, 10))])
"""Word boundaries and back references, outside of classes."""
_DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|"
    r"02-(?:0[1-9]|1\d|2[0-8]))|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[zZ]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
FORMAT_PATTERNS: Mapping[object, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
}
"""RFC 3339, where the compiler would take any February 29th and any leap second; here there are no leap seconds."""


def pattern_fault(value: object) -> str | None:
    """Patterns are JavaScript's, the compiler's are Rust's: what the two read differently is refused, and a control
    character where it is not one of many, for the compiler would take the pattern without it. In a negated class, or
    as one end of a range, it only stands for what is never written."""
    if not isinstance(value, str):
        return "must be a string"
    if _FLAGS.search(value):
        return "has flags, which are not supported"
    tokens = _pattern_tokens(value)
    in_class = is_negated = False
    for index, token in enumerate(tokens):
        before, after = tokens[index - 1] if index else "", tokens[index + 1] if index + 1 < len(tokens) else ""
        if token.startswith("\\") and not _ESCAPE.fullmatch(token):
            return f"has {token[:12]}, which is no escape in JavaScript"
        if not in_class:
            in_class, is_negated = token == "[", after == "^"
            if in_class and tokens[index + 1 + is_negated : index + 2 + is_negated] == ["]"]:
                return "has a class of characters that is empty or begins with ]"
            if token == "(" and _LOOK_AROUND.match("".join(tokens[index : index + 4])):
                return "has look-ahead or look-behind, which is not supported"
            if token in _NO_LITERAL:
                return f"has {token}, which is not supported"
            if token == "{" and after == ",":
                return "has a repetition without its least number"
            if is_lost(_spelled(token)):
                return "has a control character, which is not supported here"
        elif token == "]":
            in_class = False
        elif token == "[" or (token in ("&", "-", "~") and after == token):
            return f"has {token} in a class of characters, where it must be escaped"
        elif is_lost(_spelled(token)) and not is_negated:
            ends_range = before == "-" and tokens[index - 2] not in (token, "[")
            starts_range = after == "-" and tokens[index + 2 : index + 3] not in ([token], ["]"])
            if not (starts_range or ends_range):
                return "has a control character, which is not supported here"
    return None


def _pattern_tokens(pattern: str) -> list[str]:
    return [match[0] for match in _PATTERN_TOKEN.finditer(pattern)]


def is_lost(character: str) -> bool:
    """Whether JSON writes a character only as `\\u` and its number: the compiler leaves it out of strings."""
    return (character < " " or character == "\x7f") and character not in "\b\t\n\f\r"


def pattern_for_compiler(pattern: str) -> str:
    """A pattern in Rust's notation, whose classes of characters have no U+0001."""
    result: list[str] = []
    in_class = False
    for token in _pattern_tokens(pattern):
        if in_class:
            result.append(_IN_RUST.get(token, token))
            if token == "]":
                in_class = False
                result.append(r"&&[^\x01]]")
        elif token == "[":
            in_class = True
            result.append("[[")
        elif token[:2] in ("\\p", "\\P"):
            result.append(rf"[{token}&&[^\x01]]")
        else:
            result.append(r"[^\n\r\x{2028}\x{2029}]" if token == "." else _IN_RUST.get(token, token))
    return "".join(result)


def _spelled(token: str) -> str:
    """The character that a piece of a pattern spells; a space for what is no single character."""
    if not token.startswith("\\"):
        return token
    if token[1] in "xuU" and len(token) > 2:
        number = int(token[2:].strip("{}") or "20", 16)
        return chr(number) if number < 0x110000 else " "
    return {"0": "\0", "v": "\v", "c": "\x01"}.get(token[1], " ")
