"""Drafts are what followed before, as many as are worth it, and none where they cost more than they give."""

import random
from array import array
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.config.engine import SpeculationConfig, SpeculationMethod
from trioengine.core.speculation import PROBE_INTERVAL_STEPS, SpeculationStatistics, Speculator, StepCost, look_up

CostFunction = Callable[[int], float]
REFRAIN = (1, 2, 3, 4, 5)


def naive_look_up(token_ids: Sequence[int], min_length: int, max_length: int, num_drafts: int) -> list[int]:
    """The definition."""
    for length in range(min(max_length, len(token_ids) - 1), min_length - 1, -1):
        suffix = token_ids[len(token_ids) - length :]
        for first in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[first : first + length] == suffix:
                return list(islice(cycle(token_ids[first + length :]), num_drafts))
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 6),
)
def test_lookup_is_a_search_for_the_longest_and_then_most_recent_suffix(
    token_ids: list[int], min_length: int, more: int, num_drafts: int
) -> None:
    """The same as comparing every place."""
    found = look_up(array("i", token_ids), min_length, min_length + more, num_drafts)
    assert list(found) == naive_look_up(token_ids, min_length, min_length + more, num_drafts)


def test_lookup_leaves_the_tokens_growable() -> None:
    """The view of their memory that it takes is gone when it returns."""
    token_ids = array("i", [1, 2, 3, 1, 2])
    assert list(look_up(token_ids, 2, 5, 4)) == [3, 1, 2, 3]
    token_ids.append(3)
    assert list(look_up(token_ids, 2, 5, 2)) == [1, 2]


def test_the_cost_of_a_step_lies_between_its_neighbours() -> None:
    """Where no such step was measured; above the largest one it does not grow, below the smallest it is unknown."""
    cost = StepCost()
    assert cost.seconds(3) is None
    cost.measure(2, 1.0)
    cost.measure(6, 3.0)
    assert cost.seconds(1) is None
    assert cost.seconds(2) == 1.0
    assert cost.seconds(3) == pytest.approx(1.5)
    assert cost.seconds(64) == 3.0


@given(st.integers(1, 10_000))
def test_large_steps_are_alike_within_an_eighth(num_tokens: int) -> None:
    """So that a few measurements tell all sizes."""
    cost = StepCost()
    cost.measure(num_tokens, 1.0)
    cost.measure(num_tokens + num_tokens // 8 + 1, 9.0)
    assert cost.seconds(num_tokens) == 1.0


def test_one_outlier_moves_the_cost_little() -> None:
    """A step during which the machine did something else."""
    cost = StepCost()
    for _ in range(5):
        cost.measure(4, 1.0)
    cost.measure(4, 100.0)
    assert cost.seconds(4) == pytest.approx(1.1)


class Simulation:
    """Sequences that repeat themselves, and steps with made-up times. Of their drafts a given share is right."""

    def __init__(
        self,
        batch: int,
        cost: CostFunction,
        acceptance: float,
        *,
        method: SpeculationMethod = SpeculationMethod.NGRAM,
        round_cost: float = 0.0,
        num_speculative_tokens: int = 4,
    ) -> None:
        self.cost, self.acceptance, self.round_cost = cost, acceptance, round_cost
        config = SpeculationConfig(
            method=method,
            num_speculative_tokens=num_speculative_tokens,
            model="draft" if method is SpeculationMethod.DRAFT_MODEL else None,
        )
        self.speculator = Speculator(config)
        self._states = [self.speculator.new_request() for _ in range(batch)]
        self._token_ids = [array("i", [1, 2, 3, 4, 5] * 3) for _ in range(batch)]
        self._random = random.Random(1)

    def run(self, num_steps: int) -> "Run":
        """Compute some steps."""
        run = Run()
        for _ in range(num_steps):
            self._step(run)
        return run

    def _step(self, run: "Run") -> None:
        speculator, batch = self.speculator, len(self._states)
        is_worth = speculator.begin_step(batch, batch)
        drafts = [
            speculator.propose(state, token_ids, 100) if is_worth else ()
            for state, token_ids in zip(self._states, self._token_ids, strict=True)
        ]
        wanted = [speculator.num_drafts_wanted(state) for state in self._states]
        for state, token_ids, proposed, num_wanted in zip(self._states, self._token_ids, drafts, wanted, strict=True):
            num_accepted = 0
            while num_accepted < len(proposed) and self._random.random() < self.acceptance:
                num_accepted += 1
            speculator.observe(state, len(proposed), num_accepted)
            token_ids.extend(proposed[:num_accepted])
            # What follows is what a draft would have been, as often as drafts are right.
            is_right = self._random.random() < self.acceptance
            right = look_up(token_ids, 2, 5, 1)[0]
            token_ids.extend((right,) if is_right else (right + 1, *REFRAIN))
            if num_wanted:
                speculator.offer(state, token_ids, look_up(token_ids, 2, 5, num_wanted))
            run.num_tokens += num_accepted + 1
            run.num_drafts += len(proposed)
        draft_seconds = self.round_cost * max(wanted)
        seconds = self.cost(batch + sum(map(len, drafts))) + draft_seconds
        speculator.observe_step(seconds, draft_seconds)
        run.seconds += seconds


@attrs.define
class Run:
    """What some steps came to."""

    num_tokens: int = 0
    num_drafts: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def bound_by_weights(num_tokens: int) -> float:
    """Few rows cost nothing more."""
    return 1.0 + 0.01 * num_tokens


def bound_by_rows(num_tokens: int) -> float:
    """Each row costs as much."""
    return float(num_tokens)


def test_one_request_is_faster_with_drafts() -> None:
    """Where rows cost next to nothing, all drafts are verified."""
    simulation = Simulation(1, bound_by_weights, 0.9)
    simulation.run(20)
    assert simulation.run(200).tokens_per_second > 3


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9])
def test_drafts_that_cost_more_than_they_give_are_left_out(batch: int, acceptance: float) -> None:
    """But for a probe now and then, which costs less than two percent."""
    simulation = Simulation(batch, bound_by_rows, acceptance)
    simulation.run(20)
    run = simulation.run(256)
    assert run.num_drafts <= 256 // PROBE_INTERVAL_STEPS * 4
    assert run.tokens_per_second > 0.93 * batch / bound_by_rows(batch)


