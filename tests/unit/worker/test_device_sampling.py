"""The sampling of a step on a device: the tokens of the CPU's samplers, from one block, for any mix of rules."""

import itertools
from types import SimpleNamespace

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trioengine_kernels.native.sampler import (  # noqa: E402
    ChangedLogits,
    LogitBias,
    Masks,
    Penalties,
    RaggedIds,
    SamplingArrays,
)
from trioengine_kernels.sampling import device_reference  # noqa: E402
from trioengine_kernels.sampling import triton as triton_sampling  # noqa: E402
from trioengine_kernels.sampling.device import change_rows, empty_state  # noqa: E402

from trioengine.worker.device.sampling import (  # noqa: E402
    SamplingPlanner,
    SamplingShape,
    StepSampling,
    read_sampling,
    sample_logits,
    sampling_layout,
    start_rows,
    write_sampling,
)
from trioengine.worker.sampler import sample_rows  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

KERNELS = {"reference": device_reference, "triton": triton_sampling}
VOCAB_SIZE = 300
NUM_STATE_ROWS = 8


def ragged(rows):
    ids = np.array([token_id for row in rows for token_id in row], np.int32)
    return RaggedIds(np.cumsum([0, *map(len, rows)], dtype=np.int64), ids)


def random_arrays(rng, num_rows, **rules):
    return SamplingArrays(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5], num_rows).astype(np.float32),
        top_k=rng.choice([0, -1, 1, 5, 50, 2**31 - 1], num_rows).astype(np.int32),
        top_p=rng.choice([1.0, 0.5, 0.95], num_rows).astype(np.float32),
        min_p=rng.choice([0.0, 0.0, 0.1], num_rows).astype(np.float32),
        seed=rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        position=rng.integers(0, 2**33, num_rows),
        **rules,
    )


def random_rules(rng, num_rows, logits):
    """Every kind of rule, each in some of the rows, about likely tokens."""

    def some(share, num):
        best = np.argsort(-logits, -1)[:, :30]
        return [rng.permutation(best[row])[:num].tolist() if rng.random() < share else [] for row in range(num_rows)]

    biased, seen = some(0.4, 6), some(0.5, 12)
    lengths = np.array([len(row) for row in seen])
    return {
        "changed": None,
        "masks": Masks(
            rng.integers(-1, 3, num_rows).astype(np.int32), rng.integers(-(2**31), 2**31, (3, 11), dtype=np.int32)
        ),
        "logit_bias": LogitBias(ragged(biased), (rng.standard_normal(sum(map(len, biased))) * 5).astype(np.float32)),
        "penalties": Penalties(
            seen=ragged(seen),
            num_prompt_tokens=rng.integers(0, lengths + 1),
            repetition=rng.uniform(0.5, 2, num_rows).astype(np.float32),
            presence=rng.uniform(-2, 2, num_rows).astype(np.float32),
            frequency=rng.uniform(-2, 2, num_rows).astype(np.float32),
        ),
        "forbidden": ragged(some(0.4, 9)),
        "allowed": ragged(some(0.4, 20)),
        "forced": np.where(rng.random(num_rows) < 0.2, rng.integers(0, VOCAB_SIZE, num_rows), -1).astype(np.int32),
    }


class FakeDevice:
    """The state of a device, and steps on it."""

    def __init__(self, kernels, vocab_size=VOCAB_SIZE):
        self.kernels = kernels
        self.planner = SamplingPlanner(NUM_STATE_ROWS, vocab_size)
        self.state = empty_state(NUM_STATE_ROWS, vocab_size, "cpu")
        self.last_tokens = torch.full((NUM_STATE_ROWS + 1,), 7, dtype=torch.int32)

    def sample(self, logits, arrays, rows, shape=None):
        return self.run(logits, self.planner.plan(arrays, np.array(rows)), shape)

    def run(self, logits, step, shape=None):
        """The tokens and status of a step, from a block of a shape."""
        layout = sampling_layout(shape or step.shape)
        block = np.full(layout.num_words, 77, np.int32)
        write_sampling(step, layout, block)
        bits = torch.from_numpy(step.bits)
        if len(step.started_rows):
            start_rows(self.state, torch.from_numpy(step.started_rows), bits[step.num_masks :])
        masks = bits[: step.num_masks] if step.num_masks else None
        sampling = read_sampling(torch.from_numpy(block), layout, self.state, masks)
        num_rows = len(step.mask_rows)
        padded = torch.full((layout.shape.num_rows, logits.shape[1]), torch.nan)
        padded[:num_rows] = torch.from_numpy(logits)
        if (changed := step.arrays.changed) is not None:
            where = np.flatnonzero(changed.rows >= 0)
            padded = change_rows(padded, torch.from_numpy(where), torch.from_numpy(changed.logits[changed.rows[where]]))
        before = padded.clone()
        found = sample_logits(
            self.kernels,
            padded,
            sampling,
            self.last_tokens,
            has_rules=step.has_rules,
            has_forced=step.has_forced,
            is_kept=True,
        )
        assert torch.equal(padded.nan_to_num(), before.nan_to_num())
        return found.tokens[:num_rows].tolist(), found.status[:num_rows].tolist()


