"""First come, first served, within a token budget and the blocks there are."""

from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from trioengine.config.engine import SchedulingPolicy
from trioengine.core.executor import NO_TOKEN, KVCacheGroup, SequenceFailure, StepPlan, StepResult
from trioengine.core.kv_cache_manager import KVCacheManager
from trioengine.core.lora import LoRAAdapters
from trioengine.core.request import Request, RequestEvent, RequestStatus, make_request
from trioengine.core.scheduler import Scheduler
from trioengine.core.step import StepOutcome
from trioengine.errors import RequestError
from trioengine.testing.core_driver import make_core_config, make_core_request
from trioengine.types.messages import Finished
from trioengine.types.output import FinishReason
from trioengine.types.params import SamplingParams


class Steps:
    """A scheduler whose requests all get token 1 whenever they get one."""

    def __init__(self, *, num_blocks: int = 64, **options: Any) -> None:
        self.config = attrs.evolve(make_core_config(), **options)
        self.kv_cache = KVCacheManager(
            [KVCacheGroup(num_blocks)],
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        loras = LoRAAdapters(0, 0, lambda _id: None)
        self.scheduler = Scheduler(self.config, self.kv_cache, loras)
        self.requests: list[Request] = []
        self._num_known: dict[int, int] = {}  # As the executor has them, tokens that are on their way included.
        self._tokens: deque[tuple[int, list[int]]] = deque()

    def add(
        self,
        num_prompt_tokens: int,
        max_tokens: int = 8,
        *,
        priority: int = 0,
        token: int = 1,
        sampling: SamplingParams | None = None,
    ) -> Request:
        prompt = [token] * num_prompt_tokens
        message = make_core_request(prompt=prompt, max_tokens=max_tokens, priority=priority, sampling=sampling)
        request = make_request(0, message, len(self.requests), self.config)
        self.requests.append(request)
        self.scheduler.check(request)
        self.scheduler.add(request)
        return request

    def schedule(self) -> StepPlan:
        """The next plan; there is one."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self._num_known |= {new.sequence_id: len(new.token_ids) for new in plan.new}
        tokens: list[int] = []
        for work in plan.scheduled:
            is_complete = work.num_computed_tokens + work.num_tokens == self._num_known[work.sequence_id]
            self._num_known[work.sequence_id] += is_complete
            tokens.append(1 if is_complete else NO_TOKEN)
        self._tokens.append((plan.step, tokens))
        return plan

    def update(self) -> StepOutcome:
        """The result of the oldest step in flight."""
        outcome = self.scheduler.update(StepResult(*self._tokens.popleft()))
        self.scheduler.check_integrity()
        return outcome

    def step(self) -> dict[int, int]:
        """One step: sequence id -> tokens computed."""
        plan = self.schedule()
        num_tokens = {work.sequence_id: work.num_tokens for work in plan.scheduled}
        self.update()
        return num_tokens

    def abort(self, request: Request) -> None:
        finished = Finished(request.slot, FinishReason.ABORT)
        self.scheduler.end(request, RequestEvent.ABORTED, finished)

    def step_while(self, condition: Callable[[], bool], max_steps: int = 200) -> None:
        """Steps until the condition no longer holds."""
        for _ in range(max_steps):
            if condition():
                self.step()
        assert not condition(), f"still so after {max_steps} steps"


def test_prompts_and_decodes_share_the_budget() -> None:
    """Running requests take theirs first; the next prompt gets what is left, in chunks."""
    steps = Steps(max_num_batched_tokens=8)
    steps.add(5)
    steps.add(9)
    steps.add(3)
    assert steps.step() == {0: 5, 1: 3}
    assert steps.step() == {0: 1, 1: 6, 2: 1}
    assert steps.step() == {0: 1, 1: 1, 2: 2}
    assert steps.step() == {0: 1, 1: 1, 2: 1}


def test_a_chunk_of_a_prompt_gives_no_row() -> None:
    """Only the last chunk's step has a token for the request."""
    steps = Steps(max_num_batched_tokens=4)
    request = steps.add(7)
    steps.schedule()
    assert list(steps.update().requests) == []
    steps.schedule()
    outcome = steps.update()
    assert (list(outcome.requests), list(outcome.tokens)) == ([request], [1])


def test_no_more_than_max_num_seqs_run() -> None:
    """The next one starts when one has ended, in the order of arrival."""
    steps = Steps(max_num_seqs=2)
    requests = [steps.add(2, max_tokens=2) for _ in range(3)]
    assert steps.step().keys() == {0, 1}
    assert steps.step().keys() == {0, 1}
    assert [request.status for request in requests] == [
        RequestStatus.FINISHED,
        RequestStatus.FINISHED,
        RequestStatus.WAITING,
    ]
    assert steps.step().keys() == {2}


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    """What does not fit holds back what came later, so it cannot starve."""
    steps = Steps(num_blocks=8)
    steps.add(16, max_tokens=1)
    large = steps.add(20, max_tokens=2)
    small = steps.add(1)
    assert steps.step().keys() == {0}
    assert (large.status, small.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
    assert steps.step().keys() == {1, 2}


def test_the_request_that_arrived_last_is_preempted_first() -> None:
    """It goes to the front of the queue, before those that never ran, and its tokens are computed again."""
    steps = Steps(num_blocks=4)
    first, second, third = (steps.add(7, max_tokens=6) for _ in range(3))
    assert steps.step() == {0: 7, 1: 7}
    assert steps.step() == {0: 1, 1: 1}

    plan = steps.schedule()
    assert [work.sequence_id for work in plan.scheduled] == [0]
    assert (list(plan.removed), list(plan.new)) == ([1], [])
    steps.update()
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    assert (second.num_computed_tokens, second.num_generated_tokens) == (0, 2)

    steps.step_while(lambda: first.status is RequestStatus.RUNNING)
    plan = steps.schedule()
    assert [(new.sequence_id, len(new.token_ids), new.num_prompt_tokens) for new in plan.new] == [(1, 9, 7)]
    assert third.status is RequestStatus.WAITING


def test_a_request_can_be_preempted_by_its_own_need() -> None:
    """The newest one that needs a block itself gives way to the older ones."""
    steps = Steps(num_blocks=4)
    steps.add(5)
    newest = steps.add(8)
    assert steps.step() == {0: 5, 1: 8}
    plan = steps.schedule()
    assert ([work.sequence_id for work in plan.scheduled], list(plan.removed)) == ([0], [1])
    steps.update()
    assert newest.status is RequestStatus.WAITING
    steps.step_while(lambda: steps.scheduler.has_work)
    assert newest.num_generated_tokens == 8


def test_nobody_is_preempted_in_a_step_that_it_was_scheduled_in() -> None:
    """Case 50 (vllm 23347): a plan that removes a sequence does not schedule it, nor make it new."""
    steps = Steps(num_blocks=6, max_num_batched_tokens=16)
    for _ in range(6):
        steps.add(6, max_tokens=12)
    num_preemptions = 0
    while steps.scheduler.has_work:
        plan = steps.schedule()
        scheduled = {work.sequence_id for work in plan.scheduled}
        assert not scheduled & set(plan.removed)
        assert not {new.sequence_id for new in plan.new} & set(plan.removed)
        assert len(scheduled) == steps.scheduler.num_running
        waiting = {i for i, request in enumerate(steps.requests) if request.status is RequestStatus.WAITING}
        num_preemptions += len(waiting & set(plan.removed))
        steps.update()
        assert plan.step < 200
    assert num_preemptions > 3
    assert all(request.num_generated_tokens == 12 for request in steps.requests)


def test_a_request_that_could_not_run_alone_is_refused() -> None:
    """Rather than waiting for ever; the last token needs no room, so the limit is exact."""
    steps = Steps(num_blocks=3)
    with pytest.raises(RequestError, match=r"14 tokens, which is 4 blocks of KV cache; the engine has 3") as caught:
        steps.add(6, max_tokens=8)
    assert caught.value.param == "max_tokens"
    assert not steps.scheduler.has_work
    request = steps.add(6, max_tokens=7)
    steps.step_while(lambda: steps.scheduler.has_work)
    assert request.num_generated_tokens == 7


def test_aborting_a_waiting_request_leaves_the_running_one_untouched() -> None:
    """Case 5: the queued one was never told to the executor, so nothing is removed there."""
    steps = Steps(max_num_seqs=1)
    running, waiting = steps.add(4), steps.add(4)
    steps.step()
    steps.abort(waiting)
    plan = steps.schedule()
    assert [work.sequence_id for work in plan.scheduled] == [running.sequence_id]
    assert not plan.removed
    assert steps.scheduler.num_waiting == 0


def test_the_executor_is_told_of_an_abort_when_nothing_else_is_to_do() -> None:
    """An abort's blocks are free at once, and one more plan, that only removes, follows."""
    steps = Steps()
    request = steps.add(4)
    steps.step()
    steps.abort(request)
    assert steps.kv_cache.num_free_blocks == 64
    assert steps.scheduler.has_work
    plan = steps.schedule()
    assert (list(plan.scheduled), list(plan.removed)) == ([], [0])
    steps.update()
    assert not steps.scheduler.has_work


def test_a_failure_ends_its_request_only() -> None:
    """The message arrives in the error; the other request goes on."""
    steps = Steps()
    failing, other = steps.add(4), steps.add(4)
    plan = steps.schedule()
    result = StepResult(plan.step, [NO_TOKEN, 1], [SequenceFailure(0, "out of range")])
    outcome = steps.scheduler.update(result)
    assert list(outcome.finished) == [failing]
    assert list(outcome.requests) == [other]
    assert failing.finished is not None
    assert failing.finished.error is not None
    assert failing.finished.error.name == "EngineGenerateError"
    assert "out of range" in str(failing.finished.error.fields["message"])
    assert list(steps.schedule().removed) == [0]


@pytest.mark.parametrize(
    "result", [StepResult(1, [1]), StepResult(0, []), StepResult(0, [1, 1]), StepResult(0, [NO_TOKEN])]
)
def test_a_result_that_does_not_fit_its_plan_is_fatal(result: StepResult) -> None:
    """Another step's result, another number of tokens, or none where one was due: nothing is assigned by guess."""
    steps = Steps()
    steps.add(4)
    steps.schedule()
    with pytest.raises(RuntimeError, match="executor"):
        steps.scheduler.update(result)


# Priorities


def prioritized(**options: Any) -> Steps:
    return Steps(scheduling_policy=SchedulingPolicy.PRIORITY, **options)


def test_a_request_of_a_higher_priority_takes_a_place_when_all_are_taken() -> None:
    """Case 49 (vllm 24365): that of the least important one, which waits in its own place in the order."""
    steps = prioritized(max_num_seqs=2)
    first, second = steps.add(4, priority=5), steps.add(4, priority=5)
    later = steps.add(4, priority=5)
    assert steps.step().keys() == {0, 1}
    urgent = steps.add(4, priority=1)
    plan = steps.schedule()
    assert [work.sequence_id for work in plan.scheduled] == [3, 0]
    assert (list(plan.removed), [new.sequence_id for new in plan.new]) == ([1], [3])
    steps.update()
    assert (first.status, urgent.status, second.status, later.status) == (
        RequestStatus.RUNNING,
        RequestStatus.RUNNING,
        RequestStatus.WAITING,
        RequestStatus.WAITING,
    )
    steps.step_while(lambda: urgent.status is RequestStatus.RUNNING)
    steps.step_while(lambda: steps.scheduler.has_work)
    assert second.num_generated_tokens == later.num_generated_tokens == 8


def test_a_request_of_a_higher_priority_takes_blocks_when_none_is_free() -> None:
    """From as many as it takes, and no more."""
    steps = prioritized(num_blocks=6)
    for _ in range(3):
        steps.add(7, max_tokens=1000, priority=2, sampling=SamplingParams(max_tokens=8))
    steps.step()
    steps.add(5, max_tokens=3, priority=1)
    plan = steps.schedule()
    assert [work.sequence_id for work in plan.scheduled] == [3, 0, 1]
    assert list(plan.removed) == [2]


def test_equals_never_take_each_others_places() -> None:
    """Who came first goes on, also when one that came before it waits again."""
    steps = prioritized(max_num_seqs=1)
    first = steps.add(4, priority=1)
    steps.step()
    steps.add(4, priority=1)
    steps.add(4, priority=2)
    for _ in range(7):
        assert steps.step().keys() == {0}
    assert first.status is RequestStatus.FINISHED
    assert steps.scheduler.num_preemptions == 0


def test_tokens_are_given_by_priority() -> None:
    """A long prompt that nobody hurries for does not hold up one that somebody does."""
    steps = prioritized(max_num_batched_tokens=8)
    steps.add(30, priority=5)
    assert steps.step() == {0: 8}
    steps.add(6, priority=1)
    assert steps.step() == {1: 6, 0: 2}
    assert steps.step() == {1: 1, 0: 7}


def test_without_the_policy_priorities_mean_nothing() -> None:
    steps = Steps(max_num_seqs=1)
    steps.add(4)
    steps.step()
    steps.add(4, priority=-9)
    assert steps.step().keys() == {0}


@pytest.mark.parametrize("policy", SchedulingPolicy)
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preempted_requests_do_not_starve(policy: SchedulingPolicy, enable_prefix_caching: bool) -> None:
    """Case 50 (vllm 41951): while new ones arrive without end, each is finished in the order of its arrival, nearly:
    none waits for longer than those before it take."""
    steps = Steps(num_blocks=8, scheduling_policy=policy, enable_prefix_caching=enable_prefix_caching)
    for number in range(150):
        if number % 3 == 0:
            steps.add(6, max_tokens=14, token=number % 5)
        steps.step()
    assert steps.scheduler.num_preemptions > 5
    ended = [request.sequence_id for request in steps.requests if request.status is RequestStatus.FINISHED]
    assert ended == list(range(len(ended)))
    assert len(ended) > 10


def test_a_preempted_request_does_not_come_back_to_be_preempted_again() -> None:
    """It waits until there is a block for each running request beside its own: who comes back makes progress."""
    steps = Steps(num_blocks=9)
    for _ in range(4):
        steps.add(7, max_tokens=20)
    generated: dict[int, int] = {}
    num_preemptions = 0
    while steps.scheduler.has_work:
        plan = steps.schedule()
        for request in steps.requests:
            if request.sequence_id in plan.removed and request.status is RequestStatus.WAITING:
                assert request.num_generated_tokens > generated.get(request.sequence_id, 0)
                generated[request.sequence_id] = request.num_generated_tokens
                num_preemptions += 1
        steps.update()
    assert num_preemptions > 2


def test_blocks_to_spare_save_preemptions() -> None:
    """Where a preempted request came back as soon as its own blocks were free, it would be 9, and 36 tokens more."""
    steps = Steps(num_blocks=17)
    for num_prompt_tokens in (5, 5, 5, 8, 5, 7, 6, 7):
        steps.add(num_prompt_tokens, max_tokens=20)
    num_tokens = 0
    while steps.scheduler.has_work:
        num_tokens += steps.schedule().num_tokens
        steps.update()
    assert (steps.scheduler.num_preemptions, num_tokens) == (6, 278)


# Limits for prompts


def test_a_long_prompt_takes_a_part_of_each_step_and_short_ones_the_rest() -> None:
    steps = Steps(max_num_batched_tokens=16, long_prefill_token_threshold=8)
    steps.add(30)
    steps.add(6)
    assert steps.step() == {0: 8, 1: 6}
    assert steps.step() == {0: 8, 1: 1}
    assert steps.step() == {0: 8, 1: 1}
    assert steps.step() == {0: 6, 1: 1}
    assert steps.step() == {0: 1, 1: 1}


def test_short_prompts_pass_long_ones_that_wait_for_a_long_one() -> None:
    """The second long one is next when the first is complete, whoever has come since."""
    steps = Steps(max_num_batched_tokens=16, long_prefill_token_threshold=8, max_num_partial_prefills=4)
    steps.add(10, max_tokens=4)
    second = steps.add(10, max_tokens=4)
    steps.add(3, max_tokens=1)
    assert steps.step() == {0: 8, 2: 3}
    steps.add(3, max_tokens=1)
    assert second.status is RequestStatus.WAITING
    assert steps.step() == {0: 2, 1: 8, 3: 3}


def test_as_many_long_prompts_as_allowed_are_computed_at_once() -> None:
    steps = Steps(
        max_num_batched_tokens=32,
        long_prefill_token_threshold=8,
        max_num_partial_prefills=3,
        max_long_partial_prefills=2,
    )
    for _ in range(3):
        steps.add(12)
    assert steps.step() == {0: 8, 1: 8}


def test_no_more_prompts_than_allowed_are_begun() -> None:
    """One that does not fit whole waits while another is in the middle; one that fits is no partial prefill."""
    steps = Steps(max_num_batched_tokens=12, long_prefill_token_threshold=8, max_long_partial_prefills=2)
    steps.add(12)
    steps.add(6)
    assert steps.step() == {0: 8}
    assert steps.step() == {0: 4, 1: 6}


# Rows of logits


def test_prompt_logprobs_take_no_more_rows_than_there_are() -> None:
    """One row stays for each request that may need one."""
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=0)
    steps = Steps(max_num_logit_rows=6, max_num_seqs=4)
    steps.add(2)
    steps.add(12, sampling=sampling)
    assert steps.step() == {0: 2, 1: 5}
    assert steps.step() == {0: 1, 1: 5}
    steps.add(2)
    assert steps.step() == {0: 1, 1: 2, 2: 2}


def test_with_no_row_to_spare_a_prompt_goes_on_token_by_token() -> None:
    steps = Steps(max_num_logit_rows=2, max_num_seqs=2)
    steps.add(2)
    steps.add(4, sampling=SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert steps.step() == {0: 2, 1: 1}
    assert steps.step() == {0: 1, 1: 1}


# Cached prefixes


def test_a_new_request_starts_behind_what_is_cached() -> None:
    """Also when it was computed in the same step, and never behind its last token."""
    steps = Steps(enable_prefix_caching=True)
    steps.add(12)
    steps.add(10)
    plan = steps.schedule()
    assert [(work.num_computed_tokens, work.num_tokens) for work in plan.scheduled] == [(0, 12), (8, 2)]
    started = steps.update().started
    assert [(request, request.num_cached_tokens) for request in started] == list(
        zip(steps.requests[:2], (0, 8), strict=True)
    )
    steps.add(8)
    plan = steps.schedule()
    assert (plan.scheduled[2].num_computed_tokens, plan.scheduled[2].num_tokens) == (4, 4)


def test_a_preempted_request_finds_its_own_beginning_and_is_counted_once() -> None:
    """What it finds then was not found in the cache by its prompt."""
    steps = Steps(num_blocks=4, enable_prefix_caching=True)
    first, second = steps.add(7, max_tokens=6, token=2), steps.add(7, max_tokens=6, token=3)
    steps.step_while(lambda: second.status is RequestStatus.WAITING and not second.num_generated_tokens)
    steps.step_while(lambda: second.status is RequestStatus.RUNNING)
    steps.step_while(lambda: first.status is RequestStatus.RUNNING)
    plan = steps.schedule()
    assert [new.sequence_id for new in plan.new] == [1]
    assert plan.scheduled[0].num_computed_tokens > 0
    assert not steps.update().started
    assert second.num_cached_tokens == 0


# Two steps in flight


def ahead(**options: Any) -> Steps:
    return Steps(async_scheduling=True, **options)


def test_a_step_is_planned_while_the_one_before_is_computed() -> None:
    """Behind the token that is on its way; and no third one."""
    steps = ahead()
    request = steps.add(5)
    steps.schedule()
    assert steps.scheduler.may_schedule
    plan = steps.schedule()
    assert [(work.num_computed_tokens, work.num_tokens) for work in plan.scheduled] == [(5, 1)]
    assert not steps.scheduler.may_schedule
    steps.update()
    assert request.num_generated_tokens == 1
    assert steps.scheduler.may_schedule


def test_without_asynchronous_scheduling_results_come_first() -> None:
    steps = Steps()
    steps.add(5)
    steps.schedule()
    assert not steps.scheduler.may_schedule


def test_the_last_token_of_an_answer_is_foreseen() -> None:
    """No step is computed for nothing when `max_tokens` ends it."""
    steps = ahead()
    steps.add(5, max_tokens=1)
    steps.schedule()
    assert steps.scheduler.schedule() is None
    assert [request.sequence_id for request in steps.update().finished] == [0]
    assert list(steps.schedule().removed) == [0]


def test_what_is_in_flight_for_an_aborted_request_is_dropped() -> None:
    """Its blocks may be others' in the next plan: plans are computed in order."""
    steps = ahead(num_blocks=2)
    request = steps.add(7, max_tokens=2)
    other = steps.add(7, max_tokens=2)
    steps.schedule()
    steps.abort(request)
    plan = steps.schedule()
    assert (list(plan.removed), [new.sequence_id for new in plan.new]) == ([0], [1])
    assert list(steps.update().tokens) == []
    assert list(steps.update().requests) == [other]


def test_what_is_in_flight_for_a_preempted_request_is_kept() -> None:
    """It may even be the end of it."""
    steps = ahead(num_blocks=4)
    steps.add(7, max_tokens=6)
    second = steps.add(7, max_tokens=3)
    steps.schedule()
    steps.schedule()
    steps.update()
    plan = steps.schedule()
    assert list(plan.removed) == [1]
    assert (second.status, second.num_generated_tokens) == (RequestStatus.WAITING, 1)
    steps.update()
    assert second.num_generated_tokens == 2
    steps.update()
    steps.step_while(lambda: steps.scheduler.has_work)
    assert second.num_generated_tokens == 3
