"""`Scheduler`: what each step computes.

There are no phases. A step has a budget of tokens; running requests take theirs first, one token each or the next part
of a prompt, then waiting ones are admitted while budget and blocks last, and drafts get what is left. When blocks run
out, the running request that comes last gives its own back and waits, to be computed again.

Two invariants carry all the rest (`check_integrity` tests them):

1. *Running and waiting requests are each in order*: by priority (where the policy has priorities), then by arrival.
   Blocks and tokens are given in this order, and only the last running request is ever preempted: for one before it, or
   for itself. A waiting request takes the place of a running one only if its priority is higher, and a preempted one
   waits where it was in the order. So two requests never take turns in preempting each other, and none starves but for
   others of a higher priority: the first of all is never preempted, is part of every step, and ends.
2. *Of running requests, those that a step leaves out are the last ones*, for which no budget was left, and those whose
   last token is being computed.

With asynchronous scheduling a step is planned while the one before it is in flight. A request's token in that step is
not known yet: where its `num_computed_tokens` has reached all known tokens, one more is on its way. Plans are computed
in order, so blocks that are given back may be in the next plan, whatever is in flight; and what is in flight for a
request that has ended is dropped when it comes, while for one that was preempted it is kept. Requests with grammars,
and drafts, need the tokens themselves: while there are any, one step is in flight at most.

The scheduler does not know what tokens mean, where outputs go, or what a step costs.
"""

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import attrgetter

from trioengine.config.engine import SchedulingPolicy
from trioengine.core.config import CoreConfig
from trioengine.core.drafting import Drafting
from trioengine.core.executor import NO_TOKEN, StepPlan, StepResult
from trioengine.core.kv_cache_manager import Admission, KVCacheManager
from trioengine.core.request import Request, RequestEvent, RequestStatus
from trioengine.core.request_queue import RequestQueue, insert_in_order
from trioengine.core.step import Step, StepOutcome
from trioengine.core.structured_output import StructuredOutputs
from trioengine.errors import EngineGenerateError, RequestError
from trioengine.types.codec import error_to_data
from trioengine.types.messages import Finished
from trioengine.types.output import FinishReason

MAX_STEPS_IN_FLIGHT = 2

_priority = attrgetter("priority")


