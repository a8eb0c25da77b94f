"""`Scheduler`: what each step computes, first come, first served.

There are no phases. A step has a budget of tokens; running requests take theirs first, one token each or the next part
of a prompt, then waiting ones are admitted while budget and blocks last. When blocks run out, the request that arrived
last gives its own back and waits at the front of the queue, to be computed again.

Two invariants carry all the rest (`check_integrity` tests them):

1. *The running requests, then the waiting ones, are in the order of their arrival.* Only the first of the queue is ever
   admitted, and only the last running one preempted, to the front of the queue. So nobody starves: the oldest request
   is never preempted by another, and ends.
2. *Every running request is part of every step.* Whoever is admitted got at least one token of a budget from which all
   older ones had taken theirs, and older ones take exactly one from then on: a prompt that does not fit takes the rest
   of the budget, so nobody is admitted behind it until it is complete.

The scheduler does not know what tokens mean, where outputs go, or what a step costs.
"""

from collections import OrderedDict
from collections.abc import Sequence

import attrs

from trioengine.core.config import CoreConfig
from trioengine.core.executor import NO_TOKEN, NewSequence, ScheduledSequence, StepPlan, StepResult
from trioengine.core.kv_cache_manager import KVCacheManager
from trioengine.core.request import Request, RequestEvent, RequestStatus
from trioengine.errors import EngineGenerateError, RequestError
from trioengine.types.codec import error_to_data
from trioengine.types.messages import Finished
from trioengine.types.output import FinishReason


@attrs.frozen
class StepOutcome:
    """What one step did for requests."""

    requests: Sequence[Request]
    """Those that got a token. Valid until the scheduler is used again."""
    tokens: Sequence[int]
    """One for each of `requests`."""
    finished: Sequence[Request]
    """Those that ended; their last token is part of `tokens`."""


