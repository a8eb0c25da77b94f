"""Every route: its address, what answers it, and what the OpenAPI document says of it."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeAlias

import attrs
from quart import Response

from trioengine.openai.admin_protocol import (
    CollectiveRPCReply,
    CollectiveRPCRequest,
    DebugQuery,
    IsPausedReply,
    IsSleepingReply,
    PauseQuery,
    ProfileQuery,
    ProfileReply,
    ResetPrefixCacheReply,
    SleepQuery,
    StatusReply,
    VersionReply,
    WakeUpQuery,
)
from trioengine.openai.chat_protocol import ChatCompletionRequest
from trioengine.openai.completion_protocol import CompletionRequest
from trioengine.openai.encode_protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from trioengine.openai.encode_reply import ClassifyList, EmbeddingList, PoolingList, RerankList, ScoreList
from trioengine.openai.models import LoadLoRARequest, ModelCard, ModelList, UnloadLoRARequest
from trioengine.openai.openapi import Operation
from trioengine.openai.reply_schema import ChatCompletion, ChatCompletionChunk, Completion
from trioengine.openai.responses.protocol import InputItemsQuery, ResponseRequest, RetrieveQuery
from trioengine.openai.responses.reply_schema import (
    DeletedResponse,
    InputTokens,
    ResponseEvent,
    ResponseItemList,
    ResponseObject,
)
from trioengine.openai.tokenize_protocol import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
)
from trioengine.server.routes import admin, encode, generate, information, responses, tokens
from trioengine.types.messages import CoreLoad

Handler: TypeAlias = Callable[..., Awaitable[Response]]
"""Takes the application's `ServerContext`, and what stands in the address."""

_BUSY = (401, 403, 404, 408, 503, 504)
_OPERATION = (401, 403, 503)
_OPEN = (403, 503)
_STORED = (401, 403, 404)


@attrs.frozen
class Route:
    """One method of one address."""

    operation: Operation
    handler: Handler
    is_admin: bool = False
    """Whether it is there with `--enable-admin` only."""
    is_lora: bool = False
    """Whether `--enable-lora` is enough for that."""

    @property
    def rule(self) -> str:
        """The address as Quart writes it. What stands in it may have slashes: names of models do."""
        return self.operation.path.replace("{", "<path:").replace("}", ">")


def _post(
    path: str,
    tag: str,
    handler: Handler,
    errors: Collection[int],
    *,
    is_admin: bool = False,
    is_lora: bool = False,
    **more: Any,
) -> Route:
    return Route(_operation("post", path, tag, handler, errors, **more), handler, is_admin, is_lora)


def _get(
    path: str, tag: str, handler: Handler, errors: Collection[int], *, is_admin: bool = False, **more: Any
) -> Route:
    return Route(_operation("get", path, tag, handler, errors, **more), handler, is_admin)


def _operation(method: str, path: str, tag: str, handler: Handler, errors: Collection[int], **more: Any) -> Operation:
    summary = (handler.__doc__ or "").partition("\n")[0]
    return Operation(method=method, path=path, tag=tag, summary=summary, errors=errors, **more)


