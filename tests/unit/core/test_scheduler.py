"""First come, first served, within a token budget and the blocks there are."""

from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from trioengine.core.executor import NO_TOKEN, KVCacheGroup, SequenceFailure, StepPlan, StepResult
from trioengine.core.kv_cache_manager import KVCacheManager
from trioengine.core.request import Request, RequestStatus, make_request
from trioengine.core.scheduler import Scheduler
from trioengine.core.step import StepOutcome
from trioengine.errors import RequestError
from trioengine.testing.core_driver import make_core_config, make_core_request
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
        self.scheduler = Scheduler(self.config, self.kv_cache)
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
    """Case 50: a plan that removes a sequence does not schedule it, nor make it new."""
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
    steps.scheduler.abort(waiting)
    plan = steps.schedule()
    assert [work.sequence_id for work in plan.scheduled] == [running.sequence_id]
    assert not plan.removed
    assert steps.scheduler.num_waiting == 0


def test_the_executor_is_told_of_an_abort_when_nothing_else_is_to_do() -> None:
    """An abort's blocks are free at once, and one more plan, that only removes, follows."""
    steps = Steps()
    request = steps.add(4)
    steps.step()
    steps.scheduler.abort(request)
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
