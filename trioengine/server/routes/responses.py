"""OpenAI's Responses API over HTTP: make a response, look at it, cancel it, forget it."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

import attrs
import trio
from quart import Response, request
from quart.wrappers.response import ResponseBody

from trioengine.errors import RequestError
from trioengine.openai.admin_protocol import parse_query
from trioengine.openai.responses.events import Event, ResponseEvents
from trioengine.openai.responses.items import Item, ItemReference, item_fields
from trioengine.openai.responses.protocol import (
    InputItemsQuery,
    Order,
    ResponseRequest,
    RetrieveQuery,
    parse_response_request,
)
from trioengine.openai.responses.reply_schema import InputTokens
from trioengine.openai.responses.response_fields import new_response_id
from trioengine.openai.responses.store import StoredResponse
from trioengine.openai.responses.translate import ResponsePlan, response_to_generate
from trioengine.openai.sse import CONTENT_TYPE, PING, ReplyHead, dumps
from trioengine.server.context import RequestHead, ServerContext
from trioengine.server.replies import json_response
from trioengine.server.responses import BackgroundResponse, Responses
from trioengine.server.routes.generate import STREAM_HEADERS, stream_one, whole_one
from trioengine.server.routes.request import json_reply, read_body, request_head
from trioengine.server.routes.tokens import LONG_PROMPT_CHARS
from trioengine.server.stream_body import PING_INTERVAL_S
from trioengine.types.output import RequestOutput
from trioengine.types.request import GenerateRequest

Q = TypeVar("Q", bound=attrs.AttrsInstance)

_MAX_LISTED_ITEMS = 100


@attrs.frozen
class PlannedResponse:
    """A response that the engine may be asked for."""

    body: ResponseRequest
    plan: ResponsePlan
    state: ResponseEvents
    generate_request: GenerateRequest
    owner: str


class KeptEvents:
    """A stream's events, of a response that is stored when it ends."""

    def __init__(self, responses: Responses, planned: PlannedResponse) -> None:
        """Store in `responses`, where the request wants that."""
        self._responses = responses
        self._planned = planned

    @property
    def response_id(self) -> str:
        """Of the response."""
        return self._planned.state.id

    def begin(self) -> Sequence[Event]:
        """Before anything is known of the answer."""
        return self._planned.state.begin()

    def complete_empty(self) -> Sequence[Event]:
        """Of a response without an answer."""
        events = self._planned.state.complete_empty()
        self._keep()
        return events

    def feed(self, output: RequestOutput) -> Sequence[Event]:
        """Of an output."""
        events = self._planned.state.feed(output)
        if output.finished:
            self._keep()
        return events

    def fail(self, error: Exception) -> Sequence[Event]:
        """Of an error."""
        if isinstance(error, RequestError):
            error = self._planned.plan.as_written(error)
        events = self._planned.state.fail(error)
        if events:
            self._keep()
        return events

    def _keep(self) -> None:
        planned = self._planned
        if planned.body.store:
            self._responses.keep(planned.state, planned.owner, planned.plan.conversation)


class _ServerSentEvents:
    """The same, as a `StreamBody` writes them."""

    def __init__(self, events: KeptEvents) -> None:
        self._events = events

    def events(self, output: RequestOutput) -> bytes:
        return join_sse(self._events.feed(output))

    def error_event(self, error: Exception) -> bytes:
        return join_sse(self._events.fail(error))


def join_sse(events: Sequence[Event]) -> bytes:
    """Events as server-sent ones."""
    return b"".join([event.sse() for event in events])


async def create_response(context: ServerContext) -> Response:
    """Answer a conversation, whole, as a stream of events or in the background."""
    context.check_open()
    head = request_head("resp_")
    body = await read_body(parse_response_request)
    planned = await plan_response(context, body, head, owner_of(context, request.headers.get("Authorization")))
    if body.background:
        return await _in_background(context, planned)
    kept = KeptEvents(context.responses, planned)

    def reply(output: RequestOutput) -> bytes:
        kept.feed(output)
        return dumps(planned.state.fields())

    try:
        if body.stream:
            events, opening = _ServerSentEvents(kept), join_sse(kept.begin())
            return await stream_one(context, body, planned.generate_request, events, opening)
        return await whole_one(context, body, planned.generate_request, reply)
    except RequestError as error:
        raise planned.plan.as_written(error) from None


