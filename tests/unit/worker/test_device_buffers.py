"""A step's block: where its parts are, what stands in them, what pads them; results; staging memory."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from trioengine_kernels.native.sampler import SampledStatus, SamplingArrays  # noqa: E402
from trioengine_kernels.paged_attention.work import WORK_FIELDS  # noqa: E402
from trioengine_kernels.sampling import MIN_LOGPROB, Logprobs  # noqa: E402

from trioengine.core.executor import KVCacheGroup  # noqa: E402
from trioengine.testing.fake_device import FakeDevice  # noqa: E402
from trioengine.testing.tiny_model import tiny_config  # noqa: E402
from trioengine.worker.backend import LaunchBatch  # noqa: E402
from trioengine.worker.device.buffers import (  # noqa: E402
    NUM_STAGING_BLOCKS,
    DeviceState,
    StagingRing,
    StepFacts,
    StepLayout,
    StepShape,
)
from trioengine.worker.device.device import DeviceMemory  # noqa: E402
from trioengine.worker.device.graphs import DecodeGraphs  # noqa: E402
from trioengine.worker.device.results import ResultShape, pack_results  # noqa: E402
from trioengine.worker.device.sampling import SamplingPlanner, SamplingShape, StepSampling  # noqa: E402

BLOCK_SIZE = 4
NO_ROW = 6
VOCAB_SIZE = 70
FACTS = StepFacts(
    model=tiny_config(VOCAB_SIZE),
    groups=[KVCacheGroup(20), KVCacheGroup(9, window=6)],
    block_size=BLOCK_SIZE,
    max_model_len=30,
    max_num_seqs=NO_ROW,
    has_loras=True,
    is_deterministic=False,
)


def int32(values: Sequence[int]) -> Any:
    return np.array(values, np.int32)


def batch_of(lens: Sequence[tuple[int, int]], updates: Sequence[tuple[int, int, int, int]] = ()) -> LaunchBatch:
    """Of sequences that have so many tokens before the step and so many in it, the rows from the last on."""
    num_new = [new for _, new in lens]
    starts = np.append(0, np.cumsum(num_new)).astype(np.int32)
    num_seqs = len(lens)
    return LaunchBatch(
        token_ids=np.arange(starts[-1], dtype=np.int32) + 3,
        positions=int32([old + place for old, new in lens for place in range(new)]),
        query_start=starts,
        seq_lens=int32([old + new for old, new in lens]),
        logit_rows=starts[1:] - 1,
        lora_slots=int32([1 + row % 2 for row, new in enumerate(num_new) for _ in range(new)]),
        rows=int32([NO_ROW - 1 - number for number in range(num_seqs)]),
        block_updates=int32(updates).reshape(-1, 4),
        logit_owners=int32(range(num_seqs)),
        sampled_rows=int32([-1 if number == 1 else NO_ROW - 1 - number for number in range(num_seqs)]),
    )


def sampling_of(num_rows: int) -> StepSampling:
    arrays = SamplingArrays(
        temperature=np.full(num_rows, 0.5, np.float32),
        top_k=np.full(num_rows, 3, np.int32),
        top_p=np.full(num_rows, 0.9, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seed=np.full(num_rows, 2**64 - 1, np.uint64),
        position=np.full(num_rows, 2**40, np.int64),
    )
    return SamplingPlanner(NO_ROW, VOCAB_SIZE).plan(arrays, np.zeros(num_rows, np.int32))


def fill(layout: StepLayout, batch: LaunchBatch) -> tuple[Any, int]:
    """A block of 7s, filled, as tensors; and how much of it is in use."""
    staging = torch.full((layout.num_words,), 7, dtype=torch.int32)
    work = FACTS.plan_work(batch.query_start, batch.seq_lens)
    num_words = layout.fill(staging, batch, work, sampling_of(len(batch.logit_rows)))
    return layout.tensors(staging), num_words


SHAPES = st.builds(
    StepShape,
    num_tokens=st.integers(0, 9),
    num_seqs=st.integers(0, 9),
    num_logit_rows=st.integers(1, 9),
    num_hidden_rows=st.integers(0, 9),
    num_updates=st.integers(0, 9),
    num_work=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    sampling=st.builds(SamplingShape, num_rows=st.integers(0, 9), num_bias_ids=st.integers(0, 9)),
)


@given(shape=SHAPES)
def test_parts_lie_one_behind_the_other_at_multiples_of_16_bytes(shape: StepShape) -> None:
    """And what is written into one is read there, and nowhere else."""
    layout = StepLayout(shape, FACTS)
    staging = torch.zeros(layout.num_words, dtype=torch.int32)
    arrays, tensors = layout.arrays(staging), layout.tensors(staging)
    names = [field.name for field in attrs.fields(type(arrays)) if field.name != "work"]
    parts = [*(getattr(arrays, name) for name in names), *arrays.work]
    views = [*(getattr(tensors, name) for name in names), *tensors.work]
    for number, part in enumerate(parts, 1):
        assert (part.ctypes.data - staging.data_ptr()) % 16 == 0
        part[...] = number
    for number, (part, view) in enumerate(zip(parts, views, strict=True), 1):
        assert view.shape == part.shape
        assert (view == number).all()
        assert view.element_size() == part.itemsize
    assert StepLayout(shape, FACTS).num_words == layout.num_words


def test_a_step_is_written_with_padding() -> None:
    """Padded tokens are nobody's, in nobody's row and block; padded sequences have no queries."""
    batch = batch_of([(4, 1), (7, 1)], [(0, 5, 1, 19), (1, 5, 1, 8), (1, 4, 0, -1)])
    inputs, num_words = fill(StepLayout(FACTS.decode_shape(4), FACTS), batch)
    assert inputs.token_ids.tolist() == [3, 4, 0, 0]
    assert inputs.token_rows.tolist() == [5, 4, NO_ROW, NO_ROW]
    assert inputs.positions.tolist() == [4, 7, 0, 0]
    assert inputs.lora_slots.tolist() == [1, 2, 0, 0]
    assert inputs.query_start.tolist() == [0, 1, 2, 2, 2]
    assert inputs.seq_lens.tolist() == [5, 8, 0, 0]
    assert inputs.rows.tolist() == [5, 4, NO_ROW, NO_ROW]
    assert inputs.logit_rows.tolist() == [0, 1, 0, 0]
    assert inputs.sampled_rows.tolist() == [5, NO_ROW, NO_ROW, NO_ROW]
    work = FACTS.plan_work(batch.query_start, batch.seq_lens)
    assert inputs.num_work[:, 0].tolist() == [len(part) for part in work]
    for found, expected in zip(inputs.work, work, strict=True):
        assert (found[: len(expected)].numpy() == expected).all()
    # What is behind the last item is not copied.
    unused = len(inputs.work[-1]) - len(work[-1])
    assert StepLayout(FACTS.decode_shape(4), FACTS).num_words - num_words == unused * WORK_FIELDS > 0

    state = DeviceState(FACTS, torch.device("cpu"))
    assert (state.block_table[0] == 20).all()
    assert (state.block_table[1] == 9).all()
    before = state.block_table.clone()
    state.update(inputs)
    changed = (state.block_table != before).nonzero().tolist()
    assert changed == [[0, 5, 1], [1, 5, 1]]
    assert state.block_table[:, 5, 1].tolist() == [19, 8]


def test_a_step_without_sequences_is_all_padding() -> None:
    """As graphs are recorded with."""
    batch = batch_of([])
    inputs, _ = fill(StepLayout(FACTS.decode_shape(2), FACTS), batch)
    assert inputs.query_start.tolist() == [0, 0, 0]
    assert inputs.num_work[:, 0].tolist() == [0, 0]
    assert inputs.token_rows.tolist() == [NO_ROW, NO_ROW]
    assert inputs.sampled_rows.tolist() == [NO_ROW, NO_ROW]


@pytest.mark.parametrize("update", [(0, 5, 1, 20), (1, 5, 1, 9), (0, 5, 8, 1)])
def test_wrong_blocks_are_a_bug(update: tuple[int, int, int, int]) -> None:
    """They would overwrite what is another's."""
    batch = batch_of([(4, 1)], [update])
    layout = StepLayout(FACTS.decode_shape(1), FACTS)
    with pytest.raises(AssertionError):
        fill(layout, batch)


