"""From a completion request to the engine's, one for each prompt."""

import attrs

from trioengine.errors import RequestError
from trioengine.openai.completion_protocol import CompletionRequest
from trioengine.openai.translate import check_prompt_logprobs, generate_request
from trioengine.types.request import GenerateRequest


def check_num_answers(request: CompletionRequest, limit: int | None) -> None:
    """Return when the answers to all prompts could be let in at once: so many may wait.

    Raises:
        RequestError: it would never fit, whenever it comes again.
    """
    num_answers = request.sampling.n * len(request.prompt)
    if len(request.prompt) > 1 and limit is not None and num_answers > limit:
        raise RequestError(f"These are {num_answers} answers at once; the limit is {limit}.", param="prompt")


def completion_to_generate(
    request: CompletionRequest, request_id: str, lora: str | None = None
) -> tuple[GenerateRequest, ...]:
    """The requests to the engine that this completion request means, in the order of its prompts.

    Raises:
        RequestError: `max_tokens` is 0 without `echo`, or as `generate_request` says.
    """
    sampling = request.sampling
    if sampling.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens must be at least 1, or 0 with echo.", param="max_tokens")
    check_prompt_logprobs(request)
    if request.echo and sampling.prompt_logprobs is not None and sampling.logprobs is not None:
        raise RequestError(
            "prompt_logprobs cannot be asked for beside echo and logprobs, which tell the same.",
            param="prompt_logprobs",
        )
    if request.echo and sampling.prompt_logprobs is None:
        # A core that generates nothing computes the prompt for its log probabilities, which are then not told.
        wanted = 0 if sampling.logprobs is None and sampling.max_tokens == 0 else sampling.logprobs
        request = attrs.evolve(request, sampling=attrs.evolve(sampling, prompt_logprobs=wanted))
    ids = [request_id]
    if len(request.prompt) > 1:
        ids = [f"{request_id}-{position}" for position in range(len(request.prompt))]
    found = tuple(
        generate_request(request, prompt, own_id, sampling.max_tokens, lora)
        for prompt, own_id in zip(request.prompt, ids, strict=True)
    )
    return found if request.add_special_tokens else tuple(map(_without_special_tokens, found))


def _without_special_tokens(request: GenerateRequest) -> GenerateRequest:
    return attrs.evolve(
        request, tokenization_kwargs={**(request.tokenization_kwargs or {}), "add_special_tokens": False}
    )
