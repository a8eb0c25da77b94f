"""`FakeExecutor` keeps the promises of an `Executor`, and forgives no plan that breaks the rules."""

import attrs
import pytest

from trioengine.core.executor import LoRALoad, NewSequence, ScheduledSequence, StepPlan
from trioengine.errors import CheckpointError
from trioengine.testing.executor_conformance import CHECKS, LORA_CHECKS, OFFLOAD_CHECKS, WEIGHT_CHECKS, Check, Subject
from trioengine.testing.fake_executor import BROKEN_LORA, Fail, FakeExecutor, generate_alone, new_weight
from trioengine.types.messages import UpdateWeights
from trioengine.types.params import SamplingParams


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check) -> None:
    """The promises that every executor makes."""
    assert check(Subject(make=FakeExecutor, block_size=4, vocab_size=1000)) is None


@pytest.mark.parametrize("check", OFFLOAD_CHECKS, ids=lambda check: check.__name__)
def test_offload(check: Check) -> None:
    """The promises of every executor with an offload store."""

    def make() -> FakeExecutor:
        return FakeExecutor(num_offload_blocks=4)

    assert check(Subject(make=make, block_size=4, vocab_size=1000)) is None


@pytest.mark.parametrize("check", LORA_CHECKS, ids=lambda check: check.__name__)
def test_adapters(check: Check) -> None:
    """The promises of every executor with slots for adapters."""

    def make() -> FakeExecutor:
        return FakeExecutor(max_loras=2)

    assert check(Subject(make=make, block_size=4, vocab_size=1000, lora_paths=("/one", "/two"))) is None


@pytest.mark.parametrize("check", WEIGHT_CHECKS, ids=lambda check: check.__name__)
def test_new_weights(check: Check) -> None:
    """The promises of every executor whose weights can be replaced."""

    def make_new() -> FakeExecutor:
        executor = FakeExecutor()
        executor.update_weights(weights)
        executor.prepare_weights()
        executor.apply_weights()
        return executor

    weights = UpdateWeights((new_weight(5),))
    subject = Subject(make=FakeExecutor, block_size=4, vocab_size=1000, new_weights=weights, make_new=make_new)
    assert check(subject) is None


def test_rules_about_adapters() -> None:
    """What is in a slot that sequences have does not change, and they name slots that are filled."""
    executor = FakeExecutor(max_loras=1)
    executor.add_lora(5, "/one")
    with pytest.raises(AssertionError, match="no adapter in slot"):
        executor.submit(StepPlan(0, [], [attrs.evolve(_new(0, 1), lora_slot=1)]))
    executor.submit(StepPlan(0, [], [attrs.evolve(_new(0, 1), lora_slot=1)], lora_loads=[LoRALoad(1, 5)]))
    with pytest.raises(AssertionError, match="have the adapter"):
        executor.submit(StepPlan(1, [], lora_loads=[LoRALoad(1, 5)]))
    with pytest.raises(AssertionError, match="no such slot"):
        executor.submit(StepPlan(1, [], lora_loads=[LoRALoad(2, 5)]))
    with pytest.raises(CheckpointError):
        executor.add_lora(6, BROKEN_LORA)


def _new(sequence_id: int, *token_ids: int) -> NewSequence:
    return NewSequence(sequence_id, token_ids, len(token_ids), SamplingParams(), seed=0)


FIRST = StepPlan(0, [ScheduledSequence(0, 0, 2, [0])], [_new(0, 1, 2)])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(1, [ScheduledSequence(9, 0, 1, [1])]), "not known"),
        (StepPlan(1, [], removed=[9]), "not known"),
        (StepPlan(1, [], removed=[0, 0]), "not known"),
        (StepPlan(1, [ScheduledSequence(0, 2, 1)], removed=[0]), "not known"),
        (StepPlan(1, [], [_new(0, 1)]), "new twice"),
        (StepPlan(1, [], [_new(1)]), "no tokens"),
        (StepPlan(1, [], [_new(1, 1000)]), "not in the vocabulary"),
        (StepPlan(1, [ScheduledSequence(1, 0, 1, [0])], [_new(1, 3)]), "belongs to sequence 0"),
        (StepPlan(1, [ScheduledSequence(0, 2, 1, [0])]), "in the table already"),
        (StepPlan(1, [ScheduledSequence(0, 2, 1, [64])]), "no such block"),
        (StepPlan(1, [ScheduledSequence(0, 1, 1)]), "not where"),
        (StepPlan(1, [ScheduledSequence(0, 2, 2)]), "more tokens than"),
        (StepPlan(1, [ScheduledSequence(0, 2, 0)]), "nothing to do"),
        (StepPlan(1, [ScheduledSequence(0, 2, 1), ScheduledSequence(0, 3, 1)]), "scheduled twice"),
        (StepPlan(1, [ScheduledSequence(1, 0, 5, [1])], [_new(1, 1, 2, 3, 4, 5)]), "no room"),
    ],
)
def test_a_plan_that_breaks_the_rules_is_refused(plan: StepPlan, message: str) -> None:
    """Each rule of the border is checked, and the message says which was broken."""
    executor = FakeExecutor(num_blocks=64, block_size=4, vocab_size=1000)
    executor.submit(FIRST)
    with pytest.raises(AssertionError, match=message):
        executor.submit(plan)


def test_generate_alone_is_what_the_executor_generates() -> None:
    """The function and the executor agree, scripted tokens included."""
    executor = FakeExecutor(scripts={(1, 2): (7, 8)})
    executor.submit(FIRST)
    tokens = list(executor.result().tokens)
    for step in range(1, 4):
        executor.submit(StepPlan(step, [ScheduledSequence(0, 1 + step, 1, [step] if step == 3 else ())]))
        tokens += executor.result().tokens
    assert tokens == generate_alone((1, 2), 4, vocab_size=1000, script=(7, 8))
    assert tokens[:2] == [7, 8]


def test_a_scripted_failure_is_reported_for_its_sequence_only() -> None:
    """`Fail` makes a `SequenceFailure`; the other sequence gets its token."""
    executor = FakeExecutor(scripts={(1, 2): (Fail("broken"),)})
    plan = StepPlan(
        0, [ScheduledSequence(0, 0, 2, [0]), ScheduledSequence(1, 0, 2, [1])], [_new(0, 1, 2), _new(1, 3, 4)]
    )
    executor.submit(plan)
    result = executor.result()
    assert [(failure.sequence_id, failure.message) for failure in result.failures] == [(0, "broken")]
    assert result.tokens == [-1, *generate_alone((3, 4), 1, vocab_size=1000)]


def test_another_seed_gives_other_tokens() -> None:
    """The imitation notices a seed that gets lost on the way."""
    assert generate_alone((1, 2), 4, vocab_size=1000, seed=1) != generate_alone((1, 2), 4, vocab_size=1000, seed=2)
