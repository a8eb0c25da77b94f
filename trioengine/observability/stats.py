"""What happened, in numbers: what `Frontend` makes of each message of a core, and `StatLogger`, who takes it.

Times are differences of one clock, the front end's, in seconds; `queue_s` alone is the core's.
"""

from collections.abc import Mapping
from typing import Protocol

import attrs

from trioengine.types.messages import SchedulerStats


@attrs.frozen
class FinishedRequestStats:
    """A request that has ended, counted once however it ended."""

    request_id: str
    finish_reason: str
    """"stop", "length", "abort" or "error"."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    """Over all answers."""
    num_preemptions: int
    n: int
    max_tokens: int | None
    e2e_latency_s: float
    """From its arrival to its end."""
    queue_s: float | None
    """Until the core began to compute it; None where it never did."""
    time_to_first_token_s: float | None
    decode_s: float | None
    """From the first token to the last."""
    lora: str | None = None
    session_id: str | None = None
    trace_headers: Mapping[str, str] | None = None

    @property
    def prefill_s(self) -> float | None:
        """From when the core began to compute it to the first token; None where there was none."""
        if self.queue_s is None or self.time_to_first_token_s is None:
            return None
        return max(0.0, self.time_to_first_token_s - self.queue_s)  # Of two clocks.

    @property
    def inference_s(self) -> float | None:
        """From when the core began to compute it to the end."""
        return None if self.queue_s is None else max(0.0, self.e2e_latency_s - self.queue_s)

    @property
    def time_per_output_token_s(self) -> float | None:
        """The mean of an answer, its first token not counted."""
        num_later_tokens = self.num_generated_tokens / self.n - 1
        return None if self.decode_s is None or num_later_tokens <= 0 else self.decode_s / num_later_tokens


@attrs.define(eq=False)
class IterationStats:
    """One message of one core. Lists have one number for each event."""

    engine: int
    """The core's rank."""
    scheduler: SchedulerStats | None = None
    num_prompt_tokens: int = 0
    """Of prompts whose first token came."""
    num_cached_tokens: int = 0
    """Of these, found in the prefix cache."""
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    times_to_first_token_s: list[float] = attrs.field(factory=list[float])
    inter_token_latencies_s: list[float] = attrs.field(factory=list[float])
    """For each row of tokens the time since the one before, divided by the row's tokens."""
    finished: list[FinishedRequestStats] = attrs.field(factory=list[FinishedRequestStats])


class StatLogger(Protocol):
    """Takes statistics of one engine client. Plug-ins: entry points of the group `trioengine.stat_loggers`."""

    def record(self, stats: IterationStats) -> None:
        """Take what happened. Called for each message of a core and for requests that end on this side: be quick."""
        ...

    def log(self) -> None:
        """Say what happened since the last call; each `log_stats_interval_s`, and from `do_log_stats`."""
        ...

    def close(self) -> None:
        """The engine client closes."""
        ...
