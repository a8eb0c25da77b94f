"""`GenerateRequest`: the one object that describes a request from the caller down to the process border."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from trioengine.errors import RequestError
from trioengine.types.params import SamplingParams

MAX_LORA_NAME_CHARS = 256

ChatMessage: TypeAlias = Mapping[str, object]
"""One message as the chat template sees it: `role`, `content` (a string) and whatever else the template reads."""


def _is_text(_: object, __: object, text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"prompt must be a string, not {type(text).__name__}.", param="prompt")


def _is_list(_: object, __: object, token_ids: object) -> None:
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
        raise RequestError(f"prompt must be a list of token ids, not {type(token_ids).__name__}.", param="prompt")


def _are_messages(_: object, __: object, messages: Any) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list, not {type(messages).__name__}.", param="messages")
    for position, message in enumerate(messages):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if not isinstance(message, Mapping):
            param = f"messages[{position}]"
            raise RequestError(f"{param} must be a mapping.", param=param)


def _is_template(_: object, __: object, template: object) -> None:
    if not isinstance(template, str | None):
        raise RequestError("chat_template must be a string.", param="chat_template")


def _is_sampling(_: object, __: object, sampling: object) -> None:
    if not isinstance(sampling, SamplingParams):
        raise RequestError("sampling must be a SamplingParams.", param="sampling")


@attrs.frozen
class TextPrompt:
    """A text to continue, as it is: no chat template. Special tokens in it are plain text."""

    text: str = attrs.field(alias="prompt", validator=_is_text)


@attrs.frozen
class TokensPrompt:
    """Token ids to continue."""

    token_ids: Sequence[int] = attrs.field(alias="prompt_token_ids", validator=_is_list)
    prompt_text: str | None = None
    """The text that they are of, where it was rendered elsewhere; for logs and outputs only."""


@attrs.frozen
class ChatPrompt:
    """A conversation, rendered by the model's chat template."""

    messages: Sequence[ChatMessage] = attrs.field(validator=_are_messages)
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, object] = attrs.field(factory=dict[str, object])
    continue_final_message: bool = False
    """The prompt ends with the last message's text, for the model to go on with it."""
    chat_template: str | None = attrs.field(default=None, validator=_is_template)
    """In place of the model's own. It is a program, run in a sandbox."""


Prompt: TypeAlias = TextPrompt | TokensPrompt | ChatPrompt


def prompt_of(value: "Prompt | str | Sequence[int]") -> Prompt:
    """A string as a `TextPrompt`, a list of integers as a `TokensPrompt`.

    Raises:
        RequestError: it is none of them.
    """
    if isinstance(value, (TextPrompt, TokensPrompt, ChatPrompt)):
        return value
    return TextPrompt(value) if isinstance(value, str) else TokensPrompt(value)


@attrs.frozen
class KVHints:
    """What the caller knows about the keys and values of a request."""

    read_prefix_cache: bool = True
    """False computes the whole prompt, whatever is cached."""
    write_prefix_cache: bool = True
    """False leaves nothing of it behind for others: for prompts that will not come again."""


@attrs.frozen(kw_only=True)
class Deadlines:
    """Seconds that a request may take; None is no limit. When one has passed the request ends with
    `DeadlineExceededError`, after the output that was there.
    """

    total_s: float | None = None
    """From entering its block to its last token."""
    queue_s: float | None = None
    """Until the core has begun to compute it."""
    first_token_s: float | None = None
    inter_token_s: float | None = None
    """From one output of the core to the next."""


@attrs.frozen
class GenerateRequest:
    """A request for text. Travels whole; no function takes its fields apart and passes them on.

    A string as `prompt` is a `TextPrompt`, a list of integers a `TokensPrompt`. What is neither, and `sampling` that is
    none, is a `RequestError` here; every other rule is checked when the request is sent.
    """

    prompt: Prompt = attrs.field(converter=prompt_of)
    sampling: SamplingParams = attrs.field(factory=SamplingParams, validator=_is_sampling)
    request_id: str | None = None
    """The caller's name for it, in logs and outputs; need not be unique. None draws one."""
    priority: int = 0
    """Lower values come first, where the engine's `scheduling_policy` is "priority"."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    lora: str | None = None
    """The name of the LoRA adapter that changes the model for it; None is the model itself."""
    reasoning_ended: bool | None = None
    """Whether `structured_outputs` binds from the first token on, where the engine has a reasoning parser; None lets
    the prompt decide."""
    data_parallel_rank: int | None = None
    """The core that computes it; None lets the load decide."""
    session_id: str | None = None
    """Requests of one session go to the same core, whose prefix cache knows their beginning."""
    deadlines: Deadlines = attrs.field(factory=Deadlines)
    trace_headers: Mapping[str, str] | None = None
    """W3C trace context (`traceparent`, `tracestate`) that the request's span belongs to, where spans are recorded."""
    tokenization_kwargs: Mapping[str, object] | None = None
    """How a text becomes tokens: `add_special_tokens` (bool), `truncate_prompt_tokens` (int, -1 is the context),
    `truncation_side` ("left" or "right"). None is the model's way."""
    kv_hints: KVHints | None = None
    reasoning_parser_kwargs: Mapping[str, object] | None = None
    """For the engine's reasoning parser: `enable_thinking` (bool) says whether the prompt lets the model reason."""
