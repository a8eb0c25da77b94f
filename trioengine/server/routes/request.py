"""What the routes read from the current request of Quart's: its body, and what its headers say."""

import json
from collections.abc import Callable, Mapping
from typing import TypeVar, cast
from uuid import uuid4

import attrs
import trio
from quart import Response, g, request

from trioengine.errors import MediaTypeError, RequestError
from trioengine.server.context import LONG_BODY_BYTES, RequestHead
from trioengine.server.gate import MAX_REQUEST_ID_BYTES, REQUEST_ID
from trioengine.server.replies import json_response

T = TypeVar("T")

REQUEST_ID_HEADER = "X-Request-Id"
_TRACE_HEADERS = ("traceparent", "tracestate")
_REQUEST_HEADERS = frozenset({b"x-data-parallel-rank", b"x-session-id", b"traceparent", b"tracestate"})
_MAX_TRACE_CHARS = 1024


async def read_body(read: Callable[[bytes], T]) -> T:
    """What `read` makes of the request's body; of a long one in a thread.

    Raises:
        RequestError: the body is not declared as JSON, or is compressed, or as `read` raises.
    """
    # Also keeps web pages out: a browser asks before it sends this type to a foreign server.
    if request.mimetype != "application/json":
        raise MediaTypeError("The Content-Type of the request must be application/json.")
    for name, value in request.scope["headers"]:
        if name == b"content-encoding" and value.lower() != b"identity":
            raise MediaTypeError("The body of the request must not be compressed (Content-Encoding).")
    data = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    if len(data) < LONG_BODY_BYTES:
        return read(data)
    return await trio.to_thread.run_sync(read, data, abandon_on_cancel=True)


def request_head(id_prefix: str) -> RequestHead:
    """What the headers of the current request say.

    Raises:
        RequestError: one of them cannot be used.
    """
    # As the server gives them: `request.headers` would walk them for each name.
    found = {name: value for name, value in request.scope["headers"] if name in _REQUEST_HEADERS}
    headers = {name.decode(): value.decode("latin-1") for name, value in found.items()}
    rank = headers.get("x-data-parallel-rank")
    if rank is not None and not (rank.isascii() and rank.isdigit() and len(rank) < 10):
        raise RequestError("X-data-parallel-rank must be the number of a rank.", param="X-data-parallel-rank")
    session_id = headers.get("x-session-id")
    if session_id is not None and not is_token(session_id):
        raise RequestError(
            f"X-Session-Id must be 1 to {MAX_REQUEST_ID_BYTES} printable ASCII characters without spaces.",
            param="X-Session-Id",
        )
    traces = {
        name: headers[name] for name in _TRACE_HEADERS if name in headers and len(headers[name]) < _MAX_TRACE_CHARS
    }
    return RequestHead(
        id=id_prefix + http_request_id(),
        session_id=session_id,
        data_parallel_rank=None if rank is None else int(rank),
        trace_headers=traces or None,
    )


def http_request_id() -> str:
    """The current request's id: the client's own where it can be used."""
    scope_id = request_id_of_gate()
    if scope_id is not None:
        return scope_id
    drawn = cast("str | None", g.get(REQUEST_ID))
    if drawn is None:
        given = request.headers.get(REQUEST_ID_HEADER)
        drawn = given if given is not None and is_token(given) else uuid4().hex
        setattr(g, REQUEST_ID, drawn)
    return drawn


def request_id_of_gate() -> str | None:
    """The id that `serve` gave the current request; None in an application that something else serves."""
    state = cast("Mapping[str, object] | None", request.scope.get("state"))  # pyright: ignore[reportUnknownMemberType]
    value = None if state is None else state.get(REQUEST_ID)
    return value if isinstance(value, str) else None


def is_token(text: str) -> bool:
    """Whether a client's own name for something may stand in headers and logs."""
    return 0 < len(text) <= MAX_REQUEST_ID_BYTES and text.isascii() and text.isprintable() and " " not in text


def json_reply(reply: attrs.AttrsInstance, *, status: int = 200) -> Response:
    """A response of these fields."""
    return json_response(json.dumps(attrs.asdict(reply), separators=(",", ":")).encode(), status=status)
