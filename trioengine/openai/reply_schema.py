"""What the replies with text have in them, for the OpenAPI document.

The replies themselves are written from templates (`sse`); a test holds what is written to what is described here. A
field that is not in every reply is marked so.
"""

from collections.abc import Mapping
from typing import Any

import attrs

_SOMETIMES = {"is_sometimes": True}


@attrs.frozen(kw_only=True)
class PromptTokensDetails:
    """Of the prompt's tokens."""

    cached_tokens: int
    """Found in the prefix cache."""


@attrs.frozen(kw_only=True)
class CompletionTokensDetails:
    """Of the generated tokens."""

    reasoning_tokens: int


@attrs.frozen(kw_only=True)
class Usage:
    """How many tokens a request took, over all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = attrs.field(default=None, metadata=_SOMETIMES)


@attrs.frozen(kw_only=True)
class LegacyLogprobsReply:
    """Log probabilities of the tokens of a text, side by side."""

    tokens: tuple[str, ...]
    """One that is not whole characters is written as `bytes:\\x..`."""
    token_logprobs: tuple[float | None, ...]
    """None for the first token of a prompt."""
    top_logprobs: tuple[Mapping[str, float] | None, ...] | None
    """The most likely tokens at each place, and the one that stands there. None where none were asked for."""
    text_offset: tuple[int, ...]
    """Characters before the token."""


@attrs.frozen(kw_only=True)
class CompletionChoice:
    """One continuation of one prompt, or a part of it."""

    index: int
    """The prompt's place times `n`, and the answer's place."""
    text: str
    logprobs: LegacyLogprobsReply | None
    finish_reason: str | None
    """"stop", "length" or "abort"; None while it goes on."""
    stop_reason: int | str | None = attrs.field(default=None, metadata=_SOMETIMES)
    """The stop token's id, or the stop string."""
    prompt_logprobs: tuple[Mapping[str, Any] | None, ...] | None = attrs.field(default=None, metadata=_SOMETIMES)
    token_ids: tuple[int, ...] | None = attrs.field(default=None, metadata=_SOMETIMES)
    prompt_token_ids: tuple[int, ...] | None = attrs.field(default=None, metadata=_SOMETIMES)
    """In a stream, in the first event of each choice."""


@attrs.frozen(kw_only=True)
class Completion:
    """The reply of `POST /v1/completions`, and an event of its stream."""

    id: str
    object: str
    created: int
    """Unix time."""
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = attrs.field(default=None, metadata=_SOMETIMES)


@attrs.frozen(kw_only=True)
class TokenLogprob:
    """A token, and how likely it was."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


@attrs.frozen(kw_only=True)
class ChosenLogprob:
    """The token that stands at a place, and the most likely ones there."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: tuple[TokenLogprob, ...]


@attrs.frozen(kw_only=True)
class ChatLogprobs:
    """Of a chat's tokens."""

    content: tuple[ChosenLogprob, ...] | None
    refusal: tuple[ChosenLogprob, ...] | None = attrs.field(default=None, metadata=_SOMETIMES)


@attrs.frozen(kw_only=True)
class CalledFunction:
    """A function that the model calls."""

    name: str | None = attrs.field(default=None, metadata=_SOMETIMES)
    arguments: str
    """JSON, as the model wrote it."""


@attrs.frozen(kw_only=True)
class CalledTool:
    """A tool that the model calls. In a stream, a part of it."""

    index: int | None = attrs.field(default=None, metadata=_SOMETIMES)
    """In streams only."""
    id: str | None = attrs.field(default=None, metadata=_SOMETIMES)
    type: str | None = attrs.field(default=None, metadata=_SOMETIMES)
    function: CalledFunction


@attrs.frozen(kw_only=True)
class ChatReplyMessage:
    """What the model says. In a stream, what is new of it."""

    role: str | None = attrs.field(default=None, metadata=_SOMETIMES)
    content: str | None = attrs.field(default=None, metadata=_SOMETIMES)
    refusal: str | None = attrs.field(default=None, metadata=_SOMETIMES)
    reasoning_content: str | None = attrs.field(default=None, metadata=_SOMETIMES)
    reasoning: str | None = attrs.field(default=None, metadata=_SOMETIMES)
    """The same, by vLLM's newer name."""
    tool_calls: tuple[CalledTool, ...] | None = attrs.field(default=None, metadata=_SOMETIMES)
    function_call: CalledFunction | None = attrs.field(default=None, metadata=_SOMETIMES)


@attrs.frozen(kw_only=True)
class ChatChoice:
    """One answer."""

    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    """"stop", "length", "tool_calls" or "abort"."""
    stop_reason: int | str | None = attrs.field(default=None, metadata=_SOMETIMES)
    """The stop token's id, or the stop string."""
    token_ids: tuple[int, ...] | None = attrs.field(default=None, metadata=_SOMETIMES)


@attrs.frozen(kw_only=True)
class ChatCompletion:
    """The reply of `POST /v1/chat/completions`."""

    id: str
    object: str
    created: int
    """Unix time."""
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    prompt_logprobs: tuple[Mapping[str, Any] | None, ...] | None = attrs.field(default=None, metadata=_SOMETIMES)
    prompt_token_ids: tuple[int, ...] | None = attrs.field(default=None, metadata=_SOMETIMES)


@attrs.frozen(kw_only=True)
class ChatChunkChoice:
    """What is new of one answer."""

    index: int
    delta: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    """As of a whole reply; None while it goes on."""
    stop_reason: int | str | None = attrs.field(default=None, metadata=_SOMETIMES)
    """The stop token's id, or the stop string."""
    token_ids: tuple[int, ...] | None = attrs.field(default=None, metadata=_SOMETIMES)


@attrs.frozen(kw_only=True)
class ChatCompletionChunk:
    """An event of the stream of `POST /v1/chat/completions`."""

    id: str
    object: str
    created: int
    """Unix time."""
    model: str
    choices: tuple[ChatChunkChoice, ...]
    """Empty in the event that has the usage."""
    usage: Usage | None = attrs.field(default=None, metadata=_SOMETIMES)
    prompt_token_ids: tuple[int, ...] | None = attrs.field(default=None, metadata=_SOMETIMES)
    """In the first event of each choice."""


@attrs.frozen(kw_only=True)
class ErrorObject:
    """What went wrong, and whose fault it is."""

    message: str
    type: str
    param: str | None
    """The path of the field at fault."""
    code: str | None


@attrs.frozen(kw_only=True)
class ErrorReplyBody:
    """The body of every answer whose status is 400 or above."""

    error: ErrorObject