async def plan_response(
    context: ServerContext,
    body: ResponseRequest,
    head: RequestHead,
    owner: str,
    recent: Mapping[str, Sequence[Item]] | None = None,
) -> PlannedResponse:
    """What the engine is to be asked for.

    Args:
        context: of the application.
        body: of the request.
        head: its headers.
        owner: whose stored responses it may go on from.
        recent: conversations that it may go on from too, by the id of the response.

    Raises:
        RequestError: the body cannot be honoured.
        UnavailableError: the engine is full.
    """
    if body.background:
        context.responses.check_background()
    lora, plan = await _plan(context, body, head.id, owner, recent)
    context.engine.check_admission(1)
    reply_head = ReplyHead(new_response_id(), int(time.time()), lora or context.engine.model_name)
    state = ResponseEvents(reply_head, body, plan.form, plan.generate_request.sampling, clock=time.time)
    return PlannedResponse(body, plan, state, head.apply(plan.generate_request, lora), owner)


async def _plan(
    context: ServerContext,
    body: ResponseRequest,
    request_id: str,
    owner: str,
    recent: Mapping[str, Sequence[Item]] | None = None,
) -> tuple[str | None, ResponsePlan]:
    """The adapter that a body asks for, and what it means for the engine."""
    lora = await context.check_body(body)
    previous_id = body.previous_response_id
    if recent is not None and previous_id is not None and previous_id in recent:
        earlier = recent[previous_id]
    else:
        earlier = context.responses.conversation(previous_id, owner)
    references = [item.id for item in body.input if isinstance(item, ItemReference)]
    known_items = context.responses.known_items(references, owner)
    return lora, response_to_generate(body, request_id, context.chat, earlier, known_items)


async def count_input_tokens(context: ServerContext) -> Response:
    """How many tokens a response would be given, without making it."""
    body, num_bytes = await read_body(lambda data: (parse_response_request(data), len(data)))
    owner = owner_of(context, request.headers.get("Authorization"))
    _, plan = await _plan(context, body, "", owner)
    generate_request = plan.generate_request

    def count() -> int:
        rendered = context.engine.renderer.render(generate_request.prompt, generate_request.tokenization_kwargs)
        return len(rendered.token_ids)

    # What went before may be long too.
    is_long = num_bytes > LONG_PROMPT_CHARS or body.previous_response_id is not None
    try:
        num_tokens = await trio.to_thread.run_sync(count, abandon_on_cancel=True) if is_long else count()
    except RequestError as error:
        raise plan.as_written(error) from None
    return json_reply(InputTokens("response.input_tokens", num_tokens))


async def _in_background(context: ServerContext, planned: PlannedResponse) -> Response:
    context.responses.check_background()  # Again: others may have come meanwhile.
    stored = StoredResponse(
        planned.state,
        planned.owner,
        planned.plan.conversation,
        is_background=True,
        log=[] if planned.body.stream else None,
    )
    outputs = context.engine.generate(planned.generate_request)
    open_request = context.open_requests.open(planned.generate_request.request_id or "", request.path)

    def count(output: RequestOutput) -> None:
        open_request.num_tokens = output.num_generated_tokens

    background = BackgroundResponse(
        stored, planned.plan, outputs, count, lambda: context.open_requests.close(open_request)
    )
    try:
        await context.responses.start(background)
    except RequestError as error:
        raise planned.plan.as_written(error) from None
    headers = context.warning_headers(planned.body, outputs.warnings)
    if planned.body.stream:
        return _log_response(context.responses, stored, 0, headers)
    return json_response(dumps(planned.state.fields()), headers=headers)


