"""Operations: each is seen through the core, by what requests and the executor then do."""

import attrs
import pytest

from trioengine.errors import EngineGenerateError, RequestError
from trioengine.testing.core_driver import CoreDriver, make_core_config, make_core_request
from trioengine.testing.fake_executor import generate_alone
from trioengine.types.messages import (
    Finished,
    GetKVCacheEvents,
    GetStats,
    IsPaused,
    IsSleeping,
    PauseGeneration,
    PauseMode,
    ResetPrefixCache,
    ResumeGeneration,
    Sleep,
    WakeUp,
)
from trioengine.types.output import FinishReason

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
