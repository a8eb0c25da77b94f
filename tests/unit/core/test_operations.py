"""Operations: each is seen through the core, by what requests and the executor then do."""

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import pytest

from trioengine.core.background import Job
from trioengine.errors import EngineGenerateError, RequestError, UnavailableError
from trioengine.testing.core_driver import CoreDriver, make_core_config, make_core_request
from trioengine.testing.fake_executor import generate_alone, new_weight
from trioengine.types.messages import (
    Call,
    CollectiveRPC,
    Finished,
    FinishWeightUpdate,
    GetKVCacheEvents,
    GetStats,
    InitWeightTransfer,
    IsPaused,
    IsSleeping,
    PauseGeneration,
    PauseMode,
    ResetPrefixCache,
    ResumeGeneration,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    WakeUp,
)
from trioengine.types.output import FinishReason

R = TypeVar("R")

CACHING = attrs.evolve(make_core_config(), enable_prefix_caching=True)
AHEAD = attrs.evolve(make_core_config(), async_scheduling=True)
PROMPT = (1, 2, 3, 4, 5)
ALONE = generate_alone(PROMPT, 6, vocab_size=1000)


def running(config: object = None, num_steps: int = 3) -> tuple[CoreDriver, list[int]]:
    """A core in the middle of a request's answer, and this answer's tokens."""
    driver = CoreDriver(config)  # type: ignore[arg-type]
    answer = driver.add(make_core_request(0, PROMPT, max_tokens=6))
    for _ in range(num_steps):
        driver.step()
    driver.take_all()
    return driver, answer.tokens


def test_a_reset_makes_the_next_identical_prompt_miss() -> None:
    """And it is refused while a request holds blocks."""
    driver = CoreDriver(CACHING)
    for num_cached_tokens in (0, 4):
        answer = driver.add(make_core_request(0, PROMPT, max_tokens=2))
        driver.step()
        assert not driver.call(ResetPrefixCache())
        driver.run()
        assert answer.num_cached_tokens == num_cached_tokens
    assert driver.call(ResetPrefixCache())
    again = driver.add(make_core_request(0, PROMPT, max_tokens=2))
    driver.run()
    assert again.num_cached_tokens == 0
    assert again.tokens == ALONE[:2]


def test_a_pause_with_abort_ends_everything_and_holds_what_comes() -> None:
    driver, _ = running()
    waiting = driver.add(make_core_request(1))
    assert not driver.call(IsPaused())
    assert driver.begin_call(PauseGeneration(PauseMode.ABORT)) is None  # The executor has to forget the request.
    driver.run()
    assert [reply.error for reply in driver.replies] == [None]
    assert waiting.finished == Finished(1, FinishReason.ABORT)
    assert driver.executor.sequence_ids == set()
    held = driver.add(make_core_request(0, PROMPT, max_tokens=6))
    assert driver.call(IsPaused())
    assert not driver.core.has_work
    driver.call(ResumeGeneration())
    assert not driver.call(IsPaused())
    driver.run()
    assert held.tokens == ALONE


@pytest.mark.parametrize("config", [None, AHEAD])
def test_a_pause_with_wait_lets_present_requests_end_and_then_replies(config: object) -> None:
    """Queued ones are present too; later ones wait, with any priority."""
    driver, tokens = running(config)
    for slot in range(1, 12):  # More than run at once.
        driver.add(make_core_request(slot, max_tokens=4))
    assert driver.begin_call(PauseGeneration(PauseMode.WAIT)) is None
    later = driver.add(make_core_request(20, PROMPT, max_tokens=6, priority=-1))
    num_steps = 0
    while driver.core.has_work:
        assert not driver.replies
        driver.step()
        driver.take_all()
        num_steps += 1
    assert num_steps > 6
    assert len(driver.replies) == 1
    assert tokens == ALONE
    assert not later.tokens
    driver.call(ResumeGeneration())
    driver.run()
    assert later.tokens == ALONE


def test_an_abort_may_end_what_a_pause_waits_for() -> None:
    driver, _ = running()
    assert driver.begin_call(PauseGeneration(PauseMode.WAIT)) is None
    driver.abort(0)
    driver.run()
    assert len(driver.replies) == 1


