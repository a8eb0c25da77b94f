"""An HTTP/1.1 client for tests that says exactly the bytes it is told to, and can vanish by FIN or by RST.

Knows only as much of HTTP as it takes to find where a response ends.
"""

import socket
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import attrs
import trio

RECEIVE_BYTES = 64 * 1024


class ConnectionEndedError(EOFError):
    """The server ended the connection in the middle of what was being read."""


@attrs.frozen
class ResponseHead:
    """Status line and headers of a response. Header names are in lower case."""

    status: int
    headers: tuple[tuple[str, str], ...]

    def header(self, name: str) -> str | None:
        """The first value of this header, or None."""
        return next((value for key, value in self.headers if key == name.lower()), None)


@attrs.frozen
class RawResponse:
    """A whole response."""

    head: ResponseHead
    body: bytes

    @property
    def status(self) -> int:
        return self.head.status


class RawHttpClient:
    """One TCP connection. Reads raise `ConnectionEndedError` at an early end; every method is cancellable."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._has_ended = False

    async def send(self, data: bytes) -> None:
        """Send exactly these bytes."""
        view = memoryview(data)
        while view:
            view = view[await self._sock.send(view) :]

    async def send_request(
        self, method: str, path: str, *, headers: Sequence[tuple[str, str]] = (), body: bytes = b""
    ) -> None:
        """Send one request; with a body, also its `content-length`."""
        await self.send(request_bytes(method, path, headers=headers, body=body))

    async def request(
        self, method: str, path: str, *, headers: Sequence[tuple[str, str]] = (), body: bytes = b""
    ) -> RawResponse:
        """Send one request and read its response."""
        await self.send_request(method, path, headers=headers, body=body)
        return await self.read_response(is_head=method == "HEAD")

    async def read_head(self) -> ResponseHead:
        """The next response's head. Interim responses (100 Continue) count as responses."""
        status_line, *lines = (await self._read_until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = [line.partition(":") for line in lines]
        headers = tuple((name.lower(), value.strip()) for name, _, value in fields)
        return ResponseHead(status=int(status_line.split(" ", 2)[1]), headers=headers)

    async def read_chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        num_bytes = int((await self._read_until(b"\r\n")).split(b";")[0], 16)
        chunk = await self.read_exactly(num_bytes)
        if await self.read_exactly(2) != b"\r\n":
            raise ValueError("a chunk does not end where it says")
        return chunk

    async def read_body(self, head: ResponseHead) -> bytes:
        """The whole body that belongs to `head`."""
        if head.header("transfer-encoding") == "chunked":
            parts: list[bytes] = []
            while part := await self.read_chunk():
                parts.append(part)
            return b"".join(parts)
        length = head.header("content-length")
        return await self.read_to_end() if length is None else await self.read_exactly(int(length))

    async def read_response(self, *, is_head: bool = False) -> RawResponse:
        """The next response, whole."""
        head = await self.read_head()
        has_no_body = is_head or head.status in (204, 304) or head.status < 200
        return RawResponse(head, b"" if has_no_body else await self.read_body(head))

    async def read_exactly(self, num_bytes: int) -> bytes:
        """The next `num_bytes` bytes."""
        while len(self._buffer) < num_bytes:
            if not await self._receive():
                raise ConnectionEndedError(f"ended after {len(self._buffer)} of {num_bytes} bytes")
        return self._take(num_bytes)

    async def read_some(self) -> bytes:
        """Whatever comes next; empty once the server has closed."""
        if not self._buffer:
            await self._receive()
        return self._take(len(self._buffer))

    async def read_to_end(self) -> bytes:
        """Everything until the server closes. A reset counts as the end."""
        while await self._receive():
            pass
        return self._take(len(self._buffer))

    def send_fin(self) -> None:
        """Half-close: the server reads the end of the stream, and this side can still read."""
        self._sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Vanish with an RST (SO_LINGER 0)."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def close(self) -> None:
        """Close the socket: FIN, or RST if something was left unread. Closing twice is fine."""
        self._sock.close()

    async def _read_until(self, end: bytes) -> bytes:
        while (index := self._buffer.find(end)) == -1:
            if not await self._receive():
                raise ConnectionEndedError(f"ended before {end!r}, after {bytes(self._buffer[-100:])!r}")
        return self._take(index + len(end))[: -len(end)]

    async def _receive(self) -> bool:
        if self._has_ended:
            return False
        try:
            data = await self._sock.recv(RECEIVE_BYTES)
        except ConnectionError:
            data = b""
        self._has_ended = not data
        self._buffer += data
        return not self._has_ended

    def _take(self, num_bytes: int) -> bytes:
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return data


@asynccontextmanager
async def open_raw_http(url: str, *, receive_buffer_bytes: int | None = None) -> AsyncGenerator[RawHttpClient]:
    """A connection to the server at `url` (its path is ignored). Closed when the block ends.

    `receive_buffer_bytes` makes the kernel hold little for a client that does not read.
    """
    address = urlsplit(url)
    with trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        await sock.connect((address.hostname or "127.0.0.1", address.port or 80))
        yield RawHttpClient(sock)


def request_bytes(method: str, path: str, *, headers: Sequence[tuple[str, str]] = (), body: bytes = b"") -> bytes:
    """The bytes of one request with a `host` header; with a body, also its `content-length`."""
    fields = [("host", "localhost"), *headers]
    if body:
        fields.append(("content-length", str(len(body))))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunk_bytes(data: bytes) -> bytes:
    """One chunk of a chunked body; for empty data the chunk that ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)
