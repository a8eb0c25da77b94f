"""What the requests of OpenAI's API have in common, and how a JSON object becomes one.

Nothing is coerced: a value of the wrong type is an error that names its path. The sampling fields have one home,
`SamplingParams`, and are structured from the same object. `null` is the same as leaving a field out. Fields that
nobody here knows are ignored, and named in `RequestBody.unknown_fields`; those that would change the answer, and
cannot be honoured, are refused by name.
"""

import functools
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import attrs
from cattrs import Converter
from cattrs.errors import ClassValidationError, IterableValidationError
from cattrs.gen import make_dict_structure_fn, override

from trioengine.errors import RequestError
from trioengine.openai.json_body import field_path, parse_object
from trioengine.openai.structured_fields import STRUCTURED_FIELDS
from trioengine.types.codec import make_strict_converter
from trioengine.types.params import UNSUPPORTED_FIELDS, SamplingParams

T = TypeVar("T")


@attrs.frozen
class StreamOptions:
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    """The token counts come in a chunk of their own, before the end."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk has the counts so far."""


@attrs.frozen(kw_only=True)
class RequestBody:
    """What all kinds of request for text have."""

    refused_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of `SamplingParams`, or for the form, that a kind has other names for."""

    sampling: SamplingParams
    model: str | None = None
    """The served model, or one of its LoRA adapters. None is the served model."""
    stream: bool = False
    stream_options: StreamOptions = attrs.field(factory=StreamOptions)
    priority: int = 0
    cache_salt: str | None = None
    timeout: float | None = None
    """Seconds for the whole request."""
    truncate_prompt_tokens: int | None = None
    """A longer prompt loses tokens at its beginning until so many are left; -1 is as many as leave room for the
    answer. None refuses a prompt that is too long."""
    reasoning_parser_kwargs: Mapping[str, object] | None = None
    unknown_fields: tuple[str, ...] = ()
    """Fields of the body that nobody here knows, and that had no effect."""
    given_fields: frozenset[str] = attrs.field(default=frozenset[str](), eq=False)
    """Fields of the body that had a value: for defaults that depend on what was left out."""


@attrs.frozen(kw_only=True)
class TokenTellingBody(RequestBody):
    """What chats and completions have: their replies can tell of tokens by id."""

    return_token_ids: bool = False
    """The ids of the prompt's tokens, and of the answers', are told too."""
    return_tokens_as_token_ids: bool = False
    """Log probabilities name tokens `token_id:N`, so that no two have the same name."""


Neutral: TypeAlias = Mapping[str, Sequence[object]]
"""Fields that are not honoured -> the values, besides null, with which the answer is what it is without the field."""

NEUTRAL: Neutral = {
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    **dict.fromkeys(UNSUPPORTED_FIELDS, ([], 0)),
}
"""Of both kinds of request."""

HARMLESS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields that clients send for other servers' bookkeeping. They have no effect here, and that is no news."""

MAX_UNKNOWN_NAMED = 16
MAX_FIELD_NAME_CHARS = 64


def parse_fields(body: bytes, neutral: Neutral) -> dict[str, object]:
    """The fields of the JSON object that `body` holds, without those that are null or ask for nothing.

    Raises:
        RequestError: it holds none, or has a field of `neutral` with another value.
    """
    return without_neutral(parse_object(body), neutral)


