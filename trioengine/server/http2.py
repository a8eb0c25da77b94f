"""Hypercorn's HTTP/2 protocol with the backpressure that it means to have."""

from typing import Any

from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, H2Protocol, StreamBuffer


class Http2Protocol(H2Protocol):
    """Handlers wait while their client's window is closed.

    Hypercorn's buffer lets a handler go on after every piece that it takes *out*, also after none: with a closed window
    it takes out nothing on every write, so a handler whose client reads nothing filled memory at 500 MB a second.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stream_buffers = _BoundedBuffers()


class _BoundedBuffer(StreamBuffer):
    """Lets its handler go on when little is left in it, and not before."""

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= BUFFER_HIGH_WATER:
            await self._paused.clear()
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes:
        length = min(len(self.buffer), max_length)
        data = bytes(self.buffer[:length])
        del self.buffer[:length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


class _BoundedBuffers(dict[int, StreamBuffer]):
    """The buffers of a connection's streams. Hypercorn makes each, and uses it before anyone else could swap it."""

    def __setitem__(self, stream_id: int, buffer: StreamBuffer) -> None:
        buffer.__class__ = _BoundedBuffer
        super().__setitem__(stream_id, buffer)
