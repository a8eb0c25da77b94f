"""One client of the Responses API on a WebSocket, as OpenAI's SDK speaks it.

The client sends `response.create` events, and gets the events that a stream over HTTP would have. Those of one
`stream_id` are answered one after the other; those of different ones at the same time. All live in the connection's own
nursery, so its end, however it comes, leaves them at once.
"""

from collections import deque
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from uuid import uuid4

import attrs
import trio

from trioengine.errors import EngineClosedError, EngineGenerateError, RequestError, TrioEngineError, UnavailableError
from trioengine.openai.errors import error_fields
from trioengine.openai.json_body import parse_object
from trioengine.openai.responses.events import Event
from trioengine.openai.responses.items import Item
from trioengine.openai.responses.protocol import response_request
from trioengine.openai.sse import dumps
from trioengine.server.context import LONG_BODY_BYTES, RequestHead, ServerContext
from trioengine.server.failures import log_failure
from trioengine.server.routes.responses import KeptEvents, PlannedResponse, plan_response
from trioengine.server.stream_connection import MessageTransport
from trioengine.types.output import RequestOutput

MAX_WAITING = 64
"""Responses that one connection may have waiting or running."""
MAX_STREAM_ID_CHARS = 256
"""Every event has it."""
CLOSE_TIMEOUT_S = 5.0
_NO_BINARY = 1003
_GOING_AWAY = 1001
RESPONSES_PATH = "/v1/responses"


@attrs.define(eq=False)
class _Lane:
    """Responses that are made one after the other."""

    stream_id: str | None
    waiting: deque[dict[str, object]] = attrs.field(factory=deque[dict[str, object]])
    request_id: str | None = None
    """The engine's, of the response that is made now."""
    kept: KeptEvents | None = None
    """Of the same, once it has begun."""
    error: TrioEngineError | None = None
    """Why it is to end, where that is not the client's wish."""
    is_cancelled: bool = False
    """Whether that is."""