class Scheduler:
    """Turns requests into step plans and step results into progress.

    Results come back in the order of the plans. `schedule` may be called while `may_schedule`.
    """

    def __init__(
        self, config: CoreConfig, kv_cache: KVCacheManager, structured_outputs: StructuredOutputs | None = None
    ) -> None:
        self.is_paused = False
        """Whether plans compute nothing, and only tell the executor what to forget."""
        self.num_preemptions = 0
        """Since the start."""
        self.drafting = Drafting(config, kv_cache, structured_outputs)
        self._config = config
        self._kv_cache = kv_cache
        self._has_priorities = config.scheduling_policy is SchedulingPolicy.PRIORITY
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_logit_rows)
        self._running: list[Request] = []
        self._waiting = RequestQueue()
        self._removed: list[int] = []  # Sequences that the executor still has to forget.
        self._in_flight: deque[Step] = deque()
        self._step = 0  # The next one's number.
        self._num_bound = 0  # Running requests with grammars.
        self._num_special = 0  # Running requests whose results are not just tokens.

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that are queued, preempted ones included."""
        return len(self._waiting)

    @property
    def num_steps(self) -> int:
        """Steps planned since the start."""
        return self._step

    @property
    def num_in_flight(self) -> int:
        """Steps whose results are still to come."""
        return len(self._in_flight)

    @property
    def may_schedule(self) -> bool:
        """Whether another step may be planned before the next result."""
        if not self._in_flight:
            return True
        is_ahead_allowed = self._config.async_scheduling and not self._num_bound
        return is_ahead_allowed and not self.drafting.waits_for_tokens and len(self._in_flight) < MAX_STEPS_IN_FLIGHT

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight and the executor knows of no sequence but those that run."""
        return not (self._in_flight or self._removed)

    @property
    def has_work(self) -> bool:
        """Whether a result is to come, or a plan would hold anything, if only a sequence to forget."""
        has_requests = bool(self._running or self._waiting) and not self.is_paused
        return has_requests or bool(self._in_flight or self._removed)

    def check(self, request: Request) -> None:
        """Return when a new request could at least run alone.

        Raises:
            RequestError: it could not.
        """
        # The last token is never an input, so it needs no room.
        num_tokens = max(request.max_total_tokens - 1, request.num_prompt_tokens)
        if not self._kv_cache.fits_alone(num_tokens, self._config.max_num_batched_tokens):
            raise RequestError(
                f"Prompt and answer may need {request.max_total_tokens} tokens, which is "
                f"{self._kv_cache.num_blocks_for(num_tokens)} blocks of KV cache; the engine has "
                f"{self._kv_cache.num_blocks}. Lower max_tokens, shorten the prompt or give the engine more KV cache "
                "memory.",
                param="max_tokens",
            )

    def add(self, request: Request) -> None:
        """Queue a request that was checked."""
        if self.drafting.speculator is not None:
            request.speculation = self.drafting.speculator.new_request()
        self._waiting.add(request)

    def abort(self, request: Request) -> None:
        """Take out a request that has not finished; its blocks are free at once."""
        self._finish(request, RequestEvent.ABORTED, Finished(request.slot, FinishReason.ABORT))
        self._drop_left()

    def preempt_all(self) -> None:
        """Take all running requests' blocks; they will be computed again."""
        while self._running:
            self._preempt(self._running.pop())

    def schedule(self) -> StepPlan | None:
        """The next step, which is then in flight; None where there is nothing to do in it."""
        config = self._config
        num_requests = min(len(self._running) + len(self._waiting), self._max_num_seqs)
        step = Step(self._step, config.max_num_batched_tokens, config.max_num_logit_rows - num_requests)
        step.is_plain = not self._num_special
        self.drafting.forget_drafts()
        if self.is_paused:
            pass
        elif self._has_priorities:
            self._schedule_by_priority(step)
        else:
            self._advance(step, self._running)
            if self._waiting:
                self._admit(step)
        masks = None
        if step.scheduled:
            self.drafting.add_drafts(step, has_grammars=self._num_bound > 0)
            masks = self.drafting.masks(step) if self._num_bound else None
        saves, loads = self._kv_cache.take_copies()
        if not (step.scheduled or self._removed or saves or loads):
            return None
        plan = StepPlan(step.number, step.scheduled, step.new, self._removed, masks, saves, loads)
        self._step += 1
        self._removed = []
        self._in_flight.append(step)
        return plan

    def update(self, result: StepResult) -> StepOutcome:
        """Take in what the oldest step in flight sampled.

        Raises:
            RuntimeError: the result does not fit the plan. Nothing can be trusted any more.
        """
        step = self._in_flight.popleft()
        tokens = result.tokens
        if result.step != step.number or len(tokens) != len(step.requests):
            raise RuntimeError(
                f"The executor answered step {step.number} of {len(step.requests)} sequences with step {result.step} "
                f"of {len(tokens)}."
            )
        found = [request for request in step.found if request.status is not RequestStatus.FINISHED]
        is_more_than_tokens = result.failures or result.logprobs or result.failed_loads or NO_TOKEN in tokens
        if not step.is_plain or is_more_than_tokens:
            outcome = self._take_in(step, result)
        else:
            outcome = StepOutcome(step.requests, list(tokens))
            for request, token in zip(step.requests, tokens, strict=True):
                token_ids = request.token_ids
                token_ids.append(token)
                if token in request.end_token_ids or len(token_ids) >= request.max_total_tokens:
                    end = request.stop_after(token)
                    if end is not None:
                        self._stop(request, end, outcome)
        outcome.found = found
        if outcome.finished:
            self._drop_left()
        return outcome

    def check_integrity(self) -> None:
        """Return when the books are right: invariant 1, limits, states and blocks.

        Raises:
            AssertionError: saying what is wrong.
        """
        self._kv_cache.check_integrity()
        for requests in (self._running, list(self._waiting)):
            keys = [request.key for request in requests]
            if keys != sorted(set(keys)):
                raise AssertionError(f"Requests are not in order: {keys}")
        if len(self._running) > self._max_num_seqs:
            raise AssertionError(f"{len(self._running)} requests run; the limit is {self._max_num_seqs}")
        running = {request.sequence_id for request in self._running}
        if running != self._kv_cache.sequence_ids:
            raise AssertionError(f"{sorted(running)} run, but {sorted(self._kv_cache.sequence_ids)} hold blocks")
        if self._num_bound != sum(request.grammar is not None for request in self._running):
            raise AssertionError(f"{self._num_bound} requests are counted as bound by grammars")
        num_ahead = 1 if self._in_flight else 0
        for request in self._running:
            num_room = len(self._kv_cache.block_tables(request.sequence_id)[0]) * self._config.block_size
            if request.status is not RequestStatus.RUNNING or not (
                request.num_computed_tokens <= request.num_slots <= num_room
                and request.num_computed_tokens < len(request.token_ids) + num_ahead
            ):
                raise AssertionError(f"A running request is not as it should be, with room for {num_room}: {request}")
        for request in self._waiting:
            if request.status is not RequestStatus.WAITING or request.num_computed_tokens or request.num_slots:
                raise AssertionError(f"A waiting request is not as it should be: {request}")

    # Planning

    def _schedule_by_priority(self, step: Step) -> None:
        """Running and waiting requests in one order: a waiting one gets its tokens before running ones that are less
        important, and takes the place of the last of them where none is left."""
        position = 0
        while self._waiting and position < len(self._running):
            end = bisect.bisect_right(self._running, self._waiting[0].priority, lo=position, key=_priority)
            self._advance(step, islice(self._running, position, end))
            position = end
            if position >= len(self._running):
                break
            num_new = len(step.new)
            # Preempted are only requests behind `position`, which this step has not scheduled.
            self._admit(step, before=self._running[position].priority)
            if len(step.new) == num_new:
                break
            position += len(step.new) - num_new
        self._advance(step, islice(self._running, position, None))
        if self._waiting:
            self._admit(step)

    def _advance(self, step: Step, running: Iterable[Request]) -> None:
        """Schedule the next tokens of running requests."""
        budget = step.num_tokens_left
        scheduled, requests = step.scheduled, step.requests
        # Making room takes requests from the list's end only, so the loop then just ends earlier.
        for request in running:
            work = request.work
            start = work.num_computed_tokens + work.num_tokens
            known = len(request.token_ids)
            num_tokens = known - start
            if num_tokens == 0:  # The step in flight samples the token that this one begins with.
                if known + 1 >= request.max_total_tokens:
                    continue  # And that is its last.
                num_tokens = 1
            elif num_tokens > 1:
                num_tokens = self._num_prompt_tokens(step, request, num_tokens, budget)
            if num_tokens > budget:
                break
            end = start + num_tokens
            if end <= request.num_slots:
                work.new_block_ids = ()
            elif not self._make_room(request, start, end):
                break
            work.num_computed_tokens = start
            work.num_tokens = num_tokens
            budget -= num_tokens
            if num_tokens > 1 or end < known:
                self._note_prompt(step, request, end)
            scheduled.append(work)
            requests.append(request)
        step.num_tokens_left = budget

    def _admit(self, step: Step, before: int | None = None) -> None:
        """Start waiting requests while there is room.

        With `before`, only those whose priority is higher (a lower value) than this one; and they may take the places
        and blocks of running requests that are less important than they.
        """
        position = 0
        while step.num_tokens_left and position < len(self._waiting):
            request = self._waiting[position]
            # Nobody comes back in the step that preempted it. And it comes back only with a block to spare for each
            # running request: else the next of these to need one would end its new beginning.
            if request.preempted_in == step.number or (before is not None and request.priority >= before):
                break
            num_spare = self._kv_cache.num_free_blocks - len(self._running)
            if request.preempted_in >= 0 and self._running and num_spare < request.num_blocks_given_back:
                break
            if request.is_long and step.num_long_prefills >= self._config.max_long_partial_prefills:
                position += 1  # Shorter ones may pass it by: it is first when the long one before it is complete.
                continue
            num_tokens = self._num_prompt_tokens(step, request, len(request.token_ids), step.num_tokens_left)
            is_partial = num_tokens < len(request.token_ids)
            if is_partial and len(step.incomplete) >= self._config.max_num_partial_prefills:
                break
            admission = self._find_place(request, num_tokens, may_preempt=before is not None)
            if admission is None:
                break
            self._start(step, request, admission)

    def _find_place(self, request: Request, num_tokens: int, *, may_preempt: bool) -> Admission | None:
        """A place among the running requests and blocks for the first tokens; None where there is not both."""
        kv_cache = self._kv_cache
        while True:
            if len(self._running) < self._max_num_seqs:
                admission = kv_cache.admit(
                    request.sequence_id,
                    request.token_ids,
                    len(request.token_ids),
                    max_new_tokens=num_tokens if kv_cache.has_windows else None,
                    namespace=request.namespace,
                    use_cached=not request.has_prompt_logprobs,
                )
                if admission is not None:
                    return admission
            if not may_preempt or not self._running or self._running[-1].priority <= request.priority:
                return None
            self._preempt(self._running.pop())

    def _start(self, step: Step, request: Request, admission: Admission) -> None:
        """Let a request run that has got its blocks."""
        self._waiting.remove(request)
        request.apply(RequestEvent.ADMITTED)
        insert_in_order(self._running, request)
        if request.grammar is not None:
            self._num_bound += 1
        if request.grammar is not None or request.has_prompt_logprobs:
            self._num_special += 1
            step.is_plain = False
        known, start = len(request.token_ids), admission.num_cached_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = start
            if start:
                step.found.append(request)
        work = request.work
        work.num_computed_tokens = start
        work.num_tokens = self._num_prompt_tokens(step, request, known - start, step.num_tokens_left)
        work.new_block_ids = admission.new_block_ids
        step.num_tokens_left -= work.num_tokens
        end = start + work.num_tokens
        request.num_slots = self._num_slots(end if self._kv_cache.has_windows else known)
        request.next_prompt_logprob = 1
        self._note_prompt(step, request, end)
        step.scheduled.append(work)
        step.requests.append(request)
        step.new.append(request.new_sequence())

    def _num_prompt_tokens(self, step: Step, request: Request, num_tokens: int, budget: int) -> int:
        """How many of the next `num_tokens` known tokens of a request a step with this budget computes."""
        num_tokens = max(1, min(num_tokens, budget))
        if request.is_long:
            num_tokens = min(num_tokens, self._config.long_prefill_token_threshold)
        if request.has_prompt_logprobs:  # Each of the prompt's tokens takes a row.
            num_tokens = min(num_tokens, 1 + step.num_extra_rows)
        return num_tokens

    def _note_prompt(self, step: Step, request: Request, end: int) -> None:
        """Count the part of a prompt, up to `end`, that the step computes; others may use it from now on, also those
        that start in the same step."""
        self._kv_cache.commit(request.sequence_id, request.token_ids, end)
        if request.has_prompt_logprobs:
            step.num_extra_rows -= request.work.num_tokens - 1
        if end < len(request.token_ids):
            step.incomplete.add(len(step.scheduled))
            step.num_long_prefills += request.is_long

    def _num_slots(self, num_tokens: int) -> int:
        return self._kv_cache.num_blocks_for(num_tokens) * self._config.block_size

    # Blocks

    def _make_room(self, request: Request, start: int, end: int) -> bool:
        """Find blocks, from the last running requests if need be; False when the request itself had to give."""
        # All tokens before `start` are known: at most the one at `start` is on its way.
        self._kv_cache.commit(request.sequence_id, request.token_ids, start)
        while True:
            new_block_ids = self._kv_cache.allocate(request.sequence_id, end, start)
            if new_block_ids is not None:
                request.work.new_block_ids = new_block_ids
                request.num_slots = self._num_slots(end)
                return True
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False

    def _preempt(self, victim: Request, *, is_valid: bool = True) -> None:
        """Let a request wait again. The caller has taken it, or will take it, out of the running ones.

        Where what is in its blocks is not valid, neither is what steps in flight sample for it.
        """
        num_free = self._kv_cache.num_free_blocks
        if is_valid:
            self._give_back(victim)
        else:
            self._kv_cache.free(victim.sequence_id)
            self._leave(victim)
            victim.valid_from = self._step
        victim.num_blocks_given_back = self._kv_cache.num_free_blocks - num_free
        victim.preempted_in = self._step
        victim.apply(RequestEvent.PREEMPTED)
        self._waiting.add(victim)
        self.num_preemptions += 1

    def _give_back(self, request: Request) -> None:
        """Free a running request's blocks. What is in them stays findable until they are used for something else."""
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        self._kv_cache.commit(request.sequence_id, request.token_ids, num_known)
        self._kv_cache.free_withdrawn(request.sequence_id, num_known)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Note that a request, whose blocks are free, does not run any more."""
        self._removed.append(request.sequence_id)
        self._num_bound -= request.grammar is not None
        self._num_special -= request.grammar is not None or request.has_prompt_logprobs
        work = request.work
        work.num_computed_tokens = work.num_tokens = request.num_slots = 0

    # Results

    def _take_in(self, step: Step, result: StepResult) -> StepOutcome:
        """Take in a result that is more, or less, than one token for each request."""
        outcome = StepOutcome([], [])
        self._take_in_failures(step, result, outcome)
        for index, request in enumerate(step.requests):
            # Nobody wants it any more, or it is wrong.
            if request.status is RequestStatus.FINISHED or step.number < request.valid_from:
                continue
            part = result.prompt_logprobs.get(index)
            if part and (unsent := request.unsent_prompt_logprobs(part)):
                outcome.prompt_logprobs.append((request, unsent))
            is_incomplete = index in step.incomplete
            if not is_incomplete and request.max_total_tokens == request.num_prompt_tokens:
                # Only its prompt's log probabilities were asked for.
                self._stop(request, Finished(request.slot, FinishReason.LENGTH), outcome)
                continue
            if is_incomplete is not (result.tokens[index] == NO_TOKEN):
                raise RuntimeError(f"The executor sampled nothing, or too early, for sequence {request.sequence_id}.")
            if not is_incomplete:
                self._take_in_tokens(step, index, result, outcome)
        return outcome

    def _take_in_failures(self, step: Step, result: StepResult, outcome: StepOutcome) -> None:
        """End the requests that failed, and let those be computed again that used what these left behind."""
        kv_cache = self._kv_cache
        messages = {failure.sequence_id: failure.message for failure in result.failures}
        wrong: set[int] = set()
        for request in step.requests if messages else ():
            message = messages.get(request.sequence_id)
            if message is None or request.status is RequestStatus.FINISHED or step.number < request.valid_from:
                continue
            if request.status is RequestStatus.RUNNING:
                # Where another step has been planned since, nobody knows any more where this one began.
                start = 0 if self._in_flight else request.work.num_computed_tokens
                wrong |= kv_cache.free_failed(request.sequence_id, start)
                self._leave(request)
            else:
                self._waiting.remove(request)
            error = error_to_data(EngineGenerateError(message))
            self._end(request, RequestEvent.FAILED, Finished(request.slot, FinishReason.ABORT, error=error))
            outcome.finished.append(request)
        if result.failed_loads:
            wrong |= kv_cache.drop_loaded(result.failed_loads)
        if wrong:
            for request in self._running:
                if request.status is RequestStatus.RUNNING and request.sequence_id in wrong:
                    self._preempt(request, is_valid=False)
            self._note_dropped()
        self._drop_left()

    def _take_in_tokens(self, step: Step, index: int, result: StepResult, outcome: StepOutcome) -> None:
        """Take in a request's tokens, up to the one that ends it."""
        request = step.requests[index]
        work, grammar = request.work, request.grammar
        drafts = work.draft_token_ids
        num_accepted = result.num_accepted.get(index, 0)
        new_tokens = [*drafts[:num_accepted], result.tokens[index]]
        work.num_tokens -= len(drafts) - num_accepted
        speculator = self.drafting.speculator
        if speculator is not None and request.speculation is not None and index in step.proposed:
            speculator.observe(request.speculation, len(drafts), num_accepted)
        if grammar is not None:
            if grammar.error is None:
                new_tokens = new_tokens[: grammar.accept(new_tokens)]
            if grammar.error is not None:
                error = error_to_data(grammar.error)
                self._finish(request, RequestEvent.FAILED, Finished(request.slot, FinishReason.ABORT, error=error))
                outcome.finished.append(request)
                return
        num_known = len(request.token_ids)
        end = _append(request, new_tokens)
        num_new = len(request.token_ids) - num_known
        outcome.requests.extend([request] * num_new)
        outcome.tokens.extend(new_tokens[:num_new])
        if index in result.logprobs:
            outcome.logprobs.append((request, result.logprobs[index][:num_new]))
        if end is not None:
            self._stop(request, end, outcome)
        elif speculator is not None and request.speculation is not None and index in result.drafts:
            speculator.offer(request.speculation, request.token_ids, result.drafts[index])

    def _stop(self, request: Request, finished: Finished, outcome: StepOutcome) -> None:
        self._finish(request, RequestEvent.STOPPED, finished)
        outcome.finished.append(request)

    def _finish(self, request: Request, event: RequestEvent, finished: Finished) -> None:
        """End a request. `_drop_left` must follow."""
        if request.status is RequestStatus.RUNNING:
            self._give_back(request)
        else:
            self._waiting.remove(request)
        self._end(request, event, finished)

    def _end(self, request: Request, event: RequestEvent, finished: Finished) -> None:
        request.apply(event)
        request.finished = finished
        self._note_dropped()

    def _note_dropped(self) -> None:
        """Something that steps in flight sample is of no use any more."""
        for step in self._in_flight:
            step.is_plain = False

    def _drop_left(self) -> None:
        """Take requests that do not run any more out of the running ones."""
        self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]


def _append(request: Request, new_tokens: Sequence[int]) -> Finished | None:
    """Append new tokens up to the one that ends the request, and say how it ends; None when it goes on."""
    for token in new_tokens:
        request.token_ids.append(token)
        end = request.stop_after(token)
        if end is not None:
            return end
    # Nothing but the end can follow what is complete.
    is_complete = request.grammar is not None and request.grammar.is_complete
    return Finished(request.slot, FinishReason.STOP, ends_with_text=True) if is_complete else None
