"""From a completion request to the engine's."""

from trioengine.openai.completion_protocol import CompletionRequest
from trioengine.openai.translate import generate_request
from trioengine.types.request import GenerateRequest


def completion_to_generate(request: CompletionRequest, request_id: str) -> GenerateRequest:
    """The request to the engine that this completion request means."""
    return generate_request(request, request.prompt, request_id, request.sampling.max_tokens)
