"""From the wire's requests to the engine's: pure, so that every rule of it is a one-line test."""

import attrs

from trioengine.errors import ModelNotFoundError, RequestError
from trioengine.openai.protocol import ChatCompletionRequest, CompletionRequest, Message, RequestBody, Role
from trioengine.types.params import RequestOutputKind
from trioengine.types.request import ChatMessage, ChatPrompt, GenerateRequest, Prompt


def chat_to_generate(request: ChatCompletionRequest, request_id: str) -> GenerateRequest:
    """The request to the engine that this chat request means.

    Raises:
        RequestError: `messages` or the limit of tokens make no sense.
    """
    if not request.messages:
        raise RequestError("messages is empty.", param="messages")
    prompt = ChatPrompt(
        messages=[_chat_message(position, message) for position, message in enumerate(request.messages)],
        add_generation_prompt=request.add_generation_prompt,
        template_kwargs=request.chat_template_kwargs,
    )
    limit = request.max_tokens
    if request.max_completion_tokens is not None:
        limit = request.max_completion_tokens
        if limit < 1:
            raise RequestError("max_completion_tokens must be at least 1.", param="max_completion_tokens")
    return _generate_request(request, prompt, request_id, limit)


def completion_to_generate(request: CompletionRequest, request_id: str) -> GenerateRequest:
    """The request to the engine that this completion request means."""
    return _generate_request(request, request.prompt, request_id, request.sampling.max_tokens)


def check_model(request: RequestBody, served_model_name: str) -> None:
    """Return when the request asks for this model, or for none in particular.

    Raises:
        ModelNotFoundError: it asks for another.
    """
    if request.model is not None and request.model != served_model_name:
        raise ModelNotFoundError(
            f"The model `{request.model[:100]}` does not exist here; this server has `{served_model_name}`.",
            param="model",
        )


def _generate_request(request: RequestBody, prompt: Prompt, request_id: str, max_tokens: int | None) -> GenerateRequest:
    output_kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    sampling = attrs.evolve(request.sampling, output_kind=output_kind, max_tokens=max_tokens)
    return GenerateRequest(prompt=prompt, sampling=sampling, request_id=request_id)


def _chat_message(position: int, message: Message) -> ChatMessage:
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            path = f"messages[{position}].{name}"
            raise RequestError(f"{path} is not supported by this server.", param=path)
    if message.content is None and message.role is not Role.ASSISTANT:
        path = f"messages[{position}].content"
        raise RequestError(f"{path} is required in a message of role {message.role}.", param=path)
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    fields: dict[str, object] = {"role": role.value, "content": message.content or ""}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields
