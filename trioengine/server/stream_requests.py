"""Answers the requests of `/v1/stream`: a body in, chunks out. OpenAI's rules are those of the HTTP routes."""

import json
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast
from uuid import uuid4

import attrs
import trio

from trioengine.client.interface import OutputStream
from trioengine.errors import CheckpointError, EngineGenerateError, ForbiddenError, RequestError
from trioengine.openai.chat_answer import chat_form
from trioengine.openai.chat_protocol import ChatCompletionRequest, parse_chat_request
from trioengine.openai.chat_stream import chat_events, chat_reply
from trioengine.openai.chat_translate import ChatPlan, chat_to_generate
from trioengine.openai.completion_protocol import CompletionRequest, parse_completion_request
from trioengine.openai.completion_stream import CompletionEvents, completion_reply, usage_of
from trioengine.openai.completion_translate import check_num_answers, completion_to_generate
from trioengine.openai.json_body import field_path
from trioengine.openai.protocol import RequestBody
from trioengine.openai.sse import EventStream, ReplyHead
from trioengine.openai.stream_protocol import FinishReasons, StartRequest, event_data
from trioengine.openai.structured_fields import form_field
from trioengine.openai.translate import as_written, unknown_fields_warning, with_generation_defaults
from trioengine.server.completion_form import completion_form
from trioengine.server.context import LONG_BODY_BYTES, ServerContext
from trioengine.server.open_requests import OpenRequest
from trioengine.server.request_batch import RequestBatch
from trioengine.server.stream_connection import LiveRequest, MessageTransport, StreamConnection
from trioengine.types.messages import (
    Call,
    CheckIntegrity,
    GetLoad,
    GetStats,
    IsPaused,
    IsSleeping,
    ListLoRAs,
)
from trioengine.types.native_json import (
    JsonObject,
    call_from_json,
    dumps,
    from_json,
    output_to_json,
    pooling_to_json,
    reply_to_json,
    to_json,
)
from trioengine.types.output import RequestOutput
from trioengine.types.pooling import EncodeRequest
from trioengine.types.request import ChatPrompt, GenerateRequest
from trioengine.types.stream_messages import STREAM_PATH, Endpoint, StreamLimits

T = TypeVar("T")

FREE_CALLS: tuple[type[Call[object]], ...] = (GetLoad, GetStats, CheckIntegrity, IsPaused, IsSleeping, ListLoRAs)
"""What may be asked of every server: nothing changes by it."""
LONG_PROMPT_TOKENS = 8192
"""Longer ones take over 5 ms to check."""