@given(
    lens=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=6),
    num_updates=st.integers(0, 5),
)
def test_the_smallest_shape_has_no_padding(lens: list[tuple[int, int]], num_updates: int) -> None:
    batch = batch_of(lens, [(0, 0, place, place) for place in range(num_updates)])
    work = FACTS.plan_work(batch.query_start, batch.seq_lens)
    shape = StepShape.of(batch, work, sampling_of(len(lens)))
    layout = StepLayout(shape, FACTS)
    inputs, num_words = fill(layout, batch)
    assert num_words == layout.num_words
    assert inputs.token_ids.tolist() == batch.token_ids.tolist()
    assert inputs.update_ids.tolist() == list(range(num_updates))
    assert [part.shape[0] for part in inputs.work] == [len(part) for part in work]


@given(num_seqs=st.integers(1, NO_ROW), lens=st.lists(st.integers(0, 29), min_size=NO_ROW, max_size=NO_ROW))
def test_decodes_fit_into_their_shape(num_seqs: int, lens: list[int]) -> None:
    """However long they are, and if each gets a new block of each group."""
    updates = [(group, row, 0, 0) for row in range(num_seqs) for group in (0, 1)]
    batch = batch_of([(old, 1) for old in lens[:num_seqs]], updates)
    work = FACTS.plan_work(batch.query_start, batch.seq_lens)
    exact, room = StepShape.of(batch, work, sampling_of(num_seqs)), FACTS.decode_shape(num_seqs)
    assert attrs.evolve(exact, num_work=room.num_work) == room
    assert all(few <= many for few, many in zip(exact.num_work, room.num_work, strict=True))