@pytest.mark.parametrize("config", [CACHING, AHEAD])
@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_pause_with_keep_goes_on_where_it_was(config: object, clear_cache: bool) -> None:
    """Without recomputing anything, unless what was computed is to be forgotten."""
    driver, tokens = running(config)
    driver.begin_call(PauseGeneration(PauseMode.KEEP, clear_cache=clear_cache))
    while driver.core.has_work:
        driver.step()
    driver.take_all()
    num_tokens = len(tokens)
    assert 0 < num_tokens < 6
    assert (driver.core.scheduler.num_running == 0) is clear_cache
    driver.call(ResumeGeneration())
    num_plans = len(driver.plans)
    driver.run()
    assert tokens == ALONE
    recomputed = [new for plan in driver.plans[num_plans:] for new in plan.new]
    assert len(recomputed) == clear_cache
    assert driver.plans[num_plans].num_tokens == (len(PROMPT) + num_tokens if clear_cache else 1)


@pytest.mark.parametrize("clear_cache", [False, True])
@pytest.mark.parametrize(("config", "mode"), [(None, PauseMode.WAIT), (AHEAD, PauseMode.WAIT), (AHEAD, PauseMode.KEEP)])
def test_a_pause_that_is_resumed_before_it_was_there_is_answered_at_once(
    config: object, mode: PauseMode, clear_cache: bool
) -> None:
    """And does nothing to those that run by then."""
    driver, tokens = running(config)
    assert driver.begin_call(PauseGeneration(mode, clear_cache)) is None
    num_preemptions = driver.call(GetStats()).num_preemptions
    driver.call(ResumeGeneration())
    driver.take_all()
    assert [reply.error for reply in driver.replies] == [None]
    driver.run()
    assert tokens == ALONE
    assert driver.call(GetStats()).num_preemptions == num_preemptions


@pytest.mark.parametrize("config", [CACHING, AHEAD])
@pytest.mark.parametrize("level", [1, 2])
def test_kept_requests_are_computed_again_after_sleep(config: object, level: int) -> None:
    """And those that come meanwhile wait. The executor sleeps when it knows nobody and nothing is in flight, which it
    checks itself."""
    driver, tokens = running(config)
    assert driver.begin_call(Sleep(level, PauseMode.KEEP)) is None
    driver.run()
    assert len(driver.replies) == 1
    assert driver.executor.sleep_levels == [level]
    assert driver.call(IsSleeping())
    assert driver.call(IsPaused())
    meanwhile = driver.add(make_core_request(1, PROMPT, max_tokens=6))
    assert not driver.core.has_work
    driver.call(WakeUp(("weights",)))
    assert driver.executor.asleep == {"kv_cache"}
    assert driver.call(IsSleeping())
    assert not driver.core.has_work
    driver.call(WakeUp())
    assert not driver.call(IsSleeping())
    driver.run()
    assert tokens == ALONE
    assert (meanwhile.tokens, meanwhile.num_cached_tokens) == (ALONE, 4 if config is CACHING else 0)


def test_sleep_may_wait_for_the_present_requests() -> None:
    driver, tokens = running()
    assert driver.begin_call(Sleep(1, PauseMode.WAIT)) is None
    later = driver.add(make_core_request(1))
    driver.run()
    assert tokens == ALONE
    assert driver.call(IsSleeping())
    latest = driver.add(make_core_request(2))
    driver.run()
    assert not later.tokens
    assert not latest.tokens
    driver.call(WakeUp())
    driver.run()
    assert later.tokens == latest.tokens == generate_alone((1, 2, 3), 4, vocab_size=1000)


def test_a_sleep_does_not_wait_for_what_a_pause_holds() -> None:
    """It would be for ever: what came during the first pause is held until both have ended."""
    driver, tokens = running()
    driver.begin_call(PauseGeneration(PauseMode.WAIT))
    driver.run()
    assert tokens == ALONE
    held = driver.add(make_core_request(1))
    driver.call(Sleep(1, PauseMode.WAIT))
    assert driver.call(IsSleeping())
    driver.call(WakeUp())
    driver.run()
    assert not held.tokens
    driver.call(ResumeGeneration())
    driver.run()
    assert held.tokens == generate_alone((1, 2, 3), 4, vocab_size=1000)


@pytest.mark.parametrize("is_sleep_first", [False, True])
def test_two_pauses_that_wait_end_in_any_order(is_sleep_first: bool) -> None:
    """What comes between the two goes on when both have ended."""
    driver, tokens = running()
    calls = [PauseGeneration(PauseMode.WAIT), Sleep(1, PauseMode.WAIT)]
    first, second = reversed(calls) if is_sleep_first else calls
    driver.begin_call(first)
    between = driver.add(make_core_request(1))
    driver.begin_call(second)
    driver.call(ResumeGeneration())
    driver.run()
    assert len(driver.replies) == 2
    assert tokens == ALONE
    assert driver.call(IsSleeping())
    assert not between.tokens
    driver.call(WakeUp())
    driver.run()
    assert between.tokens == generate_alone((1, 2, 3), 4, vocab_size=1000)


