"""`ParentRequest`: one request of a caller over its answers, each of which is a request of its own to the core."""

from collections.abc import Sequence
from typing import Protocol

from trioengine.errors import TrioEngineError
from trioengine.frontend.input_processor import ProcessedEncodeRequest, ProcessedRequest
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.observability.stats import FinishedRequestStats
from trioengine.types.messages import Finished
from trioengine.types.output import FinishReason


class Child(Protocol):
    """One answer of a request, as `Frontend` routes to it.

    It ends once: by the core's `Finished`, by a stop string, or by one of `end`, `fail`, `give_up` and `drop`. After
    that every call does nothing, so what the core sent before it heard of the end is ignored.
    """

    slot: int
    parent: "ParentRequest"
    num_tokens: int
    """Generated so far."""
    last_row_s: float | None
    """When its last tokens came; None before the first."""
    is_registered: bool
    """Whether `Frontend` counts it as open."""
    is_queued: bool
    """Whether it waits for its first output."""

    @property
    def is_open(self) -> bool:
        """Whether anyone still waits for outputs."""
        ...

    def receive_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """Take what became known of the prompt."""
        ...

    def receive_logprobs(self, logprobs: Sequence[LogprobEntry]) -> None:
        """Take log probabilities of the tokens that come next, before these."""
        ...

    def receive_weight_version(self, version: str) -> None:
        """What comes from now on was computed with these weights."""
        ...

    def receive(self, token_ids: Sequence[int], finished: Finished | None) -> bool:
        """Take the tokens of one row, and the core's last word if it came with them.

        Returns:
            Whether it has ended before the core said so: the core must be told.
        """
        ...

    def end(self, reason: FinishReason) -> None:
        """End without the core."""
        ...

    def fail(self, error: TrioEngineError) -> None:
        """End the request with an error, after what was there."""
        ...

    def give_up(self) -> None:
        """End because another answer has failed, which tells the reader; what was there is shown before."""
        ...

    def drop(self) -> None:
        """End because nobody waits any more."""
        ...


class ParentRequest:
    """What all answers of one request share. Ends with the last of them; only `Frontend` changes it."""

    __slots__ = (
        "arrival_s",
        "children",
        "deadlines",
        "first_token_s",
        "holds_queued_tokens",
        "num_cached_tokens",
        "num_open",
        "num_preemptions",
        "processed",
        "queue_s",
        "rank",
    )

    def __init__(self, processed: ProcessedRequest | ProcessedEncodeRequest, rank: int, arrival_s: float) -> None:
        self.processed = processed
        self.rank = rank
        self.arrival_s = arrival_s
        self.deadlines = processed.deadlines
        self.children: Sequence[Child] = ()
        self.num_open = 0
        self.holds_queued_tokens = True
        """Whether its prompt waits for a first output."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.queue_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def external_id(self) -> str:
        """The caller's name for it."""
        return self.processed.external_id

    @property
    def is_open(self) -> bool:
        """Whether anyone still waits for outputs."""
        return self.num_open > 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, which all answers share."""
        return len(self.processed.prompt_token_ids)

    def next_deadline(self) -> tuple[float, str] | None:
        """The clock's time at which it is over as things are, and which of `Deadlines` that is; None if never.

        The deadline of the queue is the core's to keep, which alone knows when it begins.
        """
        deadlines, arrival_s = self.deadlines, self.arrival_s
        due: list[tuple[float, str]] = []
        if deadlines.total_s is not None:
            due.append((arrival_s + deadlines.total_s, "total_s"))
        for child in self.children:
            if not child.is_registered:
                continue
            if child.last_row_s is None:
                if deadlines.first_token_s is not None:
                    due.append((arrival_s + deadlines.first_token_s, "first_token_s"))
            elif deadlines.inter_token_s is not None:
                due.append((child.last_row_s + deadlines.inter_token_s, "inter_token_s"))
        return min(due, default=None)

    def finished_stats(self, reason: str, now_s: float) -> FinishedRequestStats:
        """What is to be said of it at its end."""
        processed = self.processed
        is_text = isinstance(processed, ProcessedRequest)
        first_s = self.first_token_s
        last_s = max((child.last_row_s for child in self.children if child.last_row_s is not None), default=None)
        return FinishedRequestStats(
            request_id=processed.external_id,
            finish_reason=reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=sum(child.num_tokens for child in self.children),
            num_preemptions=self.num_preemptions,
            n=len(self.children),
            max_tokens=processed.sampling.max_tokens if is_text else None,
            e2e_latency_s=now_s - self.arrival_s,
            queue_s=self.queue_s,
            time_to_first_token_s=None if first_s is None else first_s - self.arrival_s,
            decode_s=None if first_s is None or last_s is None else last_s - first_s,
            lora=processed.lora,
            session_id=processed.session_id,
            trace_headers=processed.trace_headers,
        )
