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
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import attrgetter

from trioengine.config.engine import SchedulingPolicy
from trioengine.core.config import CoreConfig
from trioengine.core.drafting import Drafting
from trioengine.core.executor import StepPlan, StepResult
from trioengine.core.kv_cache_manager import Admission, KVCacheManager
from trioengine.core.lora import LoRAAdapters
from trioengine.core.request import Request, RequestEvent
from trioengine.core.request_table import RequestTable
from trioengine.core.results import ResultReader
from trioengine.core.step import Step, StepOutcome
from trioengine.core.structured_output import StructuredOutputs
from trioengine.errors import RequestError
from trioengine.types.messages import Finished

MAX_STEPS_IN_FLIGHT = 2

_priority = attrgetter("priority")


class Scheduler:
    """Turns requests into step plans and step results into progress.

    Results come back in the order of the plans. `schedule` may be called while `may_schedule`.
    """

    def __init__(
        self,
        config: CoreConfig,
        kv_cache: KVCacheManager,
        loras: LoRAAdapters,
        structured_outputs: StructuredOutputs | None = None,
    ) -> None:
        self.is_paused = False
        """Whether plans compute nothing, and only tell the executor what to forget."""
        self.drafting = Drafting(config, kv_cache, structured_outputs)
        self._config = config
        self._kv_cache = kv_cache
        self._loras = loras
        self._block_size = config.block_size
        # Blocks that fill one token after another are hashed when somebody may look for them, in one go. But those that
        # are behind a window are gone by then, and who reads events wants to know at once.
        self._commits_at_once = kv_cache.has_windows or config.enable_kv_cache_events
        self._has_priorities = config.scheduling_policy is SchedulingPolicy.PRIORITY
        self._table = RequestTable(config, kv_cache, loras)
        self._results = ResultReader(self._table, kv_cache, self.drafting.speculator)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._table.running)

    @property
    def num_waiting(self) -> int:
        """Requests that are queued, preempted ones included."""
        return len(self._table.waiting)

    @property
    def num_preemptions(self) -> int:
        """Since the start."""
        return self._table.num_preemptions

    @property
    def num_steps(self) -> int:
        """Steps planned since the start."""
        return self._table.next_step

    @property
    def num_in_flight(self) -> int:
        """Steps whose results are still to come."""
        return len(self._table.in_flight)

    @property
    def may_schedule(self) -> bool:
        """Whether another step may be planned before the next result."""
        num_in_flight = len(self._table.in_flight)
        if not num_in_flight:
            return True
        needs_tokens = self._table.num_bound > 0 or self.drafting.waits_for_tokens
        return self._config.async_scheduling and not needs_tokens and num_in_flight < MAX_STEPS_IN_FLIGHT

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight and the executor knows of no sequence but those that run."""
        return not (self._table.in_flight or self._table.removed)

    @property
    def has_work(self) -> bool:
        """Whether a result is to come, or a plan would hold anything, if only a sequence to forget."""
        has_requests = bool(self._table.running or self._table.waiting) and not self.is_paused
        return has_requests or not self.is_idle

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
                param="max_tokens" if request.pooling is None else "prompt",
            )

    def add(self, request: Request) -> None:
        """Queue a request that was checked."""
        if self.drafting.speculator is not None:
            request.speculation = self.drafting.speculator.new_request()
        self._table.waiting.add(request)

    def end(self, request: Request, event: RequestEvent, finished: Finished) -> None:
        """Take out a request that has not finished; its blocks are free at once."""
        self._table.take_out(request, event, finished)

    def take_preempted(self) -> Sequence[Request]:
        """The requests that were preempted since the last call, one entry for each time. Some may have ended since."""
        preempted, self._table.preempted = self._table.preempted, []
        return preempted

    def preempt_all(self) -> None:
        """Take all running requests' blocks; they will be computed again."""
        while self._table.running:
            self._table.preempt(self._table.running.pop())

    def schedule(self) -> StepPlan | None:
        """The next step, which is then in flight; None where there is nothing to do in it."""
        config, table = self._config, self._table
        num_requests = min(len(table.running) + len(table.waiting), table.max_num_seqs)
        step = Step(table.next_step, config.max_num_batched_tokens, config.max_num_logit_rows - num_requests)
        step.is_plain = not table.num_special
        self.drafting.forget_drafts()
        if self.is_paused:
            pass
        elif self._has_priorities:
            self._schedule_by_priority(step)
        else:
            self._advance(step, table.running)
            if table.waiting:
                self._admit(step)
        masks = None
        if step.scheduled:
            self.drafting.add_drafts(step, has_grammars=table.num_bound > 0)
            masks = self.drafting.masks(step) if table.num_bound else None
        saves, loads = self._kv_cache.take_copies()
        if not (step.scheduled or table.removed or saves or loads):
            return None
        plan = StepPlan(
            step.number, step.scheduled, step.new, table.removed, masks, saves, loads, self._loras.take_loads()
        )
        table.next_step += 1
        table.removed = []
        table.in_flight.append(step)
        return plan

    def update(self, result: StepResult) -> StepOutcome:
        """Take in what the oldest step in flight sampled.

        Raises:
            RuntimeError: the result does not fit the plan. Nothing can be trusted any more.
        """
        return self._results.take_in(self._table.in_flight.popleft(), result)

    def check_integrity(self) -> None:
        """Return when the books are right: invariant 1, limits, states and blocks.

        Raises:
            AssertionError: saying what is wrong.
        """
        self._table.check_integrity()

    # Planning

    def _schedule_by_priority(self, step: Step) -> None:
        """Running and waiting requests in one order: a waiting one gets its tokens before running ones that are less
        important, and takes the place of the last of them where none is left."""
        running, waiting = self._table.running, self._table.waiting
        position = 0
        while waiting and position < len(running):
            end = bisect.bisect_right(running, waiting[0].priority, lo=position, key=_priority)
            self._advance(step, islice(running, position, end))
            position = end
            if position >= len(running):
                break
            num_new = len(step.new)
            # Preempted are only requests behind `position`, which this step has not scheduled.
            self._admit(step, before=running[position].priority)
            if len(step.new) == num_new:
                break
            position += len(step.new) - num_new
        self._advance(step, islice(running, position, None))
        if waiting:
            self._admit(step)

    def _advance(self, step: Step, running: Iterable[Request]) -> None:
        """Schedule the next tokens of running requests."""
        budget = step.num_tokens_left
        append_work, append_request = step.scheduled.append, step.requests.append
        # Making room takes requests from the list's end only, so the loop then just ends earlier.
        for request in running:
            work = request.work
            start = work.num_computed_tokens + work.num_tokens
            num_known = len(request.token_ids)
            if num_known > start + 1:
                num_tokens = self._advance_prompt(step, request, start, budget)
                if not num_tokens:
                    break
                budget -= num_tokens
                continue
            # The token is known, or else the step in flight samples it; that may be its last.
            if num_known == start and num_known + 1 >= request.max_total_tokens:
                continue
            if not budget:
                break
            if start < request.num_slots:
                work.new_block_ids = ()
            elif not self._make_room(request, start, start + 1):
                break
            work.num_computed_tokens = start
            work.num_tokens = 1
            budget -= 1
            append_work(work)
            append_request(request)
        step.num_tokens_left = budget

    def _advance_prompt(self, step: Step, request: Request, start: int, budget: int) -> int:
        """Schedule the next of several known tokens of a running request; how many. None where there is no room."""
        if not budget:
            return 0
        num_tokens = self._num_prompt_tokens(step, request, len(request.token_ids) - start, budget)
        end, work = start + num_tokens, request.work
        if end <= request.num_slots:
            work.new_block_ids = ()
        elif not self._make_room(request, start, end):
            return 0
        work.num_computed_tokens = start
        work.num_tokens = num_tokens
        self._schedule_prompt(step, request, end)
        return num_tokens

    def _admit(self, step: Step, before: int | None = None) -> None:
        """Start waiting requests while there is room.

        With `before`, only those whose priority is higher (a lower value) than this one; and they may take the places
        and blocks of running requests that are less important than they.

        Where one waits for its adapter's slot, none behind it starts with an adapter: then those that run end, one
        after another, and their slots become free.
        """
        running, waiting = self._table.running, self._table.waiting
        position, waits_for_slot = 0, False
        while step.num_tokens_left and position < len(waiting):
            request = waiting[position]
            # Nobody comes back in the step that preempted it. And it comes back only with a block to spare for each
            # running request: else the next of these to need one would end its new beginning.
            if request.preempted_in == step.number or (before is not None and request.priority >= before):
                break
            num_spare = self._kv_cache.num_free_blocks - len(running)
            if request.preempted_in >= 0 and running and num_spare < request.num_blocks_given_back:
                break
            if request.is_long and step.num_long_prefills >= self._config.max_long_partial_prefills:
                position += 1  # Shorter ones may pass it by: it is first when the long one before it is complete.
                continue
            if request.lora is not None and (waits_for_slot or not self._loras.has_place(request.lora)):
                position, waits_for_slot = position + 1, True
                continue
            num_tokens = self._num_prompt_tokens(step, request, len(request.token_ids), step.num_tokens_left)
            is_partial = num_tokens < len(request.token_ids)
            if is_partial and not self._config.splits_prompts:
                break
            if is_partial and len(step.incomplete) >= self._config.max_num_partial_prefills:
                break
            admission = self._find_place(request, num_tokens, may_preempt=before is not None)
            if admission is None:
                break
            self._start(step, request, admission)

    def _find_place(self, request: Request, num_tokens: int, *, may_preempt: bool) -> Admission | None:
        """A place among the running requests and blocks for the first tokens; None where there is not both."""
        kv_cache, running = self._kv_cache, self._table.running
        while True:
            if len(running) < self._table.max_num_seqs:
                self._table.commit_grown()
                admission = kv_cache.admit(
                    request.sequence_id,
                    request.token_ids,
                    max_new_tokens=num_tokens if kv_cache.has_windows else None,
                    namespace=request.namespace,
                    use_cached=request.may_use_cached,
                    can_commit=request.may_be_cached,
                )
                if admission is not None:
                    return admission
            if not may_preempt or not running or running[-1].priority <= request.priority:
                return None
            self._table.preempt(running.pop())

    def _start(self, step: Step, request: Request, admission: Admission) -> None:
        """Let a request run that has got its blocks."""
        self._table.start(request, admission)
        known, start = len(request.token_ids), admission.num_cached_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = start
            step.started.append(request)
        work = request.work
        work.num_tokens = self._num_prompt_tokens(step, request, known - start, step.num_tokens_left)
        step.num_tokens_left -= work.num_tokens
        step.is_plain = step.is_plain and not request.is_special
        end = start + work.num_tokens
        num_slots = end if self._kv_cache.has_windows else known
        request.num_slots = num_slots + -num_slots % self._block_size
        self._schedule_prompt(step, request, end)
        step.new.append(request.new_sequence())

    def _num_prompt_tokens(self, step: Step, request: Request, num_tokens: int, budget: int) -> int:
        """How many of the next `num_tokens` known tokens of a request a step with this budget computes."""
        num_tokens = min(num_tokens, budget)
        if request.is_long:
            num_tokens = min(num_tokens, self._config.long_prefill_token_threshold)
        if request.has_prompt_logprobs:  # Each of the prompt's tokens takes a row.
            num_tokens = min(num_tokens, 1 + step.num_extra_rows)
        return num_tokens

    def _schedule_prompt(self, step: Step, request: Request, end: int) -> None:
        """Let the step compute the part of a prompt up to `end`. Others may use it from now on, also those that start
        in the same step."""
        self._kv_cache.commit(request.sequence_id, request.token_ids, end)
        if request.has_prompt_logprobs:
            step.num_extra_rows -= request.work.num_tokens - 1
        if end < len(request.token_ids):
            step.incomplete.add(len(step.scheduled))
            step.num_long_prefills += request.is_long
        step.scheduled.append(request.work)
        step.requests.append(request)

    def _make_room(self, request: Request, start: int, end: int) -> bool:
        """Find blocks, from the last running requests if need be; False when the request itself had to give."""
        # All tokens before `start` are known: at most the one at `start` is on its way.
        if self._commits_at_once:
            self._kv_cache.commit(request.sequence_id, request.token_ids, start)
        else:
            self._table.grown[request.sequence_id] = request
        while True:
            new_block_ids = self._kv_cache.allocate(request.sequence_id, end, start)
            if new_block_ids is not None:
                request.work.new_block_ids = new_block_ids
                request.num_slots = end + -end % self._block_size
                return True
            victim = self._table.running.pop()
            self._table.preempt(victim)
            if victim is request:
                return False