# Staging memory


def test_blocks_are_used_in_turn() -> None:
    device = FakeDevice()
    ring = StagingRing(device)
    addresses: list[int] = []
    for _ in range(2 * NUM_STAGING_BLOCKS):
        addresses.append(ring.take(8).data_ptr())
        copy = device.launch(lambda: torch.zeros(1))
        ring.launched(copy)
        device.wait(copy)
    assert len({*addresses[:NUM_STAGING_BLOCKS]}) == NUM_STAGING_BLOCKS
    assert addresses[NUM_STAGING_BLOCKS:] == addresses[:NUM_STAGING_BLOCKS]
    assert device.num_synchronizations == 2 * NUM_STAGING_BLOCKS


def test_a_block_that_is_still_read_is_waited_for() -> None:
    device = FakeDevice()
    ring = StagingRing(device)
    for _ in range(NUM_STAGING_BLOCKS):
        ring.take(8)
        ring.launched(device.launch(lambda: torch.zeros(1)))
    assert device.num_synchronizations == 0
    ring.take(8)
    assert device.num_synchronizations == 1
    assert device.num_queued == NUM_STAGING_BLOCKS - 1


def test_blocks_grow() -> None:
    ring = StagingRing(FakeDevice())
    assert len(ring.take(3)) >= 3
    memory = ring.take(1000)
    assert len(memory) >= 1000
    assert ring.take(500).data_ptr() == memory.data_ptr()


# Results


