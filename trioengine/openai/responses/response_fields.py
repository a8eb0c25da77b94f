"""The parts of a response object that do not change while it is made: what it tells of its request, and of an error."""

import secrets
from collections.abc import Mapping

from trioengine.errors import RequestError, UnavailableError
from trioengine.openai.errors import error_fields
from trioengine.openai.responses.protocol import (
    AllowedTools,
    FunctionChoice,
    FunctionTool,
    ResponseRequest,
    TextFormat,
)
from trioengine.openai.sse import ReplyHead
from trioengine.types.params import SamplingParams

_SERVICE_TIER = "default"


def new_response_id() -> str:
    """An id that nobody guesses."""
    return "resp_" + secrets.token_hex(24)


def request_fields(head: ReplyHead, request: ResponseRequest, sampling: SamplingParams) -> Mapping[str, object]:
    """What a response tells of its request."""
    reasoning = request.reasoning
    summary = reasoning.effective_summary
    names = {
        "prompt_cache_key": request.prompt_cache_key,
        "safety_identifier": request.safety_identifier,
        "user": request.user,
    }
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created_s,
        "status": None,
        "background": request.background,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": head.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": {"effort": reasoning.effort, "summary": None if summary is None else summary.value},
        "service_tier": _SERVICE_TIER,
        "store": request.store,
        "temperature": sampling.temperature,
        "text": {
            "format": _format_fields(request.text.format),
            "verbosity": "medium" if request.text.verbosity is None else request.text.verbosity.value,
        },
        "tool_choice": _choice_fields(request),
        "tools": [_tool_fields(tool) for tool in request.tools],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": request.truncation.value,
        "metadata": dict(request.metadata),
        **{name: value for name, value in names.items() if value is not None},
    }


def _format_fields(text_format: TextFormat) -> Mapping[str, object]:
    fields: dict[str, object] = {
        "type": text_format.type.value,
        "name": text_format.name,
        "schema": text_format.schema,
        "description": text_format.description,
        "strict": text_format.strict,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _tool_fields(tool: FunctionTool) -> Mapping[str, object]:
    return {
        "type": tool.type.value,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _choice_fields(request: ResponseRequest) -> object:
    match request.tool_choice:
        case None:
            return "auto"
        case FunctionChoice(name):
            return {"type": "function", "name": name}
        case AllowedTools(is_required, names):
            tools = [{"type": "function", "name": name} for name in names]
            return {"type": "allowed_tools", "mode": "required" if is_required else "auto", "tools": tools}
        case choice:
            return choice.value


def failure_fields(error: Exception) -> Mapping[str, object]:
    """Why a response failed, in OpenAI's codes, of which there are few."""
    match error:
        case RequestError():
            code = "invalid_prompt"
        case UnavailableError():
            code = "rate_limit_exceeded"
        case _:
            code = "server_error"
    fields = error_fields(error)
    return {"code": code, "message": fields["message"], "param": fields["param"], "type": fields["type"]}
