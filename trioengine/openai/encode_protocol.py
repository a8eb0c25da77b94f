"""The bodies of the routes that answer with vectors: embeddings, pooling, labels, scores and ranks.

Inputs are texts or token ids, one or many. Fields are vLLM's where OpenAI has none.
"""

import enum
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar, cast

import attrs
from cattrs.gen import override

from trioengine.errors import RequestError
from trioengine.frontend.request_checks import MAX_CACHE_SALT_CHARS
from trioengine.openai.json_body import field_path
from trioengine.openai.protocol import make_request_converter, parse_fields, register_object, structure_body
from trioengine.types.pooling import PoolingTask
from trioengine.types.request import TextPrompt, TokensPrompt

B = TypeVar("B", bound="EncodeBody")

EncodeInput: TypeAlias = TextPrompt | TokensPrompt

_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
INPUT_SCHEMA = {
    "anyOf": [
        _TEXT_SCHEMA,
        _TOKENS_SCHEMA,
        {"type": "array", "items": {"anyOf": [_TEXT_SCHEMA, _TOKENS_SCHEMA]}, "minItems": 1},
    ]
}
"""JSON schema of texts or token ids, one or many."""
_TEXTS_SCHEMA = {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1}]}
_TRUNCATE_SCHEMA = {"anyOf": [{"enum": [-1]}, {"type": "integer", "minimum": 1}]}


class EncodingFormat(enum.StrEnum):
    """How a vector is written."""

    FLOAT = "float"
    """As a list of numbers."""
    BASE64 = "base64"
    """As base64 of float32 numbers, little-endian."""


@attrs.frozen(kw_only=True)
class EncodeBody:
    """What all requests for vectors share."""

    model: str | None = None
    """The served model, or one of its LoRA adapters. None is the served model."""
    truncate_prompt_tokens: int | None = attrs.field(default=None, metadata={"schema": _TRUNCATE_SCHEMA})
    """A longer text loses tokens at its end until so many are left; -1 is as many as the model takes. None refuses a
    text that is too long."""
    priority: int = attrs.field(default=0, metadata={"schema": {"minimum": -(2**31), "maximum": 2**31 - 1}})
    """Lower values come first, where the engine's `scheduling_policy` is "priority"."""
    cache_salt: str | None = attrs.field(
        default=None, metadata={"schema": {"minLength": 1, "maxLength": MAX_CACHE_SALT_CHARS}}
    )
    """Requests share cached prefixes only with requests of the same salt."""
    timeout: float | None = attrs.field(default=None, metadata={"schema": {"exclusiveMinimum": 0}})
    """Seconds for the whole request."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the body that nobody here knows, and that had no effect."""


@attrs.frozen(kw_only=True)
class EmbeddingRequest(EncodeBody):
    """The body of `POST /v1/embeddings`."""

    input: tuple[EncodeInput, ...] = attrs.field(metadata={"schema": INPUT_SCHEMA})
    """A text, a list of token ids, or a list of those. The vectors come in their order."""
    encoding_format: EncodingFormat = EncodingFormat.FLOAT
    dimensions: int | None = attrs.field(default=None, metadata={"schema": {"minimum": 1}})
    """How many of a vector's first numbers are kept, before it is normalized."""
    normalize: bool | None = None
    """Whether vectors get the length 1. None is what the model says."""


@attrs.frozen(kw_only=True)
class PoolingRequest(EncodeBody):
    """The body of `POST /pooling`."""

    input: tuple[EncodeInput, ...] = attrs.field(metadata={"schema": INPUT_SCHEMA})
    """As of embeddings."""
    task: PoolingTask | None = attrs.field(
        default=None, metadata={"schema": {"enum": ["embed", "token_embed", "classify"]}}
    )
    """What the vectors are for. None is what the model was made for."""
    encoding_format: EncodingFormat = EncodingFormat.FLOAT
    dimensions: int | None = attrs.field(default=None, metadata={"schema": {"minimum": 1}})
    """As of embeddings."""
    normalize: bool | None = None
    """Whether vectors get the length 1. None is what the model says."""
    use_activation: bool | None = None
    """For labels: whether logits become probabilities."""


