"""`CoreDriver`: an `EngineCore` over a `FakeExecutor`, with the front ends' side of the protocol kept and checked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.config.engine import SchedulingPolicy
from trioengine.core.config import CoreConfig
from trioengine.core.engine_core import EngineCore
from trioengine.core.executor import BlockCopy, NewSequence, StepPlan, TokenLogprobs
from trioengine.core.structured_output import StructuredOutputs
from trioengine.testing.fake_executor import FakeExecutor, Script
from trioengine.types.codec import decode_reply, error_from_data
from trioengine.types.messages import (
    AbortRequests,
    Call,
    CallRequest,
    EncodeCoreRequest,
    EngineCoreRequest,
    Finished,
    LogprobColumns,
    PooledOutput,
    Reply,
    StepOutput,
    pack_int32,
    unpack_int32,
)
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import PoolingParams, PoolingType

R = TypeVar("R")


def make_core_config(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    block_size: int = 4,
    vocab_size: int = 1000,
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS,
    max_loras: int = 0,
    max_cpu_loras: int = 0,
) -> CoreConfig:
    """Limits with small defaults."""
    return CoreConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        vocab_size=vocab_size,
        scheduling_policy=scheduling_policy,
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
    )


def make_core_request(
    slot: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    sampling: SamplingParams | None = None,
    max_tokens: int = 4,
    seed: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    priority: int = 0,
    cache_salt: str | None = None,
    lora: str | None = None,
) -> EngineCoreRequest:
    """A request as a front end sends it; `max_tokens` counts where `sampling` is not given."""
    return EngineCoreRequest(
        slot=slot,
        request_id=f"request-{slot}",
        prompt_token_ids=pack_int32(prompt),
        sampling=sampling or SamplingParams(max_tokens=max_tokens),
        seed=seed,
        eos_token_ids=eos_token_ids,
        priority=priority,
        cache_salt=cache_salt,
        lora=lora,
    )


def make_encode_request(
    slot: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    pooling_type: PoolingType = PoolingType.LAST,
    priority: int = 0,
    cache_salt: str | None = None,
) -> EncodeCoreRequest:
    """A request for an embedding as a front end sends it."""
    return EncodeCoreRequest(
        slot=slot,
        request_id=f"request-{slot}",
        prompt_token_ids=pack_int32(prompt),
        pooling=PoolingParams(pooling_type=pooling_type, normalize=False),
        priority=priority,
        cache_salt=cache_salt,
    )


@attrs.define(eq=False)
class Answer:
    """What has come back for one request."""

    client: int
    slot: int
    tokens: list[int] = attrs.field(factory=list[int])
    logprobs: list[TokenLogprobs] = attrs.field(factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] = attrs.field(factory=list[TokenLogprobs])
    num_cached_tokens: int = 0
    waited_us: int | None = None
    """None before it was scheduled."""
    num_preemptions: int = 0
    vectors: NDArray[np.float32] | None = None
    finished: Finished | None = None


class CoreDriver:
    """Sends requests to a core and collects answers.

    It fails an assertion when outputs are not numbered without a gap, when a row or an end comes for a slot that is not
    in use, and, after each step, when the core's books are wrong.
    """

    def __init__(
        self,
        config: CoreConfig | None = None,
        *,
        num_blocks: int = 64,
        scripts: Mapping[tuple[int, ...], Script] | None = None,
        draft_model: Callable[[Sequence[int]], Sequence[int]] | None = None,
        num_offload_blocks: int = 0,
        fails: Callable[[NewSequence, int], bool] = lambda _sequence, _num_generated: False,
        fails_load: Callable[[BlockCopy], bool] = lambda _: False,
        structured_outputs: StructuredOutputs | None = None,
    ) -> None:
        self.config = config or make_core_config()
        self.plans: list[StepPlan] = []
        """Every plan so far, as it was when it was submitted."""
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            vocab_size=self.config.vocab_size,
            scripts=scripts,
            before_step=self._record,
            draft_model=draft_model,
            num_offload_blocks=num_offload_blocks,
            fails=fails,
            fails_load=fails_load,
            max_loras=self.config.max_loras,
        )
        self.now_s = 0.0
        """The core's clock. Steps take no time, so that nobody decides by how long they took."""
        self.core = EngineCore(self.config, self.executor, structured_outputs, clock=lambda: self.now_s)
        self.outputs: list[StepOutput] = []
        self.replies: list[Reply] = []
        """Those that came later."""
        self._answers: dict[int, dict[int, Answer]] = {}
        self._sequences: dict[int, int] = {}
        self._num_calls = 0

    def add(self, request: EngineCoreRequest | EncodeCoreRequest, client: int = 0) -> Answer:
        """Send a request; its answer fills as output is taken."""
        answers = self._answers.setdefault(client, {})
        assert request.slot not in answers, f"slot {request.slot} is in use"
        answers[request.slot] = answer = Answer(client, request.slot)
        assert self.core.handle(client, request) is None
        return answer

    def abort(self, *slots: int, client: int = 0) -> None:
        """Send an abort."""
        assert self.core.handle(client, AbortRequests(slots)) is None

    def call(self, call: Call[R], client: int = 0) -> R:
        """Run an operation whose reply comes at once, or raise its error."""
        reply = self.begin_call(call, client)
        assert reply is not None, f"no reply yet to {call}"
        return self.value_of(call, reply)

    def begin_call(self, call: Call[object], client: int = 0) -> Reply | None:
        """Send an operation; its reply if that comes at once, else it will be in `replies`."""
        self._num_calls += 1
        reply = self.core.handle(client, CallRequest(self._num_calls, call))
        if reply is None:
            self.take_all()
            if self.replies and self.replies[-1].call_id == self._num_calls:
                reply = self.replies.pop()
        return reply

    def value_of(self, call: Call[R], reply: Reply) -> R:
        """What a reply to this operation says, or raise its error."""
        if reply.error is not None:
            raise error_from_data(reply.error)
        return decode_reply(type(call), reply.value)

    def drop_client(self, client: int) -> None:
        """Let a client vanish."""
        self.core.drop_client(client)
        self._answers.pop(client, None)
        self._sequences.pop(client, None)

    def step(self) -> None:
        """One step, its output left pending."""
        self.core.poll()
        self.core.step()
        self.core.check_integrity()

    def take(self, client: int = 0) -> StepOutput | None:
        """A client's pending output, sorted into its answers."""
        output = self.core.take_output(client)
        if output is None:
            return None
        assert output.sequence == self._sequences.get(client, 0)
        self._sequences[client] = output.sequence + 1
        self.outputs.append(output)
        answers = self._answers[client]
        slots, tokens = unpack_int32(output.slots), iter(unpack_int32(output.tokens))
        assert len(set(slots)) == len(slots), f"two rows for one slot: {output}"
        for slot, count in zip(slots, unpack_int32(output.counts) if output.counts else [1] * len(slots), strict=True):
            answers[slot].tokens.extend(next(tokens) for _ in range(count))
        assert next(tokens, None) is None, f"more tokens than counted: {output}"
        for entry, logprobs in _entries(output.logprobs):
            answers[entry].logprobs.append(logprobs)
        for entry, logprobs in _entries(output.prompt_logprobs):
            answers[entry].prompt_logprobs.append(logprobs)
        cached = unpack_int32(output.cached_tokens)
        for slot, num_tokens in zip(cached[::2], cached[1::2], strict=True):
            assert num_tokens > 0
            assert answers[slot].num_cached_tokens == 0, f"told twice: {output}"
            answers[slot].num_cached_tokens = num_tokens
        scheduled = unpack_int32(output.scheduled)
        for slot, waited_us in zip(scheduled[::2], scheduled[1::2], strict=True):
            assert waited_us >= 0
            assert answers[slot].waited_us is None, f"told twice: {output}"
            answers[slot].waited_us = waited_us
        assert all(answers[slot].waited_us is not None for slot in slots), f"tokens before it was scheduled: {output}"
        for slot in unpack_int32(output.preempted):
            answers[slot].num_preemptions += 1
        assert output.stats is not None
        for slot, vectors in _vectors(output.pooled):
            assert answers[slot].vectors is None, f"vectors came twice: {output}"
            answers[slot].vectors = vectors
        for finished in output.finished:
            answers.pop(finished.slot).finished = finished
        return output

    def take_all(self) -> None:
        """Take every client's output, then its replies."""
        for client in self.core.clients_with_output():
            assert self.take(client) is not None
        for client in self._answers.keys() | {0}:
            self.replies += self.core.take_replies(client)

    def run(self, max_steps: int = 1000) -> None:
        """Step until nothing is left to do, taking all output."""
        self.take_all()
        for _ in range(max_steps):
            if self.core.has_work:
                self.step()
                self.take_all()
        assert not self.core.has_work, f"still busy after {max_steps} steps"

    def _record(self, plan: StepPlan) -> None:
        # The core changes the entries from step to step.
        self.plans.append(attrs.evolve(plan, scheduled=[attrs.evolve(work) for work in plan.scheduled]))


def _entries(columns: LogprobColumns | None) -> Iterator[tuple[int, TokenLogprobs]]:
    """Slot and log probabilities of each entry."""
    if columns is None:
        return
    token_ids, logprobs = unpack_int32(columns.token_ids), memoryview(columns.logprobs).cast("f")
    start = 0
    for slot, count, rank in zip(*map(unpack_int32, (columns.slots, columns.counts, columns.ranks)), strict=True):
        end = start + count
        yield slot, TokenLogprobs(list(token_ids[start:end]), list(logprobs[start:end]), rank)
        start = end
    assert start == len(token_ids) == len(logprobs)


def _vectors(columns: PooledOutput | None) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Slot and vectors of each entry."""
    if columns is None:
        return
    values = np.frombuffer(columns.values, np.float32)
    start = 0
    for slot, rows, width in zip(*map(unpack_int32, (columns.slots, columns.num_rows, columns.widths)), strict=True):
        end = start + abs(rows) * width
        yield slot, values[start:end].reshape((width,) if rows < 0 else (rows, width))
        start = end
    assert start == len(values)
