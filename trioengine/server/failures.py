"""What a server logs of requests that fail: what is not the client's doing, each in one line unless it is a bug."""

import logging

from trioengine.errors import (
    DeadlineExceededError,
    EngineClosedError,
    RequestError,
    TrioEngineError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

_EXPECTED = (RequestError, UnavailableError, DeadlineExceededError, EngineClosedError)
"""What clients cause, hang-ups included: whoever reads a request that was left gets `EngineClosedError`."""


def log_failure(what: str, error: Exception) -> None:
    """Log that `what` has ended with an error."""
    if isinstance(error, _EXPECTED):
        logger.debug("%s ended: %r", what, error)
    elif isinstance(error, TrioEngineError):
        # It says it all; only of another must one know where in the code it came from.
        logger.error("%s failed: %r", what, error)
    else:
        logger.error("%s failed: %r", what, error, exc_info=error)
