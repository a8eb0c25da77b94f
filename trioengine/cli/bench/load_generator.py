"""Loads an OpenAI-compatible server over raw sockets: completions, streamed, with the time of every event.

A worker has one connection at a time, keeps it while the server does, and sends its next request when the answer to the
last has ended. Nothing here knows what is done with the times.
"""

import contextlib
import json
import random
import socket
import time
import urllib.parse
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, cast

import attrs
import trio

from trioengine.cli.bench.http_response import EventSplitter, ResponseParser
from trioengine.cli.bench.report import StreamTimes
from trioengine.errors import BenchError, ConfigError, TrioEngineError

MAX_READ_BYTES = 65536
TOKEN_IDS = range(1000, 10000)
"""Ordinary words in the vocabulary of every model that is worth a benchmark."""
WORDS = ("time", "house", "water", "music", "letter", "winter", "garden", "number", "silver", "market", "window")

PromptContent: TypeAlias = list[int] | str


@attrs.frozen
class ServerAddress:
    """Where a server is."""

    host: str
    port: int
    prefix: str

    @classmethod
    def from_url(cls, url: str) -> "ServerAddress":
        """From a base URL, with or without `/v1` at its end.

        Raises:
            ConfigError: this is no URL of an HTTP server.
        """
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:
            port = None
        if parts.scheme != "http" or not parts.hostname or port is None or not url.isascii():
            raise ConfigError(f"--base-url must be like http://127.0.0.1:8000, not {url!r}.", option="base_url")
        return cls(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))


class Connection:
    """One connection, for one request at a time. Leaving its block closes it."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._stream: trio.SocketStream | None = None
        self._request = b""
        self._is_unanswered_reuse = False
        """Whether nothing has come back yet for a request on a connection that served another before."""

    async def __aenter__(self) -> "Connection":
        await trio.lowlevel.checkpoint()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up, in the middle of an answer too. Does not wait."""
        if self._stream is not None:
            self._stream.socket.close()
            self._stream = None

    async def send(self, method: str, path: str, body: bytes = b"") -> None:
        """Send a request; connects where there is no connection."""
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        head = (
            f"{method} {self._address.prefix}{path} HTTP/1.1\r\nHost: {host}:{self._address.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode("ascii") + body
        self._is_unanswered_reuse = self._stream is not None
        await self._send()

    async def receive(self, parser: ResponseParser) -> bytes:
        """More of the body, empty where only other parts of the response came.

        Raises:
            BenchError: the server has hung up, or talks something else.
        """
        try:
            data = await self._receive()
            if not data and self._is_unanswered_reuse:
                # The server gave the idle connection up before it saw the request, as any server may.
                self._is_unanswered_reuse = False
                self.close()
                await self._send()
                data = await self._receive()
            self._is_unanswered_reuse = False
            body = parser.feed(data)
        except (ValueError, trio.BrokenResourceError) as error:
            raise BenchError(f"The server's answer is broken: {error}.") from error
        if parser.is_complete and parser.closes_connection:
            self.close()
        return body

    async def _send(self) -> None:
        if self._stream is None:
            self._stream = await _connect(self._address)
        with contextlib.suppress(trio.BrokenResourceError):  # What `_receive` meets tells more.
            await self._stream.send_all(self._request)

    async def _receive(self) -> bytes:
        """Some bytes, or none when the server has hung up."""
        assert self._stream is not None
        try:
            return bytes(await self._stream.receive_some(MAX_READ_BYTES))
        except trio.BrokenResourceError:
            if self._is_unanswered_reuse:
                return b""
            raise

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of a whole response."""
        await self.send(method, path, body)
        parser, parts = ResponseParser(), list[bytes]()
        while not parser.is_complete:
            parts.append(await self.receive(parser))
        return parser.status, b"".join(parts)


@attrs.frozen(kw_only=True)
class CompletionLoad:
    """What every request of a load has in common."""

    model: str
    num_output_tokens: int
    stop: str | None = None

    def body(self, prompt: PromptContent) -> bytes:
        """The request's body. It generates exactly `num_output_tokens` and ends its stream with the usage."""
        fields: dict[str, object] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.stop is not None:
            fields["stop"] = self.stop
        return json.dumps(fields).encode()


@attrs.define
class CompletionTimes(StreamTimes):
    """The times of one streamed completion, and the text of each of its outputs."""

    texts: list[str] = attrs.field(factory=list[str])


async def find_model(connection: Connection) -> str:
    """The first model that the server serves.

    Raises:
        BenchError: it says of none.
    """
    status, body = await connection.fetch("GET", "/v1/models")
    try:
        return json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"The server names no model: status {status}, {body[:200]!r}.") from error


