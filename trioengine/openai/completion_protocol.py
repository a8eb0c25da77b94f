"""The body of `POST /v1/completions`."""

from typing import TypeAlias, cast

import attrs
from cattrs import override

from trioengine.errors import RequestError
from trioengine.openai.json_body import field_path
from trioengine.openai.protocol import (
    NEUTRAL,
    Neutral,
    TokenTellingBody,
    check_stream_options,
    make_request_converter,
    parse_fields,
    register_object,
    structure_request,
)
from trioengine.openai.structured_fields import structured_outputs_of
from trioengine.types.request import TextPrompt, TokensPrompt

CompletionPrompt: TypeAlias = TextPrompt | TokensPrompt

_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}


@attrs.frozen(kw_only=True)
class CompletionRequest(TokenTellingBody):
    """The body of `POST /v1/completions`."""

    prompt: tuple[CompletionPrompt, ...] = attrs.field(
        metadata={
            "schema": {
                "anyOf": [
                    _TEXT_SCHEMA,
                    _TOKENS_SCHEMA,
                    {"type": "array", "items": {"anyOf": [_TEXT_SCHEMA, _TOKENS_SCHEMA]}, "minItems": 1},
                ]
            }
        }
    )
    """A text or a list of token ids, or a list of those: each is continued by itself, `n` times. The choices of the
    first come first."""
    echo: bool = False
    """The prompt is a part of the text; with `logprobs` it has log probabilities too. `max_tokens` may be 0 then."""
    best_of: int | None = attrs.field(default=None, metadata={"schema": {"minimum": 1}})
    """The same as `n`, or left out: every answer that is made is told."""
    add_special_tokens: bool = True
    """Whether a text begins with what the model wants there, such as BOS."""


_NEUTRAL: Neutral = {
    **{name: values for name, values in NEUTRAL.items() if name != "best_of"},
    "prompt_embeds": (),
}


def parse_completion_request(body: bytes) -> CompletionRequest:
    """The completion request that the body of an HTTP request holds.

    Raises:
        RequestError: it holds none, or asks for what cannot be honoured. `param` is the path of the field at fault.
    """
    fields = parse_fields(body, _NEUTRAL)
    if fields.pop("suffix", "") != "":
        raise RequestError(
            "suffix is not supported: models are asked to continue, not to fill in. Write the prompt as token ids, "
            "with the model's own ones for filling in.",
            param="suffix",
        )
    request = structure_request(_CONVERTER, fields, fields, CompletionRequest)
    check_stream_options(request)
    if request.best_of is not None and request.best_of != request.sampling.n:
        raise RequestError(
            "best_of must be the same as n, or be left out: this server tells every answer that it makes.",
            param="best_of",
        )
    form = structured_outputs_of(fields)
    if form is None:
        return request
    return attrs.evolve(request, sampling=attrs.evolve(request.sampling, structured_outputs=form))


def _structure_prompts(value: object, _: object) -> tuple[CompletionPrompt, ...]:
    if isinstance(value, str):
        if not value:
            raise ValueError("it is empty, so there is nothing to continue")
        return (TextPrompt(value),)
    if not isinstance(value, list):
        raise TypeError("expected a string, a list of token ids, or a list of those")
    items = cast("list[object]", value)
    if not items:
        raise ValueError("it is empty, so there is nothing to continue")
    if _are_ids(items):
        return (TokensPrompt(cast("list[int]", items)),)
    return tuple(_prompt(position, item) for position, item in enumerate(items))


def _prompt(position: int, item: object) -> CompletionPrompt:
    if isinstance(item, str) and item:
        return TextPrompt(item)
    if isinstance(item, list) and item and _are_ids(cast("list[object]", item)):
        return TokensPrompt(cast("list[int]", item))
    path = field_path("prompt", position)
    raise RequestError(f"{path} must be a text or a list of token ids, and not empty.", param=path)


def _are_ids(items: list[object]) -> bool:
    # `all` is much faster than a hook for each; their range is the engine's to check.
    return all(type(item) is int for item in items)


_CONVERTER = make_request_converter()
register_object(_CONVERTER, CompletionRequest, prompt=override(struct_hook=_structure_prompts))
