"""Errors as OpenAI's API writes them: a status, a short JSON body, and headers.

What went wrong inside the engine is for logs; a client reads whose fault it is and what to do.
"""

import json
import math
from collections.abc import Mapping

import attrs

from trioengine.errors import (
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineGenerateError,
    RequestError,
    TrioEngineError,
    UnavailableError,
)

MAX_MESSAGE_CHARS = 1000
"""At most 12 bytes each once escaped, so a body stays under 16 KB."""
MAX_PARAM_CHARS = 200
RESTART_S = "5"
"""When to come back to a server that stops: another one takes its place by then, or nothing does."""


_TIMEOUT = ("deadlines.total_s", "timeout")
"""The engine's word for the field, and what it is in a body of OpenAI's form."""


@attrs.frozen
class ErrorReply:
    """An HTTP answer that reports an error."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def error_reply(error: Exception) -> ErrorReply:
    """The answer to a request that ended in this exception. One that is not TrioEngine's is an internal error."""
    headers: dict[str, str] = {}
    if isinstance(error, UnavailableError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, EngineClosedError):
        headers["Retry-After"] = RESTART_S
    status = error.status if isinstance(error, TrioEngineError) else TrioEngineError.status
    return ErrorReply(status, error_body(error), headers)


def error_body(error: Exception) -> bytes:
    """The JSON object `{"error": {...}}`, under 16 KB whatever the exception holds."""
    return _body(error_fields(error))


def error_fields(error: Exception, *, is_native: bool = False) -> Mapping[str, object]:
    """The fields of the object in `error_body`. A native request has the engine's fields, not OpenAI's."""
    known = error if isinstance(error, TrioEngineError) else TrioEngineError("")
    param = error.param if isinstance(error, RequestError) else None
    message = _public_message(error)
    if isinstance(error, DeadlineExceededError) and not is_native:
        message = message.replace(*_TIMEOUT, 1)
    return _fields(message, known.error_type, param, known.code)


def at_path(error: TrioEngineError, path: str) -> TrioEngineError:
    """The same error, of this place in the body: the engine knows one prompt only, and calls it `prompt`."""
    if isinstance(error, RequestError) and error.param is not None and error.param.startswith("prompt"):
        return attrs.evolve(error, param=path + error.param.removeprefix("prompt"))
    return error


def status_reply(status: int, message: str) -> ErrorReply:
    """The answer for an HTTP status that no exception of TrioEngine's stands for."""
    is_clients_fault = 400 <= status < 500
    error_type = RequestError.error_type if is_clients_fault else TrioEngineError.error_type
    code = RequestError.code if is_clients_fault else TrioEngineError.code
    return ErrorReply(status, _body(_fields(message, error_type, None, code)), {})


def _fields(message: str, error_type: str, param: str | None, code: str) -> Mapping[str, object]:
    return {
        "message": _cut(message, MAX_MESSAGE_CHARS),
        "type": error_type,
        "param": None if param is None else _cut(param, MAX_PARAM_CHARS),
        "code": code,
    }


def _body(fields: Mapping[str, object]) -> bytes:
    return json.dumps({"error": fields}, separators=(",", ":")).encode()


def _public_message(error: Exception) -> str:
    match error:
        case RequestError() | UnavailableError() | DeadlineExceededError():
            return error.message
        case EngineGenerateError():
            return "The engine could not finish this request; others go on."
        case EngineDeadError():
            return "The engine has died, or does not answer."
        case EngineClosedError():
            return "The engine is closed; the server is shutting down."
        case _:
            return "The server failed to handle this request."


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."