class StreamRequests:
    """The requests of one server. `answer` is `stream_connection.Answer`."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._engine = context.engine

    async def answer(self, request: LiveRequest, start: StartRequest) -> None:
        """Run a request to its end.

        Raises:
            TrioEngineError: why it has no good one.
        """
        self._context.check_open()
        body = start.create.body
        match start.endpoint:
            case Endpoint.CHAT:
                await self._chat(request, body)
            case Endpoint.COMPLETIONS:
                await self._completions(request, body)
            case Endpoint.GENERATE:
                await self._generate(request, body)
            case Endpoint.ENCODE:
                await self._encode(request, body)
            case Endpoint.CALL:
                await self._call(request, body)
            case Endpoint.DESCRIBE:
                request.chunk(self._description())
                request.done()

    # OpenAI's forms

    async def _chat(self, request: LiveRequest, fields: JsonObject) -> None:
        context, head_id = self._context, f"chatcmpl-{uuid4().hex}"

        def read(data: bytes) -> tuple[ChatCompletionRequest, ChatPlan]:
            body = parse_chat_request(data)
            return body, chat_to_generate(body, head_id, context.chat)

        body, plan = await _read(read, fields)
        lora = await context.check_body(body)
        head = ReplyHead(head_id, int(time.time()), lora or self._engine.model_name)
        generate_request = attrs.evolve(plan.generate_request, lora=lora)
        self._engine.check_admission(body.sampling.n)
        form = chat_form(body, plan, context.chat)
        batch = RequestBatch([self._engine.generate(generate_request)])
        try:
            if body.stream:
                await self._stream(request, body, batch, [generate_request], [chat_events(head, form)])
            else:
                await self._whole(
                    request, body, batch, [generate_request], lambda outputs: chat_reply(head, form, outputs[0])
                )
        except RequestError as error:
            raise plan.as_written(error) from None

    async def _completions(self, request: LiveRequest, fields: JsonObject) -> None:
        context, head_id = self._context, f"cmpl-{uuid4().hex}"

        def read(data: bytes) -> tuple[CompletionRequest, Sequence[GenerateRequest]]:
            body = with_generation_defaults(parse_completion_request(data), context.chat.generation_defaults)
            check_num_answers(body, context.engine.config.max_num_queued_reqs)
            return body, completion_to_generate(body, head_id)

        body, generate_requests = await _read(read, fields)
        lora = await context.check_body(body)
        head = ReplyHead(head_id, int(time.time()), lora or self._engine.model_name)
        generate_requests = [attrs.evolve(each, lora=lora) for each in generate_requests]
        num_prompts = len(generate_requests)
        self._engine.check_admission(body.sampling.n * num_prompts)
        form = completion_form(context, body)
        batch = RequestBatch(
            [self._engine.generate(each) for each in generate_requests],
            ["prompt"] if num_prompts == 1 else [field_path("prompt", index) for index in range(num_prompts)],
        )
        try:
            if body.stream:
                events = [CompletionEvents.of(head, form, index) for index in range(num_prompts)]
                await self._stream(request, body, batch, generate_requests, events)
            else:
                await self._whole(
                    request, body, batch, generate_requests, lambda outputs: completion_reply(head, form, outputs)
                )
        except RequestError as error:
            raise as_written(error, form_field(body.given_fields)) from None

    async def _stream(
        self,
        request: LiveRequest,
        body: RequestBody,
        batch: RequestBatch,
        generate_requests: Sequence[GenerateRequest],
        events: Sequence[EventStream],
    ) -> None:
        """Chunks as they come."""
        with _shown(self._context, generate_requests[0].request_id) as opened:
            async with batch:
                self._started(request, body, batch, generate_requests, opened)
                finish, latest = FinishReasons(), dict[int, RequestOutput]()
                if len(events) == 1:
                    usage = await self._stream_one(request, batch.streams[0], events[0], finish, opened)
                else:
                    await _each(
                        [
                            partial(self._stream_some, request, stream, index, events[index], finish, latest, opened)
                            for index, stream in enumerate(batch.streams)
                        ]
                    )
                    usage = usage_of(latest.values())
            request.done(finish.in_order, usage)

    async def _stream_one(
        self,
        request: LiveRequest,
        stream: OutputStream,
        events: EventStream,
        finish: FinishReasons,
        opened: OpenRequest,
    ) -> Mapping[str, object]:
        while True:
            if not request.may_read:
                await request.wait_to_read()
            output = await _next(stream)
            opened.num_tokens = output.num_generated_tokens
            chunks = event_data(events.events(output))
            for chunk in chunks:
                request.chunk(chunk)
            if output.finished or len(output.outputs) > 1:
                for chunk in chunks:
                    finish.read(chunk)
            if output.finished:
                return events.usage(output)

    async def _stream_some(
        self,
        request: LiveRequest,
        stream: OutputStream,
        index: int,
        events: EventStream,
        finish: FinishReasons,
        latest: dict[int, RequestOutput],
        opened: OpenRequest,
    ) -> None:
        """One of several prompts."""
        assert isinstance(events, CompletionEvents)
        while True:
            await request.wait_to_read()
            latest[index] = output = await _next(stream)
            opened.num_tokens = sum(each.num_generated_tokens for each in latest.values())
            for chunk in event_data(events.chunks(output, latest.values())):
                request.chunk(chunk)
                finish.read(chunk)
            if output.finished:
                return

    async def _whole(
        self,
        request: LiveRequest,
        body: RequestBody,
        batch: RequestBatch,
        generate_requests: Sequence[GenerateRequest],
        reply: Callable[[Sequence[RequestOutput]], bytes],
    ) -> None:
        """One chunk, of everything."""
        with _shown(self._context, generate_requests[0].request_id) as opened:
            async with batch:
                self._started(request, body, batch, generate_requests, opened)
                # All run at the same time; in which order they are read does not matter.
                outputs = [await _last(stream) for stream in batch.streams]
            chunk = reply(outputs)
            finish = FinishReasons()
            usage = finish.read(chunk)
            await request.wait_to_read()
            request.chunk(chunk)
            request.done(finish.in_order, usage)

    def _started(
        self,
        request: LiveRequest,
        body: RequestBody,
        batch: RequestBatch,
        generate_requests: Sequence[GenerateRequest],
        opened: OpenRequest,
    ) -> None:
        self._context.warning_headers(body, batch.warnings)  # Where the server is strict, this refuses.
        opened.num_prompt_tokens = batch.num_prompt_tokens
        request.engine_ids = [each.request_id or "" for each in generate_requests]
        request.started(batch.num_prompt_tokens, [*batch.warnings, *unknown_fields_warning(body)])

    # Native forms

    async def _generate(self, request: LiveRequest, fields: JsonObject) -> None:
        generate_request = await _read_native(GenerateRequest, fields)
        self._check_trust(generate_request)
        name = generate_request.request_id or f"request-{uuid4().hex[:16]}"
        # Names need not be unique, but an abort must meet no other's request.
        generate_request = attrs.evolve(generate_request, request_id=f"{name}-{uuid4().hex[:12]}")
        with _shown(self._context, generate_request.request_id) as opened:
            async with self._engine.generate(generate_request) as stream:
                opened.num_prompt_tokens = stream.num_prompt_tokens
                request.engine_ids = [generate_request.request_id or ""]
                request.started(stream.num_prompt_tokens, stream.warnings, {"request_id": name})
                finish, is_first = dict[int, str](), True
                while True:
                    if not request.may_read:
                        await request.wait_to_read()
                    output = await _next(stream)
                    opened.num_tokens = output.num_generated_tokens
                    request.chunk(output_to_json(output, with_prompt=is_first))
                    is_first = False
                    for choice in output.outputs:
                        if choice.finish_reason is not None:
                            finish[choice.index] = choice.finish_reason
                    if output.finished:
                        break
            request.done([reason for _, reason in sorted(finish.items())], usage_of([output]))

    async def _encode(self, request: LiveRequest, fields: JsonObject) -> None:
        encode_request = await _read_native(EncodeRequest, fields)
        self._check_trust(encode_request)
        with _shown(self._context, encode_request.request_id):
            output = await self._engine.encode(encode_request)
        request.chunk(pooling_to_json(output))
        request.done()

    def _check_trust(self, request: GenerateRequest | EncodeRequest) -> None:
        """Return where nothing is asked for that is the operator's to allow.

        Raises:
            ForbiddenError: naming the field.
        """
        config, prompt = self._context.config, request.prompt
        if isinstance(prompt, ChatPrompt) and prompt.chat_template and not config.trust_request_chat_template:
            problem = "This server takes no chat template of a request (see --trust-request-chat-template)."
            raise ForbiddenError(problem, param="prompt.chat_template")
        if isinstance(request, EncodeRequest) or config.enable_admin:
            return
        for name in ("logits_processors", "extra_args"):
            if getattr(request.sampling, name) is not None:
                raise ForbiddenError(f"{name} needs a server with --enable-admin.", param=f"sampling.{name}")

    async def _call(self, request: LiveRequest, fields: JsonObject) -> None:
        call = call_from_json(fields)
        if not self._context.config.enable_admin and not isinstance(call, FREE_CALLS):
            raise ForbiddenError(f"{type(call).__name__} needs a server with --enable-admin.")
        self._engine.check_health()  # A core that hangs would let the caller wait.
        try:
            reply = await self._engine.call(call)
        except CheckpointError as error:
            # What a file holds that a caller names is the caller's fault.
            raise RequestError(error.message, param="path") from None
        request.chunk(dumps({"reply": reply_to_json(call, reply)}))
        request.done()

    def _description(self) -> bytes:
        engine = self._engine
        config = {name: to_json(getattr(engine.config, name)) for name in DESCRIBED_OPTIONS}
        return dumps(
            {
                "model_name": engine.model_name,
                "model": to_json(engine.model_config),
                "generation_defaults": to_json(engine.generation_defaults),
                "config": {name: value for name, value in config.items() if value is not None},
            }
        )


DESCRIBED_OPTIONS = ("enable_lora", "reasoning_parser", "data_parallel_size")
"""Options of the engine that its clients may know."""


@contextmanager
def _shown(context: ServerContext, name: str | None) -> Generator[OpenRequest]:
    """Shows a request to whoever asks what the server is busy with."""
    opened = context.open_requests.open(name or "", STREAM_PATH)
    try:
        yield opened
    finally:
        context.open_requests.close(opened)


async def _read(read: Callable[[bytes], T], fields: JsonObject) -> T:
    """What `read` makes of a body, streamed unless it says otherwise; of a long one in a thread."""
    if fields.get("stream") is None:
        fields = {**fields, "stream": True}
    data = json.dumps(fields).encode()
    if len(data) < LONG_BODY_BYTES:
        return read(data)
    return await trio.to_thread.run_sync(read, data, abandon_on_cancel=True)


async def _read_native(type_: type[T], fields: JsonObject) -> T:
    """The object that a body stands for. A long one is a prompt of many numbers, which takes a thread's time."""
    prompt = fields.get("prompt")
    token_ids = cast("JsonObject", prompt).get("token_ids") if isinstance(prompt, dict) else None
    if isinstance(token_ids, list) and len(cast("list[object]", token_ids)) > LONG_PROMPT_TOKENS:
        return await trio.to_thread.run_sync(from_json, fields, type_, abandon_on_cancel=True)
    return from_json(fields, type_)


async def _next(stream: OutputStream) -> RequestOutput:
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        raise EngineGenerateError("The engine's outputs ended without a last one.") from None


async def _last(stream: OutputStream) -> RequestOutput:
    while not (output := await _next(stream)).finished:
        pass
    return output


async def _each(readers: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run these at once, and raise the first error as itself."""
    errors: list[Exception] = []

    async def run(reader: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
        try:
            await reader()
        except Exception as error:
            errors.append(error)
            scope.cancel()

    async with trio.open_nursery() as nursery:
        for reader in readers:
            nursery.start_soon(run, reader, nursery.cancel_scope)
    if errors:
        raise errors[0]


def stream_connection(
    transport: MessageTransport, context: ServerContext, requests: StreamRequests
) -> StreamConnection:
    """One client's connection to this server, not running yet."""
    return StreamConnection(
        transport,
        requests.answer,
        context.engine.abort,
        model_name=context.engine.model_name,
        limits=StreamLimits(
            max_message_bytes=context.config.max_body_bytes, max_model_len=context.engine.model_config.max_model_len
        ),
        shutdown=context.shutdown,
        stop=context.stop,
    )
