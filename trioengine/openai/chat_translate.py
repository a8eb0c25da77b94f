"""From a chat request to the engine's."""

from trioengine.errors import RequestError
from trioengine.openai.chat_protocol import ChatCompletionRequest, Message, Role
from trioengine.openai.translate import generate_request
from trioengine.types.request import ChatMessage, ChatPrompt, GenerateRequest


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
    return generate_request(request, prompt, request_id, limit)


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