class Scheduler:
    """Turns requests into step plans and step results into progress.

    `schedule` and `update` alternate; `add` and `abort` come between an `update` and the next `schedule`.
    """

    def __init__(self, config: CoreConfig, kv_cache: KVCacheManager) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._running: list[Request] = []
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._removed: list[int] = []  # Sequences that the executor still has to forget.
        self._step = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that are queued, preempted ones included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether the next plan would hold anything, if only a sequence to forget."""
        return bool(self._running or self._waiting or self._removed)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestError: it could not even run alone. It is not queued.
        """
        # The last token is never an input, so it needs no room.
        num_needed = self._kv_cache.num_blocks_for(request.max_total_tokens - 1)
        if num_needed > self._kv_cache.num_blocks:
            raise RequestError(
                f"Prompt and answer may need {request.max_total_tokens} tokens, which is {num_needed} blocks of KV "
                f"cache; the engine has {self._kv_cache.num_blocks}. Lower max_tokens, shorten the prompt or give the "
                "engine more KV cache memory.",
                param="max_tokens",
            )
        self._waiting[request.sequence_id] = request

    def abort(self, request: Request) -> None:
        """Take out a request that has not finished; its blocks are free at once."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            del self._waiting[request.sequence_id]
        self._finish(request, RequestEvent.ABORTED, Finished(request.slot, FinishReason.ABORT))

    def schedule(self) -> StepPlan:
        """The next step. Its `scheduled` is one entry for each running request, in order."""
        budget = self._config.max_num_batched_tokens
        block_size = self._config.block_size
        scheduled: list[ScheduledSequence] = []
        # Making room takes requests from the list's end only, so the loop then just ends earlier.
        for request in self._running:
            work = request.work
            num_computed = work.num_computed_tokens
            num_tokens = len(request.token_ids) - num_computed
            if num_tokens > budget:
                num_tokens = budget
            # Blocks for all tokens known were allocated on admission, so one is missing only for a token generated
            # since, and only when it is the first of its block.
            if num_computed % block_size:
                work.new_block_ids = ()
            elif not self._make_room(request, num_computed + num_tokens):
                break
            work.num_tokens = num_tokens
            budget -= num_tokens
            scheduled.append(work)
        # Nobody preempted just now comes back here: one is preempted when no block is free, at least one of its blocks
        # is then taken or was not enough, and being the first of the queue, it needs no fewer than it had.
        new = self._admit(budget, scheduled)
        plan = StepPlan(self._step, scheduled, new, removed=self._removed)
        self._step += 1
        self._removed = []
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """Take in what the newest plan's step sampled.

        Raises:
            RuntimeError: the result does not fit the plan. Nothing can be trusted any more.
        """
        if result.step != plan.step or len(result.tokens) != len(self._running):
            raise RuntimeError(
                f"The executor answered step {plan.step} of {len(self._running)} sequences with step {result.step} "
                f"of {len(result.tokens)}."
            )
        messages = {failure.sequence_id: failure.message for failure in result.failures}
        finished: list[Request] = []
        for request, token in zip(self._running, result.tokens, strict=True):
            work = request.work
            work.num_computed_tokens += work.num_tokens
            if token == NO_TOKEN:
                self._update_without_token(request, messages, finished)
                continue
            token_ids = request.token_ids
            token_ids.append(token)
            if token in request.end_token_ids or len(token_ids) >= request.max_total_tokens:
                end = request.stop_after(token)
                if end is not None:
                    self._finish(request, RequestEvent.STOPPED, end)
                    finished.append(request)
        outcome = self._outcome(result.tokens, finished)
        if finished:
            self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]
        return outcome

    def check_integrity(self) -> None:
        """Return when the books are right: invariant 1, limits, states and blocks.

        Raises:
            AssertionError: saying what is wrong.
        """
        self._kv_cache.check_integrity()
        order = [request.sequence_id for request in (*self._running, *self._waiting.values())]
        if order != sorted(set(order)):
            raise AssertionError(f"Requests are not in the order of their arrival: {order}")
        if len(self._running) > self._config.max_num_seqs:
            raise AssertionError(f"{len(self._running)} requests run; the limit is {self._config.max_num_seqs}")
        running = {request.sequence_id for request in self._running}
        if running != self._kv_cache.sequence_ids:
            raise AssertionError(f"{sorted(running)} run, but {sorted(self._kv_cache.sequence_ids)} hold blocks")
        for request in self._running:
            num_room = len(self._kv_cache.block_table(request.sequence_id)) * self._config.block_size
            if request.status is not RequestStatus.RUNNING or not (
                request.num_computed_tokens <= num_room and request.num_computed_tokens < len(request.token_ids)
            ):
                raise AssertionError(f"A running request is not as it should be, with room for {num_room}: {request}")
        for request in self._waiting.values():
            if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
                raise AssertionError(f"A waiting request is not as it should be: {request}")

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Find blocks, from the newest running requests if need be; False when the request itself had to give."""
        while True:
            new_block_ids = self._kv_cache.allocate(request.sequence_id, num_tokens)
            if new_block_ids is not None:
                request.work.new_block_ids = new_block_ids
                return True
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False

    def _preempt(self, victim: Request) -> None:
        victim.apply(RequestEvent.PREEMPTED)
        self._kv_cache.free(victim.sequence_id)
        self._removed.append(victim.sequence_id)
        victim.work.num_computed_tokens = 0
        self._waiting[victim.sequence_id] = victim
        self._waiting.move_to_end(victim.sequence_id, last=False)

    def _admit(self, budget: int, scheduled: list[ScheduledSequence]) -> list[NewSequence]:
        """Start waiting requests while there is room for all their known tokens; append their work to `scheduled`."""
        new: list[NewSequence] = []
        while budget > 0 and self._waiting and len(self._running) < self._config.max_num_seqs:
            request = next(iter(self._waiting.values()))
            new_block_ids = self._kv_cache.allocate(request.sequence_id, len(request.token_ids))
            if new_block_ids is None:
                break
            del self._waiting[request.sequence_id]
            request.apply(RequestEvent.ADMITTED)
            request.work.new_block_ids = new_block_ids
            request.work.num_tokens = min(len(request.token_ids), budget)
            budget -= request.work.num_tokens
            self._running.append(request)
            scheduled.append(request.work)
            new.append(request.new_sequence())
        return new

    def _update_without_token(self, request: Request, messages: dict[int, str], finished: list[Request]) -> None:
        message = messages.get(request.sequence_id)
        if message is not None:
            error = error_to_data(EngineGenerateError(message))
            self._finish(request, RequestEvent.FAILED, Finished(request.slot, FinishReason.ABORT, error=error))
            finished.append(request)
        elif request.num_computed_tokens == len(request.token_ids):
            raise RuntimeError(f"The executor sampled nothing for sequence {request.sequence_id} and gives no reason.")

    def _outcome(self, tokens: Sequence[int], finished: list[Request]) -> StepOutcome:
        if NO_TOKEN not in tokens:
            return StepOutcome(self._running, tokens, finished)
        rows = [(request, token) for request, token in zip(self._running, tokens, strict=True) if token != NO_TOKEN]
        return StepOutcome([request for request, _ in rows], [token for _, token in rows], finished)

    def _finish(self, request: Request, event: RequestEvent, finished: Finished) -> None:
        """Free what a request holds. The caller has taken it, or will take it, out of the running or waiting ones."""
        if request.status is RequestStatus.RUNNING:
            self._kv_cache.free(request.sequence_id)
            self._removed.append(request.sequence_id)
        request.apply(event)
        request.finished = finished
