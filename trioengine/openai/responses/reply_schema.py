"""What the replies of the Responses API have in them, for the OpenAPI document.

The replies are written by `events` and `items`; a test holds what is written to what is described here.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from trioengine.openai.reply_schema import ChosenLogprob

_SOMETIMES = {"is_sometimes": True}


@attrs.frozen(kw_only=True)
class ResponsePart:
    """A part of an item: text, of the kind that `type` says."""

    type: str
    text: str
    annotations: tuple[Mapping[str, object], ...] = attrs.field(default=(), metadata=_SOMETIMES)
    """Always empty: nothing is cited."""
    logprobs: tuple[ChosenLogprob, ...] = attrs.field(default=(), metadata=_SOMETIMES)
    """With `include`, of the part's tokens."""


@attrs.frozen(kw_only=True)
class ResponseItem:
    """A message, a call, what a call gave, or reasoning, as `type` says."""

    id: str
    type: str
    status: str
    """"in_progress", "completed" or "incomplete"."""
    role: str = attrs.field(default="", metadata=_SOMETIMES)
    content: tuple[ResponsePart, ...] = attrs.field(default=(), metadata=_SOMETIMES)
    """Of a message or of reasoning."""
    summary: tuple[ResponsePart, ...] = attrs.field(default=(), metadata=_SOMETIMES)
    """Of reasoning."""
    encrypted_content: str | None = attrs.field(default=None, metadata=_SOMETIMES)
    """Always null: reasoning is in the clear."""
    call_id: str = attrs.field(default="", metadata=_SOMETIMES)
    name: str = attrs.field(default="", metadata=_SOMETIMES)
    arguments: str = attrs.field(default="", metadata=_SOMETIMES)
    """Of a call: the JSON of an object."""
    output: str = attrs.field(default="", metadata=_SOMETIMES)
    """What a call gave."""


@attrs.frozen(kw_only=True)
class ResponseError:
    """Why a response failed."""

    code: str
    message: str
    param: str | None
    type: str


@attrs.frozen(kw_only=True)
class ResponseIncompleteDetails:
    """Why a response has no end."""

    reason: str


@attrs.frozen(kw_only=True)
class ResponseInputTokensDetails:
    """Of the tokens of the conversation."""

    cached_tokens: int
    """Found in the prefix cache."""
    cache_write_tokens: int
    """Always 0: it costs nothing to write."""


@attrs.frozen(kw_only=True)
class ResponseOutputTokensDetails:
    """Of the generated tokens."""

    reasoning_tokens: int


@attrs.frozen(kw_only=True)
class ResponseUsage:
    """How many tokens a response took."""

    input_tokens: int
    input_tokens_details: ResponseInputTokensDetails
    output_tokens: int
    output_tokens_details: ResponseOutputTokensDetails
    total_tokens: int


@attrs.frozen(kw_only=True)
class ResponseObject:
    """A response."""

    id: str
    object: str
    created_at: int
    """Unix time."""
    status: str
    """"queued", "in_progress", "completed", "incomplete", "failed" or "cancelled"."""
    background: bool
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: ResponseIncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: tuple[ResponseItem, ...]
    """What the model has written, in its order."""
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str = attrs.field(default="", metadata=_SOMETIMES)
    prompt_cache_retention: str | None
    reasoning: Mapping[str, Any]
    safety_identifier: str = attrs.field(default="", metadata=_SOMETIMES)
    service_tier: str
    store: bool
    temperature: float
    text: Mapping[str, Any]
    tool_choice: Any
    tools: tuple[Mapping[str, Any], ...]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage = attrs.field(default=None, metadata=_SOMETIMES)  # pyright: ignore[reportAssignmentType]
    """Not before the first output."""
    user: str = attrs.field(default="", metadata=_SOMETIMES)
    metadata: Mapping[str, str]


@attrs.frozen(kw_only=True)
class ResponseEvent:
    """One event of a response's stream."""

    type: str
    """Which of the others are there, it says."""
    sequence_number: int
    """Counts from 0."""
    response: ResponseObject = attrs.field(default=None, metadata=_SOMETIMES)  # pyright: ignore[reportAssignmentType]
    item: ResponseItem = attrs.field(default=None, metadata=_SOMETIMES)  # pyright: ignore[reportAssignmentType]
    item_id: str = attrs.field(default="", metadata=_SOMETIMES)
    output_index: int = attrs.field(default=0, metadata=_SOMETIMES)
    content_index: int = attrs.field(default=0, metadata=_SOMETIMES)
    summary_index: int = attrs.field(default=0, metadata=_SOMETIMES)
    part: ResponsePart = attrs.field(default=None, metadata=_SOMETIMES)  # pyright: ignore[reportAssignmentType]
    delta: str = attrs.field(default="", metadata=_SOMETIMES)
    text: str = attrs.field(default="", metadata=_SOMETIMES)
    name: str = attrs.field(default="", metadata=_SOMETIMES)
    arguments: str = attrs.field(default="", metadata=_SOMETIMES)
    logprobs: tuple[ChosenLogprob, ...] = attrs.field(default=(), metadata=_SOMETIMES)


@attrs.frozen(kw_only=True)
class DeletedResponse:
    """The reply of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: str
    deleted: bool


@attrs.frozen(kw_only=True)
class ResponseItemList:
    """The reply of `GET /v1/responses/{response_id}/input_items`."""

    object: str
    data: tuple[ResponseItem, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


@attrs.frozen
class InputTokens:
    """The reply of `POST /v1/responses/input_tokens`."""

    object: str
    input_tokens: int
