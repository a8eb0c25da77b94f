"""One line of the log for each request, at its end."""

import logging
from collections.abc import Iterable

import attrs

logger = logging.getLogger("trioengine.access")


@attrs.define
class Exchange:
    """A request, and what has become of it so far. Counted as it passes, so that the line at its end costs little."""

    method: str
    path: str
    """Without the query, which may hold what is nobody's business."""
    peer: str
    request_id: str
    started_s: float
    status: int | None = None
    """None until a response has begun."""
    num_sent_bytes: int = 0
    """Of the response's body."""
    is_complete: bool = False


class AccessLog:
    """Writes the lines to the logger `trioengine.access`."""

    def __init__(self, silent_paths: Iterable[str] = ()) -> None:
        """Say nothing about requests for `silent_paths`."""
        self._silent_paths = frozenset(silent_paths)

    def write(self, exchange: Exchange, now_s: float) -> None:
        """The request has ended."""
        if exchange.path in self._silent_paths or not logger.isEnabledFor(logging.INFO):
            return
        logger.info(
            '%s "%s %s" %s %d B %.3f s %s%s',
            exchange.peer,
            exchange.method,
            _printable(exchange.path),
            exchange.status or "-",
            exchange.num_sent_bytes,
            now_s - exchange.started_s,
            exchange.request_id,
            "" if exchange.is_complete else " cut",
        )


def peer_name(address: Iterable[object] | None) -> str:
    """An ASGI scope's client as a log shows it. `-` for a UNIX socket, which has none."""
    return ":".join(map(str, address)) if address else "-"


def _printable(path: str) -> str:
    # A line break in a path must not make a line of its own.
    return path if path.isascii() and path.isprintable() else ascii(path)[1:-1]
