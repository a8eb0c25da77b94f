"""Words that tell the time: how long they say that a token was on its way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.cli.bench.word_clock import CLOCK_TICK_S, NUM_CLOCK_WORDS, WordClock, delay_s, words_of
from trioengine.errors import BenchError
from trioengine.testing.scripted_core import Script, ScriptedCore
from trioengine.types.messages import EngineCoreRequest, pack_int32, unpack_int32
from trioengine.types.params import SamplingParams


@given(made_s=st.floats(0, 1e6), delayed_s=st.floats(0, 1.9))
def test_the_delay_is_right_to_half_a_tick(made_s: float, delayed_s: float) -> None:
    tick = int(made_s / CLOCK_TICK_S) % NUM_CLOCK_WORDS
    assert delay_s(tick, made_s + delayed_s) == pytest.approx(delayed_s, abs=CLOCK_TICK_S / 2 + 1e-6)


def test_only_plain_words_tell_the_time_each_once() -> None:
    letters = [f" {a}{b}{c}{d}" for a in "abcdefghij" for b in "abcdefghij" for c in "abcdefghij" for d in "abcdefghij"]
    clock = WordClock.of([None, "the", " a1", " x", letters[0], *letters, " \u00fcber"])
    assert len(clock.texts) == len(set(clock.texts)) == NUM_CLOCK_WORDS
    assert clock.texts[:2] == (" aaaa", " aaab")
    assert clock.token_ids[:2] == (4, 6)
    assert words_of("".join(clock.texts[:3])) == list(clock.texts[:3])


def test_a_vocabulary_without_words_is_refused() -> None:
    with pytest.raises(BenchError):
        WordClock.of([" word", None])


def test_the_scripted_core_makes_the_word_of_the_moment_at_which_a_step_ends() -> None:
    options = {"clock_tokens": "10,11,12,13", "clock_tick_s": "0.5"}
    times_s = [100.0, 100.4, 100.5, 101.9, 102.0]
    core = ScriptedCore(Script.from_options(options), clock=lambda: times_s[0])
    for slot in (0, 1):
        core.handle(0, EngineCoreRequest(slot, "x", pack_int32([1]), SamplingParams(max_tokens=9), 0))
    tokens: list[list[int]] = []
    while times_s:
        core.step()
        times_s.pop(0)
        output = core.take_output(0)
        assert output is not None
        tokens.append(list(unpack_int32(output.tokens)))
    assert tokens == [[10, 10], [10, 10], [11, 11], [13, 13], [10, 10]]
