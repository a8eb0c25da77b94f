"""Frames byte by byte, as RFC 6455 (5.2) has them, and a WebSocket client that sends what it is told to."""

import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import attrs
import trio

from trioengine.testing.raw_http import RawHttpClient, ResponseHead, open_raw_http

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
MASK = b"\x12\x34\x56\x78"
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
UPGRADE = (
    ("connection", "Upgrade"),
    ("upgrade", "websocket"),
    ("sec-websocket-version", "13"),
    ("sec-websocket-key", KEY),
)


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True, length: int | None = None
) -> bytes:
    """One frame of a client's. `length`: how many bytes of length are used, where not the fewest."""
    num_bytes = len(payload)
    mask_bit = 0x80 if masked else 0
    head = bytes(((0x80 if fin else 0) | rsv << 4 | opcode,))
    if length == 2 or (length is None and 126 <= num_bytes < 65536):
        head += bytes((mask_bit | 126,)) + struct.pack("!H", num_bytes)
    elif length == 8 or (length is None and num_bytes >= 65536):
        head += bytes((mask_bit | 127,)) + struct.pack("!Q", num_bytes)
    else:
        head += bytes((mask_bit | num_bytes,))
    if not masked:
        return head + payload
    return head + MASK + bytes(byte ^ MASK[place % 4] for place, byte in enumerate(payload))


def close_frame(code: int, reason: bytes = b"") -> bytes:
    """A close frame of a client's."""
    return frame(CLOSE, struct.pack("!H", code) + reason)


@attrs.frozen
class Received:
    """A frame of the server's."""

    opcode: int
    payload: bytes

    @property
    def code(self) -> int | None:
        """Of a close frame; None where it says none."""
        assert self.opcode == CLOSE
        return struct.unpack("!H", self.payload[:2])[0] if self.payload else None


class FrameClient:
    """A client of a WebSocket that was accepted."""

    def __init__(self, http: RawHttpClient) -> None:
        self.http = http

    async def send(self, *frames: bytes) -> None:
        await self.http.send(b"".join(frames))

    async def receive(self) -> Received:
        """The next frame. It is checked: whole, without a mask, no reserved bit."""
        first, second = await self.http.read_exactly(2)
        assert first & 0xF0 == 0x80
        assert second & 0x80 == 0
        length = second
        if length == 126:
            length = int.from_bytes(await self.http.read_exactly(2), "big")
            assert length >= 126
        elif length == 127:
            length = int.from_bytes(await self.http.read_exactly(8), "big")
            assert length >= 65536
        return Received(first & 0xF, await self.http.read_exactly(length))

    async def receive_close(self) -> Received:
        """The next close frame, and that nothing follows it."""
        while (received := await self.receive()).opcode != CLOSE:
            pass
        assert await self.http.read_to_end() == b""
        return received


async def upgrade(http: RawHttpClient, path: str, headers: Sequence[tuple[str, str]] = ()) -> ResponseHead:
    """Ask for a WebSocket."""
    own = {name for name, _ in headers}
    fields = [*((name, value) for name, value in UPGRADE if name not in own), *headers]
    await http.send_request("GET", path, headers=[(name, value) for name, value in fields if value])
    return await http.read_head()


@asynccontextmanager
async def open_frames(
    url: str, path: str = "/", headers: Sequence[tuple[str, str]] = (), **options: int
) -> AsyncGenerator[FrameClient]:
    """A WebSocket to the server at `url`."""
    with trio.fail_after(20):
        async with open_raw_http(url, **options) as http:
            head = await upgrade(http, path, headers)
            assert head.status == 101, head
            yield FrameClient(http)