def random_prompt(rng: random.Random, num_tokens: int, *, takes_tokens: bool) -> PromptContent:
    """A prompt that no other request has: so many token ids, or about as many tokens of text."""
    if takes_tokens:
        return rng.choices(TOKEN_IDS, k=num_tokens)
    return " ".join(rng.choices(WORDS, k=num_tokens))


def joined(first: PromptContent, second: PromptContent) -> PromptContent:
    """Two prompts of one kind as one."""
    if isinstance(first, str) or isinstance(second, str):
        return f"{first} {second}".strip()
    return first + second


async def stream_completion(connection: Connection, body: bytes, times: CompletionTimes) -> None:
    """Send a request and note every output's time and text in `times`, to the end of the answer.

    Raises:
        BenchError: the server refused or broke off.
    """
    times.sent_s = time.monotonic()
    await connection.send("POST", "/v1/completions", body)
    parser, splitter, refusal = ResponseParser(), EventSplitter(), list[bytes]()
    is_whole = False
    while not parser.is_complete:
        data = await connection.receive(parser)
        now_s = time.monotonic()
        if parser.status != 200:
            refusal.append(data)
            continue
        for event in splitter.feed(data):
            if event == b"[DONE]":
                is_whole = True
            else:
                _note_event(event, now_s, times)
    if parser.status != 200:
        raise BenchError(f"The server answered {parser.status}: {b''.join(refusal)[:300].decode(errors='replace')}")
    if not is_whole:
        raise BenchError("The server's stream ended without [DONE].")
    if not times.num_output_tokens:
        # A server that sends no usage.
        times.num_output_tokens = len(times.outputs_s)


async def run_load(
    address: ServerAddress, load: CompletionLoad, prompts: Sequence[PromptContent], *, concurrency: int
) -> list[CompletionTimes]:
    """Send a request for each prompt, at most `concurrency` at once, and return the times of each.

    Raises:
        BenchError: one failed; the others are ended.
    """
    times = [CompletionTimes(sent_s=0.0) for _ in prompts]
    remaining = iter(list(zip(prompts, times, strict=True)))

    async def work() -> None:
        async with Connection(address) as connection:
            for prompt, its_times in remaining:
                await stream_completion(connection, load.body(prompt), its_times)

    with first_error():
        async with trio.open_nursery() as nursery:
            for _ in range(min(concurrency, len(prompts))):
                nursery.start_soon(work)
    return times


@contextlib.contextmanager
def first_error() -> Generator[None]:
    """Raises the first of a group of our errors by itself: they failed for one reason, most likely."""
    errors: Sequence[BaseException] = ()
    try:
        yield
    except* TrioEngineError as failed:
        errors = failed.exceptions
    # Not up there: Python 3.11.2 makes a group of what is raised there.
    if errors:
        raise errors[0] from None


def _note_event(event: bytes, now_s: float, times: CompletionTimes) -> None:
    try:
        chunk = cast("dict[str, Any]", json.loads(event))
        if "error" in chunk:
            raise BenchError(f"The server broke off: {str(chunk['error'])[:300]}")
        for choice in chunk.get("choices", ()):
            text = choice.get("text") or ""
            # A last chunk that only says why the answer ended is no output.
            if text or not choice.get("finish_reason"):
                times.outputs_s.append(now_s)
                times.texts.append(text)
        if usage := chunk.get("usage"):
            times.num_prompt_tokens = usage["prompt_tokens"]
            times.num_output_tokens = usage["completion_tokens"]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise BenchError(f"The server sent what is no chunk of a completion: {event[:200]!r}") from error


async def _connect(address: ServerAddress) -> trio.SocketStream:
    try:
        stream = await trio.open_tcp_stream(address.host, address.port)
    except OSError as error:
        raise BenchError(f"Cannot connect to {address.host} port {address.port}: {error}") from error
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    return stream
