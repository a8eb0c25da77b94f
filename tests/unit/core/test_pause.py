"""Pauses and sleep: which requests wait, and when nothing is computed."""

import pytest

from trioengine.core.pause import Pause
from trioengine.errors import RequestError
from trioengine.types.messages import PauseMode


@pytest.mark.parametrize("is_sleep", [False, True])
@pytest.mark.parametrize("mode", PauseMode)
def test_only_waiting_pauses_compute(mode: PauseMode, is_sleep: bool) -> None:
    """What was there goes on, and what comes is held."""
    pause = Pause()
    assert [pause.is_on, pause.is_frozen, pause.holds(0)] == [False, False, False]
    pause.begin(mode, 5, is_sleep=is_sleep)
    assert pause.is_on
    assert pause.is_frozen is (mode is not PauseMode.WAIT)
    assert [pause.holds(arrival) for arrival in (4, 5)] == [False, mode is PauseMode.WAIT]


def test_a_second_pause_does_not_let_in_what_the_first_one_holds() -> None:
    pause = Pause()
    pause.begin(PauseMode.WAIT, 5, is_sleep=False)
    pause.begin(PauseMode.WAIT, 9, is_sleep=True)
    assert [pause.holds(arrival) for arrival in (4, 5, 9)] == [False, True, True]
    pause.mode = None
    assert pause.holds(5)


def test_a_second_pause_that_computes_nothing_lets_nothing_in_either() -> None:
    """Or it would be computed when the second one ends, though the first one is still on."""
    pause = Pause()
    pause.begin(PauseMode.WAIT, 5, is_sleep=False)
    pause.begin(PauseMode.KEEP, 9, is_sleep=True)
    assert [pause.holds(arrival) for arrival in (4, 5, 9)] == [False, True, True]


def test_what_sleeps_can_be_woken_up() -> None:
    """All of it where nothing is named; what is awake already is not woken up again."""
    pause = Pause(sleep_mode=PauseMode.KEEP, asleep=frozenset({"kv_cache"}))
    assert pause.is_frozen
    assert pause.wake_up(()) == {"kv_cache"}
    assert pause.wake_up(("weights",)) == set()
    with pytest.raises(RequestError) as caught:
        pause.wake_up(("weights", "mind"))
    assert caught.value.param == "tags"