def test_a_sleep_does_not_wait_for_what_a_pause_keeps() -> None:
    """It goes on where it was when both have ended."""
    driver, tokens = running()
    driver.begin_call(PauseGeneration(PauseMode.KEEP))
    driver.run()
    driver.begin_call(Sleep(1, PauseMode.WAIT))
    driver.run()
    assert driver.call(IsSleeping())
    driver.call(WakeUp())
    driver.call(ResumeGeneration())
    driver.run()
    assert tokens == ALONE


def test_sleep_may_abort() -> None:
    driver, _ = running()
    driver.begin_call(Sleep())
    driver.run()
    assert driver.outputs[-1].finished == (Finished(0, FinishReason.ABORT),)
    assert driver.executor.sleep_levels == [1]


def test_waking_up_does_not_end_a_pause() -> None:
    driver = CoreDriver()
    driver.call(PauseGeneration())
    driver.call(Sleep())
    driver.call(Sleep(2))  # It sleeps already.
    assert driver.executor.sleep_levels == [1]
    held = driver.add(make_core_request(0, PROMPT))
    driver.call(WakeUp())
    assert driver.call(IsPaused())
    assert not driver.core.has_work
    driver.call(ResumeGeneration())
    driver.run()
    assert held.tokens == ALONE[:4]


def test_a_core_that_is_woken_up_before_it_sleeps_does_not_sleep() -> None:
    driver, tokens = running()
    assert driver.begin_call(Sleep(1, PauseMode.WAIT)) is None
    driver.call(WakeUp())
    driver.take_all()
    assert len(driver.replies) == 1
    driver.run()
    assert tokens == ALONE
    assert driver.executor.sleep_levels == []


def test_a_sleep_that_fails_is_a_reply_and_the_core_goes_on() -> None:
    driver = CoreDriver()
    driver.executor.sleep_error = EngineGenerateError("cannot sleep")
    with pytest.raises(EngineGenerateError, match="cannot sleep"):
        driver.call(Sleep())
    answer = driver.add(make_core_request(0, PROMPT))
    driver.run()
    assert answer.tokens == ALONE[:4]


def test_a_core_that_cannot_wake_up_sleeps_on() -> None:
    """Until it can."""
    driver = CoreDriver()
    driver.call(Sleep())
    driver.executor.wake_error = EngineGenerateError("no memory")
    with pytest.raises(EngineGenerateError, match="no memory"):
        driver.call(WakeUp())
    answer = driver.add(make_core_request(0, PROMPT))
    assert driver.call(IsSleeping())
    assert not driver.core.has_work
    driver.executor.wake_error = None
    driver.call(WakeUp())
    driver.run()
    assert answer.tokens == ALONE[:4]


def test_wrong_arguments_are_named() -> None:
    driver = CoreDriver()
    with pytest.raises(RequestError) as caught:
        driver.call(Sleep(3))
    assert caught.value.param == "level"
    with pytest.raises(RequestError) as caught:
        driver.call(WakeUp(("everything",)))
    assert caught.value.param == "tags"
    assert not driver.call(IsPaused())


def test_a_client_that_vanishes_gets_no_reply_and_what_it_asked_for_is_done() -> None:
    """Nor does the one that takes its number."""
    driver, tokens = running()
    assert driver.begin_call(Sleep(1, PauseMode.WAIT), client=3) is None
    driver.drop_client(3)
    driver.run()
    assert tokens == ALONE
    assert driver.executor.sleep_levels == [1]
    driver.call(WakeUp(), client=3)
    assert driver.core.take_replies(3) == ()


def test_statistics_count() -> None:
    driver = CoreDriver(attrs.evolve(CACHING, max_num_seqs=1), num_blocks=8)
    for slot in range(3):
        driver.add(make_core_request(slot, PROMPT, max_tokens=2))
    driver.step()
    stats = driver.call(GetStats())
    assert (stats.running, stats.waiting, stats.kv_cache_usage, stats.num_steps) == (1, 2, 0.25, 1)
    driver.run()
    stats = driver.call(GetStats())
    assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert (stats.num_prefix_cache_queries, stats.num_prefix_cache_hits) == (15, 8)
    assert (stats.num_preemptions, stats.num_drafts, stats.num_accepted_tokens_per_pos) == (0, 0, ())


def test_preemptions_are_counted() -> None:
    driver = CoreDriver(num_blocks=4)
    for slot in range(2):
        driver.add(make_core_request(slot, [1] * 7, max_tokens=6))
    driver.run()
    assert driver.call(GetStats()).num_preemptions == 1


