"""`open_remote`: an engine that a server somewhere else has, as an `EngineClient`: an application changes one line.

Requests go over one WebSocket, by the native forms of `/v1/stream` (`docs/stream-protocol.md`). Where the connection
is lost, whoever waits gets `EngineDeadError`, behind the output that had come; nothing is asked twice by itself. Tokens
are counted and texts are made by the server, so that nothing here needs the model's files.
"""

import math
import secrets
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar, cast

import attrs
import trio

from trioengine.checkpoint.generation import GenerationDefaults
from trioengine.client.interface import EngineClient
from trioengine.client.remote_link import Exchange, RemoteLink, ServerAddress
from trioengine.config.engine import EngineConfig
from trioengine.errors import (
    CodecError,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineGenerateError,
    RequestError,
    TrioEngineError,
)
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.renderer import Renderer
from trioengine.frontend.request_checks import check_request
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.messages import Call, ModelFacts
from trioengine.types.native_json import (
    JsonObject,
    call_to_json,
    from_json,
    output_from_json,
    pooling_from_json,
    reply_from_json,
    to_json,
)
from trioengine.types.output import CompletionOutput, FinishReason, PositionLogprobs, RequestOutput
from trioengine.types.params import RequestOutputKind
from trioengine.types.pooling import EncodeRequest, PoolingOutput
from trioengine.types.request import GenerateRequest, TokensPrompt
from trioengine.types.stream_messages import Endpoint

R = TypeVar("R")

LONG_PROMPT_TOKENS = 32_768
"""Longer ones take over 5 ms to write, which an event loop should not wait for."""


