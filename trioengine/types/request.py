"""`GenerateRequest`: the one object that describes a request from the caller down to the process border."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from trioengine.types.params import SamplingParams

MAX_LORA_NAME_CHARS = 256

ChatMessage: TypeAlias = Mapping[str, object]
"""One message as the chat template sees it: `role`, `content` (a string) and whatever else the template reads."""


@attrs.frozen
class TextPrompt:
    """A text to continue, as it is: no chat template. Special tokens in it are plain text."""

    text: str


@attrs.frozen
class TokensPrompt:
    """Token ids to continue."""

    token_ids: Sequence[int]


@attrs.frozen
class ChatPrompt:
    """A conversation, rendered by the model's chat template."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, object] = attrs.field(factory=dict[str, object])


Prompt: TypeAlias = TextPrompt | TokensPrompt | ChatPrompt


def prompt_of(value: "Prompt | str | Sequence[int]") -> Prompt:
    """A string as a `TextPrompt`, a list of integers as a `TokensPrompt`."""
    if isinstance(value, (TextPrompt, TokensPrompt, ChatPrompt)):
        return value
    return TextPrompt(value) if isinstance(value, str) else TokensPrompt(value)


@attrs.frozen
class GenerateRequest:
    """A request for text. Travels whole; no function takes its fields apart and passes them on.

    A string as `prompt` is a `TextPrompt`, a list of integers a `TokensPrompt`.
    """

    prompt: Prompt = attrs.field(converter=prompt_of)
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
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