ROUTES: Sequence[Route] = (
    _post(
        "/v1/chat/completions",
        "text",
        generate.chat_completions,
        _BUSY,
        request=(ChatCompletionRequest,),
        reply=ChatCompletion,
        stream=ChatCompletionChunk,
    ),
    _post(
        "/v1/completions",
        "text",
        generate.completions,
        _BUSY,
        request=(CompletionRequest,),
        reply=Completion,
        stream=Completion,
    ),
    _post(
        "/v1/responses",
        "text",
        responses.create_response,
        _BUSY,
        request=(ResponseRequest,),
        reply=ResponseObject,
        stream=ResponseEvent,
    ),
    _post(
        "/v1/responses/input_tokens",
        "text",
        responses.count_input_tokens,
        (401, 403, 404, 408),
        request=(ResponseRequest,),
        reply=InputTokens,
    ),
    _get(
        "/v1/responses/{response_id}",
        "text",
        responses.retrieve_response,
        _STORED,
        query=RetrieveQuery,
        reply=ResponseObject,
        stream=ResponseEvent,
    ),
    Route(
        _operation(
            "delete", "/v1/responses/{response_id}", "text", responses.delete_response, _STORED, reply=DeletedResponse
        ),
        responses.delete_response,
    ),
    _post("/v1/responses/{response_id}/cancel", "text", responses.cancel_response, _STORED, reply=ResponseObject),
    _get(
        "/v1/responses/{response_id}/input_items",
        "text",
        responses.list_input_items,
        _STORED,
        query=InputItemsQuery,
        reply=ResponseItemList,
    ),
    _post("/v1/embeddings", "vectors", encode.embeddings, _BUSY, request=(EmbeddingRequest,), reply=EmbeddingList),
    _post("/pooling", "vectors", encode.pooling, _BUSY, request=(PoolingRequest,), reply=PoolingList),
    _post("/classify", "vectors", encode.classify, _BUSY, request=(ClassifyRequest,), reply=ClassifyList),
    *(
        _post(path, "vectors", encode.score, _BUSY, request=(ScoreRequest,), reply=ScoreList)
        for path in ("/v1/score", "/score")
    ),
    *(
        _post(path, "vectors", encode.rerank, _BUSY, request=(RerankRequest,), reply=RerankList)
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    _post(
        "/tokenize",
        "tokens",
        tokens.tokenize,
        (401, 403, 404, 408),
        request=(TokenizeRequest, ChatCompletionRequest),
        reply=TokenizeReply,
    ),
    _post(
        "/detokenize",
        "tokens",
        tokens.detokenize,
        (401, 403, 404, 408),
        request=(DetokenizeRequest,),
        reply=DetokenizeReply,
    ),
    _get("/v1/models", "information", information.models, _OPERATION, reply=ModelList),
    _get("/v1/models/{model_id}", "information", information.model, (*_OPERATION, 404), reply=ModelCard),
    _get("/health", "information", information.health, _OPEN, needs_key=False, reply=StatusReply),
    _get("/ping", "information", information.health, _OPEN, needs_key=False, reply=StatusReply),
    _get("/ready", "information", information.ready, _OPEN, needs_key=False, reply=StatusReply),
    _get("/version", "information", information.version, (401, 403), reply=VersionReply),
    _get("/load", "information", information.load, _OPERATION, reply=CoreLoad),
    _get("/metrics", "information", information.metrics, (401, 403), text_reply="text/plain"),
    _post(
        "/v1/load_lora_adapter",
        "operation",
        admin.load_lora_adapter,
        _OPERATION,
        is_admin=True,
        is_lora=True,
        request=(LoadLoRARequest,),
        reply=StatusReply,
    ),
    _post(
        "/v1/unload_lora_adapter",
        "operation",
        admin.unload_lora_adapter,
        (*_OPERATION, 404),
        is_admin=True,
        is_lora=True,
        request=(UnloadLoRARequest,),
        reply=StatusReply,
    ),
    _post("/sleep", "operation", admin.sleep, _OPERATION, is_admin=True, query=SleepQuery, reply=StatusReply),
    _post("/wake_up", "operation", admin.wake_up, _OPERATION, is_admin=True, query=WakeUpQuery, reply=StatusReply),
    _get("/is_sleeping", "operation", admin.is_sleeping, _OPERATION, is_admin=True, reply=IsSleepingReply),
    _post("/pause", "operation", admin.pause, _OPERATION, is_admin=True, query=PauseQuery, reply=StatusReply),
    _post("/resume", "operation", admin.resume, _OPERATION, is_admin=True, reply=StatusReply),
    _get("/is_paused", "operation", admin.is_paused, _OPERATION, is_admin=True, reply=IsPausedReply),
    _post(
        "/reset_prefix_cache",
        "operation",
        admin.reset_prefix_cache,
        _OPERATION,
        is_admin=True,
        reply=ResetPrefixCacheReply,
    ),
    _post(
        "/collective_rpc",
        "operation",
        admin.collective_rpc,
        (*_OPERATION, 504),
        is_admin=True,
        request=(CollectiveRPCRequest,),
        reply=CollectiveRPCReply,
    ),
    _post(
        "/start_profile",
        "operation",
        admin.start_profile,
        _OPERATION,
        is_admin=True,
        query=ProfileQuery,
        reply=StatusReply,
    ),
    _post("/stop_profile", "operation", admin.stop_profile, _OPERATION, is_admin=True, reply=ProfileReply),
    _get(
        "/debug/tasks",
        "operation",
        admin.debug_tasks,
        (401, 403),
        is_admin=True,
        query=DebugQuery,
        reply=admin.DebugReply,
        text_reply="text/plain",
    ),
)
