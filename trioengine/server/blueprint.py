"""OpenAI's routes over an engine, as a blueprint for anybody's Quart-Trio application.

It maps: bodies to requests, outputs to bodies, exceptions to error objects. All rules are in `trioengine.openai`.
"""

import json
import time
from collections.abc import Callable
from typing import Generic, TypeVar
from uuid import uuid4

import attrs
import trio
from quart import Blueprint, Response, request

from trioengine import __version__
from trioengine.client.interface import EngineClient
from trioengine.errors import EngineGenerateError, MediaTypeError, RequestError, UnavailableError
from trioengine.openai.chat_protocol import parse_chat_request
from trioengine.openai.chat_stream import chat_reply, chat_stream
from trioengine.openai.chat_translate import chat_to_generate
from trioengine.openai.completion_protocol import parse_completion_request
from trioengine.openai.completion_stream import completion_reply, completion_stream
from trioengine.openai.completion_translate import completion_to_generate
from trioengine.openai.protocol import RequestBody
from trioengine.openai.sse import CONTENT_TYPE, EventStream, ReplyHead
from trioengine.openai.translate import check_model
from trioengine.server.replies import error_response, json_response
from trioengine.server.stream_body import StreamBody, enter_request
from trioengine.types.messages import GetLoad
from trioengine.types.output import RequestOutput
from trioengine.types.request import GenerateRequest

LONG_BODY_BYTES = 256 * 1024
"""Longer bodies take over 5 ms to parse, which an event loop should not wait for."""
WARNING_HEADER = "X-TrioEngine-Warning"
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies hand each event on as it comes."""

B = TypeVar("B", bound=RequestBody)
T = TypeVar("T")


@attrs.frozen
class _Endpoint(Generic[B]):
    """How one of the generating routes differs from the other."""

    id_prefix: str
    parse: Callable[[bytes], B]
    translate: Callable[[B, str], GenerateRequest]
    stream: Callable[[ReplyHead, bool], EventStream]
    whole: Callable[[ReplyHead, RequestOutput], bytes]


_CHAT = _Endpoint(
    id_prefix="chatcmpl-",
    parse=parse_chat_request,
    translate=chat_to_generate,
    stream=lambda head, include_usage: chat_stream(head, include_usage=include_usage),
    whole=chat_reply,
)
_COMPLETIONS = _Endpoint(
    id_prefix="cmpl-",
    parse=parse_completion_request,
    translate=completion_to_generate,
    stream=lambda head, include_usage: completion_stream(head, include_usage=include_usage),
    whole=completion_reply,
)


def openai_blueprint(
    engine: EngineClient,
    *,
    shutdown: trio.Event | None = None,
    stop: trio.Event | None = None,
    is_strict: bool = False,
) -> Blueprint:
    """The routes `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`, `/version` and `/load`.

    A client that disconnects ends its request in the engine. Errors of these routes are OpenAI's error objects.

    Args:
        engine: open for as long as the application serves.
        shutdown: once it is set, new requests are refused with 503; those that run go on.
        stop: once it is set, those that run end with an error: an event in a stream, else 503.
        is_strict: a request that would be changed to fit is refused, instead of answered with a warning header.
    """
    routes = _Routes(engine, shutdown, stop, is_strict)
    blueprint = Blueprint("openai", __name__)
    blueprint.post("/v1/chat/completions")(routes.chat_completions)
    blueprint.post("/v1/completions")(routes.completions)
    blueprint.get("/v1/models")(routes.models)
    blueprint.get("/health")(routes.health)
    blueprint.get("/version")(routes.version)
    blueprint.get("/load")(routes.load)
    blueprint.register_error_handler(Exception, handle_error)
    return blueprint


async def handle_error(error: Exception) -> Response:
    """Quart's error handler of this API. A border: whatever a route raises becomes an answer."""
    return error_response(error)


@attrs.frozen
class _Routes:
    engine: EngineClient
    shutdown: trio.Event | None
    stop: trio.Event | None
    is_strict: bool
    started_s: int = attrs.field(factory=lambda: int(time.time()))

    async def chat_completions(self) -> Response:
        return await self._generate(_CHAT)

    async def completions(self) -> Response:
        return await self._generate(_COMPLETIONS)

    async def models(self) -> Response:
        model = {
            "id": self.engine.model_name,
            "object": "model",
            "created": self.started_s,
            "owned_by": "trioengine",
            "max_model_len": self.engine.model_facts.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def health(self) -> Response:
        self.engine.check_health()
        return _json({"status": "ok"})

    async def version(self) -> Response:
        return _json({"version": __version__})

    async def load(self) -> Response:
        self.engine.check_health()  # A core that hangs would let the caller wait.
        return _json(attrs.asdict(await self.engine.call(GetLoad())))

    async def _generate(self, endpoint: _Endpoint[B]) -> Response:
        if self.shutdown is not None and self.shutdown.is_set():
            raise UnavailableError("The server is shutting down.", retry_after_s=5.0)
        head = ReplyHead(endpoint.id_prefix + uuid4().hex, int(time.time()), self.engine.model_name)

        def read(data: bytes) -> tuple[B, GenerateRequest]:
            body = endpoint.parse(data)
            check_model(body, head.model)
            return body, endpoint.translate(body, head.id)

        body, generate_request = await _read_body(read)
        if body.stream:
            events = endpoint.stream(head, bool(body.stream_options.include_usage))
            return await self._streamed(generate_request, events)
        return await self._whole(generate_request, lambda output: endpoint.whole(head, output))

    async def _streamed(self, generate_request: GenerateRequest, events: EventStream) -> Response:
        outputs = self.engine.generate(generate_request)
        request_scope = await enter_request(outputs, self.stop)
        headers = {**_STREAM_HEADERS, **self._warning_headers(outputs.warnings)}
        response = Response(StreamBody(outputs, events, request_scope), headers=headers, content_type=CONTENT_TYPE)
        # Quart would cut it after a minute.
        response.timeout = None
        return response

    async def _whole(self, generate_request: GenerateRequest, reply: Callable[[RequestOutput], bytes]) -> Response:
        outputs = self.engine.generate(generate_request)
        request_scope = await enter_request(outputs, self.stop)
        try:
            headers = self._warning_headers(outputs.warnings)
            async for output in outputs:
                if output.finished:
                    return json_response(reply(output), headers=headers)
        finally:
            request_scope.cancel()
        raise EngineGenerateError("The engine's outputs ended without a last one.")

    def _warning_headers(self, warnings: tuple[str, ...]) -> dict[str, str]:
        if warnings and self.is_strict:
            raise RequestError(f"{warnings[0]}.", param="max_tokens")
        return {WARNING_HEADER: "; ".join(warnings)} if warnings else {}


async def _read_body(read: Callable[[bytes], T]) -> T:
    # Also keeps web pages out: a browser asks before it sends this type to a foreign server.
    if request.mimetype != "application/json":
        raise MediaTypeError("The Content-Type of the request must be application/json.")
    data = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    if len(data) < LONG_BODY_BYTES:
        return read(data)
    return await trio.to_thread.run_sync(read, data, abandon_on_cancel=True)


def _json(value: dict[str, object]) -> Response:
    return json_response(json.dumps(value).encode())
