"""The requests that an application's routes have open, for whoever asks what the server is busy with."""

from collections.abc import Sequence

import attrs
import trio


@attrs.define(eq=False)
class OpenRequest:
    """One of them. Counted as its outputs pass."""

    id: str
    path: str
    opened_s: float
    """By Trio's clock."""
    num_prompt_tokens: int | None = None
    """None until it is with the engine."""
    num_tokens: int | None = None
    """Generated so far, as far as the server has seen; None before the first, and where the reply comes whole."""


@attrs.frozen
class OpenRequestInfo:
    """What is told about one."""

    id: str
    path: str
    age_s: float
    state: str
    """"preparing": its body is read and its prompt tokenized. "waiting": for the first token, or for a whole reply.
    "streaming": its tokens are written."""
    num_prompt_tokens: int | None
    num_tokens: int | None
    """Generated so far; None where that is not known here."""


class OpenRequests:
    """All of one application."""

    def __init__(self) -> None:
        self._open: dict[int, OpenRequest] = {}

    def open(self, request_id: str, path: str) -> OpenRequest:
        """Add one. Whoever does closes it, whatever becomes of it."""
        request = OpenRequest(request_id, path, trio.current_time())
        self._open[id(request)] = request
        return request

    def close(self, request: OpenRequest) -> None:
        """Forget one. A second time does nothing."""
        self._open.pop(id(request), None)

    def infos(self) -> Sequence[OpenRequestInfo]:
        """The oldest first."""
        now_s = trio.current_time()
        return [_info(request, now_s) for request in self._open.values()]


def _info(request: OpenRequest, now_s: float) -> OpenRequestInfo:
    if request.num_tokens is not None:
        state = "streaming"
    else:
        state = "preparing" if request.num_prompt_tokens is None else "waiting"
    return OpenRequestInfo(
        id=request.id,
        path=request.path,
        age_s=round(now_s - request.opened_s, 3),
        state=state,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=request.num_tokens,
    )