@attrs.frozen(kw_only=True)
class ClassifyRequest(EncodeBody):
    """The body of `POST /classify`."""

    input: tuple[EncodeInput, ...] = attrs.field(metadata={"schema": INPUT_SCHEMA})
    """As of embeddings."""
    use_activation: bool | None = None
    """Whether logits become probabilities; they do by default."""


@attrs.frozen(kw_only=True)
class ScoreRequest(EncodeBody):
    """The body of `POST /v1/score`."""

    text_1: tuple[str, ...] = attrs.field(metadata={"schema": _TEXTS_SCHEMA})
    """One text, which is compared with each of `text_2`; or as many as there are in `text_2`, compared one by one."""
    text_2: tuple[str, ...] = attrs.field(metadata={"schema": _TEXTS_SCHEMA})
    """One text or several."""
    use_activation: bool | None = None
    """Whether logits become probabilities; they do by default. For models that read both texts at once."""


@attrs.frozen(kw_only=True)
class RerankRequest(EncodeBody):
    """The body of `POST /v1/rerank`."""

    query: str = attrs.field(metadata={"schema": _TEXT_SCHEMA})
    documents: tuple[str, ...] = attrs.field(
        metadata={"schema": {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1}}
    )
    top_n: int = attrs.field(default=0, metadata={"schema": {"minimum": 0}})
    """How many of the best documents are told; 0 is all."""
    return_documents: bool = True
    """Whether the documents' texts come with their scores."""
    use_activation: bool | None = None
    """As of scores."""


def parse_encode_body(body: bytes, body_class: type[B]) -> B:
    """The request of this class that the body of an HTTP request holds.

    Raises:
        RequestError: it holds none. `param` is the path of the field at fault.
    """
    return structure_body(_CONVERTER, parse_fields(body, {}), body_class)


def _structure_input(value: object, _: object) -> tuple[EncodeInput, ...]:
    if isinstance(value, str):
        return (TextPrompt(_text(value)),)
    items = _items(value, "expected a string, a list of token ids, or a list of those")
    if _are_ids(items):
        return (TokensPrompt(cast("list[int]", items)),)
    return tuple(_input_item(position, item) for position, item in enumerate(items))


def _input_item(position: int, item: object) -> EncodeInput:
    if isinstance(item, str) and item:
        return TextPrompt(item)
    if isinstance(item, list) and item and _are_ids(cast("list[object]", item)):
        return TokensPrompt(cast("list[int]", item))
    path = field_path("input", position)
    raise RequestError(f"{path} must be a text or a list of token ids, and not empty.", param=path)


def _structure_texts(name: str) -> Callable[[object, object], tuple[str, ...]]:
    def structure(value: object, _: object) -> tuple[str, ...]:
        if isinstance(value, str) and name != "documents":
            return (_text(value),)
        items = _items(value, "expected a list of strings")
        for position, item in enumerate(items):
            if not isinstance(item, str) or not item:
                path = field_path(name, position)
                raise RequestError(f"{path} must be a text, and not empty.", param=path)
        return tuple(cast("list[str]", items))

    return structure


def _structure_text(value: object, _: object) -> str:
    if not isinstance(value, str):
        raise TypeError("expected a string")
    return _text(value)


def _text(value: str) -> str:
    if not value:
        raise ValueError("it is empty")
    return value


def _items(value: object, expected: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise TypeError(expected)
    if not value:
        raise ValueError("it is empty")
    return cast("list[object]", value)


def _are_ids(items: Sequence[object]) -> bool:
    # Much faster than a hook for each; their range is the engine's to check.
    return all(type(item) is int for item in items)


_CONVERTER = make_request_converter()
for _class in (EmbeddingRequest, PoolingRequest, ClassifyRequest):
    register_object(_CONVERTER, _class, input=override(struct_hook=_structure_input))
register_object(
    _CONVERTER,
    ScoreRequest,
    text_1=override(struct_hook=_structure_texts("text_1")),
    text_2=override(struct_hook=_structure_texts("text_2")),
)
register_object(
    _CONVERTER,
    RerankRequest,
    query=override(struct_hook=_structure_text),
    documents=override(struct_hook=_structure_texts("documents")),
)
