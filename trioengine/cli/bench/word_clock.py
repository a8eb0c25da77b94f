"""Words that tell the time, so that a stream's reader knows how long each token was on its way.

A scripted core makes, in each step, the token of the moment at which the step ends: word `n` of a list of words, where
`n` counts ticks of the clock that all processes of a machine share, round and round. Pure.
"""

import re
from collections.abc import Sequence

import attrs

from trioengine.errors import BenchError

CLOCK_TICK_S = 0.00025
NUM_CLOCK_WORDS = 8192
"""Two seconds of ticks; a longer delay would look short."""
_WORD = re.compile(r" [A-Za-z]{2,}")


@attrs.frozen
class WordClock:
    """The words, each of which is one token and keeps its text beside others."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]

    @classmethod
    def of(cls, token_texts: Sequence[str | None]) -> "WordClock":
        """From the texts of a vocabulary, by token id.

        Raises:
            BenchError: it has too few plain words.
        """
        words: dict[str, int] = {}
        for token_id, text in enumerate(token_texts):
            if text is not None and _WORD.fullmatch(text):
                words.setdefault(text, token_id)
        if len(words) < NUM_CLOCK_WORDS:
            raise BenchError(f"The vocabulary has {len(words)} plain words; {NUM_CLOCK_WORDS} are needed.")
        chosen = list(words.items())[:NUM_CLOCK_WORDS]
        return cls(tuple(token_id for _, token_id in chosen), tuple(text for text, _ in chosen))


def words_of(text: str) -> list[str]:
    """The words of a piece of a stream."""
    return [f" {word}" for word in text.split()]


def delay_s(tick: int, read_s: float) -> float:
    """How long a token was on its way that names this tick and was read at `read_s`: right to half a tick.

    A tick stands for its middle, so the error is none on average; the delay of a token read at once may be negative.
    """
    period_s = NUM_CLOCK_WORDS * CLOCK_TICK_S
    return (read_s - (tick - 0.5) * CLOCK_TICK_S) % period_s - CLOCK_TICK_S
