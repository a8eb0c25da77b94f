"""The requests of OpenAI's API, as far as they are served here, and how a JSON object becomes one.

Nothing is coerced: a value of the wrong type is an error that names its path. The sampling fields have one home,
`SamplingParams`, and are structured from the same object. `null` is the same as leaving a field out. Fields that
nobody here knows are ignored; those that would change the answer, and cannot be honoured, are refused by name.
"""

import enum
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

import attrs
from cattrs import Converter
from cattrs.errors import ClassValidationError, IterableValidationError
from cattrs.gen import make_dict_structure_fn, override

from trioengine.errors import RequestError
from trioengine.openai.json_body import field_path, parse_object
from trioengine.types.codec import make_strict_converter
from trioengine.types.params import SamplingParams
from trioengine.types.request import TextPrompt, TokensPrompt

T = TypeVar("T")


class Role(enum.StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    """What newer clients call `system`."""
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class PartType(enum.StrEnum):
    """What a part of a message's content is."""

    TEXT = "text"


@attrs.frozen
class TextPart:
    """One part of a message's content."""

    type: PartType
    text: str


@attrs.frozen
class Message:
    """One message of a conversation."""

    role: Role
    content: str | None = None
    """The texts of its parts, joined. None where there was none."""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: object = None
    function_call: object = None
    audio: object = None


@attrs.frozen
class StreamOptions:
    """What a stream tells besides the text."""

    include_usage: bool | None = None


CompletionPrompt: TypeAlias = TextPrompt | TokensPrompt


@attrs.frozen(kw_only=True)
class RequestBody:
    """What both kinds of request have."""

    sampling: SamplingParams
    model: str | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions = attrs.field(factory=StreamOptions)


@attrs.frozen(kw_only=True)
class ChatCompletionRequest(RequestBody):
    """The body of `POST /v1/chat/completions`."""

    messages: tuple[Message, ...]
    max_tokens: int | None = None
    """None is what the context leaves: not `sampling`'s default, which is for completions."""
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`; counts when both are given."""
    add_generation_prompt: bool = True
    chat_template_kwargs: Mapping[str, object] = attrs.field(factory=dict[str, object])


@attrs.frozen(kw_only=True)
class CompletionRequest(RequestBody):
    """The body of `POST /v1/completions`."""

    prompt: CompletionPrompt


def parse_chat_request(body: bytes) -> ChatCompletionRequest:
    """The chat request that the body of an HTTP request holds.

    Raises:
        RequestError: it holds none, or asks for what cannot be honoured. `param` is the path of the field at fault.
    """
    return _parse(body, ChatCompletionRequest, {**_NEUTRAL_IN_BOTH, **_NEUTRAL_IN_CHAT})


def parse_completion_request(body: bytes) -> CompletionRequest:
    """The completion request that the body of an HTTP request holds.

    Raises:
        RequestError: as `parse_chat_request`.
    """
    return _parse(body, CompletionRequest, {**_NEUTRAL_IN_BOTH, **_NEUTRAL_IN_COMPLETIONS})


_NEUTRAL_IN_BOTH: Mapping[str, Sequence[object]] = {
    "best_of": (1,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields that are not honoured -> the values, besides null, with which the answer is what it is without the field."""

_NEUTRAL_IN_CHAT: Mapping[str, Sequence[object]] = {
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}

_NEUTRAL_IN_COMPLETIONS: Mapping[str, Sequence[object]] = {
    "logprobs": (),
    "prompt_embeds": (),
    "suffix": ("",),
}


def _parse(body: bytes, request_class: type[T], neutral: Mapping[str, Sequence[object]]) -> T:
    fields = {name: value for name, value in parse_object(body).items() if value is not None}
    for name in neutral.keys() & fields.keys():
        if not any(_is_same_json(fields[name], value) for value in neutral[name]):
            raise RequestError(f"{name} is not supported by this server.", param=name)
        # It asks for nothing, and may have another form here than in `SamplingParams`.
        del fields[name]
    n = fields.get("n", 1)
    if type(n) is int and n != 1:
        problem = "n must be at least 1" if n < 1 else "n must be 1: this server gives one answer to a request"
        raise RequestError(f"{problem}, not {_short(n)}.", param="n")
    try:
        return _CONVERTER.structure({**fields, _SAMPLING: fields}, request_class)
    except (ClassValidationError, IterableValidationError) as error:
        raise _request_error(error) from None


_SAMPLING = "sampling"


def _is_same_json(value: object, other: object) -> bool:
    # True == 1 in Python, not in JSON.
    return type(value) is type(other) and value == other


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**20 else "a number of many digits"


def _request_error(error: Exception) -> RequestError:
    """The first thing that is wrong, with its path: one error is enough, however many there are."""
    path = ""
    while isinstance(error, (ClassValidationError, IterableValidationError)):
        if isinstance(error, ClassValidationError):
            noted, others = error.group_exceptions()
            error, key = (noted[0][0], noted[0][1].name) if noted else (others[0], "")
        else:
            noted, others = error.group_exceptions()
            error, key = (noted[0][0], noted[0][1].index) if noted else (others[0], "")
        if key != "" and (path or key != _SAMPLING):
            path = field_path(path, key)
    problem = "is required" if isinstance(error, KeyError) else str(error)
    return RequestError(f"{path} {problem}." if isinstance(error, KeyError) else f"{path}: {problem}.", param=path)


def _make_converter() -> Converter:
    converter = make_strict_converter(forbid_extra_keys=False)
    converter.register_structure_hook_func(lambda type_: type_ is object, lambda value, _: value)
    converter.register_structure_hook(int, lambda value, _: _structure_int(value))

    def structure_content(value: object, _: object) -> str | None:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise TypeError("expected a string or a list of parts")
        return "".join(part.text for part in converter.structure(cast(object, value), tuple[TextPart, ...]))

    def structure_stop(value: object, _: object) -> tuple[str, ...]:
        if not isinstance(value, (str, list)):
            raise TypeError("expected a string or a list of strings")
        return (value,) if isinstance(value, str) else converter.structure(cast(object, value), tuple[str, ...])

    def structure_logit_bias(value: object, _: object) -> dict[int, float]:
        if not isinstance(value, dict):
            raise TypeError("expected an object")
        biases = converter.structure(cast(object, value), dict[str, float])
        return {_token_id(key): bias for key, bias in biases.items()}

    def check_object(value: object) -> None:
        if not isinstance(value, dict):
            raise TypeError("expected an object")

    def register(class_: type[T], **overrides: object) -> None:
        structure = make_dict_structure_fn(class_, converter, **overrides)  # pyright: ignore[reportArgumentType]

        def structure_object(value: object, type_: type[T]) -> T:
            check_object(value)
            return structure(cast("Mapping[str, object]", value), type_)

        converter.register_structure_hook(class_, structure_object)

    register(TextPart)
    register(StreamOptions)
    register(Message, content=override(struct_hook=structure_content))
    register(
        SamplingParams,
        stop=override(struct_hook=structure_stop),
        logit_bias=override(struct_hook=structure_logit_bias),
        # Not the caller's to choose over HTTP.
        detokenize=override(omit=True),
        output_kind=override(omit=True),
    )
    register(ChatCompletionRequest)
    register(CompletionRequest, prompt=override(struct_hook=_structure_prompt))
    return converter


def _structure_int(value: object) -> int:
    if type(value) is not int:
        raise TypeError("expected an integer")
    # Larger ones cannot travel to the core.
    if not -(2**63) <= value < 2**64:
        raise ValueError("expected an integer of 64 bits")
    return value


def _structure_prompt(value: object, _: object) -> CompletionPrompt:
    if isinstance(value, str):
        if not value:
            raise ValueError("it is empty, so there is nothing to continue")
        return TextPrompt(value)
    if not isinstance(value, list):
        raise TypeError("expected a string or a list of token ids")
    items = cast("list[object]", value)
    if not items:
        raise ValueError("it is empty, so there is nothing to continue")
    if all(type(item) is int for item in items):
        # `all` is much faster than a hook for each; their range is the engine's to check.
        return TokensPrompt(cast("list[int]", items))
    if not all(isinstance(item, (str, list)) for item in items):
        raise TypeError("expected a string or a list of token ids")
    if len(items) > 1:
        raise ValueError(f"one prompt in a request, please, not {len(items)}")
    inner = items[0]
    if isinstance(inner, str):
        return _structure_prompt(inner, None)
    token_ids = _CONVERTER.structure(inner, list[int])
    return _structure_prompt(cast(object, token_ids), None)


_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise ValueError("its keys must be token ids")
    return int(key)


_CONVERTER = _make_converter()