@asynccontextmanager
async def open_remote(
    url: str,
    api_key: str | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncGenerator["RemoteEngine", None]:
    """The engine of the server at `url`, for the length of the block.

    Args:
        url: like `ws://127.0.0.1:8000`; http and https are understood, and a path before `/v1/stream` is kept.
        api_key: the server's, where it has one.
        tokenizer: of the same model, for `tokenizer`, `renderer` and `input_processor`; without it those raise.
        tls: for `wss`, instead of the default context.

    Leaving the block ends every stream and call that is still open with `EngineClosedError`, and the server aborts
    them. An exception of the block leaves it as itself, not in a group.

    Raises:
        PeerUnreachableError: there is no such server.
        AuthenticationError, ForbiddenError: it lets nobody in by this key, or from here.
        ConfigError: this is no URL of a server.
    """
    address = ServerAddress.of(url, tls)
    block_error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            connect_error: TrioEngineError | None = None
            engine = RemoteEngine(address, api_key, tokenizer, nursery)
            try:
                await engine.reconnect()
            except TrioEngineError as error:
                connect_error = error  # Kept out of the nursery, which would wrap it in a group.
            if connect_error is None:
                try:
                    yield engine
                    await engine.say_goodbye()
                except BaseException as error:
                    block_error = error
            else:
                block_error = connect_error
            engine.close()
            nursery.cancel_scope.cancel()
    finally:
        if block_error is not None:
            raise block_error


class RemoteEngine(EngineClient):
    """An open engine of another process, made by `open_remote`; see `EngineClient` for what it promises."""

    def __init__(
        self, address: "ServerAddress", api_key: str | None, tokenizer: Tokenizer | None, nursery: trio.Nursery
    ) -> None:
        self._address = address
        self._api_key = api_key
        self._tokenizer = tokenizer
        self._nursery = nursery
        self._connecting = trio.Lock()
        self._link: RemoteLink | None = None
        self._description: _Description | None = None
        self._closed_error: EngineClosedError | None = None

    async def reconnect(self) -> None:
        """Connect again where the connection was lost, for requests that are made from now on. Tasks that call it at
        the same time connect once.

        Raises:
            PeerUnreachableError, AuthenticationError, ForbiddenError: as `open_remote`.
        """
        async with self._connecting:
            if self._closed_error is not None:
                raise attrs.evolve(self._closed_error)
            if self._link is not None and self._link.error is None:
                return
            link = RemoteLink(self._address, self._api_key)
            # What ends the link ends nothing else, so its start alone may raise.
            await self._nursery.start(link.run)
            self._link = link
            self._description = _Description.of(await _only_chunk(link, Endpoint.DESCRIBE, {}))

    def close(self) -> None:
        """End everything. Does not wait; `open_remote` calls it."""
        self._closed_error = EngineClosedError("The engine is closed.")
        if self._link is not None:
            self._link.end(self._closed_error)

    async def say_goodbye(self) -> None:
        """Let the server know that this is meant to be the end; `open_remote` calls it where nothing went wrong."""
        if self._link is not None:
            await self._link.close()

    # What it is

    @property
    def config(self) -> EngineConfig:
        """What the server tells of its engine's options; the others are defaults, whatever they are there."""
        return self._described.config

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        return self._described.model_name

    @property
    def model_config(self) -> ModelFacts:
        """Context length, vocabulary size, end tokens, and what the model can do."""
        return self._described.model

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """What the model's authors recommend. Nothing here applies it by itself."""
        return self._described.generation_defaults

    @property
    def tokenizer(self) -> Tokenizer:
        """The one that `open_remote` was given.

        Raises:
            ConfigError: it was given none.
        """
        if self._tokenizer is None:
            raise ConfigError(
                "This engine is remote and was opened without a tokenizer; give open_remote one of the same model.",
                option="tokenizer",
            )
        return self._tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        """As `tokenizer`. `generate` and `encode` do without it: the server tokenizes."""
        return InputProcessor(self.tokenizer, self.model_config)

    @property
    def renderer(self) -> Renderer:
        """As `tokenizer`."""
        return self.input_processor.renderer

    # What it does

    def generate(self, request: GenerateRequest) -> "RemoteStream":
        """The outputs of a request. Nothing happens before its `async with` is entered."""
        return RemoteStream(self, request)

    async def encode(self, request: EncodeRequest) -> PoolingOutput:
        """The vectors of a prompt. As `EngineClient.encode`."""
        link = self.live_link
        request.pooling.validate()
        check_request(request)
        name = request.request_id or _draw_name()
        with link.exchange(Endpoint.ENCODE, _body(attrs.evolve(request, request_id=name)), name) as exchange:
            chunk = await exchange.next()
            if chunk is None:
                raise EngineGenerateError("The request was aborted.")
            return pooling_from_json(chunk, name)

    async def call(self, call: Call[R]) -> R:
        """Run an operation on all cores. As `EngineClient.call`. Needs a server with `--enable-admin` where it changes
        something.
        """
        chunk = await _only_chunk(self.live_link, Endpoint.CALL, _json(call_to_json(call)))
        return reply_from_json(call, chunk.get("reply"))

    def abort(self, request_id: str) -> None:
        """End all live requests of this client with this caller's id; their streams end with reason "abort"."""
        if self._link is not None:
            self._link.abort(request_id)

    def check_admission(self, n: int = 1, num_prompt_tokens: int = 0) -> None:
        """Return. The server knows whether there is room, and `generate` hears of it."""
        del n, num_prompt_tokens

    def do_log_stats(self) -> None:
        """Nothing: the statistics are the server's."""

    @property
    def dead_error(self) -> EngineDeadError | EngineClosedError | None:
        """Why nothing can be asked now; `reconnect` may end that where it is an `EngineDeadError`."""
        if self._closed_error is not None:
            return self._closed_error
        return None if self._link is None else cast("EngineDeadError | None", self._link.error)

    def check_health(self) -> None:
        """Return while there is a connection.

        Raises:
            EngineDeadError: it was lost.
            EngineClosedError: the block of `open_remote` was left.
        """
        error = self.dead_error
        if error is not None:
            raise attrs.evolve(error)

    @property
    def live_link(self) -> "RemoteLink":
        """The connection, for requests. Raises as `check_health`."""
        self.check_health()
        assert self._link is not None
        return self._link

    @property
    def _described(self) -> "_Description":
        assert self._description is not None, "open_remote has asked for it"
        return self._description


class RemoteStream:
    """The outputs of one request; see `client.interface.OutputStream` for what it promises."""

    def __init__(self, engine: RemoteEngine, request: GenerateRequest) -> None:
        self._engine = engine
        self._request = request
        self._is_entered = False
        self._exchange: Exchange | None = None
        self._name = ""
        self._prompt_token_ids: tuple[int, ...] = ()
        self._whole: _WholeOutput | None = None
        """What came so far, for CUMULATIVE."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; known once the block is entered."""
        return self._entered.num_prompt_tokens

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was changed to make the request fit; known once the block is entered."""
        return self._entered.warnings

    async def __aenter__(self) -> "RemoteStream":
        if self._is_entered:
            raise RuntimeError("A request stream is entered once; call generate() again.")
        self._is_entered = True
        request, engine = self._request, self._engine
        engine.check_health()
        # What the server would say as well; here it says it without JSON, which has no words for some mistakes.
        check_request(request)
        request.sampling.validate()
        self._name = request.request_id or _draw_name()
        sampling = request.sampling
        if sampling.output_kind is RequestOutputKind.CUMULATIVE:
            # A text that is sent again with each of its tokens would be sent n times.
            sampling = attrs.evolve(sampling, output_kind=RequestOutputKind.DELTA)
            self._whole = _WholeOutput(has_logprobs=sampling.logprobs is not None)
        request = attrs.evolve(request, sampling=sampling, request_id=self._name)
        prompt = request.prompt
        if isinstance(prompt, TokensPrompt) and len(prompt.token_ids) > LONG_PROMPT_TOKENS:
            body = await trio.to_thread.run_sync(_body, request, abandon_on_cancel=True)
        else:
            body = _body(request)
            await trio.lowlevel.checkpoint()
        exchange = engine.live_link.exchange(Endpoint.GENERATE, body, self._name)
        try:
            await exchange.wait_started()
        except BaseException:
            exchange.leave()
            raise
        self._exchange = exchange
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        if self._exchange is not None:
            self._exchange.leave()

    def __aiter__(self) -> "RemoteStream":
        return self

    async def __anext__(self) -> RequestOutput:
        exchange = self._entered
        chunk = await exchange.next()
        if chunk is None:
            raise StopAsyncIteration
        output = self._read(chunk)
        if self._whole is None:
            return output
        self._whole.add(output)
        while not output.finished and (chunk := exchange.next_nowait()) is not None:
            output = self._read(chunk)
            self._whole.add(output)
        return self._whole.output(output)

    def _read(self, chunk: Mapping[str, Any]) -> RequestOutput:
        output = output_from_json(chunk, self._name, self._prompt_token_ids)
        self._prompt_token_ids = output.prompt_token_ids
        return output

    @property
    def _entered(self) -> "Exchange":
        if self._exchange is None:
            raise RuntimeError("Enter the stream first: `async with engine.generate(request) as outputs`.")
        return self._exchange


@attrs.define
class _WholeChoice:
    texts: list[str] = attrs.field(factory=list[str])
    token_ids: list[int] = attrs.field(factory=list[int])
    logprobs: list[PositionLogprobs] = attrs.field(factory=list[PositionLogprobs])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class _WholeOutput:
    """Deltas in, whole answers out."""

    def __init__(self, *, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs
        self._choices: dict[int, _WholeChoice] = {}
        self._prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None

    def add(self, delta: RequestOutput) -> None:
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        for new in delta.outputs:
            whole = self._choices.setdefault(new.index, _WholeChoice())
            whole.texts.append(new.text)
            whole.token_ids.extend(new.token_ids)
            whole.logprobs.extend(new.logprobs or ())
            if new.finish_reason is not None:
                whole.finish_reason, whole.stop_reason = new.finish_reason, new.stop_reason

    def output(self, delta: RequestOutput) -> RequestOutput:
        """All so far. `delta` is the newest."""
        choices = [
            CompletionOutput(
                index,
                "".join(whole.texts),
                tuple(whole.token_ids),
                whole.finish_reason,
                whole.stop_reason,
                tuple(whole.logprobs) if self._has_logprobs else None,
            )
            for index, whole in sorted(self._choices.items())
        ]
        return attrs.evolve(delta, outputs=tuple(choices), prompt_logprobs=self._prompt_logprobs)


@attrs.frozen
class _Description:
    model_name: str
    model: ModelFacts
    generation_defaults: GenerationDefaults
    config: EngineConfig

    @classmethod
    def of(cls, chunk: Mapping[str, Any]) -> "_Description":
        try:
            return cls(
                chunk["model_name"],
                from_json(chunk["model"], ModelFacts),
                from_json(chunk["generation_defaults"], GenerationDefaults),
                EngineConfig(served_model_name=chunk["model_name"], **chunk["config"]),
            )
        except (KeyError, TypeError, TrioEngineError) as error:
            raise CodecError(f"The server describes its engine in a way that is not known here: {error!r}") from error


async def _only_chunk(link: RemoteLink, endpoint: Endpoint, body: JsonObject) -> Mapping[str, Any]:
    """The chunk of a request that has one. Cancelling stops the waiting, not the operation."""
    exchange = link.exchange(endpoint, body)
    chunk = await exchange.next()
    if chunk is None:
        raise CodecError("The server's answer is empty.")
    return chunk


def _body(request: GenerateRequest | EncodeRequest) -> JsonObject:
    return _json(to_json(request))


def _json(body: JsonObject) -> JsonObject:
    """The same, if JSON has words for all of it."""
    _check_finite(body, "")
    return body


def _check_finite(value: object, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{path} must be a finite number.", param=path)
    if isinstance(value, dict):
        for key, item in cast("dict[str, object]", value).items():
            _check_finite(item, f"{path}.{key}" if path else key)


def _draw_name() -> str:
    return f"request-{secrets.token_hex(8)}"