def test_wrong_drafts_are_left_out_even_where_they_cost_little() -> None:
    """A request whose drafts are never right gets hardly any."""
    simulation = Simulation(1, lambda num_tokens: 1.0 + 0.2 * num_tokens, 0.0)
    simulation.run(50)
    assert simulation.run(200).num_drafts <= 200 // PROBE_INTERVAL_STEPS * 4 + 4


def test_drafts_come_back_when_they_are_right_again() -> None:
    """Drafts that were not verified are compared with what came, so it takes some tokens only, no probe."""
    simulation = Simulation(1, lambda num_tokens: 1.0 + 0.2 * num_tokens, 0.0)
    simulation.run(2 * PROBE_INTERVAL_STEPS + 1)
    simulation.acceptance = 1.0
    simulation.run(PROBE_INTERVAL_STEPS // 3)
    assert simulation.run(PROBE_INTERVAL_STEPS // 3).num_tokens > 2.5 * (PROBE_INTERVAL_STEPS // 3)


def test_drafts_come_back_when_they_cost_less() -> None:
    """Such as when a full batch's requests have ended, or another program has."""
    simulation = Simulation(2, bound_by_rows, 0.9)
    assert simulation.run(200).num_drafts < 40
    simulation.cost = bound_by_weights
    simulation.run(40 * PROBE_INTERVAL_STEPS)
    assert simulation.run(100).tokens_per_second > 4


def test_the_number_of_drafts_follows_the_steps_of_the_cost() -> None:
    """Where kernels work on four rows at once, the fourth is free and the fifth is not."""
    simulation = Simulation(1, lambda num_tokens: float(-(-num_tokens // 4)), 0.7, num_speculative_tokens=6)
    simulation.run(600)
    run = simulation.run(100)
    assert run.num_drafts == pytest.approx(300, rel=0.05)


def test_requests_are_judged_one_by_one() -> None:
    """In one batch, drafts go to the request whose drafts were right."""
    speculator = Speculator(SpeculationConfig(method=SpeculationMethod.NGRAM, num_speculative_tokens=4))
    good, bad = speculator.new_request(), speculator.new_request()
    token_ids = array("i", [1, 2, 3] * 5)
    totals = {good: 0, bad: 0}
    for _ in range(200):
        speculator.begin_step(2, 2)
        num_tokens = 2
        for state in (good, bad):
            drafts = speculator.propose(state, token_ids, 4)
            speculator.observe(state, len(drafts), len(drafts) if state is good else 0)
            totals[state] += len(drafts)
            num_tokens += len(drafts)
        speculator.observe_step(1.0 + 0.2 * num_tokens)
    assert totals[good] > 750
    assert totals[bad] < 50


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(-2, 6), st.integers(1, 4))
def test_never_more_drafts_than_there_is_room_for(token_ids: list[int], limit: int, most: int) -> None:
    """Nor more than configured."""
    speculator = Speculator(SpeculationConfig(method=SpeculationMethod.NGRAM, num_speculative_tokens=most))
    speculator.begin_step(1, 1)
    assert len(speculator.propose(speculator.new_request(), array("i", token_ids), limit)) <= max(0, min(limit, most))


def draft_model(batch: int, cost: CostFunction, acceptance: float, round_cost: float) -> Simulation:
    """With a draft model."""
    return Simulation(batch, cost, acceptance, method=SpeculationMethod.DRAFT_MODEL, round_cost=round_cost)


def test_a_draft_model_drafts_where_it_pays() -> None:
    """Rounds of a tenth of a step, and drafts that are mostly right."""
    simulation = draft_model(4, bound_by_weights, 0.9, 0.1)
    simulation.run(50)
    assert simulation.run(200).tokens_per_second > 1.5 * 4 / bound_by_weights(4)


def test_the_time_of_drafting_is_no_part_of_a_steps_cost() -> None:
    """It is paid once, for the next step."""
    simulation = draft_model(1, bound_by_weights, 0.9, 0.5)
    simulation.run(50)
    assert simulation.run(200).tokens_per_second > 1.2 / bound_by_weights(1)


@pytest.mark.parametrize(("round_cost", "acceptance"), [(2.0, 0.9), (0.3, 0.05)])
def test_a_draft_model_rests_where_it_does_not(round_cost: float, acceptance: float) -> None:
    """Because it is slow, or wrong."""
    simulation = draft_model(4, bound_by_weights, acceptance, round_cost)
    simulation.run(200)
    run = simulation.run(320)
    assert run.num_drafts <= 4 * 4 * (320 // PROBE_INTERVAL_STEPS + 1)


def test_a_draft_model_starts_again_when_it_pays() -> None:
    """Probes find that it has become right."""
    simulation = draft_model(1, bound_by_weights, 0.0, 0.3)
    simulation.run(200)
    simulation.acceptance = 0.95
    simulation.run(20 * PROBE_INTERVAL_STEPS)
    assert simulation.run(100).num_tokens > 250


def test_drafts_of_another_place_are_not_used() -> None:
    """Of a step that came to more tokens, or for a sequence that was left out since."""
    config = SpeculationConfig(method=SpeculationMethod.DRAFT_MODEL, num_speculative_tokens=3, model="draft")
    speculator = Speculator(config)
    state, token_ids = speculator.new_request(), array("i", [1, 2, 3])
    speculator.offer(state, token_ids, [4, 5, 6])
    assert speculator.begin_step(1, 1)
    token_ids.append(4)
    assert list(speculator.propose(state, token_ids, 3)) == []
    speculator.offer(state, token_ids, [5, 6, 7])
    assert speculator.begin_step(1, 1)
    assert list(speculator.propose(state, token_ids, 2)) == [5, 6]
    assert not speculator.begin_step(1, 1)
    assert list(speculator.propose(state, token_ids, 2)) == []


def test_statistics_count_by_position() -> None:
    """As vLLM's metrics do."""
    speculator = Speculator(SpeculationConfig(method=SpeculationMethod.NGRAM, num_speculative_tokens=3))
    state = speculator.new_request()
    for num_drafts, num_accepted in ((3, 2), (2, 0), (3, 3), (0, 0)):
        speculator.observe(state, num_drafts, num_accepted)
    assert speculator.statistics == SpeculationStatistics(3, 8, 5, [2, 2, 1])


def test_steps_are_measured_by_what_they_computed() -> None:
    """Drafts that were cut, or that a grammar gave, are no reason to take a step for one of another size."""
    speculator = Speculator(SpeculationConfig(method=SpeculationMethod.NGRAM, num_speculative_tokens=4))
    state, token_ids = speculator.new_request(), array("i", [1, 2, 3] * 5)
    for num_tokens, seconds in ((1, 1.0), (2, 10.0), (1, 1.0)):
        speculator.begin_step(1, 1)
        speculator.propose(state, token_ids, 4)
        speculator.end_planning(num_tokens)
        speculator.observe_step(seconds)
    assert not speculator.begin_step(1, 1)
