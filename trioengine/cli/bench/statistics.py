"""Numbers out of measurements. Pure."""

import itertools
import math
from collections.abc import Iterable, Sequence


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least `percent` of all values do not exceed; None of no values."""
    if not values:
        return None
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(0, rank - 1)]


def percentile_ms(values_s: Sequence[float], percent: float) -> float | None:
    """A percentile of seconds, in milliseconds."""
    value_s = percentile(values_s, percent)
    return None if value_s is None else value_s * 1000


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """How much time at least one of the intervals (start, end) covers."""
    covered, end_so_far = 0.0, -math.inf
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, end_so_far))
        end_so_far = max(end_so_far, end)
    return covered


def gaps(times_s: Sequence[float]) -> list[float]:
    """The time from each to the next."""
    return [later - earlier for earlier, later in itertools.pairwise(times_s)]
