"""`Speculator`: which drafts each sequence verifies in a step, and when none are worth it.

Verifying a draft costs a row of the step; an accepted one saves a step. The executor accepts a draft exactly when it is
the token that it samples in that place anyway, and what it samples is a function of the logits there, the seed and the
position. So drafts never change a token, and a draft model that draws with the same seed and position agrees with its
target as often as two samplers can that do not talk to each other (Daliri, Musco and Suresh 2024, "Coupling without
communication and drafter-invariant speculative decoding").

A number of drafts is worth it when the tokens that are expected of the step, over the seconds that it will take, become
more. Seconds come from measured steps (`StepCost`), what is expected from the drafts that the request had accepted
before. So one request alone gets drafts when it repeats itself at all, and a full batch gets none where rows cost as
much as they can give. Both estimates are checked from time to time, so that neither is wrong for good.

Nothing here reads a clock, schedules or computes.
"""

import bisect
from array import array
from collections import deque
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.config.engine import SpeculationConfig, SpeculationMethod

PROBE_INTERVAL_STEPS = 64
"""In one of so many steps, one request tries what does not seem to be worth it."""
ACCEPTANCE_MEMORY_DRAFTS = 12
"""A request's acceptance is its average over about so many of its last drafts."""
COMMON_MEMORY_DRAFTS = 256
"""The same over all requests: what is expected of one that has had no drafts yet."""
INITIAL_ACCEPTANCE = 0.7
SECONDS_WEIGHT = 0.1
"""Of the newest step in the running average of its kind."""
MIN_GAIN = 1.05
"""Times vary by more than a few percent, and the best of several numbers of drafts is the one that had luck: what seems
to gain less is left out."""
MAX_EXACT_TOKENS = 64
"""Steps up to this size are told apart by each token: kernels work on several rows at once, so that one more may cost
nothing or much. Above, sizes within an eighth are one kind."""


def look_up(token_ids: "array[int]", min_length: int, max_length: int, num_drafts: int) -> "array[int]":
    """What followed the last tokens when they stood in the sequence before: prompt lookup (Saxena 2023).

    The longest suffix of `min_length` to `max_length` tokens that is found counts, and its most recent place. Where the
    place is so near that the sequence ends first, it goes on repeating itself.

    Takes 10 to 20 µs for 8,000 tokens.

    Args:
        token_ids: at least one.
        min_length: at least 1.
        max_length: at least `min_length`.
        num_drafts: at least 1.

    Returns:
        `num_drafts` tokens, or none where nothing is found.
    """
    tokens = np.frombuffer(token_ids, np.int32)
    found: NDArray[np.intp] | None = None
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    for length in range(1, max_length + 1):
        if not len(ends):
            break
        if length >= min_length:
            found = ends
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[-1 - length]]
    if found is None:
        return array("i")
    first = int(found[-1]) + 1
    followed = token_ids[first : first + num_drafts]
    return (followed * -(-num_drafts // len(followed)))[:num_drafts]


class StepCost:
    """What a step of some number of tokens takes, by the steps that were measured."""

    def __init__(self) -> None:
        self._kinds: list[int] = []
        """Sorted."""
        self._seconds: dict[int, float] = {}
        self._measured: dict[int, int] = {}
        self._num_measured = 0

    def measure(self, num_tokens: int, seconds: float) -> None:
        """Take in a step."""
        kind = _kind(num_tokens)
        known = self._seconds.get(kind)
        if known is None:
            bisect.insort(self._kinds, kind)
            known = seconds
        # A step during which the machine did something else should not count as a step of its kind.
        self._seconds[kind] = _average(known, seconds)
        self._num_measured += 1
        self._measured[kind] = self._num_measured

    def seconds(self, num_tokens: int) -> float | None:
        """Expected for a step, between its neighbours where there was none like it.

        Fewer tokens than any step had are None. More are taken to cost nothing more, so that they are tried.
        """
        kind = _kind(num_tokens)
        known = self._seconds.get(kind)
        if known is not None:
            return known
        index = bisect.bisect(self._kinds, kind)
        if index == 0:
            return None
        below = self._kinds[index - 1]
        if index == len(self._kinds):
            return self._seconds[below]
        above = self._kinds[index]
        share = (kind - below) / (above - below)
        return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])

    def age(self, num_tokens: int) -> int:
        """Measurements since the last one of such a step; more than all there were when there was none."""
        return self._num_measured - self._measured.get(_kind(num_tokens), -1)


def _average(known: float, newest: float) -> float:
    """A running average that no single outlier moves far."""
    return known + SECONDS_WEIGHT * (min(newest, 2 * known) - known)


def _kind(num_tokens: int) -> int:
    """The size that stands for this one."""
    if num_tokens <= MAX_EXACT_TOKENS:
        return num_tokens
    grain = 1 << (num_tokens.bit_length() - 4)
    return num_tokens // grain * grain


