"""Reads streams of completions over `/v1/stream`, for `bench frontend --mode ws`: raw sockets, no more than it takes.

Many requests on each connection, each with credits that come back as its chunks are read.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, cast

import trio

from trioengine.cli.bench.load_generator import CompletionLoad, CompletionTimes, ServerAddress, first_error
from trioengine.errors import BenchError
from trioengine.types.stream_messages import PROTOCOL_VERSION, STREAM_PATH, Create, Credit, Hello, write_message

MAX_READ_BYTES = 262_144
CREDITS = 64
CREDITS_AT_ONCE = 32
_PING, _PONG, _CLOSE = 0x9, 0xA, 0x8


class FrameSplitter:
    """Frames of a server's out of bytes: it masks nothing, and sends each message whole."""

    def __init__(self) -> None:
        self._waiting = b""

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete now: opcode and payload."""
        data = self._waiting + data
        frames: list[tuple[int, bytes]] = []
        start = 0
        while len(data) - start >= 2:
            length, payload_start = data[start + 1], start + 2
            if length >= 126:
                payload_start += 2 if length == 126 else 8
                if len(data) < payload_start:
                    break
                length = int.from_bytes(data[start + 2 : payload_start], "big")
            if len(data) - payload_start < length:
                break
            frames.append((data[start] & 0xF, data[payload_start : payload_start + length]))
            start = payload_start + length
        self._waiting = data[start:]
        return frames


def client_frame(payload: bytes, opcode: int = 0x1) -> bytes:
    """A message of a client's. Its mask is all zeros, which leaves the payload as it is."""
    length = len(payload)
    if length < 126:
        head = bytes((0x80 | opcode, 0x80 | length))
    elif length < 65536:
        head = bytes((0x80 | opcode, 0x80 | 126)) + length.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0x80 | 127)) + length.to_bytes(8, "big")
    return head + bytes(4) + payload


class StreamConnection:
    """One connection. Leaving its block, or `close`, hangs up."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._stream: trio.SocketStream | None = None
        self._splitter = FrameSplitter()

    async def __aenter__(self) -> "StreamConnection":
        try:
            self._stream = await trio.open_tcp_stream(self._address.host, self._address.port)
            await self._greet(self._stream)
        except BaseException:
            self.close()
            raise
        return self

    async def _greet(self, stream: trio.SocketStream) -> None:
        address = self._address
        upgrade = (
            f"GET {address.prefix}{STREAM_PATH} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        await stream.send_all(upgrade.encode())
        head = b""
        while b"\r\n\r\n" not in head:
            data = bytes(await stream.receive_some(4096))
            if not data:
                raise BenchError("The server hung up on the upgrade.")
            head += data
        if not head.startswith(b"HTTP/1.1 101 "):
            raise BenchError(f"The server refuses the upgrade: {head[:200]!r}")
        await self.send([write_message(Hello(PROTOCOL_VERSION))])

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up. Does not wait."""
        if self._stream is not None:
            self._stream.socket.close()

    async def send(self, messages: Sequence[str]) -> None:
        """Send these with one write."""
        await self._send(b"".join([client_frame(message.encode()) for message in messages]))

    async def receive(self) -> list[dict[str, Any]]:
        """The next messages.

        Raises:
            BenchError: there are none, for the server has closed.
        """
        assert self._stream is not None
        while True:
            data = bytes(await self._stream.receive_some(MAX_READ_BYTES))
            messages: list[dict[str, Any]] = []
            for opcode, payload in self._splitter.feed(data):
                if opcode == _PING:
                    await self._send(client_frame(payload, _PONG))
                elif opcode == _CLOSE:
                    raise BenchError(f"The server closed: {payload[2:].decode()}.")
                else:
                    messages.append(json.loads(payload))
            if messages:
                return messages
            if not data:
                raise BenchError("The server hung up.")

    async def _send(self, data: bytes) -> None:
        assert self._stream is not None
        await self._stream.send_all(data)


async def run_stream_load(
    address: ServerAddress, load: CompletionLoad, prompt: list[int], *, num_streams: int, num_connections: int
) -> list[CompletionTimes]:
    """Read so many streams to their ends, all at once, on so many connections, and return the times of each.

    Raises:
        BenchError: one failed; the others are ended.
    """
    streams = [CompletionTimes(sent_s=0.0) for _ in range(num_streams)]
    body = cast("dict[str, object]", json.loads(load.body(prompt)))

    async def work(own: Sequence[CompletionTimes]) -> None:
        async with StreamConnection(address) as connection:
            await read_streams(connection, body, own)

    with first_error():
        async with trio.open_nursery() as nursery:
            for index in range(min(num_connections, num_streams)):
                nursery.start_soon(work, streams[index::num_connections])
    return streams


async def read_streams(
    connection: StreamConnection, body: dict[str, object], streams: Sequence[CompletionTimes]
) -> None:
    """Start a request for each stream, and note the time and text of every output."""
    by_id = {str(index): times for index, times in enumerate(streams)}
    await connection.send([write_message(Create(id_, "completions", body, CREDITS)) for id_ in by_id])
    num_read = dict.fromkeys(by_id, 0)
    now_s = time.monotonic()
    for times in streams:
        times.sent_s = now_s
    num_open = len(streams)
    while num_open:
        messages = await connection.receive()
        now_s = time.monotonic()
        credits: list[str] = []
        for message in messages:
            match message["type"]:
                case "chunk":
                    id_ = message["id"]
                    _note_chunk(message["data"], now_s, by_id[id_])
                    num_read[id_] += 1
                    if num_read[id_] % CREDITS_AT_ONCE == 0:
                        credits.append(write_message(Credit(id_, CREDITS_AT_ONCE)))
                case "done":
                    num_open -= 1
                case "error":
                    raise BenchError(f"The server broke off: {str(message['error'])[:300]}")
                case _:
                    pass
        if credits:
            await connection.send(credits)


def _note_chunk(chunk: dict[str, Any], now_s: float, times: CompletionTimes) -> None:
    for choice in chunk.get("choices", ()):
        text = choice.get("text") or ""
        # A last chunk that only says why the answer ended is no output.
        if text or not choice.get("finish_reason"):
            times.outputs_s.append(now_s)
            times.texts.append(text)