@pytest.mark.parametrize("kind", ["finite", "infinite"])
@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_rules_in_the_devices_order_give_the_tokens_of_the_cpus(kernels, kind: str) -> None:
    """Masks forbid first what the CPU forbids last, also where logits are infinite or no numbers."""
    for seed in range(2 if kernels is triton_sampling else 20):
        rng = np.random.default_rng(seed)
        num_rows = NUM_STATE_ROWS
        logits = (rng.standard_normal((num_rows, VOCAB_SIZE)) * 3).astype(np.float32)
        rules = random_rules(rng, num_rows, logits)
        if kind == "infinite":
            logits[0, rng.integers(0, VOCAB_SIZE, 3)] = np.nan
            logits[1, rng.integers(0, VOCAB_SIZE, 90)] = np.inf
            logits[2, rng.integers(0, VOCAB_SIZE, 200)] = -np.inf
            logits[3] = -np.inf
            logits[4, rules["forbidden"].token_ids[:3]] = np.nan
        arrays = random_arrays(rng, num_rows, **rules)
        expected = sample_rows(torch.from_numpy(logits), arrays)
        tokens, status = FakeDevice(kernels).sample(logits, arrays, range(num_rows))
        assert status == expected.status.tolist()
        # A row that is wrong has no token that means anything.
        right = expected.status == 0
        assert np.array(tokens)[right].tolist() == expected.token_ids[right].tolist()
        assert right.sum() >= (3 if kind == "infinite" else 5)


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_changed_logits_are_sampled_after_the_rules(kernels) -> None:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((6, VOCAB_SIZE)) * 3).astype(np.float32)
    logits[4, 2] = np.nan
    changed = ChangedLogits(np.array([-1, 1, -1, -1, 0, -1], np.int32), logits[[1, 0]].copy())
    rules = attrs.evolve(random_arrays(rng, 6, **random_rules(rng, 6, logits)), changed=changed, forced=None)
    expected = sample_rows(torch.from_numpy(logits), rules)
    tokens, status = FakeDevice(kernels).sample(logits, rules, range(6))
    assert status == expected.status.tolist()
    assert status[4] == 1
    assert [tokens[row] for row in (0, 1, 2, 3, 5)] == [expected.token_ids[row] for row in (0, 1, 2, 3, 5)]


def test_steps_without_rules_need_no_bits() -> None:
    rng = np.random.default_rng(4)
    arrays = random_arrays(rng, 5)
    step = SamplingPlanner(NUM_STATE_ROWS, VOCAB_SIZE).plan(arrays, np.arange(5))
    assert (step.has_rules, step.has_forced, len(step.bits)) == (False, False, 0)
    assert step.shape == SamplingShape(5)


def test_padded_rows_have_no_rules_and_change_nothing() -> None:
    """A block with room for more, whose padded rows have logits that are no numbers."""
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((4, VOCAB_SIZE)) * 3).astype(np.float32)
    arrays = random_arrays(rng, 4, **random_rules(rng, 4, logits))
    device = FakeDevice(device_reference)
    exact = device.sample(logits, arrays, range(4))
    counts = device.state.output_counts[:-1].clone()
    device = FakeDevice(device_reference)
    assert device.sample(logits, arrays, range(4), SamplingShape(7, 40, 9, 60)) == exact
    assert torch.equal(device.state.output_counts[:-1], counts)
    assert counts.any()