class ResponsesConnection:
    """One client."""

    def __init__(self, context: ServerContext, transport: MessageTransport, owner: str) -> None:
        """Answer what comes by `transport`, for the client that `owner` stands for."""
        self._context = context
        self._transport = transport
        self._owner = owner
        self._lanes: dict[str | None, _Lane] = {}
        self._recent: dict[str, tuple[Item, ...]] = {}
        """The last response, also where it is not stored: the next may go on from it."""
        self._sending = trio.StrictFIFOLock()
        self._news = trio.Event()

    async def run(self) -> None:
        """Serve until the client or the server ends it. Leaving aborts every response, without awaiting."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_server, nursery)
            await self._read(nursery)
            nursery.cancel_scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        while True:
            message = await self._transport.receive()
            if message is None:
                return
            if isinstance(message, bytes):
                await self._transport.close(_NO_BINARY, "Messages are JSON texts.")
                return
            stream_id: str | None = None
            try:
                data = message.encode()
                if len(data) < LONG_BODY_BYTES:
                    fields = parse_object(data)
                else:
                    fields = await trio.to_thread.run_sync(parse_object, data, abandon_on_cancel=True)
                stream_id = _take_stream_id(fields)
                self._take(nursery, stream_id, fields)
            except (RequestError, UnavailableError) as error:
                await self._send_error(error, stream_id)

    def _take(self, nursery: trio.Nursery, stream_id: str | None, fields: dict[str, object]) -> None:
        match fields.pop("type", None):
            case "response.create":
                self._add(nursery, stream_id, fields)
            case "response.cancel":
                self._cancel(fields.get("response_id"), stream_id)
            case str(kind):
                raise RequestError(f"type: {kind[:100]!r} is no event that this server takes.", param="type")
            case _:
                raise RequestError("type is required.", param="type")

    def _add(self, nursery: trio.Nursery, stream_id: str | None, fields: dict[str, object]) -> None:
        if sum(len(lane.waiting) + 1 for lane in self._lanes.values()) >= MAX_WAITING:
            raise UnavailableError(f"{MAX_WAITING} responses wait on this connection already.")
        lane = self._lanes.get(stream_id)
        if lane is None:
            lane = self._lanes[stream_id] = _Lane(stream_id)
            nursery.start_soon(self._run_lane, lane)
        lane.waiting.append(fields)

    def _cancel(self, response_id: object, stream_id: str | None) -> None:
        """End a response that is being made; of no id, that of the lane. Nothing where it has ended."""
        for lane in self._lanes.values():
            if lane.stream_id == stream_id if response_id is None else _id_of(lane) == response_id:
                lane.is_cancelled = True
                self._abort(lane)

    def _abort(self, lane: _Lane) -> None:
        # By the engine, not by a cancel scope, which would cut a message that is being written.
        if lane.request_id is not None:
            self._context.engine.abort(lane.request_id)

    async def _run_lane(self, lane: _Lane) -> None:
        while lane.waiting:
            fields = lane.waiting.popleft()
            lane.request_id, lane.kept, lane.is_cancelled = None, None, False
            try:
                await self._answer(lane, fields)
            except Exception as error:
                # A border: an error of one response is told to its client.
                await self._fail(lane, error)
        del self._lanes[lane.stream_id]
        self._tell()

    async def _answer(self, lane: _Lane, fields: dict[str, object]) -> None:
        context = self._context
        context.check_open()
        generates = fields.pop("generate", None)
        if generates is not None and not isinstance(generates, bool):
            raise RequestError("generate: expected true or false.", param="generate")
        fields.pop("stream", None)
        body = attrs.evolve(response_request(fields), stream=True)
        if body.background:
            raise RequestError("background: not on a WebSocket.", param="background")
        head = RequestHead(f"resp_{uuid4().hex}", None, None, None)
        planned = await plan_response(context, body, head, self._owner, self._recent)
        _check_goes_on(lane)
        kept = KeptEvents(context.responses, planned)
        if generates is False:
            lane.kept = kept
            await self._send(lane, [*kept.begin(), *kept.complete_empty()])
            self._remember(planned)
            return
        open_request = context.open_requests.open(head.id, RESPONSES_PATH)
        lane.request_id = planned.generate_request.request_id
        try:
            async with context.engine.generate(planned.generate_request) as outputs:
                _check_goes_on(lane)
                open_request.num_prompt_tokens = outputs.num_prompt_tokens
                lane.kept = kept
                await self._send(lane, kept.begin())
                async for output in outputs:
                    if lane.error is not None:
                        raise lane.error
                    open_request.num_tokens = output.num_generated_tokens
                    await self._send(lane, self._feed(planned, kept, output))
                    if output.finished:
                        return
            raise EngineGenerateError("The engine's outputs ended without a last one.")
        except RequestError as error:
            raise planned.plan.as_written(error) from None
        finally:
            context.open_requests.close(open_request)

    def _feed(self, planned: PlannedResponse, kept: KeptEvents, output: RequestOutput) -> Sequence[Event]:
        events = kept.feed(output)
        if output.finished:
            self._remember(planned)
        return events

    def _remember(self, planned: PlannedResponse) -> None:
        self._recent = {planned.state.id: (*planned.plan.conversation, *planned.state.items)}

    async def _fail(self, lane: _Lane, error: Exception) -> None:
        log_failure("A response", error)
        if lane.kept is None:
            await self._send_error(error, lane.stream_id)
        else:
            await self._send(lane, lane.kept.fail(error))

    async def _send(self, lane: _Lane, events: Sequence[Event]) -> None:
        if not events:
            return
        texts = [event.data for event in events]
        if lane.stream_id is not None:
            end = b',"stream_id":' + encode_basestring_ascii(lane.stream_id).encode() + b"}"
            texts = [text[:-1] + end for text in texts]
        await self._write(texts)

    async def _send_error(self, error: Exception, stream_id: str | None) -> None:
        status = error.status if isinstance(error, TrioEngineError) else TrioEngineError.status
        fields: dict[str, object] = {"type": "error", "status": status, "error": error_fields(error)}
        if stream_id is not None:
            fields["stream_id"] = stream_id
        await self._write([dumps(fields)])

    async def _write(self, texts: Sequence[bytes]) -> None:
        # One writer at a time; where nobody else writes, without giving way to others first.
        try:
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            await self._transport.send(texts)
        finally:
            self._sending.release()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def _watch_server(self, nursery: trio.Nursery) -> None:
        """What runs at the server's shutdown may finish; at its stop it fails. Then the client is sent away."""
        context = self._context
        if context.shutdown is None:
            return
        await context.shutdown.wait()
        async with trio.open_nursery() as waiting:
            if context.stop is not None:
                waiting.start_soon(self._fail_at_stop, context.stop)
            while self._lanes:
                await self._news.wait()
            waiting.cancel_scope.cancel()
        async with self._sending:
            await self._transport.close(_GOING_AWAY, "The server is shutting down.")
        with trio.move_on_after(CLOSE_TIMEOUT_S):
            await trio.sleep_forever()
        nursery.cancel_scope.cancel()

    async def _fail_at_stop(self, stop: trio.Event) -> None:
        await stop.wait()
        for lane in self._lanes.values():
            lane.error = EngineClosedError("The server has stopped.")
            self._abort(lane)


def _check_goes_on(lane: _Lane) -> None:
    if lane.error is not None:
        raise lane.error
    if lane.is_cancelled:
        raise RequestError("The response was cancelled before it began.")


def _id_of(lane: _Lane) -> str | None:
    return None if lane.kept is None else lane.kept.response_id


def _take_stream_id(fields: dict[str, object]) -> str | None:
    stream_id = fields.pop("stream_id", None)
    if stream_id is None or (isinstance(stream_id, str) and len(stream_id) <= MAX_STREAM_ID_CHARS):
        return stream_id
    words = f"expected a string of at most {MAX_STREAM_ID_CHARS} characters"
    raise RequestError(f"stream_id: {words}.", param="stream_id")
