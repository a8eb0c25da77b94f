"""What every `Executor` promises, as checks that run against any of them.

A test module makes a `Subject` and runs each of `CHECKS` on it, or of its parts `STEP_CHECKS`, `DRAFT_CHECKS`,
`SHARING_CHECKS`, `SLEEP_CHECKS` and `SAMPLING_CHECKS` (for executors that know every rule of `SamplingParams`).
`OFFLOAD_CHECKS` are for executors with an offload store of at least 4 blocks, `LORA_CHECKS` for those with two slots
for adapters or more, `WEIGHT_CHECKS` for those whose weights can be replaced:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check: Check) -> None:
        check(Subject(make=MyExecutor, block_size=4, vocab_size=1000))

The checks compare an executor with itself: a sequence's tokens must not depend on what else is in the step, on how its
prompt is split, or on which blocks it has. None of them knows a right token.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.core.executor import (
    NO_TOKEN,
    BlockCopy,
    Executor,
    LoRALoad,
    NewSequence,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)
from trioengine.errors import CheckpointError, RequestError
from trioengine.types.messages import UpdateWeights
from trioengine.types.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=None)
RANDOM = SamplingParams(temperature=1.0, max_tokens=None)


@attrs.frozen
class Subject:
    """An executor to check. It has at least 24 blocks and takes sequences of at least 96 tokens."""

    make: Callable[[], Executor]
    """A fresh executor; the check closes it."""
    block_size: int
    vocab_size: int
    lora_paths: Sequence[str] = ()
    """For `LORA_CHECKS`: two adapters that make different models."""
    new_weights: UpdateWeights | None = None
    """For `WEIGHT_CHECKS`: what makes another model."""
    make_new: Callable[[], Executor] | None = None
    """For `WEIGHT_CHECKS`: as `make`, of that model."""

    def prompt(self, num_tokens: int, start: int = 0) -> list[int]:
        """Token ids that differ with `start`."""
        return [(start * 31 + position * 7 + 1) % self.vocab_size for position in range(num_tokens)]


Check: TypeAlias = Callable[[Subject], None]


def check_a_step_without_sequences_has_no_tokens(subject: Subject) -> None:
    """A plan that schedules nothing, or only removes, is a step like others."""
    with _session(subject) as session:
        assert session.step() == []
        sequence_id = session.add(subject.prompt(3))
        session.step(sequence_id)
        assert session.step(remove=[sequence_id]) == []


def check_results_carry_their_step(subject: Subject) -> None:
    """A result has its plan's step number, and one token for each entry."""
    with _session(subject) as session:
        sequence_ids = [session.add(subject.prompt(3, start)) for start in range(3)]
        for step in range(3):
            result = session.run(session.plan(dict.fromkeys(sequence_ids)))
            assert result.step == step
            assert len(result.tokens) == 3
            assert all(type(token) is int and 0 <= token < subject.vocab_size for token in result.tokens)
            assert not result.failures
            session.take_in(sequence_ids, result)


def check_an_incomplete_prompt_samples_nothing(subject: Subject) -> None:
    """Only the step that reaches the end of the known tokens samples one."""
    with _session(subject) as session:
        sequence_id = session.add(subject.prompt(7))
        assert session.step(sequence_id, num_tokens=3) == [NO_TOKEN]
        assert session.step(sequence_id, num_tokens=3) == [NO_TOKEN]
        assert session.step(sequence_id, num_tokens=1) != [NO_TOKEN]


