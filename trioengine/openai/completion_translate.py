"""From a completion request to the engine's, one for each prompt."""

import attrs

from trioengine.errors import RequestError
from trioengine.openai.completion_protocol import CompletionRequest
from trioengine.openai.translate import generate_request
from trioengine.types.request import GenerateRequest


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
    if request.echo:
        # A core that generates nothing computes the prompt for its log probabilities, which are then not told.
        wanted = 0 if sampling.logprobs is None and sampling.max_tokens == 0 else sampling.logprobs
        request = attrs.evolve(request, sampling=attrs.evolve(sampling, prompt_logprobs=wanted))
    if len(request.prompt) == 1:
        return (generate_request(request, request.prompt[0], request_id, sampling.max_tokens, lora),)
    return tuple(
        generate_request(request, prompt, f"{request_id}-{position}", sampling.max_tokens, lora)
        for position, prompt in enumerate(request.prompt)
    )
