"""`RepetitionDetectionParams`: when an answer that repeats itself has ended."""

from array import array

import attrs

from trioengine.errors import RequestError

PARAM = "repetition_detection"
MAX_PATTERN_SIZE = 1024
MAX_COUNT = 2**31 - 1


@attrs.frozen
class RepetitionDetectionParams:
    """An answer ends when its last tokens are one pattern, again and again. Names and defaults are vLLM's."""

    max_pattern_size: int = 0
    """The longest pattern that is looked for, in tokens; 0 looks for none."""
    min_pattern_size: int = 0
    """The shortest one; 0 is 1."""
    min_count: int = 0
    """How often it must stand there, one behind the other: at least 2."""

    def validate(self) -> None:
        """Check every rule.

        Raises:
            RequestError: naming the first field at fault.
        """
        for name, limit in (
            ("max_pattern_size", MAX_PATTERN_SIZE),
            ("min_pattern_size", MAX_PATTERN_SIZE),
            ("min_count", MAX_COUNT),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= limit:
                _refuse(name, f"must be an integer from 0 to {limit}")
        if self.min_pattern_size > self.max_pattern_size:
            _refuse("min_pattern_size", f"must not be more than max_pattern_size, which is {self.max_pattern_size}")
        if self.max_pattern_size > 0 and self.min_count < 2:
            _refuse("min_count", "must be at least 2: a pattern that stands there once repeats nothing")

    def ends(self, token_ids: "array[int]", start: int) -> bool:
        """Whether the tokens from `start` on end in a pattern that stands there often enough.

        Only distances at which the last token has stood before are looked at, which `array` finds quickly.
        """
        last = len(token_ids) - 1
        largest = min(self.max_pattern_size, (last + 1 - start) // self.min_count) if self.max_pattern_size else 0
        smallest = max(self.min_pattern_size, 1)
        place = last - largest
        while place <= last - smallest:
            try:
                place = token_ids.index(token_ids[last], place, last - smallest + 1)
            except ValueError:
                return False
            size = last - place
            # Twice first: it is what fails, and costs little.
            if _repeats(token_ids, size, 2) and _repeats(token_ids, size, self.min_count):
                return True
            place += 1
        return False


def _repeats(token_ids: "array[int]", size: int, count: int) -> bool:
    """Whether the last `size` tokens stand there `count` times."""
    end = len(token_ids)
    first = end - size * count
    return token_ids[first : end - size] == token_ids[first + size :]


def _refuse(name: str, problem: str) -> None:
    raise RequestError(f"{PARAM}.{name} {problem}.", param=f"{PARAM}.{name}")