@attrs.define
class SpeculationStatistics:
    """Counts since the start. Names are those of vLLM's metrics."""

    num_drafts: int
    """Times that a sequence had drafts in a step."""
    num_draft_tokens: int
    """Draft tokens that were verified."""
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    """Of the accepted ones, how many were first, second, …"""


@attrs.define(eq=False)
class Acceptance:
    """How often drafts are accepted, lately."""

    memory_drafts: float
    num_tried: float = 0.0
    """Both numbers fade with each new draft."""
    num_accepted: float = 0.0

    def observe(self, is_accepted: bool) -> None:
        """Take in a draft whose predecessors were accepted."""
        kept = 1 - 1 / self.memory_drafts
        self.num_tried = kept * self.num_tried + 1
        self.num_accepted = kept * self.num_accepted + is_accepted

    def probability(self, expected: float) -> float:
        """That the next draft is accepted. What is expected without evidence weighs as much as one draft."""
        return (self.num_accepted + expected) / (self.num_tried + 1)


@attrs.define(eq=False)
class RequestSpeculation:
    """What is known about one request."""

    acceptance: Acceptance = attrs.field(factory=lambda: Acceptance(ACCEPTANCE_MEMORY_DRAFTS))
    expected_token: int = -1
    """A draft that was not worth verifying: whether it was right is known when its place has a token."""
    expected_at: int = -1
    """That place."""
    offered: Sequence[int] = ()
    """The draft model's drafts."""
    offered_at: int = -1
    """The place of the first."""


@attrs.define(eq=False)
class _Step:
    """A step that was begun and has not been observed."""

    num_tokens: int
    """So far."""
    num_sampled: int
    expected_tokens: float
    """That sequences get from it."""
    num_rounds: int = 0
    """Of the draft model."""


