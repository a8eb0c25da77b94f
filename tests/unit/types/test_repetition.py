"""Whether tokens end in a repetition."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from trioengine.types.repetition import RepetitionDetectionParams


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.integers(0, 4),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(2, 4),
)
def test_a_repetition_is_found_where_there_is_one(
    tokens: list[int], num_prompt_tokens: int, smallest: int, more: int, count: int
) -> None:
    """The same as when every pattern is written out as often as it must stand there."""
    start = min(num_prompt_tokens, len(tokens) - 1)
    params = RepetitionDetectionParams(smallest + more, smallest, count)
    answer = tokens[start:]
    expected = any(
        answer[-size * count :] == answer[-size:] * count for size in range(max(smallest, 1), smallest + more + 1)
    )
    assert params.ends(array("i", tokens), start) is expected


def test_nothing_is_looked_for_where_no_pattern_may_be() -> None:
    assert not RepetitionDetectionParams().ends(array("i", [1] * 100), 0)
