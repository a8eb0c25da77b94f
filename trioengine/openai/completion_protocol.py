"""The body of `POST /v1/completions`."""

from typing import TypeAlias, cast

import attrs
from cattrs import override

from trioengine.openai.protocol import (
    NEUTRAL,
    Neutral,
    RequestBody,
    make_request_converter,
    parse_fields,
    register_object,
    structure_request,
)
from trioengine.openai.structured_fields import structured_outputs_of
from trioengine.types.request import TextPrompt, TokensPrompt

CompletionPrompt: TypeAlias = TextPrompt | TokensPrompt


@attrs.frozen(kw_only=True)
class CompletionRequest(RequestBody):
    """The body of `POST /v1/completions`."""

    prompt: CompletionPrompt


_NEUTRAL: Neutral = {
    **NEUTRAL,
    "echo": (False,),
    "logprobs": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "suffix": ("",),
}


def parse_completion_request(body: bytes) -> CompletionRequest:
    """The completion request that the body of an HTTP request holds.

    Raises:
        RequestError: it holds none, or asks for what cannot be honoured. `param` is the path of the field at fault.
    """
    fields = parse_fields(body, _NEUTRAL)
    request = structure_request(_CONVERTER, fields, fields, CompletionRequest)
    form = structured_outputs_of(fields)
    return (
        request
        if form is None
        else attrs.evolve(request, sampling=attrs.evolve(request.sampling, structured_outputs=form))
    )


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


_CONVERTER = make_request_converter()
register_object(_CONVERTER, CompletionRequest, prompt=override(struct_hook=_structure_prompt))