async def retrieve_response(context: ServerContext, response_id: str) -> Response:
    """A stored response as of now; or, with `stream`, its events, also those to come."""
    query = _query(RetrieveQuery)
    stored = _stored(context, response_id)
    if query.starting_after is not None and not query.stream:
        raise RequestError("starting_after needs stream=true.", param="starting_after")
    if not query.stream:
        return json_response(dumps(stored.state.fields()))
    if stored.log is None:
        raise RequestError(
            "The events of this response are not kept: they are where it was made with background and stream, and"
            " there is room.",
            param="stream",
        )
    first = 0 if query.starting_after is None else query.starting_after + 1
    return _log_response(context.responses, stored, first, {})


async def cancel_response(context: ServerContext, response_id: str) -> Response:
    """End a response in the background. One that has ended stays as it is."""
    stored = _stored(context, response_id)
    context.responses.cancel(stored)
    return json_response(dumps(stored.state.fields()))


async def delete_response(context: ServerContext, response_id: str) -> Response:
    """Forget a stored response, and end it where it runs."""
    stored = _stored(context, response_id)
    context.responses.delete(stored)
    return json_response(dumps({"id": stored.id, "object": "response", "deleted": True}))


async def list_input_items(context: ServerContext, response_id: str) -> Response:
    """What a stored response answers: the conversation before it, without instructions."""
    query = _query(InputItemsQuery)
    stored = _stored(context, response_id)
    if not 1 <= query.limit <= _MAX_LISTED_ITEMS:
        raise RequestError(f"limit must be from 1 to {_MAX_LISTED_ITEMS}.", param="limit")
    if query.order not in tuple(Order):
        raise RequestError(f"order must be one of {', '.join(Order)}.", param="order")
    items = list(stored.conversation)
    if query.order == Order.DESCENDING:
        items.reverse()
    if query.after is not None:
        places = [place for place, item in enumerate(items) if item.id == query.after]
        if not places:
            raise RequestError(f"after: the response has no item {query.after[:100]}.", param="after")
        items = items[places[-1] + 1 :]
    listed = items[: query.limit]
    fields = {
        "object": "list",
        "data": [item_fields(item) for item in listed],
        "first_id": listed[0].id if listed else None,
        "last_id": listed[-1].id if listed else None,
        "has_more": len(items) > len(listed),
    }
    return json_response(dumps(fields))


def owner_of(context: ServerContext, authorization: str | None) -> str:
    """Whose responses a client may see: those made with its key; where there are no keys, all."""
    if not context.config.api_key:
        return ""
    _, _, key = (authorization or "").partition(" ")
    return hashlib.sha256(key.strip().encode()).hexdigest()


def _stored(context: ServerContext, response_id: str) -> StoredResponse:
    return context.responses.get(response_id, owner_of(context, request.headers.get("Authorization")))


def _query(query_class: type[Q]) -> Q:
    # The SDK writes lists as `include[]`.
    return parse_query({name.removesuffix("[]"): request.args.getlist(name) for name in request.args}, query_class)


def _log_response(responses: Responses, stored: StoredResponse, first: int, headers: dict[str, str]) -> Response:
    body = _LogBody(responses, stored, first)
    response = Response(body, headers={**STREAM_HEADERS, **headers}, content_type=CONTENT_TYPE)
    response.timeout = None
    return response


class _LogBody(ResponseBody):
    """The kept events of a response in the background, and those to come. Leaving it ends nothing."""

    def __init__(self, responses: Responses, stored: StoredResponse, first: int) -> None:
        self._responses = responses
        self._stored = stored
        self._next = first

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next events, never empty: a ping while nothing comes."""
        await trio.lowlevel.checkpoint()
        while True:
            log = self._stored.log
            if log is None:
                raise StopAsyncIteration  # There was no room for them any more; the reader may retrieve the response.
            if self._next < len(log):
                events, self._next = log[self._next :], len(log)
                return join_sse(events)
            running = self._responses.running(self._stored)
            if running is None:
                raise StopAsyncIteration
            with trio.move_on_after(PING_INTERVAL_S) as waiting:
                await running.news.wait()
            if waiting.cancelled_caught:
                return PING
