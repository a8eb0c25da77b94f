"""The routes that answer with text: chat and completions, streamed and whole."""

import time
from collections.abc import Callable, Sequence

import trio
from quart import Response, request

from trioengine.client.interface import OutputStream
from trioengine.errors import EngineGenerateError, RequestError
from trioengine.openai.chat_answer import chat_form
from trioengine.openai.chat_protocol import ChatCompletionRequest, parse_chat_request
from trioengine.openai.chat_stream import chat_events, chat_reply
from trioengine.openai.chat_translate import ChatPlan, chat_to_generate
from trioengine.openai.completion_protocol import CompletionRequest, parse_completion_request
from trioengine.openai.completion_stream import CompletionEvents, completion_reply
from trioengine.openai.completion_translate import check_num_answers, completion_to_generate
from trioengine.openai.json_body import field_path
from trioengine.openai.protocol import RequestBody
from trioengine.openai.sse import CONTENT_TYPE, ReplyHead
from trioengine.openai.structured_fields import form_field
from trioengine.openai.translate import as_written, with_generation_defaults
from trioengine.server.completion_form import completion_form
from trioengine.server.context import RequestHead, ServerContext
from trioengine.server.open_requests import OpenRequest
from trioengine.server.replies import json_response
from trioengine.server.request_batch import RequestBatch
from trioengine.server.routes.request import read_body, request_head
from trioengine.server.stream_body import BatchBody, Events, StreamBody, enter_request
from trioengine.types.output import RequestOutput
from trioengine.types.params import SamplingParams
from trioengine.types.request import GenerateRequest

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies hand each event on as it comes."""


async def chat_completions(context: ServerContext) -> Response:
    """Answer a conversation."""
    context.check_open()
    head = request_head("chatcmpl-")

    def read(data: bytes) -> tuple[ChatCompletionRequest, ChatPlan]:
        body = parse_chat_request(data)
        return body, chat_to_generate(body, head.id, context.chat)

    body, plan = await read_body(read)
    lora = await context.check_body(body)
    reply_head = _reply_head(context, head, lora)
    context.engine.check_admission(body.sampling.n)
    generate_request = head.apply(plan.generate_request, lora)
    form = chat_form(body, plan, context.chat)
    try:
        if body.stream:
            return await stream_one(context, body, generate_request, chat_events(reply_head, form))
        return await whole_one(context, body, generate_request, lambda output: chat_reply(reply_head, form, output))
    except RequestError as error:
        raise plan.as_written(error) from None


async def completions(context: ServerContext) -> Response:
    """Continue a text, or several."""
    context.check_open()
    head = request_head("cmpl-")

    def read(data: bytes) -> tuple[CompletionRequest, Sequence[GenerateRequest]]:
        body = with_generation_defaults(parse_completion_request(data), context.chat.generation_defaults)
        check_num_answers(body, context.engine.config.max_num_queued_reqs)
        return body, completion_to_generate(body, head.id)

    body, generate_requests = await read_body(read)
    lora = await context.check_body(body)
    reply_head = _reply_head(context, head, lora)
    context.engine.check_admission(body.sampling.n * len(generate_requests))
    generate_requests = [head.apply(generate_request, lora) for generate_request in generate_requests]
    try:
        return await _continued(context, body, generate_requests, reply_head)
    except RequestError as error:
        raise as_written(error, form_field(body.given_fields)) from None


async def _continued(
    context: ServerContext, body: CompletionRequest, generate_requests: Sequence[GenerateRequest], reply_head: ReplyHead
) -> Response:
    form = completion_form(context, body)
    num_prompts = len(generate_requests)
    if num_prompts == 1 and body.stream:
        return await stream_one(context, body, generate_requests[0], CompletionEvents.of(reply_head, form))
    batch = RequestBatch(
        [context.engine.generate(generate_request) for generate_request in generate_requests],
        ["prompt"] if num_prompts == 1 else [field_path("prompt", index) for index in range(num_prompts)],
    )
    if body.stream:
        events = [CompletionEvents.of(reply_head, form, index) for index in range(num_prompts)]
        return await _stream_batch(context, body, batch, events, reply_head.id)
    return await _whole_batch(
        context, body, batch, lambda outputs: completion_reply(reply_head, form, outputs), reply_head.id
    )


async def stream_one(
    context: ServerContext, body: RequestBody, generate_request: GenerateRequest, events: Events, opening: bytes = b""
) -> Response:
    """The response that streams the events of a request, after `opening`.

    Raises:
        RequestError: the request cannot be honoured. Nothing was sent.
    """
    outputs = context.engine.generate(generate_request)
    open_request = _open(context, generate_request.request_id or "")
    request_scope = await enter_request(
        outputs, context.stop, on_left=lambda: context.open_requests.close(open_request)
    )
    try:
        open_request.num_prompt_tokens = outputs.num_prompt_tokens
        headers = {**STREAM_HEADERS, **context.warning_headers(body, outputs.warnings)}
    except BaseException:
        request_scope.cancel()
        raise
    stream_body = StreamBody(outputs, events, request_scope, open_request, opening)
    return await _stream_response(generate_request.sampling, stream_body, headers, request_scope)


async def _stream_response(
    sampling: SamplingParams,
    stream_body: StreamBody | BatchBody,
    headers: dict[str, str],
    request_scope: trio.CancelScope,
) -> Response:
    if (sampling.structured_outputs, sampling.thinking_token_budget, sampling.logprob_token_ids) != (None, None, None):
        # Whether these can be honoured is known for certain in the core: a form, when it has been compiled.
        try:
            await stream_body.wait_for_output()
        except BaseException:
            request_scope.cancel()
            raise
    response = Response(stream_body, headers=headers, content_type=CONTENT_TYPE)
    # Quart would cut it after a minute.
    response.timeout = None
    return response


async def whole_one(
    context: ServerContext,
    body: RequestBody,
    generate_request: GenerateRequest,
    reply: Callable[[RequestOutput], bytes],
) -> Response:
    """The response that has the reply of a request.

    Raises:
        RequestError: the request cannot be honoured.
        EngineGenerateError: it failed.
    """
    batch = RequestBatch([context.engine.generate(generate_request)])
    return await _whole_batch(
        context, body, batch, lambda outputs: reply(outputs[0]), generate_request.request_id or ""
    )


async def _stream_batch(
    context: ServerContext, body: RequestBody, batch: RequestBatch, events: Sequence[CompletionEvents], request_id: str
) -> Response:
    open_request = _open(context, request_id)
    request_scope = await enter_request(batch, context.stop, on_left=lambda: context.open_requests.close(open_request))
    try:
        open_request.num_prompt_tokens = batch.num_prompt_tokens
        headers = {**STREAM_HEADERS, **context.warning_headers(body, batch.warnings)}
    except BaseException:
        request_scope.cancel()
        raise
    stream_body = BatchBody(batch.streams, events, request_scope, open_request)
    return await _stream_response(body.sampling, stream_body, headers, request_scope)


async def _whole_batch(
    context: ServerContext,
    body: RequestBody,
    batch: RequestBatch,
    reply: Callable[[Sequence[RequestOutput]], bytes],
    request_id: str,
) -> Response:
    open_request = _open(context, request_id)
    request_scope = await enter_request(batch, context.stop, on_left=lambda: context.open_requests.close(open_request))
    try:
        open_request.num_prompt_tokens = batch.num_prompt_tokens
        headers = context.warning_headers(body, batch.warnings)
        # All run at the same time; in which order they are read does not matter.
        outputs = [await _last_output(stream) for stream in batch.streams]
        return json_response(reply(outputs), headers=headers)
    finally:
        request_scope.cancel()


async def _last_output(stream: OutputStream) -> RequestOutput:
    async for output in stream:
        if output.finished:
            return output
    raise EngineGenerateError("The engine's outputs ended without a last one.")


def _open(context: ServerContext, request_id: str) -> OpenRequest:
    return context.open_requests.open(request_id, request.path)


def _reply_head(context: ServerContext, head: RequestHead, lora: str | None) -> ReplyHead:
    return ReplyHead(head.id, int(time.time()), lora or context.engine.model_name)