def test_events_tell_what_can_be_found() -> None:
    driver = CoreDriver(attrs.evolve(CACHING, enable_kv_cache_events=True))
    driver.add(make_core_request(0, PROMPT, max_tokens=2))
    driver.run()
    events = driver.call(GetKVCacheEvents(after=0))
    assert events.last == len(events.events) == 1


# Operations on the worker's side


def test_new_weights_count_from_the_finish_on() -> None:
    """Cached prefixes are forgotten, a running request goes on with its keys and values, and output says so once."""
    driver = CoreDriver(CACHING)
    first = driver.add(make_core_request(0, PROMPT, max_tokens=2))
    driver.run()
    assert first.tokens == ALONE[:2]
    driver.call(InitWeightTransfer())
    driver.call(UpdateWeights((new_weight(3),)))
    driver.call(UpdateWeights((new_weight(7),)))
    unchanged = driver.add(make_core_request(0, PROMPT, max_tokens=2))
    driver.run()
    assert (unchanged.tokens, unchanged.num_cached_tokens) == (ALONE[:2], 4)
    running = driver.add(make_core_request(1, PROMPT, max_tokens=6))
    driver.step()
    driver.take_all()
    assert {output.weight_version for output in driver.outputs} == {None}
    assert driver.call(FinishWeightUpdate()) == "1"
    after = driver.add(make_core_request(0, PROMPT, max_tokens=2))
    driver.run()
    assert after.num_cached_tokens == 0
    assert after.tokens == generate_alone(PROMPT, 2, vocab_size=1000, weight=7)
    assert running.tokens[0] == ALONE[0]
    assert len(running.tokens) == 6
    assert [output.weight_version for output in driver.outputs].count("1") == 1
    again = driver.add(make_core_request(0, PROMPT, max_tokens=2))
    driver.run()
    assert again.num_cached_tokens == 4, "what has the new weights is cached again"


def test_a_preempted_request_is_computed_anew_with_the_new_weights() -> None:
    """So is one that waits since before the update: neither finds blocks of the old weights."""
    driver = CoreDriver(attrs.evolve(CACHING, max_num_seqs=1))
    answers = [driver.add(make_core_request(slot, PROMPT, max_tokens=4)) for slot in range(2)]
    driver.step()
    driver.take_all()
    driver.call(InitWeightTransfer())
    driver.call(UpdateWeights((new_weight(7),)))
    driver.call(FinishWeightUpdate())
    driver.core.scheduler.preempt_all()
    driver.run()
    assert answers[0].tokens[:1] == ALONE[:1]
    assert answers[1].tokens == generate_alone(PROMPT, 4, vocab_size=1000, weight=7)


def test_output_of_steps_in_flight_is_of_the_old_weights() -> None:
    """The reply to the finish waits for them, and the first output of new weights carries the version."""
    driver = CoreDriver(AHEAD)
    answer = driver.add(make_core_request(0, PROMPT, max_tokens=6))
    driver.step()
    driver.step()
    driver.take_all()
    driver.call(InitWeightTransfer())
    driver.call(UpdateWeights((new_weight(7),)))
    call = FinishWeightUpdate("release 2")
    assert driver.begin_call(call) is None
    num_outputs = len(driver.outputs)
    driver.run()
    (reply,) = driver.replies
    assert driver.value_of(call, reply) == "release 2"
    versions = [output.weight_version for output in driver.outputs[num_outputs:]]
    assert versions[:2] == [None, "release 2"]
    assert versions.count("release 2") == 1
    assert answer.tokens[:2] == ALONE[:2]
    assert answer.tokens[2] != ALONE[2]


def test_weights_by_file() -> None:
    driver = CoreDriver()
    driver.call(InitWeightTransfer("file"))
    driver.call(UpdateWeights(path="/a"))
    driver.call(FinishWeightUpdate())
    answer = driver.add(make_core_request(0, PROMPT, max_tokens=2))
    driver.run()
    assert answer.tokens == generate_alone(PROMPT, 2, vocab_size=1000, weight=2)


