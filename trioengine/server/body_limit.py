"""An ASGI application that answers 413 for another one when a request's body is too long.

Knows nothing about routes: the limit holds for whatever is behind it, also for applications that would never have
read the body.
"""

from collections.abc import Iterable

import trio
from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)

from trioengine.errors import BodyTooLargeError
from trioengine.openai.errors import error_body


class BodyLimit:
    """Passes requests on to `app` as long as their body has at most `max_body_bytes`.

    A `content-length` over the limit is answered at once and `app` is not called. A body that turns out too long
    while it arrives cancels `app`, then 413 is sent, unless `app` has started its response already.
    """

    def __init__(self, app: ASGIFramework, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Handle one ASGI scope. Cancellable at every await."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _content_length(scope["headers"]) > self._max_body_bytes:
            await self._refuse(send)
        else:
            await self._call_counting(scope, receive, send)

    async def _call_counting(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        num_received_bytes = 0
        has_started = False
        too_long = trio.CancelScope()

        async def counting_receive() -> ASGIReceiveEvent:
            nonlocal num_received_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_received_bytes += len(message["body"])
                if num_received_bytes > self._max_body_bytes:
                    too_long.cancel()
                    await trio.lowlevel.checkpoint()
            return message

        async def watched_send(message: ASGISendEvent) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        with too_long:
            await self._app(scope, counting_receive, watched_send)
        if too_long.cancel_called and not has_started:
            await self._refuse(send)

    async def _refuse(self, send: ASGISendCallable) -> None:
        error = BodyTooLargeError(f"The request's body is longer than {self._max_body_bytes} bytes.")
        body = error_body(error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            # The rest of the body is still on its way, so the connection has no further use. (h2 strips this.)
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    for name, value in headers:
        if name.lower() == b"content-length" and value.isdigit():
            return int(value)
    return 0
