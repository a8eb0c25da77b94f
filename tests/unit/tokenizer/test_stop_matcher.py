import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.tokenizer.stop_matcher import StopMatcher


def run(stops: list[str], deltas: list[str], *, include: bool = False) -> tuple[list[str], int | None]:
    """What is shown after each delta (and at the end), and the stop that matched."""
    matcher = StopMatcher(stops, include_stop_str_in_output=include)
    shown: list[str] = []
    for delta in deltas:
        result = matcher.feed(delta)
        shown.append(result.emit)
        if result.matched is not None:
            return shown, result.matched
    return [*shown, matcher.flush()], None


def cut_whole(stops: list[str], text: str, include: bool) -> tuple[str, int | None]:
    """The promise, spelled out: try every end in turn, and every stop at each."""
    for end in range(1, len(text) + 1):
        for index, stop in enumerate(stops):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], index
    return text, None


def test_a_stop_over_three_tokens_shows_nothing() -> None:
    """Case 22 (vllm 3574)."""
    assert run(["DEFGHIJ"], ["DEF", "G", "HI", "J"]) == (["", "", "", ""], 0)


def test_what_turns_out_to_be_no_stop_is_shown_at_once() -> None:
    """Case 22: the token that rules the stop out brings all that was held."""
    assert run(["DEFGHIJ"], ["DEF", "G", "X"]) == (["", "", "DEFGX", ""], None)


def test_a_long_stop_that_does_not_match_delays_nothing() -> None:
    """Case 23 (vllm 13087): no delta waits past the token that rules the stop out."""
    deltas = ["some ", "text ", "aa", "ab", "aac", "no"]
    assert run(["a" * 30], deltas) == (["some ", "text ", "", "aaab", "aac", "no", ""], None)


def test_only_the_suffix_that_can_still_become_a_stop_is_held() -> None:
    assert run(["abcabd"], ["xabcab", "c", "abd!"]) == (["x", "abc", ""], 0)


def test_a_stop_may_start_inside_one_delta_and_end_inside_another() -> None:
    assert run(["STOP"], ["beforeST", "OPafter"]) == (["before", ""], 0)


def test_text_is_cut_at_the_end_of_the_stop_when_it_is_included() -> None:
    """Nothing needs to be held then: what is shown early is shown in any case."""
    assert run(["STOP"], ["beforeST", "OPafter"], include=True) == (["beforeST", "OP"], 0)


def test_the_stop_that_ends_first_wins() -> None:
    assert run(["bcde", "c"], ["abcdef"]) == (["ab"], 1)


@pytest.mark.parametrize(("stops", "shown"), [(["bc", "abc"], "xa"), (["abc", "bc"], "x")])
def test_of_stops_that_end_together_the_first_in_the_list_wins(stops: list[str], shown: str) -> None:
    assert run(stops, ["xabc"]) == ([shown], 0)


def test_a_repeated_stop_string_counts_as_its_first() -> None:
    assert run(["a", "a"], ["xa"]) == (["x"], 0)


def test_after_a_match_everything_is_ignored() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.feed("ax").matched == 0
    assert matcher.feed("more x") == ("", None)
    assert matcher.flush() == ""


def test_without_stops_text_passes() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    deltas=st.lists(st.text("abc", max_size=4), max_size=12),
    include=st.booleans(),
)
def test_joined_pieces_equal_the_whole_text_cut(stops: list[str], deltas: list[str], include: bool) -> None:
    shown, matched = run(stops, deltas, include=include)
    assert ("".join(shown), matched) == cut_whole(stops, "".join(deltas), include)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    deltas=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_what_is_held_is_the_longest_suffix_that_starts_a_stop(stops: list[str], deltas: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for delta in deltas:
        text += delta
        result = matcher.feed(delta)
        shown += result.emit
        if result.matched is not None:
            return
        held = max(
            n for n in range(len(text) + 1) if n == 0 or any(s.startswith(text[-n:]) and n < len(s) for s in stops)
        )
        assert len(text) - len(shown) == held
