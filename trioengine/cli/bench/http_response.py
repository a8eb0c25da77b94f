"""HTTP/1.1 responses and server-sent events out of bytes, as cheaply as a load generator needs it. No I/O.

It reads what servers send; unlike a client for general use it checks little and keeps no headers.
"""

import enum

_HEAD_END = b"\r\n\r\n"
_LINE_END = b"\r\n"


class _State(enum.Enum):
    HEAD = enum.auto()
    LENGTH_BODY = enum.auto()
    UNTIL_CLOSE = enum.auto()
    CHUNK_HEAD = enum.auto()
    CHUNK_BODY = enum.auto()
    CHUNK_END = enum.auto()
    TRAILER = enum.auto()
    DONE = enum.auto()


class ResponseParser:
    """One response, fed as it comes. `status` is 0 until the head is complete."""

    def __init__(self) -> None:
        self.status = 0
        self.closes_connection = False
        self._state = _State.HEAD
        self._waiting = b""
        self._remaining_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether the whole response was fed."""
        return self._state is _State.DONE

    def feed(self, data: bytes) -> bytes:
        """The body's bytes that became known with `data`; no data means that the peer has closed.

        Raises:
            ValueError: this is no HTTP response, or it ends too early.
        """
        if not data:
            if self._state is not _State.UNTIL_CLOSE:
                raise ValueError("the connection closed in the middle of a response")
            self._state = _State.DONE
            return b""
        self._waiting += data
        body: list[bytes] = []
        while self._waiting and self._state is not _State.DONE and self._advance(body):
            pass
        return b"".join(body)

    def _advance(self, body: list[bytes]) -> bool:
        """Take one part of what waits; whether there was a whole one."""
        match self._state:
            case _State.HEAD:
                return self._take_head()
            case _State.LENGTH_BODY | _State.CHUNK_BODY:
                self._take_body(body)
            case _State.UNTIL_CLOSE:
                body.append(self._waiting)
                self._waiting = b""
            case _State.CHUNK_HEAD:
                line = self._take_line()
                if line is None:
                    return False
                self._remaining_bytes = int(line.partition(b";")[0], 16)
                self._state = _State.CHUNK_BODY if self._remaining_bytes else _State.TRAILER
            case _State.CHUNK_END:
                if self._take_line() is None:
                    return False
                self._state = _State.CHUNK_HEAD
            case _State.TRAILER:
                line = self._take_line()
                if line is None:
                    return False
                if not line:
                    self._state = _State.DONE
            case _State.DONE:
                return False
        return True

    def _take_head(self) -> bool:
        head, end, rest = self._waiting.partition(_HEAD_END)
        if not end:
            return False
        self._waiting = rest
        status_line, *lines = head.split(_LINE_END)
        protocol, _, status = status_line.partition(b" ")
        if not protocol.startswith(b"HTTP/1."):
            raise ValueError(f"not an HTTP/1 response: {status_line[:80]!r}")
        self.status = int(status[:3])
        if self.status < 200:  # Informational; the real one follows.
            return True
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self.closes_connection = headers.get(b"connection", b"").lower() == b"close" or protocol == b"HTTP/1.0"
        self._state = self._body_state(headers)
        return True

    def _body_state(self, headers: dict[bytes, bytes]) -> _State:
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            return _State.CHUNK_HEAD
        if b"content-length" in headers:
            self._remaining_bytes = int(headers[b"content-length"])
            return _State.LENGTH_BODY if self._remaining_bytes else _State.DONE
        if self.status in (204, 304):
            return _State.DONE
        self.closes_connection = True
        return _State.UNTIL_CLOSE

    def _take_body(self, body: list[bytes]) -> None:
        part = self._waiting[: self._remaining_bytes]
        self._waiting = self._waiting[len(part) :]
        self._remaining_bytes -= len(part)
        body.append(part)
        if not self._remaining_bytes:
            self._state = _State.DONE if self._state is _State.LENGTH_BODY else _State.CHUNK_END

    def _take_line(self) -> bytes | None:
        line, end, rest = self._waiting.partition(_LINE_END)
        if not end:
            return None
        self._waiting = rest
        return line


class EventSplitter:
    """The data of server-sent events, fed as they come. Comments are left out."""

    def __init__(self) -> None:
        self._waiting = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that became complete with these bytes."""
        *events, self._waiting = (self._waiting + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return [data for event in events if (data := _event_data(event))]


def _event_data(event: bytes) -> bytes:
    lines = (line.removeprefix(b"data:").removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)
