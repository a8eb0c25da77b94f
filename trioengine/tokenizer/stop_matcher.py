"""Finds stop strings in text that arrives in pieces, holding back no more of it than must be.

The machine is that of Aho and Corasick (1975): after each character its state is the longest suffix of the text that
is a proper prefix of some stop string, which is exactly what may not be shown yet. This module does not know tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """What one piece of text led to."""

    emit: str
    """Text that may be shown now."""
    matched: int | None
    """Index of the stop string that this piece completed. The text ends with `emit` then."""


class StopMatcher:
    """Cuts a text at the first stop string that is completed in it.

    The stop that ends first wins; of those that end at the same character, the one listed first. The text is cut where
    the stop starts, or where it ends with `include_stop_str_in_output`, in which case nothing is ever held back.
    """

    __slots__ = ("_automaton", "_held", "_includes_stop", "_is_over", "_state")

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """Prepare for one text.

        Raises:
            ValueError: a stop string is empty.
        """
        self._automaton = _Automaton(stops)
        self._includes_stop = include_stop_str_in_output
        self._held = ""
        self._state = 0
        self._is_over = False

    def another(self) -> "StopMatcher":
        """A matcher of the same stop strings, for another text. Takes neither time nor memory for them."""
        other = StopMatcher((), self._includes_stop)
        other._automaton = self._automaton
        return other

    def feed(self, delta: str) -> StopResult:
        """Take the next piece of text. After a match, everything is ignored."""
        automaton = self._automaton
        if self._state == 0 and automaton.first_characters.isdisjoint(delta) and not self._is_over:
            return StopResult(delta, None)
        if self._is_over:
            return StopResult("", None)
        return self._advance(delta)

    def flush(self) -> str:
        """Return the text held back, when no more follows."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _advance(self, delta: str) -> StopResult:
        automaton = self._automaton
        state = self._state
        text = self._held + delta
        for position, character in enumerate(delta, len(self._held) + 1):
            state = automaton.step(state, character)
            stop = automaton.completed[state]
            if stop is not None:
                self._is_over = True
                self._held, self._state = "", 0
                cut = position - (0 if self._includes_stop else len(automaton.stops[stop]))
                return StopResult(text[:cut], stop)
        self._state = state
        # What is held is the suffix that the state stands for: _held's length always equals the state's depth.
        cut = len(text) - (0 if self._includes_stop else automaton.depths[state])
        self._held = text[cut:]
        return StopResult(text[:cut], None)


class _Automaton:
    """The states are the prefixes of the stops; 0 is the empty one."""

    __slots__ = ("completed", "depths", "fallbacks", "first_characters", "stops", "successors")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.successors: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.completed: list[int | None] = [None]
        """Per state: the first in the list of the stops that end here."""
        for index, stop in enumerate(self.stops):
            if not stop:
                raise ValueError("a stop string must not be empty")
            self._add(index, stop)
        self.fallbacks = [0] * len(self.depths)
        self._link()
        self.first_characters = frozenset(self.successors[0])

    def step(self, state: int, character: str) -> int:
        successors = self.successors
        while (following := successors[state].get(character)) is None:
            if state == 0:
                return 0
            state = self.fallbacks[state]
        return following

    def _add(self, index: int, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.successors[state].get(character)
            if following is None:
                following = len(self.depths)
                self.successors[state][character] = following
                self.successors.append({})
                self.depths.append(self.depths[state] + 1)
                self.completed.append(None)
            state = following
        if self.completed[state] is None:
            self.completed[state] = index

    def _link(self) -> None:
        # Breadth first: a state's fallback is shorter than the state, so it is ready when the state's turn comes.
        queue = list(self.successors[0].values())
        for state in queue:
            fallback = self.fallbacks[state]
            shorter, own = self.completed[fallback], self.completed[state]
            if shorter is not None and (own is None or shorter < own):
                self.completed[state] = shorter
            for character, following in self.successors[state].items():
                self.fallbacks[following] = self.step(fallback, character)
                queue.append(following)