class Speculator:
    """Proposes drafts. One for a core.

    For each step: `begin_step`; for each sequence that samples `propose`, unless `begin_step` said no, and then
    `num_drafts_wanted`; `end_planning`, where there were any; when it is done `observe` and `offer`, then
    `observe_step`. Steps may overlap, and are observed in their order.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self.statistics = SpeculationStatistics(0, 0, 0, [0] * config.num_speculative_tokens)
        self.drafts_with_model = config.method is SpeculationMethod.DRAFT_MODEL
        self._config = config
        self._step_cost = StepCost()
        self._round_seconds: float | None = None
        self._common = Acceptance(COMMON_MEMORY_DRAFTS)
        self._steps: deque[_Step] = deque()
        self._steps_to_probe = PROBE_INTERVAL_STEPS
        self._has_offers = False

    def new_request(self) -> RequestSpeculation:
        """The state of a request that has just arrived. Preemption does not change it."""
        return RequestSpeculation()

    def begin_step(self, num_tokens: int, num_sampled: int) -> bool:
        """Begin a step.

        Args:
            num_tokens: that it computes without drafts.
            num_sampled: sequences that get a token.

        Returns:
            Whether to call `propose`: False where drafts could not be worth it if all were accepted.
        """
        self._steps.append(step := _Step(num_tokens, num_sampled, num_sampled))
        self._steps_to_probe -= 1
        if self.drafts_with_model:
            has_offers, self._has_offers = self._has_offers, False
            return has_offers
        return self._is_probe_due or self._num_worth(step, 1.0, self._config.num_speculative_tokens) > 0

    def propose(self, state: RequestSpeculation, token_ids: "array[int]", limit: int) -> Sequence[int]:
        """The drafts of a sequence that samples after its last known token.

        Args:
            state: of its request.
            token_ids: all that it has.
            limit: the most there is room for.

        Returns:
            At most `limit` and `num_speculative_tokens`; often none.
        """
        step = self._steps[-1]
        if self.drafts_with_model:
            # That verifying them is worth it was decided when they were made.
            drafts = state.offered[: max(0, limit)] if state.offered_at == len(token_ids) else ()
            state.offered = ()
        else:
            drafts = self._look_up(step, state, token_ids, limit)
        step.num_tokens += len(drafts)
        step.expected_tokens += _expected_accepted(self._probability(state), len(drafts))
        return drafts

    def num_drafts_wanted(self, state: RequestSpeculation) -> int:
        """How many tokens the draft model should draft for a sequence that samples in this step.

        They are verified in the next one, if this is the last step that was begun. 0 where there is no draft model.
        """
        if not self.drafts_with_model:
            return 0
        step = self._steps[-1]
        limit = self._config.num_speculative_tokens
        probability = self._probability(state)
        num_drafts = self._num_worth_drafting(step.num_sampled, probability, limit)
        if not num_drafts and self._is_probe_due:
            num_drafts = limit
            self._steps_to_probe = PROBE_INTERVAL_STEPS
        step.num_rounds = max(step.num_rounds, num_drafts)
        return num_drafts

    def end_planning(self, num_tokens: int) -> None:
        """Say what the step that was begun last computes in all: drafts may have been cut, or come from elsewhere."""
        self._steps[-1].num_tokens = num_tokens

    def offer(self, state: RequestSpeculation, token_ids: "array[int]", drafts: Sequence[int]) -> None:
        """Take in what the draft model expects after a sequence's tokens, new ones included."""
        state.offered, state.offered_at = drafts, len(token_ids)
        self._has_offers = True

    def observe(self, state: RequestSpeculation, num_drafts: int, num_accepted: int) -> None:
        """Take in how many of a sequence's drafts were accepted."""
        if not num_drafts:
            return
        for _ in range(num_accepted):
            self._observe_draft(state, True)
        if num_accepted < num_drafts:
            self._observe_draft(state, False)
        statistics = self.statistics
        statistics.num_drafts += 1
        statistics.num_draft_tokens += num_drafts
        statistics.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            statistics.num_accepted_tokens_per_pos[position] += 1

    def observe_step(self, seconds: float, draft_seconds: float = 0.0) -> None:
        """Take in how long the oldest step took that has not been observed.

        Args:
            seconds: all of it.
            draft_seconds: the draft model's part.
        """
        step = self._steps.popleft()
        if step.num_tokens:
            self._step_cost.measure(step.num_tokens, max(0.0, seconds - draft_seconds))
        if step.num_rounds and draft_seconds:
            measured = draft_seconds / step.num_rounds
            self._round_seconds = _average(measured if self._round_seconds is None else self._round_seconds, measured)

    @property
    def _is_probe_due(self) -> bool:
        return self._steps_to_probe <= 0

    def _look_up(self, step: _Step, state: RequestSpeculation, token_ids: "array[int]", limit: int) -> Sequence[int]:
        config = self._config
        if 0 <= state.expected_at < len(token_ids):
            self._observe_draft(state, token_ids[state.expected_at] == state.expected_token)
        state.expected_at = -1
        max_drafts = min(limit, config.num_speculative_tokens)
        if max_drafts <= 0:
            return ()
        found = look_up(token_ids, config.prompt_lookup_min, config.prompt_lookup_max, max_drafts)
        if not found:
            return found
        if self._is_probe_due:
            self._steps_to_probe = PROBE_INTERVAL_STEPS
            numbers = range(len(found) + 1)
            return found[: max(numbers, key=lambda number: self._step_cost.age(step.num_tokens + number))]
        num_drafts = self._num_worth(step, self._probability(state), len(found))
        if not num_drafts:
            state.expected_token, state.expected_at = found[0], len(token_ids)
        return found[:num_drafts]

    def _num_worth(self, step: _Step, probability: float, limit: int) -> int:
        """How many drafts one more sequence should have, each accepted with this probability after the one before.

        None while it is not known what the step takes without.
        """
        before = self._step_cost.seconds(step.num_tokens)
        if not before:
            return 0 if before is None else limit
        best, best_rate = 0, MIN_GAIN * step.expected_tokens / before
        expected, chance = step.expected_tokens, 1.0
        for num_drafts in range(1, limit + 1):
            chance *= probability
            expected += chance
            seconds = self._step_cost.seconds(step.num_tokens + num_drafts)
            if seconds and expected / seconds > best_rate:
                best, best_rate = num_drafts, expected / seconds
        return best

    def _num_worth_drafting(self, num_sequences: int, probability: float, limit: int) -> int:
        """The same with the draft model's rounds, as if all sequences were like this one: a round serves them all."""
        before = self._step_cost.seconds(num_sequences)
        if before is None:
            return 0
        if not before or self._round_seconds is None:
            return limit
        best, best_rate = 0, MIN_GAIN * num_sequences / before
        for num_drafts in range(1, limit + 1):
            verifying = self._step_cost.seconds(num_sequences * (1 + num_drafts))
            expected = num_sequences * (1 + _expected_accepted(probability, num_drafts))
            if verifying is not None:
                rate = expected / (verifying + num_drafts * self._round_seconds)
                if rate > best_rate:
                    best, best_rate = num_drafts, rate
        return best

    def _probability(self, state: RequestSpeculation) -> float:
        return state.acceptance.probability(self._common.probability(INITIAL_ACCEPTANCE))

    def _observe_draft(self, state: RequestSpeculation, is_accepted: bool) -> None:
        state.acceptance.observe(is_accepted)
        self._common.observe(is_accepted)


def _expected_accepted(probability: float, num_drafts: int) -> float:
    """Of drafts that are each accepted with this probability, if those before it were."""
    return sum(probability**position for position in range(1, num_drafts + 1))