def test_results_are_taken_apart() -> None:
    """What a row did not want, or a row that is no number, has no log probabilities."""
    generator = torch.Generator().manual_seed(0)
    tokens, status = torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.uint8)
    top = torch.randn(3, 2, generator=generator)
    top_ids = torch.arange(6).view(3, 2)
    logprobs = Logprobs(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1, 2, 3]), top, top_ids)
    hidden = torch.randn(2, 4, generator=generator)
    shape = ResultShape(3, np.array([1, 2, 2], np.int32), 2, 4)
    numbers = shape.unpack(pack_results(tokens, status, logprobs, hidden).numpy())
    assert numbers.sampled is not None
    assert numbers.sampled.token_ids.tolist() == [5, 6, 7]
    assert numbers.sampled.status.tolist() == [
        SampledStatus.SAMPLED,
        SampledStatus.IS_NAN,
        SampledStatus.NOTHING_ALLOWED,
    ]
    found = numbers.sampled.logprobs
    assert found is not None
    assert found.chosen.tolist() == [-1.0, MIN_LOGPROB, -3.0]
    assert found.rank.tolist() == [1, 0, 3]
    assert found.top_token_ids.tolist() == [[0, -1], [-1, -1], [4, 5]]
    assert found.top[0].tolist() == [top[0, 0].item(), MIN_LOGPROB]
    assert numbers.hidden_states is not None
    assert (numbers.hidden_states == hidden.numpy()).all()
    plain = ResultShape(3, None, 0, 4).unpack(pack_results(tokens, status, None, None).numpy())
    assert plain.sampled is not None
    assert plain.sampled.logprobs is None
    assert plain.hidden_states is None
    assert ResultShape(0, None, 2, 4).unpack(pack_results(None, None, None, hidden).numpy()).sampled is None


# Graphs, and the device that is always late


def test_sizes_of_graphs() -> None:
    """Recorded the largest first, each beside others' memory; a step takes the smallest that it fits into."""
    device, recorded = FakeDevice(), []

    def work_of(size: int):
        recorded.append(size)
        return lambda: torch.zeros(size)

    graphs = DecodeGraphs(device, [8, 1, 4, 4])
    assert graphs.size_for(1) is None
    graphs.record(work_of)
    assert recorded == [8, 4, 1]
    assert [graphs.size_for(number) for number in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]
    assert len({id(graphs.graph(size)) for size in (1, 4, 8)}) == 3
    graphs.drop()
    assert graphs.size_for(1) is None
    with pytest.raises(KeyError):
        graphs.graph(4)


def test_work_is_done_when_it_is_waited_for_in_its_order() -> None:
    device, done = FakeDevice(DeviceMemory(5, 10, 2)), []
    device.run(lambda: done.append(0))
    staging, target = device.staging(1), torch.zeros(1, dtype=torch.int32)

    def read() -> Any:
        device.copy_to_device(target, staging)
        return target

    staging[0] = 3
    first, second = device.launch(read), device.launch(lambda: target + 1)
    assert (first.is_done, first.host, done) == (False, None, [])
    staging[0] = 4
    assert device.wait(first).tolist() == [4]
    assert (first.is_done, second.is_done, done, device.num_queued) == (True, False, [0], 1)
    assert device.wait(first).tolist() == [4]
    assert device.num_synchronizations == 1
    device.synchronize()
    assert device.num_queued == 0
    assert device.wait(second).tolist() == [5]
    assert device.num_synchronizations == 3
    assert device.num_copies_to_device == 1
    assert device.memory().free_bytes == 5


def test_only_staging_memory_is_copied_and_never_into_a_graph() -> None:
    """From other memory the host would wait; a graph would read what stands there later."""
    device, target = FakeDevice(), torch.zeros(2, dtype=torch.int32)
    staging = device.staging(4)
    staging[:] = 7
    device.copy_to_device(target, staging[1:3])
    assert target.tolist() == [7, 7]
    with pytest.raises(AssertionError, match="no staging memory"):
        device.copy_to_device(target, torch.ones(2, dtype=torch.int32))
    for work in (lambda: device.copy_to_device(target, staging[:2]), lambda: device.staging(1)):
        with pytest.raises(AssertionError, match="while a graph is recorded"):
            device.capture(work)
    device.copy_to_device(target, device.staging(2))
    assert target.tolist() == [0, 0]


def test_a_graph_is_its_work_again() -> None:
    """With what is in its memory then, and only in memory that it had."""
    device = FakeDevice()
    numbers, other = torch.arange(3.0), torch.zeros(3)
    used = [numbers]

    def work() -> None:
        used[0] += torch.ones(3).cumsum(0)

    graph = device.capture(work)
    assert numbers.tolist() == [1, 3, 5]
    numbers.zero_()
    graph.replay()
    assert numbers.tolist() == [1, 2, 3]
    used[0] = other
    with pytest.raises(AssertionError, match="not where they were"):
        graph.replay()
    assert device.num_replays == 2