def check_a_split_prompt_gives_the_same_tokens(subject: Subject) -> None:
    """However a prompt is split over steps, across blocks or inside them, the answer is the same."""
    prompt = subject.prompt(2 * subject.block_size + 3)
    whole = _generate(subject, prompt)
    for num_tokens in (1, 2, subject.block_size, subject.block_size + 1):
        with _session(subject) as session:
            sequence_id = session.add(prompt)
            for _ in range((len(prompt) - 1) // num_tokens):
                assert session.step(sequence_id, num_tokens=num_tokens) == [NO_TOKEN]
            assert session.generate(sequence_id, len(whole)) == whole


def check_a_batch_gives_the_same_tokens(subject: Subject) -> None:
    """Sequences of unequal length, started in different steps, get the tokens that each gets alone."""
    prompts = [subject.prompt(length, start=length) for length in (1, subject.block_size, subject.block_size + 3, 2)]
    alone = [_generate(subject, prompt, num_tokens=8) for prompt in prompts]
    with _session(subject) as session:
        generated: dict[int, list[int]] = {}
        for prompt in prompts:  # Each step has prompts and decodes.
            generated[session.add(prompt)] = []
            session.step_all(generated)
        while any(len(tokens) < 8 for tokens in generated.values()):
            session.step_all(generated)
        assert [tokens[:8] for tokens in generated.values()] == alone


def check_the_order_of_a_batch_does_not_matter(subject: Subject) -> None:
    """Tokens follow `scheduled`'s order, which may change from step to step."""
    prompts = [subject.prompt(3, start) for start in range(3)]
    alone = [_generate(subject, prompt, num_tokens=4) for prompt in prompts]
    with _session(subject) as session:
        sequence_ids = [session.add(prompt) for prompt in prompts]
        generated: dict[int, list[int]] = {sequence_id: [] for sequence_id in sequence_ids}
        for turn in range(4):
            turned = sequence_ids[turn % 3 :] + sequence_ids[: turn % 3]
            session.step_all({sequence_id: generated[sequence_id] for sequence_id in turned})
        assert list(generated.values()) == alone


def check_blocks_may_be_in_any_order(subject: Subject) -> None:
    """A block table is a list, not a range."""
    prompt = subject.prompt(3 * subject.block_size)
    with _session(subject) as session:
        session.free_block_ids = session.free_block_ids[1::2][::-1] + session.free_block_ids[::2]
        assert session.generate(session.add(prompt), 6) == _generate(subject, prompt)


def check_a_preempted_sequence_goes_on(subject: Subject) -> None:
    """Removed, and new again with the tokens generated before, a sequence continues as if nothing had happened."""
    prompt = subject.prompt(subject.block_size + 1)
    for sampling in (GREEDY, RANDOM):
        whole = _generate(subject, prompt, num_tokens=8, sampling=sampling)
        with _session(subject) as session:
            sequence_id = session.add(prompt, sampling=sampling)
            assert session.generate(sequence_id, 3) == whole[:3]
            session.readd(sequence_id)
            assert session.generate(sequence_id, 5) == whole[3:]


def check_blocks_pass_on_within_a_step(subject: Subject) -> None:
    """A step's new sequence may get the blocks of one that the same step removes."""
    first, second = subject.prompt(subject.block_size + 2), subject.prompt(subject.block_size + 1, start=5)
    with _session(subject) as session:
        session.free_block_ids = session.free_block_ids[:3]
        first_id = session.add(first)
        session.generate(first_id, subject.block_size)
        second_id = session.add(second)
        tokens = session.step(second_id, remove=[first_id])
        assert tokens + session.generate(second_id, 5) == _generate(subject, second)


def check_a_sequence_may_rest(subject: Subject) -> None:
    """A sequence that a step leaves out loses nothing."""
    first, second = subject.prompt(4), subject.prompt(5, start=3)
    with _session(subject) as session:
        first_id, second_id = session.add(first), session.add(second)
        tokens = session.generate(first_id, 3)
        assert session.generate(second_id, 6) == _generate(subject, second)
        assert tokens + session.generate(first_id, 3) == _generate(subject, first)


def check_a_seed_gives_the_same_tokens(subject: Subject) -> None:
    """Random numbers depend on seed and position only: not on the batch, nor on the sequence's id."""
    prompt = subject.prompt(4)
    largest = 2**64 - 1
    alone = {seed: _generate(subject, prompt, num_tokens=6, sampling=RANDOM, seed=seed) for seed in (0, 1, largest)}
    with _session(subject) as session:
        session.step(session.add(subject.prompt(2, start=9), sampling=RANDOM, seed=7))
        by_id = {session.add(prompt, sampling=RANDOM, seed=seed): seed for seed in (largest, 0, 1)}
        generated: dict[int, list[int]] = {sequence_id: [] for sequence_id in by_id}
        for _ in range(6):
            session.step_all(generated)
        assert {by_id[sequence_id]: tokens for sequence_id, tokens in generated.items()} == alone


def check_end_tokens_wait_for_min_tokens(subject: Subject) -> None:
    """End tokens are not sampled before `min_tokens` tokens are generated; then they may be, after a preemption too."""
    prompt = subject.prompt(5)
    free = _generate(subject, prompt, num_tokens=4)
    held_back = attrs.evolve(GREEDY, min_tokens=3)
    with _session(subject) as session:
        sequence_id = session.add(prompt, sampling=held_back, end_token_ids=free)
        tokens = session.generate(sequence_id, 2)
        session.readd(sequence_id)
        tokens += session.generate(sequence_id, 1)
        assert not set(tokens) & set(free)
        whole = [*prompt, *tokens]
        assert session.generate(sequence_id, 3) == _generate(subject, whole, num_tokens=3)
    with _session(subject) as session:
        sequence_id = session.add(prompt, sampling=attrs.evolve(GREEDY, min_tokens=0), end_token_ids=free)
        assert session.generate(sequence_id, 4) == free


def check_steps_may_be_submitted_ahead(subject: Subject) -> None:
    """A step may be submitted before the result of the one before it is fetched, with the same objects in its plan: its
    inputs then hold a token that only the executor knows."""
    prompts = [subject.prompt(length, start=length) for length in (3, subject.block_size)]
    alone = [_generate(subject, prompt, num_tokens=6, sampling=RANDOM) for prompt in prompts]
    with _session(subject) as session:
        ids = [session.add(prompt, sampling=RANDOM) for prompt in prompts]
        plan = session.plan(dict.fromkeys(ids))
        session.submit(plan)
        tokens: list[Sequence[int]] = []
        for _ in range(6):
            plan = session.plan_ahead(plan)
            session.submit(plan)
            tokens.append(session.fetch().tokens)
        session.fetch()
        assert [list(column) for column in zip(*tokens, strict=True)] == alone


def check_close_twice(subject: Subject) -> None:
    """`close` may come again, and while sequences are known."""
    executor = subject.make()
    new = NewSequence(0, subject.prompt(2), 2, GREEDY, seed=0)
    block_ids = [0] * len(executor.kv_cache_groups)
    executor.submit(StepPlan(0, [ScheduledSequence(0, 0, 2, block_ids)], [new]))
    assert len(executor.result().tokens) == 1
    executor.close()
    executor.close()


# Sleep


def check_generation_is_the_same_after_sleep(subject: Subject) -> None:
    """At both levels, whatever wakes first."""
    prompt = subject.prompt(2 * subject.block_size + 1)
    expected = _generate(subject, prompt)
    with _session(subject) as session:
        for level in (1, 2):
            for wakes in ([("weights", "kv_cache")], [("weights",), ("kv_cache",)], [("kv_cache",), ("weights",)]):
                sequence_id = session.add(prompt)
                assert session.generate(sequence_id, len(expected)) == expected
                assert session.step(remove=[sequence_id]) == []
                session.executor.sleep(level)
                for tags in wakes:
                    session.executor.wake_up(tags)
        assert session.generate(session.add(prompt), len(expected)) == expected


# The offload store


def check_saved_blocks_come_back(subject: Subject) -> None:
    """Content that was saved, overwritten and loaded into other blocks gives the same tokens."""
    prompt = subject.prompt(2 * subject.block_size + 1)
    other = subject.prompt(3 * subject.block_size, start=7)
    with _session(subject) as session:
        first_id = session.add(prompt)
        expected = session.generate(first_id, 5)
        blocks = session.blocks(first_id)[:2]
        session.run(attrs.evolve(session.plan({}, remove=[first_id]), saves=session.copies(blocks, [3, 1])))
        other_id = session.add(other)
        assert session.generate(other_id, 2) == _generate(subject, other, num_tokens=2)
        assert {*blocks} <= {*session.blocks(other_id)}
        second_id = session.add(prompt)
        session.reserve(second_id, len(prompt))
        session.skip(second_id, 2)
        loads = session.copies(session.blocks(second_id)[:2], [3, 1])
        result = session.run(attrs.evolve(session.plan({second_id: None}), loads=loads))
        assert not result.failed_loads
        session.take_in([second_id], result)
        assert [*result.tokens, *session.generate(second_id, 4)] == expected


def check_blocks_are_saved_and_loaded_before_a_step_changes_them(subject: Subject) -> None:
    """A step may save blocks of a sequence that it removes, load them into others, and compute in the saved ones."""
    prompt = subject.prompt(subject.block_size + 1)
    other = subject.prompt(2 * subject.block_size + 1, start=7)
    with _session(subject) as session:
        first_id = session.add(prompt)
        expected = session.generate(first_id, 3)
        block = session.blocks(first_id)[0]
        session.forget(first_id)
        other_id, second_id = session.add(other), session.add(prompt)
        session.reserve(other_id, len(other))
        assert block in session.blocks(other_id)
        session.reserve(second_id, len(prompt))
        session.skip(second_id, 1)
        plan = attrs.evolve(
            session.plan({other_id: None, second_id: None}),
            saves=session.copies([block], [0]),
            loads=session.copies(session.blocks(second_id)[:1], [0]),
        )
        result = session.run(plan)
        session.take_in([other_id, second_id], result)
        assert result.tokens[1] == expected[0]
        assert session.generate(second_id, 2) == expected[1:]
        assert [result.tokens[0], *session.generate(other_id, 2)] == _generate(subject, other, num_tokens=3)


def check_what_was_saved_last_is_loaded(subject: Subject) -> None:
    """A slot is written again and again; a load leaves it as it is."""
    prompts = [subject.prompt(subject.block_size + 1, start) for start in range(3)]
    with _session(subject) as session:
        expected: list[int] = []
        for prompt in prompts:
            sequence_id = session.add(prompt)
            expected = session.generate(sequence_id, 3)
            saves = session.copies(session.blocks(sequence_id)[:1], [2])
            session.run(attrs.evolve(session.plan({}, remove=[sequence_id]), saves=saves))
        for _ in range(2):
            again_id = session.add(prompts[-1])
            session.reserve(again_id, len(prompts[-1]))
            session.skip(again_id, 1)
            loads = session.copies(session.blocks(again_id)[:1], [2])
            result = session.run(attrs.evolve(session.plan({again_id: None}), loads=loads))
            session.take_in([again_id], result)
            assert [*result.tokens, *session.generate(again_id, 2)] == expected


# Drafts


def check_right_drafts_save_steps(subject: Subject) -> None:
    """Drafts that are what would be sampled are all accepted, and one more token comes with them."""
    prompt = subject.prompt(subject.block_size - 2)
    for sampling in (GREEDY, RANDOM):
        whole = _generate(subject, prompt, num_tokens=10, sampling=sampling)
        with _session(subject) as session:
            sequence_id = session.add(prompt, sampling=sampling)
            # Behind the prompt, then across the end of a block, then none.
            assert session.draft(sequence_id, whole[:2]) == whole[:3]
            assert session.draft(sequence_id, whole[3:7]) == whole[3:8]
            assert session.generate(sequence_id, 2) == whole[8:]


def check_wrong_drafts_change_nothing(subject: Subject) -> None:
    """Drafts count up to the first wrong one; whatever they are, and wherever blocks end, tokens are the same."""
    prompt = subject.prompt(subject.block_size + 1)
    num_tokens = subject.block_size + 6
    for sampling in (GREEDY, RANDOM):
        whole = _generate(subject, prompt, num_tokens=num_tokens, sampling=sampling)
        for num_right in range(3):
            with _session(subject) as session:
                sequence_id = session.add(prompt, sampling=sampling)
                tokens = session.step(sequence_id)
                while len(tokens) < num_tokens:
                    drafts = [*whole[len(tokens) :], 0, 0, 0][:3]
                    drafts[num_right] = (drafts[num_right] + 1) % subject.vocab_size
                    new = session.draft(sequence_id, drafts)
                    is_at_end = len(tokens) + num_right >= num_tokens
                    assert is_at_end or len(new) == num_right + 1
                    tokens += new
                assert tokens[:num_tokens] == whole


def check_drafts_of_one_sequence_are_its_own(subject: Subject) -> None:
    """In a step some have drafts, right and wrong ones, and some none, and some are in the middle of their prompt."""
    prompts = [subject.prompt(length, start=length) for length in (3, subject.block_size, 5, 2 * subject.block_size)]
    alone = [_generate(subject, prompt, num_tokens=5, sampling=RANDOM) for prompt in prompts]
    with _session(subject) as session:
        ids = [session.add(prompt, sampling=RANDOM) for prompt in prompts]
        tokens = [[token] for token in session.step(*ids[:3])]
        drafts = {ids[0]: alone[0][1:3], ids[2]: [alone[2][1], (alone[2][2] + 1) % subject.vocab_size]}
        result = session.run(session.plan({ids[0]: None, ids[3]: 3, ids[1]: None, ids[2]: None}, drafts=drafts))
        assert {index: number for index, number in result.num_accepted.items() if number} == {0: 2, 3: 1}
        assert result.tokens[1] == NO_TOKEN
        new = session.take_in([ids[0], ids[3], ids[1], ids[2]], result, drafts)
        tokens = [tokens[0] + new[0], tokens[1] + new[2], tokens[2] + new[3]]
        for sequence_id, found, expected in zip(ids, [*tokens, []], alone, strict=True):
            assert found + session.generate(sequence_id, 5 - len(found)) == expected


def check_drafts_do_not_hide_a_preemption(subject: Subject) -> None:
    """A sequence that had drafts and comes again continues with what was accepted."""
    prompt = subject.prompt(3)
    whole = _generate(subject, prompt, num_tokens=7, sampling=RANDOM)
    with _session(subject) as session:
        sequence_id = session.add(prompt, sampling=RANDOM)
        tokens = session.draft(sequence_id, [whole[0], whole[1], (whole[2] + 1) % subject.vocab_size])
        session.readd(sequence_id)
        tokens += session.draft(sequence_id, whole[3:5])
        assert tokens + session.generate(sequence_id, 1) == whole


# Blocks of others


def check_a_prefix_may_be_others(subject: Subject) -> None:
    """A new sequence may begin behind blocks that another has computed, and outlive it."""
    prefix = subject.prompt(2 * subject.block_size)
    prompts = [[*prefix, *subject.prompt(3, start=7)], [*prefix, *subject.prompt(subject.block_size, start=8)]]
    alone = [_generate(subject, prompt, num_tokens=6) for prompt in prompts]
    with _session(subject) as session:
        first = session.add(prompts[0])
        tokens = session.generate(first, 2)
        second = session.add(prompts[1], shares=first, num_shared_blocks=2)
        others = session.generate(second, 2)
        tokens += session.generate(first, 4)
        assert session.step(second, remove=[first])[0] == alone[1][2]
        assert [tokens, others, session.generate(second, 3)] == [alone[0], alone[1][:2], alone[1][3:]]


def check_a_prefix_may_be_computed_in_the_same_step(subject: Subject) -> None:
    """Whichever of the two comes first in the step, and when the first is only partly computed."""
    prefix = subject.prompt(2 * subject.block_size)
    prompts = [[*prefix, *subject.prompt(3, start=7)], [*prefix, *subject.prompt(2, start=8)]]
    alone = [_generate(subject, prompt, num_tokens=4) for prompt in prompts]
    for is_reversed in (False, True):
        with _session(subject) as session:
            first = session.add(prompts[0])
            # Block ids are given in the order of the plan; the second's shared ones are the first's.
            session.reserve(first, len(prompts[0]))
            second = session.add(prompts[1], shares=first, num_shared_blocks=2)
            order = [second, first] if is_reversed else [first, second]
            tokens = dict(zip(order, session.step(*order), strict=True))
            generated = [[tokens[each], *session.generate(each, 3)] for each in (first, second)]
            assert generated == alone


# Adapters


def check_adapters_are_their_sequences_only(subject: Subject) -> None:
    """Sequences with adapters and without, of one prompt, get in one batch what each gets alone."""
    prompt = subject.prompt(subject.block_size + 3)
    alone: list[list[int]] = []
    for slot in range(3):
        with _session(subject) as session:
            session.load_loras({1: 0, 2: 1})
            alone.append(session.generate(session.add(prompt, lora_slot=slot), 6))
    assert alone[0] == _generate(subject, prompt)
    assert len({tuple(tokens) for tokens in alone}) == 3
    with _session(subject) as session:
        session.load_loras({1: 0, 2: 1})
        slots = [2, 0, 1, 0, 2]
        generated: dict[int, list[int]] = {session.add(prompt, lora_slot=slot): [] for slot in slots}
        for _ in range(6):
            session.step_all(generated)
        assert list(generated.values()) == [alone[slot] for slot in slots]


def check_a_slot_passes_on(subject: Subject) -> None:
    """A step may remove a slot's last sequence, fill the slot, and begin with the new adapter; an adapter that was
    removed meanwhile stays in its slot. What others have in theirs does not change."""
    prompt = subject.prompt(subject.block_size + 1)
    with _session(subject) as session:
        session.load_loras({1: 0, 2: 1})
        alone = [session.generate(session.add(prompt, lora_slot=slot), 5) for slot in (1, 2)]
    with _session(subject) as session:
        session.load_loras({1: 1, 2: 0})
        first, other = session.add(prompt, lora_slot=1), session.add(prompt, lora_slot=2)
        generated: dict[int, list[int]] = {first: [], other: []}
        session.step_all(generated)
        session.executor.add_lora(99, subject.lora_paths[0])
        second = session.add(prompt, lora_slot=1)
        plan = session.plan({other: None, second: None}, remove=[first])
        session.submit(attrs.evolve(plan, lora_loads=[LoRALoad(1, 99)]))
        for lora_id in (0, 1, 99):
            session.executor.remove_lora(lora_id)
        result = session.fetch()
        session.take_in([other, second], result)
        assert [*generated[other], result.tokens[0], *session.generate(other, 3)] == alone[0]
        assert [result.tokens[1], *session.generate(second, 4)] == alone[0]
        assert alone[0] != alone[1]


def check_adapters_outlive_preemption_and_sleep(subject: Subject) -> None:
    """A sequence that comes back has the adapter of the slot it then names; slots are what they were after sleep."""
    prompt = subject.prompt(subject.block_size + 1)
    with _session(subject) as session:
        session.load_loras({1: 0})
        sequence_id = session.add(prompt, lora_slot=1)
        whole = session.generate(sequence_id, 6)
        assert session.step(remove=[sequence_id]) == []
        for level in (1, 2):
            session.executor.sleep(level)
            session.executor.wake_up(("weights", "kv_cache"))
            sequence_id = session.add(prompt, lora_slot=1)
            assert session.generate(sequence_id, 3) == whole[:3]
            session.readd(sequence_id)
            assert session.generate(sequence_id, 3) == whole[3:]
            assert session.step(remove=[sequence_id]) == []


def check_what_is_no_adapter_is_an_error(subject: Subject) -> None:
    """And changes nothing."""
    with _session(subject) as session:
        session.load_loras({1: 0})
        sequence_id = session.add(subject.prompt(3), lora_slot=1)
        tokens = session.generate(sequence_id, 2)
        try:
            session.executor.add_lora(7, "broken")
            is_read = True
        except CheckpointError:
            is_read = False
        assert not is_read
        session.readd(sequence_id)
        tokens += session.generate(sequence_id, 2)
    with _session(subject) as session:
        session.load_loras({1: 0})
        assert session.generate(session.add(subject.prompt(3), lora_slot=1), 4) == tokens


# Rules


def check_masks_bind_their_sequences_only(subject: Subject) -> None:
    """Only tokens whose bits are set are sampled; a mask of all changes nothing, nor do masks of others."""
    prompts = [subject.prompt(4, start) for start in range(3)]
    alone = [_generate(subject, prompt, num_tokens=1, sampling=RANDOM) for prompt in prompts]
    allowed = [token for token in (3, 31, 32, 64) if token < subject.vocab_size and token not in alone[1]]
    with _session(subject) as session:
        ids = [session.add(prompt, sampling=RANDOM) for prompt in prompts]
        bits = _mask_bits(subject, range(subject.vocab_size), allowed)
        result = session.run(session.plan(dict.fromkeys(ids), masks=TokenMasks({1: 1, 2: 0}, bits)))
        assert [result.tokens[0], result.tokens[2]] == [alone[0][0], alone[2][0]]
        assert result.tokens[1] in allowed
        session.take_in(ids, result)
        for token in allowed:
            plan = session.plan(dict.fromkeys(ids), masks=TokenMasks({1: 0}, _mask_bits(subject, [token])))
            result = session.run(plan)
            assert result.tokens[1] == token
            session.take_in(ids, result)


def check_masks_come_with_drafts(subject: Subject) -> None:
    """Each draft's place has a mask of its own; what is behind a rejected one means nothing, not even an empty mask."""
    with _session(subject) as session:
        sequence_id = session.add(subject.prompt(3))
        masks = TokenMasks({0: 1}, _mask_bits(subject, [9], [1], [2], [3], [4]))
        assert session.draft(sequence_id, [1, 2, 3], masks) == [1, 2, 3, 4]
        masks = TokenMasks({0: 0}, _mask_bits(subject, [5], [6], []))
        assert session.draft(sequence_id, [5, 7], masks) == [5, 6]
        # Where the place behind accepted drafts fails, they count, and the next step fails.
        masks = TokenMasks({0: 0}, _mask_bits(subject, [5], [6], [], [8]))
        assert session.draft(sequence_id, [5, 6, 7], masks) == [5, 6]
        masks = TokenMasks({0: 0}, _mask_bits(subject, [], [8]))
        result = session.run(session.plan({sequence_id: None}, drafts={sequence_id: [7]}, masks=masks))
        assert [failure.sequence_id for failure in result.failures] == [sequence_id]


def check_a_mask_of_nothing_fails_its_sequence(subject: Subject) -> None:
    """Where nothing may be sampled the sequence fails, and its neighbours do not."""
    prompts = [subject.prompt(4, start) for start in range(2)]
    alone = [_generate(subject, prompt, num_tokens=3) for prompt in prompts]
    with _session(subject) as session:
        ids = [session.add(prompt) for prompt in prompts]
        result = session.run(session.plan(dict.fromkeys(ids), masks=TokenMasks({0: 0}, _mask_bits(subject, []))))
        assert [failure.sequence_id for failure in result.failures] == [ids[0]]
        assert result.failures[0].message
        assert list(result.tokens) == [NO_TOKEN, alone[1][0]]
        session.take_in(ids, result)
        assert session.step(ids[1], remove=[ids[0]]) + session.generate(ids[1], 1) == alone[1][1:]


def check_only_allowed_tokens_are_sampled(subject: Subject) -> None:
    """`allowed_token_ids`, also those that a mask leaves of them."""
    allowed = (2, 5, 7)
    prompt = subject.prompt(5)
    for sampling in (GREEDY, RANDOM):
        sampling = attrs.evolve(sampling, allowed_token_ids=allowed)
        assert set(_generate(subject, prompt, num_tokens=8, sampling=sampling)) <= set(allowed)
        with _session(subject) as session:
            sequence_id = session.add(prompt, sampling=sampling)
            masks = TokenMasks({0: 0}, _mask_bits(subject, [1, 5, 6]))
            assert session.run(session.plan({sequence_id: None}, masks=masks)).tokens[0] == 5


def check_rules_count_drafts(subject: Subject) -> None:
    """Penalties and `min_tokens` see accepted drafts as what was generated before."""
    prompt = subject.prompt(4)
    sampling = attrs.evolve(RANDOM, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3, min_tokens=4)
    end_token_ids = _generate(subject, prompt, num_tokens=6, sampling=attrs.evolve(sampling, min_tokens=0))
    whole = _generate(subject, prompt, num_tokens=9, sampling=sampling, end_token_ids=end_token_ids)
    assert not set(whole[:4]) & set(end_token_ids)
    with _session(subject) as session:
        sequence_id = session.add(prompt, sampling=sampling, end_token_ids=end_token_ids)
        assert session.draft(sequence_id, whole[:3]) == whole[:4]
        assert session.draft(sequence_id, [*whole[4:6], (whole[6] + 1) % subject.vocab_size]) == whole[4:7]
        assert session.generate(sequence_id, 2) == whole[7:]


# Log probabilities


def check_logprobs_are_of_each_new_token(subject: Subject) -> None:
    """The token's first, then as many as were asked for, the most likely first; only for those that ask."""
    prompt = subject.prompt(4)
    with _session(subject) as session:
        wanted = [None, 0, 2, -1]
        ids = [session.add(prompt, sampling=attrs.evolve(GREEDY, logprobs=number)) for number in wanted]
        for _ in range(3):
            result = session.run(session.plan(dict.fromkeys(ids)))
            assert set(result.logprobs) == {1, 2, 3}
            for index, number in enumerate(wanted[1:], 1):
                (found,) = result.logprobs[index]
                _check_logprobs(found, result.tokens[index], subject.vocab_size if number == -1 else number or 0)
                assert found.rank == 1
            everything = result.logprobs[3][0]
            assert sorted(everything.token_ids[1:]) == list(range(subject.vocab_size))
            assert math.isclose(sum(map(math.exp, everything.logprobs[1:])), 1, rel_tol=1e-4)
            assert result.logprobs[2][0].logprobs == everything.logprobs[:3]
            session.take_in(ids, result)


def check_logprobs_are_of_the_tokens_that_are_listed(subject: Subject) -> None:
    """In their order and beside the token's own, the same as among all; others in the step have theirs."""
    prompt, listed = subject.prompt(4), [7, 3, subject.vocab_size - 1, 7]
    listing = attrs.evolve(RANDOM, logprobs=5, logprob_token_ids=listed)
    with _session(subject) as session:
        ids = [
            session.add(prompt, sampling=sampling, seed=5)
            for sampling in (attrs.evolve(RANDOM, logprobs=-1), listing, attrs.evolve(GREEDY, logprobs=2))
        ]
        for _ in range(2):
            result = session.run(session.plan(dict.fromkeys(ids)))
            (everything,), (found,), (top,) = (result.logprobs[index] for index in range(3))
            assert found.token_ids == [everything.token_ids[0], *listed]
            assert (found.logprobs[0], found.rank) == (everything.logprobs[0], everything.rank)
            by_id = dict(zip(everything.token_ids, everything.logprobs, strict=True))
            for token_id, logprob in zip(listed, found.logprobs[1:], strict=True):
                assert math.isclose(logprob, by_id[token_id], rel_tol=1e-4, abs_tol=1e-4)
            _check_logprobs(top, result.tokens[2], 2)
            session.take_in(ids, result)


def check_logprobs_come_with_drafts(subject: Subject) -> None:
    """One for each new token, accepted drafts included, as without drafts."""
    prompt = subject.prompt(4)
    sampling = attrs.evolve(RANDOM, logprobs=3)
    with _session(subject) as session:
        sequence_id = session.add(prompt, sampling=sampling)
        tokens: list[int] = []
        expected: list[TokenLogprobs] = []
        for _ in range(4):
            result = session.run(session.plan({sequence_id: None}))
            tokens += session.take_in([sequence_id], result)[0]
            expected += result.logprobs[0]
    with _session(subject) as session:
        sequence_id = session.add(prompt, sampling=sampling)
        drafts = {sequence_id: [*tokens[:3], (tokens[3] + 1) % subject.vocab_size, 0]}
        result = session.run(session.plan({sequence_id: None}, drafts=drafts))
        assert session.take_in([sequence_id], result, drafts) == [tokens]
        _check_same_logprobs(result.logprobs[0], expected)


def check_logprobs_are_numbers(subject: Subject) -> None:
    """(sglang 5984) Finite, also where limits or masks leave one token."""
    with _session(subject) as session:
        ids = [
            session.add(subject.prompt(4), sampling=attrs.evolve(RANDOM, logprobs=1, prompt_logprobs=1, top_k=1)),
            session.add(subject.prompt(4), sampling=attrs.evolve(RANDOM, logprobs=20)),
        ]
        result = session.run(session.plan(dict.fromkeys(ids), masks=TokenMasks({1: 0}, _mask_bits(subject, [3]))))
        for found in (*result.logprobs[0], *result.prompt_logprobs[0], *result.logprobs[1]):
            assert all(map(math.isfinite, found.logprobs))
        assert result.logprobs[1][0].token_ids[0] == 3


def check_prompt_logprobs_are_of_the_prompts_tokens(subject: Subject) -> None:
    """From the second on, however the prompt is split; the answer is the same as without."""
    prompt = subject.prompt(subject.block_size + 3)
    sampling = attrs.evolve(GREEDY, prompt_logprobs=2)
    expected: Sequence[TokenLogprobs] = ()
    for num_tokens in (len(prompt), 1, 2, subject.block_size):
        with _session(subject) as session:
            sequence_id, other = session.add(prompt, sampling=sampling), session.add(subject.prompt(3, start=4))
            session.step(other)
            found: list[TokenLogprobs] = []
            tokens: list[int] = []
            for first in range(0, len(prompt), num_tokens):
                part = min(len(prompt) - first, num_tokens)
                result = session.run(session.plan({other: None, sequence_id: part}))
                tokens = session.take_in([other, sequence_id], result)[1]
                found += result.prompt_logprobs.get(1, ())
            assert [each.token_ids[0] for each in found] == prompt[1:]
            for each in found:
                _check_logprobs(each, each.token_ids[0], 2)
            expected = expected or found
            _check_same_logprobs(found, expected)
            assert [*tokens, *session.generate(sequence_id, 3)] == _generate(subject, prompt, num_tokens=4)


def check_prompt_logprobs_without_an_answer(subject: Subject) -> None:
    """(vllm 6521) With `max_tokens` 0 nothing is sampled, and that is no failure."""
    for length in (1, 4):
        with _session(subject) as session:
            prompt = subject.prompt(length)
            sequence_id = session.add(prompt, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
            result = session.run(session.plan({sequence_id: None}))
            assert (list(result.tokens), list(result.failures)) == ([NO_TOKEN], [])
            assert [each.token_ids for each in result.prompt_logprobs.get(0, ())] == [[token] for token in prompt[1:]]


STEP_CHECKS: Sequence[Check] = (
    check_a_step_without_sequences_has_no_tokens,
    check_results_carry_their_step,
    check_an_incomplete_prompt_samples_nothing,
    check_a_split_prompt_gives_the_same_tokens,
    check_a_batch_gives_the_same_tokens,
    check_the_order_of_a_batch_does_not_matter,
    check_blocks_may_be_in_any_order,
    check_a_preempted_sequence_goes_on,
    check_blocks_pass_on_within_a_step,
    check_a_sequence_may_rest,
    check_a_seed_gives_the_same_tokens,
    check_end_tokens_wait_for_min_tokens,
    check_steps_may_be_submitted_ahead,
    check_close_twice,
)
DRAFT_CHECKS: Sequence[Check] = (
    check_right_drafts_save_steps,
    check_wrong_drafts_change_nothing,
    check_drafts_of_one_sequence_are_its_own,
    check_drafts_do_not_hide_a_preemption,
)
SHARING_CHECKS: Sequence[Check] = (
    check_a_prefix_may_be_others,
    check_a_prefix_may_be_computed_in_the_same_step,
)
SAMPLING_CHECKS: Sequence[Check] = (
    check_masks_bind_their_sequences_only,
    check_masks_come_with_drafts,
    check_a_mask_of_nothing_fails_its_sequence,
    check_only_allowed_tokens_are_sampled,
    check_rules_count_drafts,
    check_logprobs_are_of_each_new_token,
    check_logprobs_are_of_the_tokens_that_are_listed,
    check_logprobs_come_with_drafts,
    check_logprobs_are_numbers,
    check_prompt_logprobs_are_of_the_prompts_tokens,
    check_prompt_logprobs_without_an_answer,
)


def check_new_weights_count_when_they_are_applied(subject: Subject) -> None:
    """Not a moment before; and then tokens are those of a fresh executor that has them, also after a sleep."""
    assert subject.new_weights is not None
    assert subject.make_new is not None
    prompt = subject.prompt(subject.block_size + 3)
    old = _generate(subject, prompt)
    new = _generate(attrs.evolve(subject, make=subject.make_new), prompt)
    assert old != new
    with _session(subject) as session:
        executor = session.executor
        executor.update_weights(subject.new_weights)
        assert _answer(session, prompt) == old
        executor.prepare_weights()
        assert _answer(session, prompt) == old
        running = session.add(prompt)
        assert session.generate(running, 2) == old[:2]
        executor.apply_weights()
        assert _answer(session, prompt) == new
        assert len(session.generate(running, 2)) == 2
        session.forget(running)
        session.step()
        executor.sleep(2)
        executor.wake_up(["weights", "kv_cache"])
        assert _answer(session, prompt) == new


def check_wrong_weights_change_nothing(subject: Subject) -> None:
    """One wrong tensor refuses all that come with it; discarded ones are forgotten."""
    assert subject.new_weights is not None
    prompt = subject.prompt(5)
    old = _generate(subject, prompt)
    wrong = attrs.evolve(subject.new_weights.tensors[0], name="there is none of this name")
    with _session(subject) as session:
        update = UpdateWeights((*subject.new_weights.tensors, wrong))
        assert "there is none of this name" in _refusal(lambda: session.executor.update_weights(update))
        assert _answer(session, prompt) == old
        session.executor.update_weights(subject.new_weights)
        session.executor.discard_weights()
        assert _answer(session, prompt) == old


def check_a_profile_is_started_and_stopped_once(subject: Subject) -> None:
    """Twice of either is the caller's fault. What is computed meanwhile is what is always computed."""
    prompt = subject.prompt(5)
    alone = _generate(subject, prompt)
    with _session(subject) as session:
        executor = session.executor
        assert _is_refused(executor.stop_profile)
        executor.start_profile("check")
        assert _is_refused(lambda: executor.start_profile("check"))
        assert _answer(session, prompt) == alone
        assert "check" in executor.stop_profile()
        assert _is_refused(executor.stop_profile)


def check_methods_that_are_not_marked_cannot_be_called(subject: Subject) -> None:
    """Nor those that there are not."""
    with _session(subject) as session:
        for method in ("close", "submit", "__init__", "_backend", "nonsense", ""):
            assert _is_refused(lambda method=method: session.executor.collective_rpc(method, "{}"))


SLEEP_CHECKS: Sequence[Check] = (check_generation_is_the_same_after_sleep,)
OPERATION_CHECKS: Sequence[Check] = (
    check_a_profile_is_started_and_stopped_once,
    check_methods_that_are_not_marked_cannot_be_called,
)
CHECKS: Sequence[Check] = (
    *STEP_CHECKS,
    *DRAFT_CHECKS,
    *SHARING_CHECKS,
    *SLEEP_CHECKS,
    *SAMPLING_CHECKS,
    *OPERATION_CHECKS,
)
WEIGHT_CHECKS: Sequence[Check] = (
    check_new_weights_count_when_they_are_applied,
    check_wrong_weights_change_nothing,
)
LORA_CHECKS: Sequence[Check] = (
    check_adapters_are_their_sequences_only,
    check_a_slot_passes_on,
    check_adapters_outlive_preemption_and_sleep,
    check_what_is_no_adapter_is_an_error,
)
OFFLOAD_CHECKS: Sequence[Check] = (
    check_saved_blocks_come_back,
    check_blocks_are_saved_and_loaded_before_a_step_changes_them,
    check_what_was_saved_last_is_loaded,
)


def _mask_bits(subject: Subject, *rows: Sequence[int]) -> NDArray[np.int32]:
    """A mask for each list of allowed tokens."""
    bits = np.zeros((len(rows), -(-subject.vocab_size // 32) * 32), np.uint8)
    for mask, allowed in zip(bits, rows, strict=True):
        mask[list(allowed)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def _check_logprobs(found: TokenLogprobs, token_id: int, number: int) -> None:
    """Complete, finite and in order."""
    assert found.token_ids[0] == token_id
    assert len(found.token_ids) == len(found.logprobs) == 1 + number
    assert list(found.logprobs[1:]) == sorted(found.logprobs[1:], reverse=True)
    assert all(map(math.isfinite, found.logprobs))
    assert found.rank >= 1
    if found.rank <= number:
        assert found.logprobs[found.rank] == found.logprobs[0]


def _check_same_logprobs(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    """Equal but for rounding."""
    assert [(list(each.token_ids), each.rank) for each in found] == [
        (list(each.token_ids), each.rank) for each in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-4), one.logprobs, other.logprobs))


@attrs.define(eq=False)
class _Live:
    """The session's copy of a sequence."""

    new: NewSequence
    token_ids: list[int]
    is_known: bool = False
    num_computed_tokens: int = 0
    block_table: list[int] = attrs.field(factory=list[int])
    num_given_blocks: int = 0
    """So many of its blocks the executor has been told of."""


class _Session:
    """Writes plans, in the place of a scheduler: blocks from a list, sequences by hand."""

    def __init__(self, executor: Executor, block_size: int, lora_paths: Sequence[str]) -> None:
        self.executor = executor
        self._lora_paths = lora_paths
        self._num_groups = len(executor.kv_cache_groups)
        self._num_blocks = min(group.num_blocks for group in executor.kv_cache_groups)
        self.free_block_ids = list(range(self._num_blocks))
        """Of the first group; the others' ids are made of it."""
        self._block_size = block_size
        self._live: dict[int, _Live] = {}
        self._num_sequences = 0
        self._step = 0
        self._removed: list[int] = []

    def add(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        end_token_ids: Sequence[int] = (),
        shares: int | None = None,
        num_shared_blocks: int = 0,
        lora_slot: int = 0,
    ) -> int:
        """The id of a sequence that is new in the first plan that schedules it.

        With `shares` it begins behind the first blocks of another sequence.
        """
        sequence_id = self._num_sequences
        self._num_sequences += 1
        new = NewSequence(sequence_id, list(prompt), len(prompt), sampling, seed, tuple(end_token_ids), lora_slot)
        live = self._live[sequence_id] = _Live(new, list(prompt))
        if shares is not None:
            live.block_table = self._live[shares].block_table[:num_shared_blocks]
            self.skip(sequence_id, num_shared_blocks)
        return sequence_id

    def load_loras(self, numbers: Mapping[int, int]) -> None:
        """Fill slots with adapters, which are numbers of `Subject.lora_paths` and their ids."""
        for number in numbers.values():
            self.executor.add_lora(number, self._lora_paths[number])
        loads = [LoRALoad(slot, number) for slot, number in numbers.items()]
        self.run(attrs.evolve(self.plan({}), lora_loads=loads))

    def skip(self, sequence_id: int, num_blocks: int) -> None:
        """Begin a new sequence behind its first blocks, which hold what is to be in them."""
        self._live[sequence_id].num_computed_tokens = num_blocks * self._block_size

    def blocks(self, sequence_id: int) -> list[int]:
        """A sequence's blocks."""
        return self._live[sequence_id].block_table

    def copies(self, blocks: Sequence[int], slots: Sequence[int]) -> list[BlockCopy]:
        """Of blocks to or from slots of the offload store, in every group."""
        return [
            BlockCopy(group, self._id(block, group), slot)
            for block, slot in zip(blocks, slots, strict=True)
            for group in range(self._num_groups)
        ]

    def reserve(self, sequence_id: int, num_tokens: int) -> None:
        """Choose a sequence's blocks for so many tokens before a plan needs them."""
        block_table = self._live[sequence_id].block_table
        num_missing = -(-num_tokens // self._block_size) - len(block_table)
        block_table.extend(self.free_block_ids.pop(0) for _ in range(num_missing))

    def readd(self, sequence_id: int) -> None:
        """Preempt a sequence."""
        live = self._live[sequence_id]
        self.forget(sequence_id)
        new = attrs.evolve(live.new, token_ids=list(live.token_ids))
        self._live[sequence_id] = _Live(new, live.token_ids)

    def plan(
        self,
        num_tokens: Mapping[int, int | None],
        remove: Sequence[int] = (),
        drafts: Mapping[int, Sequence[int]] | None = None,
        masks: TokenMasks | None = None,
    ) -> StepPlan:
        """A step of these sequences: so many tokens of each, or, with None, all that are known, and then drafts."""
        drafts = drafts or {}
        for sequence_id in remove:
            self.forget(sequence_id)
        new = [self._live[sequence_id].new for sequence_id in num_tokens if not self._live[sequence_id].is_known]
        scheduled = [
            self._work(self._live[sequence_id], number, drafts.get(sequence_id, ()))
            for sequence_id, number in num_tokens.items()
        ]
        plan = StepPlan(self._step, scheduled, new, self._removed, masks)
        self._step += 1
        self._removed = []
        return plan

    def plan_ahead(self, plan: StepPlan) -> StepPlan:
        """The next step of the same sequences, each with the token that the plan's step will sample."""
        for work in plan.scheduled:
            live = self._live[work.sequence_id]
            work.num_computed_tokens += work.num_tokens
            work.num_tokens = 1
            live.num_computed_tokens = work.num_computed_tokens + 1
            work.new_block_ids = self._new_blocks(live, live.num_computed_tokens)
        self._step += 1
        return StepPlan(self._step - 1, plan.scheduled)

    def submit(self, plan: StepPlan) -> None:
        """Start a plan."""
        self.executor.submit(plan)

    def fetch(self) -> StepResult:
        """The result of the oldest plan."""
        return self.executor.result()

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan."""
        self.submit(plan)
        return self.fetch()

    def take_in(
        self, sequence_ids: Sequence[int], result: StepResult, drafts: Mapping[int, Sequence[int]] | None = None
    ) -> list[list[int]]:
        """Append a step's tokens to the session's copies: what is new of each sequence."""
        new: list[list[int]] = []
        for index, (sequence_id, token) in enumerate(zip(sequence_ids, result.tokens, strict=True)):
            num_accepted = result.num_accepted.get(index, 0)
            tokens = [] if token == NO_TOKEN else [*(drafts or {}).get(sequence_id, ())[:num_accepted], token]
            new.append(tokens)
            if tokens:
                live = self._live[sequence_id]
                live.token_ids += tokens
                live.num_computed_tokens = len(live.token_ids) - 1
        return new

    def draft(self, sequence_id: int, drafts: Sequence[int], masks: TokenMasks | None = None) -> list[int]:
        """One step of a sequence with drafts: its new tokens."""
        by_id = {sequence_id: drafts}
        result = self.run(self.plan({sequence_id: None}, drafts=by_id, masks=masks))
        return self.take_in([sequence_id], result, by_id)[0]

    def step(self, *sequence_ids: int, num_tokens: int | None = None, remove: Sequence[int] = ()) -> list[int]:
        """One step of these sequences: what it sampled for each."""
        result = self.run(self.plan(dict.fromkeys(sequence_ids, num_tokens), remove))
        self.take_in(sequence_ids, result)
        return list(result.tokens)

    def step_all(self, generated: Mapping[int, list[int]]) -> None:
        """One step of these sequences; their tokens are appended to the lists."""
        for sequence_id, token in zip(generated, self.step(*generated), strict=True):
            generated[sequence_id].append(token)

    def generate(self, sequence_id: int, num_tokens: int) -> list[int]:
        """A sequence's next tokens."""
        return [self.step(sequence_id)[0] for _ in range(num_tokens)]

    def forget(self, sequence_id: int) -> None:
        """Remove a sequence in the next plan. Its blocks are free now."""
        live = self._live.pop(sequence_id)
        if live.is_known:
            self._removed.append(sequence_id)
        shared = {block_id for other in self._live.values() for block_id in other.block_table}
        self.free_block_ids[:0] = [block_id for block_id in live.block_table if block_id not in shared]

    def _work(self, live: _Live, num_tokens: int | None, drafts: Sequence[int]) -> ScheduledSequence:
        start = live.num_computed_tokens
        end = len(live.token_ids) + len(drafts) if num_tokens is None else start + num_tokens
        new_block_ids = self._new_blocks(live, end)
        live.num_computed_tokens = end
        live.is_known = True
        return ScheduledSequence(live.new.sequence_id, start, end - start, new_block_ids, drafts)

    def _new_blocks(self, live: _Live, num_tokens: int) -> Sequence[int]:
        """Those that the executor has not been told of."""
        self.reserve(live.new.sequence_id, num_tokens)
        new_blocks = live.block_table[live.num_given_blocks :]
        live.num_given_blocks = len(live.block_table)
        return [self._id(block, group) for block in new_blocks for group in range(self._num_groups)]

    def _id(self, block: int, group: int) -> int:
        """No group's is another's."""
        return (block + group) % self._num_blocks


@contextmanager
def _session(subject: Subject) -> Generator[_Session]:
    executor = subject.make()
    try:
        yield _Session(executor, subject.block_size, subject.lora_paths)
    finally:
        executor.close()


def _generate(
    subject: Subject,
    prompt: Sequence[int],
    *,
    num_tokens: int = 6,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    end_token_ids: Sequence[int] = (),
) -> list[int]:
    """What a prompt gives alone."""
    with _session(subject) as session:
        sequence_id = session.add(prompt, sampling=sampling, seed=seed, end_token_ids=end_token_ids)
        return session.generate(sequence_id, num_tokens)


def _answer(session: _Session, prompt: Sequence[int]) -> list[int]:
    """What a prompt gives here, alone."""
    sequence_id = session.add(prompt)
    tokens = session.generate(sequence_id, 6)
    session.forget(sequence_id)
    session.step()
    return tokens


def _is_refused(call: Callable[[], object]) -> bool:
    return bool(_refusal(call))


def _refusal(call: Callable[[], object]) -> str:
    """The error's message; empty where there is none."""
    try:
        call()
    except RequestError as error:
        return error.message
    return ""
