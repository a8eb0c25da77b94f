"""Quart responses of this API: JSON, and errors in OpenAI's shape from whatever was raised."""

from collections.abc import Mapping

from quart import Response
from werkzeug.exceptions import HTTPException

from trioengine.errors import (
    BodyTooLargeError,
    MethodNotAllowedError,
    NotFoundError,
    TrioEngineError,
)
from trioengine.openai.errors import ErrorReply, error_reply, status_reply
from trioengine.server.failures import log_failure


def json_response(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with this JSON text."""
    return Response(body, status=status, headers=dict(headers or {}), content_type="application/json")


def error_response(error: Exception) -> Response:
    """The response for an exception that a route raised. Whatever is not the client's fault is logged."""
    if isinstance(error, HTTPException):
        return _http_exception_response(error)
    log_failure("A request", error)
    return _response(error_reply(error))


def _http_exception_response(error: HTTPException) -> Response:
    headers: dict[str, str] = {}
    match error.code:
        case 404:
            reply = error_reply(NotFoundError("There is nothing at this address."))
        case 405:
            reply = error_reply(MethodNotAllowedError("The method is not allowed at this address."))
            headers = {name: value for name, value in error.get_headers() if name == "Allow"}
        case 413:
            reply = error_reply(BodyTooLargeError("The body of the request is larger than this server takes."))
        case None:
            reply = error_reply(TrioEngineError(""))
        case status if 300 <= status < 400:
            # A redirect is not an error: its own response has the Location header that makes it one.
            reply = ErrorReply(status, b"{}", dict(error.get_response().headers))
        case status:
            reply = status_reply(status, f"{error.name}.")
    response = _response(reply)
    response.headers.update(headers)
    return response


def _response(reply: ErrorReply) -> Response:
    return json_response(reply.body, status=reply.status, headers=reply.headers)
