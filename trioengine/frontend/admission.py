"""How much may wait: beyond it, new requests are refused before any work is done for them."""

import attrs

from trioengine.errors import UnavailableError

RETRY_AFTER_S = 1.0


@attrs.frozen(kw_only=True)
class AdmissionLimits:
    """The most that may wait for its first output; None is no limit. What finds nothing waiting is always taken."""

    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None


class AdmissionQueue:
    """Counts what waits."""

    __slots__ = ("_limits", "num_requests", "num_tokens")

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.num_requests = 0
        """Answers whose first output has not come."""
        self.num_tokens = 0
        """Of their prompts; those of one request's answers count once."""

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Return when so many more may wait.

        Raises:
            UnavailableError: too much waits already.
        """
        if self.num_requests == 0:
            return
        limits = self._limits
        _check("requests", self.num_requests, num_requests, limits.max_num_queued_reqs)
        _check("prompt tokens", self.num_tokens, num_tokens, limits.max_num_queued_tokens)

    def enter(self, num_requests: int, num_tokens: int) -> None:
        """So many more wait."""
        self.num_requests += num_requests
        self.num_tokens += num_tokens

    def leave(self, num_tokens: int) -> None:
        """One waits no more, and so many tokens with it."""
        self.num_requests -= 1
        self.num_tokens -= num_tokens


def _check(what: str, num_queued: int, num_new: int, limit: int | None) -> None:
    if limit is not None and num_queued + num_new > limit:
        raise UnavailableError(
            f"The engine is full: {num_queued} {what} wait, {num_new} more would be over the limit of {limit}.",
            retry_after_s=RETRY_AFTER_S,
        )