def test_parts_of_a_block_are_aligned_and_where_the_shape_says() -> None:
    layout = sampling_layout(SamplingShape(5, 3, 2, 7))
    assert all(part.start % 4 == 0 for part in layout.parts.values())
    ends = sorted((part.start, part.stop) for part in layout.parts.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert ends[-1][1] <= layout.num_words
    assert layout == sampling_layout(SamplingShape(5, 3, 2, 7))
    assert layout.shape.has_room_for(SamplingShape(4, 3))
    assert not layout.shape.has_room_for(SamplingShape(4, 4))


def penalized(seen, num_prompt_tokens):
    num_rows = len(seen)
    return Penalties(
        seen=ragged(seen),
        num_prompt_tokens=np.minimum(num_prompt_tokens, [len(row) for row in seen]).astype(np.int64),
        repetition=np.full(num_rows, 1.4, np.float32),
        presence=np.full(num_rows, 0.6, np.float32),
        frequency=np.full(num_rows, 0.3, np.float32),
    )


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_penalties_of_steps_whose_newest_token_only_the_device_knows(kernels) -> None:
    """Two sequences, four steps: each step is told -1 in place of the token that was sampled last, and gives the
    tokens that it gives with all tokens told."""
    rng = np.random.default_rng(6)
    device = FakeDevice(kernels)
    rows, prompts = [5, 2], [[1, 2, 3, 2], [9, 8]]
    known = [list(prompt) for prompt in prompts]
    for number in range(4):
        logits = (rng.standard_normal((2, VOCAB_SIZE)) * 0.4).astype(np.float32)
        logits[:, :12] += 3
        arrays = random_arrays(rng, 2)
        told = [[*tokens[:-1], -1] if number else tokens for tokens in known]
        expected = sample_rows(torch.from_numpy(logits), attrs.evolve(arrays, penalties=penalized(known, [4, 2])))
        tokens, _ = device.sample(logits, attrs.evolve(arrays, penalties=penalized(told, [4, 2])), rows)
        assert tokens == expected.token_ids.tolist()
        device.last_tokens[rows] = torch.tensor(tokens, dtype=torch.int32)
        for row in range(2):
            known[row].append(tokens[row])
    assert device.state.output_counts[5].sum() == 3
    assert not device.state.output_counts[0].any()


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_drafts_count_for_the_rows_behind_them_and_stay_when_they_are_accepted(kernels) -> None:
    """A step with two drafts, of which one is accepted; then a step behind it; beside it a sequence without."""
    rng = np.random.default_rng(7)
    device = FakeDevice(kernels)
    for seen, rows in (
        ([[1, 2], [1, 2, 3], [1, 2, 3, 3], [4, 4]], [3, 3, 3, 0]),
        ([[1, 2, 3, 5], [4, 4, 4]], [3, 0]),
        ([[1, 2, 3, 5, 5], [1, 2, 3, 5, 5, 1], [4, 4, 4, 6]], [3, 3, 0]),
    ):
        logits = (rng.standard_normal((len(seen), VOCAB_SIZE)) * 0.1).astype(np.float32)
        logits[:, :8] += 3
        arrays = random_arrays(rng, len(seen), penalties=penalized(seen, 2))
        expected = sample_rows(torch.from_numpy(logits), arrays)
        assert device.sample(logits, arrays, rows)[0] == expected.token_ids.tolist()


def test_a_row_that_is_forgotten_is_started_again() -> None:
    """For another sequence, or for one that is computed again with its output."""
    rng = np.random.default_rng(8)
    device = FakeDevice(device_reference)
    logits = np.zeros((1, VOCAB_SIZE), np.float32)
    device.sample(logits, random_arrays(rng, 1, penalties=penalized([[1, 2, 3, 3]], 2)), [4])
    device.planner.forget([4])
    step = device.planner.plan(random_arrays(rng, 1, penalties=penalized([[5, 6, 6]], 1)), np.array([4]))
    assert isinstance(step, StepSampling)
    assert (step.started_rows.tolist(), step.counted_rows.tolist(), step.counted_ids.tolist()) == ([4], [4, 4], [6, 6])
    device.run(logits, step)
    assert device.state.output_counts[4].nonzero().flatten().tolist() == [6]
    assert device.state.prompt_bits[4, 0] == 1 << 5
    again = device.planner.plan(random_arrays(rng, 1, penalties=penalized([[5, 6, 6, 2]], 1)), np.array([4]))
    assert (again.started_rows.tolist(), again.counted_ids.tolist(), len(again.bits)) == ([], [2], 0)


def test_a_sequence_that_lost_tokens_is_noticed() -> None:
    planner, rng = SamplingPlanner(NUM_STATE_ROWS, VOCAB_SIZE), np.random.default_rng(9)
    planner.plan(random_arrays(rng, 1, penalties=penalized([[1, 2, 3, 3]], 2)), np.array([4]))
    with pytest.raises(AssertionError, match="lost tokens"):
        planner.plan(random_arrays(rng, 1, penalties=penalized([[1, 2, 3]], 2)), np.array([4]))


def test_logits_that_nobody_wants_are_overwritten_and_others_are_not() -> None:
    calls = []

    def apply_rules(logits, rules, *, out=None):
        calls.append(out is logits)
        return logits

    kernels = SimpleNamespace(apply_rules=apply_rules, sample=device_reference.sample)
    rng = np.random.default_rng(10)
    arrays = random_arrays(rng, 1, penalties=penalized([[1]], 1))
    step = SamplingPlanner(NUM_STATE_ROWS, VOCAB_SIZE).plan(arrays, np.array([0]))
    layout = sampling_layout(step.shape)
    block = np.zeros(layout.num_words, np.int32)
    write_sampling(step, layout, block)
    sampling = read_sampling(torch.from_numpy(block), layout, empty_state(NUM_STATE_ROWS, VOCAB_SIZE, "cpu"))
    last_tokens = torch.zeros(NUM_STATE_ROWS + 1, dtype=torch.int32)
    for has_rules, is_kept in ((True, True), (True, False), (False, False)):
        options = {"has_rules": has_rules, "has_forced": False, "is_kept": is_kept}
        sample_logits(kernels, torch.zeros(1, VOCAB_SIZE), sampling, last_tokens, **options)
    assert calls == [False, True]
