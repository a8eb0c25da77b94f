"""The bodies and replies of `/tokenize` and `/detokenize`, with vLLM's fields."""

from typing import cast

import attrs
from cattrs.gen import override

from trioengine.errors import RequestError
from trioengine.openai.chat_protocol import ChatCompletionRequest, parse_chat_request
from trioengine.openai.protocol import make_request_converter, parse_fields, register_object, structure_body


@attrs.frozen(kw_only=True)
class TokenizeRequest:
    """The body of `POST /tokenize`, for a text. With `messages` it is a chat request's instead."""

    prompt: str
    """A text, as completions take it."""
    model: str | None = None
    add_special_tokens: bool = True
    """Whether the model's own first token and the like are put around it."""
    return_token_strs: bool = False
    """Whether the tokens come as text too."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the body that nobody here knows, and that had no effect."""


@attrs.frozen
class TokenizeReply:
    """The reply of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None
    """The tokens as the vocabulary writes them; None where they were not asked for."""


@attrs.frozen(kw_only=True)
class DetokenizeRequest:
    """The body of `POST /detokenize`."""

    tokens: tuple[int, ...] = attrs.field(
        metadata={"schema": {"type": "array", "items": {"type": "integer", "minimum": 0}}}
    )
    model: str | None = None
    unknown_fields: tuple[str, ...] = ()
    """Fields of the body that nobody here knows, and that had no effect."""


@attrs.frozen
class DetokenizeReply:
    """The reply of `POST /detokenize`."""

    prompt: str
    """The text, that of control tokens included."""


@attrs.frozen(kw_only=True)
class TokenizeChatRequest:
    """The body of `POST /tokenize`, for a conversation: a chat request, and what is wanted besides."""

    chat: ChatCompletionRequest
    return_token_strs: bool = False
    """Whether the tokens come as text too."""
    add_special_tokens: bool = False
    """Must be false: a chat template writes the model's first token itself."""
    unknown_fields: tuple[str, ...] = ()

    @property
    def model(self) -> str | None:
        """The chat's."""
        return self.chat.model


def parse_tokenize_request(body: bytes) -> TokenizeRequest | TokenizeChatRequest:
    """The text or conversation to tokenize.

    Raises:
        RequestError: it is neither. `param` is the path of the field at fault.
    """
    fields = parse_fields(body, {})
    if "messages" not in fields:
        return structure_body(_CONVERTER, fields, TokenizeRequest)
    chat = parse_chat_request(body)
    options = {name: fields[name] for name in _CHAT_OPTIONS if name in fields}
    request = structure_body(_CONVERTER, options, TokenizeChatRequest, {"chat": chat})
    if request.add_special_tokens:
        raise RequestError(
            "add_special_tokens must be false: the chat template writes special tokens itself.",
            param="add_special_tokens",
        )
    unknown = tuple(name for name in chat.unknown_fields if name not in _CHAT_OPTIONS)
    return attrs.evolve(request, unknown_fields=unknown)


def parse_detokenize_request(body: bytes) -> DetokenizeRequest:
    """The tokens whose text is wanted.

    Raises:
        RequestError: as `parse_tokenize_request`.
    """
    return structure_body(_CONVERTER, parse_fields(body, {}), DetokenizeRequest)


_CHAT_OPTIONS = ("return_token_strs", "add_special_tokens")


def _structure_tokens(value: object, _: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError("expected a list of token ids")
    # Much faster than a hook for each; their range is the engine's to check.
    if not all(type(item) is int for item in cast("list[object]", value)):
        raise TypeError("expected a list of token ids")
    return tuple(cast("list[int]", value))


_CONVERTER = make_request_converter()
register_object(_CONVERTER, TokenizeRequest)
register_object(_CONVERTER, TokenizeChatRequest, chat=override(struct_hook=lambda value, _: value))
register_object(_CONVERTER, DetokenizeRequest, tokens=override(struct_hook=_structure_tokens))
