"""What the head of a request says of the body that is to come."""

from collections.abc import Iterable

_LENGTH = b"content-length"
_EXPECTATION = (b"expect", b"100-continue")


def is_too_long(headers: Iterable[tuple[bytes, bytes]], max_body_bytes: int) -> bool:
    """Whether the body is to be longer than that. The names are in lower case."""
    return any(name == _LENGTH and value.isdigit() and int(value) > max_body_bytes for name, value in headers)


def is_waited_with(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the client sends the body when it is told to go on (RFC 9110, 10.1.1). The names are in lower case."""
    return any((name, value.lower()) == _EXPECTATION for name, value in headers)