def test_calls_of_a_transfer_have_an_order() -> None:
    """What is out of place is refused, and what came before it still counts; a new beginning forgets it."""
    driver, tensor = CoreDriver(), new_weight(7)

    def refusal(call: Call[object]) -> str:
        with pytest.raises(RequestError) as caught:
            driver.call(call)
        return caught.value.message

    assert "init_weight_transfer" in refusal(UpdateWeights((tensor,)))
    assert "init_weight_transfer" in refusal(FinishWeightUpdate())
    assert "method" in refusal(InitWeightTransfer("nccl"))
    driver.call(InitWeightTransfer())
    assert "No weights" in refusal(FinishWeightUpdate())
    for wrong in (UpdateWeights(), UpdateWeights(path="/a"), UpdateWeights((tensor,), "/a")):
        assert "by message" in refusal(wrong)
    assert "wrong" in refusal(UpdateWeights((attrs.evolve(tensor, name="wrong"),)))
    assert "No weights" in refusal(FinishWeightUpdate())
    driver.call(UpdateWeights((tensor,)))
    for version in ("", "x" * 201):
        assert "weight_version" in refusal(FinishWeightUpdate(version))
    driver.call(InitWeightTransfer("file"))
    assert "No weights" in refusal(FinishWeightUpdate())
    for wrong in (UpdateWeights(), UpdateWeights((tensor,)), UpdateWeights((tensor,), "/a")):
        assert "by file" in refusal(wrong)
    driver.call(UpdateWeights(path="/a"))
    assert driver.call(FinishWeightUpdate()) == "1"
    assert "No weights" in refusal(FinishWeightUpdate())
    driver.call(UpdateWeights(path="/b"))
    assert driver.call(FinishWeightUpdate()) == "2"


def test_an_update_that_cannot_be_finished_may_be_finished_later() -> None:
    """Without memory, and while the weights sleep."""
    driver = CoreDriver()
    driver.call(InitWeightTransfer())
    driver.call(UpdateWeights((new_weight(7),)))
    driver.executor.prepare_error = UnavailableError("There is no memory.")
    with pytest.raises(UnavailableError, match="no memory"):
        driver.call(FinishWeightUpdate())
    driver.executor.prepare_error = None
    driver.call(Sleep(2))
    with pytest.raises(UnavailableError, match="asleep"):
        driver.call(FinishWeightUpdate())
    driver.call(WakeUp(("weights",)))
    assert driver.call(FinishWeightUpdate()) == "1"
    driver.call(WakeUp())
    answer = driver.add(make_core_request(0, PROMPT, max_tokens=2))
    driver.run()
    assert answer.tokens == generate_alone(PROMPT, 2, vocab_size=1000, weight=7)


class Worker:
    """Does the core's slow work when a test says so."""

    def __init__(self, driver: CoreDriver) -> None:
        self._jobs: list[Job[Any]] = []
        driver.core.background.start = self.start  # type: ignore[method-assign]

    def start(self, work: Callable[[], R]) -> Job[R]:
        self._jobs.append(job := Job(work))
        return job

    def work(self) -> None:
        self._jobs.pop(0).run()


def test_steps_go_on_while_a_model_is_made() -> None:
    """Nothing changes until it is there; no other call of the transfer comes between, and a sleep makes it fail."""
    driver, answered = running()
    worker, call = Worker(driver), FinishWeightUpdate()
    driver.call(InitWeightTransfer())
    update = UpdateWeights((new_weight(7),))
    assert driver.begin_call(update) is None
    for early in (update, call, InitWeightTransfer()):
        with pytest.raises(RequestError, match="not answered"):
            driver.call(early)
    worker.work()
    driver.step()
    driver.take_all()
    assert driver.value_of(update, driver.replies.pop()) is None
    assert driver.begin_call(call) is None
    driver.run()
    assert answered == ALONE
    assert driver.replies == []
    driver.call(Sleep(2))
    worker.work()
    driver.core.poll()
    driver.take_all()
    with pytest.raises(UnavailableError, match="asleep"):
        driver.value_of(call, driver.replies.pop())
    driver.call(WakeUp())
    assert driver.begin_call(call) is None
    worker.work()
    driver.core.poll()
    driver.take_all()
    assert driver.value_of(call, driver.replies.pop()) == "1"


def test_profiles_have_names_that_stay_in_their_folder() -> None:
    driver = CoreDriver()
    with pytest.raises(RequestError):
        driver.call(StopProfile())
    for prefix in ("", "../x", "a/b", ".hidden", "a\0", "a b", "x" * 101, "ä"):
        with pytest.raises(RequestError) as caught:
            driver.call(StartProfile(prefix))
        assert caught.value.param == "prefix"
    driver.call(StartProfile("a-b_c.1"))
    with pytest.raises(RequestError):
        driver.call(StartProfile())
    assert driver.call(StopProfile()) == "a-b_c.1.json"
    driver.call(StartProfile())


def test_collective_rpc_reaches_the_workers() -> None:
    driver = CoreDriver()
    assert driver.call(CollectiveRPC("echo", '{"a": 1}')) == ('{"a": 1}',)
    with pytest.raises(RequestError, match="nonsense"):
        driver.call(CollectiveRPC("nonsense"))