def without_neutral(body: Mapping[str, object], neutral: Neutral) -> dict[str, object]:
    """These fields of a body, without those that are null or ask for nothing.

    Raises:
        RequestError: one of `neutral` has another value.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    for name in neutral.keys() & fields.keys():
        if not any(_is_same_json(fields[name], value) for value in neutral[name]):
            raise RequestError(f"{name} is not supported by this server.", param=name)
        # It asks for nothing, and may have another form here than in `SamplingParams`.
        del fields[name]
    return fields


def structure_request(
    converter: Converter, fields: Mapping[str, object], sampling_fields: Mapping[str, object], request_class: type[T]
) -> T:
    """The request for text that these fields are of.

    Args:
        converter: of `make_request_converter`, with whatever the class needs.
        fields: of the body.
        sampling_fields: the same, by the names and in the form that `SamplingParams` has.
        request_class: a class of `RequestBody`.

    Raises:
        RequestError: a value is of the wrong type. `param` is its path.
    """
    own = {_SAMPLING: sampling_fields, "given_fields": fields.keys()}
    known = _field_names(SamplingParams) - _HIDDEN_SAMPLING_FIELDS | STRUCTURED_FIELDS
    return structure_body(converter, fields, request_class, own, known)


def check_stream_options(request: RequestBody) -> None:
    """Return unless the request says what a stream tells, and asks for none.

    Raises:
        RequestError: it does.
    """
    if request.stream_options != StreamOptions() and not request.stream:
        raise RequestError("stream_options needs stream to be true.", param="stream_options")


def structure_body(
    converter: Converter,
    fields: Mapping[str, object],
    body_class: type[T],
    own_fields: Mapping[str, object] | None = None,
    known: Set[str] = frozenset(),
) -> T:
    """An object of a class that has `unknown_fields` beside what bodies of its kind may have.

    Args:
        converter: of `make_request_converter`, with whatever the class needs.
        fields: of the body.
        body_class: of the result.
        own_fields: fields of the class that are not the body's.
        known: further names that the body may have.

    Raises:
        RequestError: a value is of the wrong type. `param` is its path.
    """
    own = dict(own_fields or {})
    all_known = (_field_names(body_class) - own.keys() - {_UNKNOWN}) | known | HARMLESS
    unknown = sorted(fields.keys() - all_known)
    own[_UNKNOWN] = [name[:MAX_FIELD_NAME_CHARS] for name in unknown[:MAX_UNKNOWN_NAMED]]
    try:
        return converter.structure({**fields, **own}, body_class)
    except (ClassValidationError, IterableValidationError) as error:
        raise _request_error(error) from None


def make_request_converter() -> Converter:
    """A strict converter that knows what the kinds of request share; their classes are added by `register_object`."""
    converter = make_strict_converter(forbid_extra_keys=False)
    converter.register_structure_hook_func(lambda type_: type_ is object, lambda value, _: value)
    converter.register_structure_hook(int, lambda value, _: structure_int(value))
    converter.register_structure_hook_func(lambda type_: type_ == frozenset[str], lambda value, _: frozenset(value))

    def structure_stop(value: object, _: object) -> tuple[str, ...]:
        if not isinstance(value, (str, list)):
            raise TypeError("expected a string or a list of strings")
        return (value,) if isinstance(value, str) else converter.structure(cast(object, value), tuple[str, ...])

    def structure_logit_bias(value: object, _: object) -> dict[int, float]:
        if not isinstance(value, dict):
            raise TypeError("expected an object")
        biases = converter.structure(cast(object, value), dict[str, float])
        return {_token_id(key): bias for key, bias in biases.items()}

    register_object(converter, StreamOptions)
    register_object(
        converter,
        SamplingParams,
        stop=override(struct_hook=structure_stop),
        bad_words=override(struct_hook=structure_stop),
        logit_bias=override(struct_hook=structure_logit_bias),
        # Not the caller's to choose over HTTP.
        **dict.fromkeys(_NOT_OVER_HTTP, override(omit=True)),
    )
    return converter


def register_object(converter: Converter, class_: type[T], **overrides: object) -> None:
    """Structure this class from JSON objects only. Fields whose names begin with an underscore stay out."""
    structure = make_dict_structure_fn(class_, converter, **overrides)  # pyright: ignore[reportArgumentType]

    def structure_object(value: object, type_: type[T]) -> T:
        if not isinstance(value, dict):
            raise TypeError("expected an object")
        return structure(cast("Mapping[str, object]", value), type_)

    converter.register_structure_hook(class_, structure_object)


def structure_int(value: object) -> int:
    """An integer that can travel to the core.

    Raises:
        TypeError, ValueError: it is none.
    """
    if type(value) is not int:
        raise TypeError("expected an integer")
    if not -(2**63) <= value < 2**64:
        raise ValueError("expected an integer of 64 bits")
    return value


_SAMPLING = "sampling"
_NOT_OVER_HTTP = ("detokenize", "output_kind", "logits_processors", "extra_args", "structured_outputs")
_HIDDEN_SAMPLING_FIELDS = frozenset({"detokenize", "output_kind"})
_UNKNOWN = "unknown_fields"


@functools.cache
def _field_names(class_: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in attrs.fields(class_))


def _is_same_json(value: object, other: object) -> bool:
    # True == 1 in Python, not in JSON.
    return type(value) is type(other) and value == other


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
    if isinstance(error, RequestError):
        return error
    problem = "is required" if isinstance(error, KeyError) else str(error)
    return RequestError(f"{path} {problem}." if isinstance(error, KeyError) else f"{path}: {problem}.", param=path)


_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise ValueError("its keys must be token ids")
    return int(key)
