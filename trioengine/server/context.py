"""What every request needs, over HTTP or a WebSocket: the engine, and the server's own state. Knows no Quart."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar, cast

import attrs
import trio

from trioengine.client.interface import EngineClient
from trioengine.config.server import GenerationConfig, ServerConfig
from trioengine.errors import (
    DeadlineExceededError,
    EngineClosedError,
    RequestError,
    TrioEngineError,
    UnavailableError,
)
from trioengine.observability.prometheus import MetricsPage
from trioengine.openai.chat_settings import ChatSettings, read_chat_template
from trioengine.openai.translate import (
    ModelBody,
    UnknownFields,
    check_model,
    check_unknown_fields,
    unknown_fields_warning,
)
from trioengine.server.open_requests import OpenRequests
from trioengine.server.responses import Responses
from trioengine.types.messages import LoRAInfo
from trioengine.types.pooling import EncodeRequest
from trioengine.types.request import GenerateRequest

Q = TypeVar("Q", GenerateRequest, EncodeRequest)
T = TypeVar("T")

LONG_BODY_BYTES = 32 * 1024
"""Longer bodies take over 5 ms to parse where they have many small parts, which an event loop should not wait for."""
WARNING_HEADER = "X-TrioEngine-Warning"
_DRAIN_RETRY_S = 5.0


@attrs.frozen
class RequestHead:
    """What the headers of a request say about it."""

    id: str
    """The reply's id, which the engine knows the request by."""
    session_id: str | None
    data_parallel_rank: int | None
    trace_headers: dict[str, str] | None

    def apply(self, engine_request: Q, lora: str | None) -> Q:
        """The same request, with what the headers say, for this adapter."""
        found = {
            "session_id": self.session_id,
            "data_parallel_rank": self.data_parallel_rank,
            "trace_headers": self.trace_headers,
            "lora": lora,
        }
        changes = {name: value for name, value in found.items() if value is not None}
        return attrs.evolve(engine_request, **changes) if changes else engine_request


class MetricsSource(Protocol):
    """What writes statistics out; `observability.prometheus.PrometheusStatLogger` does."""

    def render(self, accept: str | None = None, /) -> MetricsPage:
        """Everything that was counted. `accept` is the scraper's header of this name."""
        ...


@attrs.frozen
class ServerContext:
    """One application's engine and state."""

    engine: EngineClient
    config: ServerConfig = attrs.field(factory=ServerConfig)
    shutdown: trio.Event | None = None
    """Once it is set, new requests are refused."""
    stop: trio.Event | None = None
    """Once it is set, those that run end with an error."""
    metrics: "MetricsSource | None" = None
    """What `/metrics` shows."""
    open_requests: OpenRequests = attrs.field(factory=OpenRequests)
    chat: ChatSettings = attrs.field(
        default=attrs.Factory(lambda context: _chat_settings(cast("ServerContext", context)), takes_self=True)
    )
    """How the model writes tool calls and reasoning, and what requests leave to its authors."""
    loras: dict[str, LoRAInfo] = attrs.field(factory=dict[str, LoRAInfo])
    """The adapters that were there when they were last asked for, by name."""
    responses: Responses = attrs.field(factory=Responses)
    """Those that are kept, and those in the background."""
    started_s: int = attrs.field(factory=lambda: int(time.time()))
    """Unix time."""

    def check_open(self) -> None:
        """Return while new requests are taken.

        Raises:
            UnavailableError: the server drains.
        """
        if self.shutdown is not None and self.shutdown.is_set():
            raise UnavailableError("The server is shutting down.", retry_after_s=_DRAIN_RETRY_S)

    async def check_body(self, body: ModelBody) -> str | None:
        """The LoRA adapter that a body asks for, or None, once its model is known to be served.

        Raises:
            RequestError: the server is strict and the body has unknown fields.
            ModelNotFoundError: nothing here has this name.
        """
        self.check_unknown(body)
        name = self.engine.model_name
        if body.model in self.config.model_alias:
            return None
        if body.model is not None and body.model != name and body.model not in self.loras:
            await self.refresh_loras()
        return check_model(body, name, self.loras)

    def check_unknown(self, body: UnknownFields) -> None:
        """Return unless the server is strict and the body has unknown fields.

        Raises:
            RequestError: naming the first.
        """
        if self.config.strict:
            check_unknown_fields(body)

    async def refresh_loras(self) -> Sequence[LoRAInfo]:
        """Ask which adapters there are. Another server of the same engine may have changed them."""
        self.engine.check_health()  # A core that hangs would let the caller wait.
        infos = await self.engine.list_loras() if self.engine.config.enable_lora else ()
        self.loras.clear()
        self.loras.update((info.name, info) for info in infos)
        return infos

    def warning_headers(self, body: UnknownFields, warnings: Sequence[str] = ()) -> dict[str, str]:
        """The headers that tell what was changed or ignored.

        Raises:
            RequestError: the server is strict, and something was changed.
        """
        if warnings and self.config.strict:
            raise RequestError(f"{warnings[0]}.", param="max_tokens")
        found = (*warnings, *unknown_fields_warning(body))
        return {WARNING_HEADER: "; ".join(found)} if found else {}

    async def run_to_end(self, func: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        """What `func` returns, unless the server stops or the time is over first.

        Raises:
            EngineDeadError: the engine has died, or hangs.
            EngineClosedError: the server has stopped.
            DeadlineExceededError: the time is over.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise RequestError("timeout must be a positive number of seconds.", param="timeout")
        self.engine.check_health()  # A core that hangs would let the caller wait.
        has_stopped = False
        error: TrioEngineError | None = None
        result: list[T] = []

        async def watch(stop: trio.Event, scope: trio.CancelScope) -> None:
            nonlocal has_stopped
            await stop.wait()
            has_stopped = True
            scope.cancel()

        with trio.move_on_after(float("inf") if timeout_s is None else timeout_s) as scope:
            async with trio.open_nursery() as nursery:
                if self.stop is not None:
                    nursery.start_soon(watch, self.stop, scope)
                try:
                    result.append(await func())
                except TrioEngineError as raised:
                    error = raised  # Kept out of the nursery, which would wrap it in a group.
                nursery.cancel_scope.cancel()
        if error is not None:
            raise error
        if result:
            return result[0]
        if has_stopped:
            raise EngineClosedError("The server has stopped.")
        raise DeadlineExceededError(f"The request took longer than its timeout of {timeout_s} seconds.")


def _chat_settings(context: ServerContext) -> ChatSettings:
    template = context.config.chat_template
    takes_defaults = context.config.generation_config is GenerationConfig.AUTO
    return ChatSettings.of(
        context.engine.tokenizer,
        tool_call_parser=context.config.tool_call_parser,
        reasoning_parser=context.engine.config.reasoning_parser,
        allows_chat_template=context.config.trust_request_chat_template,
        server_template=None if template is None else read_chat_template(template),
        generation_defaults=context.engine.generation_defaults if takes_defaults else None,
    )
