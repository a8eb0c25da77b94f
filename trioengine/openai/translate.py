"""From the wire's requests to the engine's, what both kinds share: pure, so that every rule is a one-line test."""

from collections.abc import Collection
from typing import Protocol, TypeVar

import attrs

from trioengine.checkpoint.generation import GenerationDefaults
from trioengine.errors import ModelNotFoundError, RequestError
from trioengine.openai.protocol import RequestBody
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import Deadlines, GenerateRequest, Prompt
from trioengine.types.structured import PARAM


class UnknownFields(Protocol):
    """A body."""

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Fields of it that had no effect."""
        ...


class ModelBody(UnknownFields, Protocol):
    """A body that may name a model."""

    @property
    def model(self) -> str | None:
        """Of the model or adapter."""
        ...


def check_model(request: ModelBody, served_model_name: str, lora_names: Collection[str] = ()) -> str | None:
    """The LoRA adapter that the request asks for by `model`; None is the served model, also where none is named.

    Raises:
        ModelNotFoundError: it asks for another.
    """
    if request.model is None or request.model == served_model_name:
        return None
    if request.model in lora_names:
        return request.model
    raise ModelNotFoundError(
        f"The model `{request.model[:100]}` does not exist here; this server has `{served_model_name}`.",
        param="model",
    )


def check_unknown_fields(request: UnknownFields) -> None:
    """Return when every field of the body is known: the rule of a strict server.

    Raises:
        RequestError: naming the first one that is not.
    """
    if request.unknown_fields:
        name = request.unknown_fields[0]
        raise RequestError(f"{name} is no field that this server knows.", param=name)


def unknown_fields_warning(request: UnknownFields) -> tuple[str, ...]:
    """What to tell a client about fields without effect, in ASCII, for a header; nothing where there are none."""
    if not request.unknown_fields:
        return ()
    names = ", ".join(ascii(name)[1:-1] for name in request.unknown_fields)
    return (f"fields without effect: {names}",)


B = TypeVar("B", bound=RequestBody)


def with_generation_defaults(request: B, defaults: GenerationDefaults) -> B:
    """The request with what the model's authors recommend where it leaves something out.

    A limit of tokens is filled in for chats only: completions have one of their own.
    """
    found = {
        field.name: value
        for field in attrs.fields(GenerationDefaults)
        if field.name != "max_tokens"
        and field.name not in request.given_fields
        and (value := getattr(defaults, field.name)) is not None
    }
    return attrs.evolve(request, sampling=attrs.evolve(request.sampling, **found)) if found else request


def generate_request(
    request: RequestBody, prompt: Prompt, request_id: str, max_tokens: int | None, lora: str | None = None
) -> GenerateRequest:
    """The request to the engine with this prompt, and all that the body says besides it.

    Raises:
        RequestError: the timeout is no time, or there are no answers to give.
    """
    if request.sampling.n < 1:
        raise RequestError(f"n must be at least 1, not {_short(request.sampling.n)}.", param="n")
    if request.timeout is not None and not request.timeout > 0:
        raise RequestError("timeout must be a positive number of seconds.", param="timeout")
    truncate = request.truncate_prompt_tokens
    if truncate is not None and truncate < 1 and truncate != -1:
        raise RequestError("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
    output_kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    sampling: SamplingParams = attrs.evolve(request.sampling, output_kind=output_kind, max_tokens=max_tokens)
    return GenerateRequest(
        prompt=prompt,
        sampling=sampling,
        request_id=request_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
        lora=lora,
        deadlines=Deadlines(total_s=request.timeout),
        tokenization_kwargs=None if truncate is None else {"truncate_prompt_tokens": truncate},
        reasoning_parser_kwargs=request.reasoning_parser_kwargs,
    )


def check_prompt_logprobs(request: RequestBody) -> None:
    """Return unless a stream is to tell the prompt's log probabilities.

    Raises:
        RequestError: it is.
    """
    if request.stream and request.sampling.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are told in whole replies, not in a stream.", param="prompt_logprobs")


def as_written(error: RequestError, form_field: str | None = None) -> RequestError:
    """The engine's error about a field that the client wrote by another name, with the client's.

    Args:
        error: of the engine.
        form_field: the field of the body that asks for a form of the answer.
    """
    param = error.param or ""
    name = form_field if param.startswith(PARAM) else param.removeprefix(_TOKENIZATION_PLACE)
    if name is None or name in (PARAM, param):
        return error  # The client has the same words for it.
    return RequestError(error.message.replace(param, name, 1), param=name)


_TOKENIZATION_PLACE = "tokenization_kwargs."


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**20 else "a number of many digits"
