"""`FrontendDriver`: a `Frontend`, its clock, and the cores' side of the protocol, step by step as a test says."""

from collections.abc import Sequence
from typing import Any

import attrs

from trioengine.errors import TrioEngineError
from trioengine.frontend.frontend import AddedRequest, Frontend
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.logprobs import LogprobEntry
from trioengine.frontend.pending_output import (
    AnyPendingOutput,
    OutputBuilder,
    ParallelOutputBuilder,
    new_pending_output,
    next_pending_output,
    output_builder,
)
from trioengine.observability.stats import FinishedRequestStats, IterationStats
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.messages import EngineCoreRequest, Finished, ModelFacts, StepOutput, pack_int32
from trioengine.types.output import FinishReason, RequestOutput
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest

TOKENIZER = FakeTokenizer()
PROCESSOR = InputProcessor(TOKENIZER, ModelFacts(1000, TOKENIZER.vocab_size, (TOKENIZER.end_token_id,)))


@attrs.define(eq=False)
class DrivenRequest:
    """A request that was added, and its reader."""

    sink: AnyPendingOutput
    builder: OutputBuilder | ParallelOutputBuilder
    added: AddedRequest = attrs.field(init=False)

    @property
    def rank(self) -> int:
        """The core that computes it."""
        return self.added.rank

    @property
    def messages(self) -> Sequence[EngineCoreRequest]:
        """What that core is sent."""
        return [message for message in self.added.messages if isinstance(message, EngineCoreRequest)]

    @property
    def slots(self) -> Sequence[int]:
        """Of its answers."""
        return [message.slot for message in self.added.messages]

    @property
    def slot(self) -> int:
        """Of its first answer."""
        return self.added.messages[0].slot

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[LogprobEntry] = (),
        index: int = 0,
    ) -> None:
        """As `Sink`."""
        self.sink.put(text, token_ids, finish_reason, stop_reason, logprobs, index)

    def put_prompt(self, num_cached_tokens: int, logprobs: Sequence[LogprobEntry]) -> None:
        """As `Sink`."""
        self.sink.put_prompt(num_cached_tokens, logprobs)

    def put_weight_version(self, version: str) -> None:
        """As `Sink`."""
        self.sink.put_weight_version(version)

    def fail(self, error: TrioEngineError) -> None:
        """As `Sink`."""
        self.sink.fail(error)

    def read(self) -> RequestOutput:
        """What has come since the last time."""
        output = self.builder.build(self.sink)
        self.sink = next_pending_output(self.sink)
        return output


@attrs.define(eq=False)
class RecordingStatLogger:
    """A `StatLogger` that keeps everything."""

    records: list[IterationStats] = attrs.field(factory=list[IterationStats])

    def record(self, stats: IterationStats) -> None:
        """Keep it."""
        self.records.append(stats)

    def log(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    @property
    def finished(self) -> list[FinishedRequestStats]:
        """All requests that have ended."""
        return [finished for record in self.records for finished in record.finished]


class FrontendDriver:
    """The front end, whose clock is `now_s`."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 0.0
        self.frontend = Frontend(clock=lambda: self.now_s, **options)
        self._sequences = [0] * self.frontend.num_cores

    def add(
        self,
        prompt: str = "p",
        *,
        waited_s: float = 0.0,
        request: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> DrivenRequest:
        """Add a request with these fields and parameters."""
        sampling = {"output_kind": RequestOutputKind.DELTA} | sampling
        processed = PROCESSOR.process(GenerateRequest(prompt, SamplingParams(**sampling), **(request or {})))
        is_cumulative = processed.sampling.output_kind is RequestOutputKind.CUMULATIVE
        sink = new_pending_output(processed.sampling.n)
        driven = DrivenRequest(sink, output_builder(processed, is_cumulative=is_cumulative))
        driven.added = self.frontend.add(processed, driven, waited_s=waited_s)
        return driven

    def step(self, *rows: tuple[int, str], rank: int = 0, finished: Sequence[Finished] = (), **others: Any) -> None:
        """Let a core send a step: slots and the texts of their new tokens."""
        tokens = [TOKENIZER.encode(text) for _, text in rows]
        message = StepOutput(
            self._sequences[rank],
            0,
            0.0,
            slots=pack_int32([slot for slot, _ in rows]),
            tokens=pack_int32([token for row in tokens for token in row]),
            counts=b"" if all(len(row) == 1 for row in tokens) else pack_int32([len(row) for row in tokens]),
            finished=tuple(finished),
            **others,
        )
        self._sequences[rank] += 1
        for _ in self.frontend.receive(rank, message):
            pass

    def finish(self, *slots: int, rank: int = 0, reason: FinishReason = FinishReason.LENGTH) -> None:
        """Let a core end these."""
        self.step(rank=rank, finished=[Finished(slot, reason) for slot in slots])

    def expire_at(self, now_s: float) -> None:
        """Let the time come."""
        self.now_s = now_s
        self.frontend.expire(now_s)

    def aborts(self) -> list[tuple[int, int]]:
        """Ranks and slots of what the cores are told to abort."""
        return [(rank, slot) for rank, aborts in self.frontend.take_aborts() for slot in aborts.slots]
