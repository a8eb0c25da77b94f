"""The KV cache takes the memory that the configuration is told, and no layer reads blocks behind its window."""

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool  # noqa: E402
from trioengine_kernels.native.program import KVCache  # noqa: E402

from trioengine.core.executor import KVCacheGroup, NewSequence, ScheduledSequence, StepPlan  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import native_copy, random_model, tiny_config  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker.backend import Backend  # noqa: E402
from trioengine.worker.kv_cache import TorchKVCache  # noqa: E402
from trioengine.worker.loading import Computer  # noqa: E402
from trioengine.worker.model_runner import ModelRunner  # noqa: E402
from trioengine.worker.native_backend import NativeBackend  # noqa: E402
from trioengine.worker.torch_backend import TorchBackend  # noqa: E402

BLOCK_SIZE = 16
WINDOWS = (None, 20, 70)
WINDOWED = random_model(attrs.evolve(tiny_config(), num_layers=4, layer_windows=(*WINDOWS, 20)))
MAX_LEN = 160
NUM_BLOCKS = [10, 11, 12]
HALF_NAN = 0x7E00


def test_the_size_per_token_is_what_torchs_cache_takes() -> None:
    config = tiny_config()
    cache = TorchKVCache(
        num_blocks=6,
        block_size=4,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    (group,) = Computer(None).shape(config).kv_groups
    assert cache.data.nbytes == 6 * 4 * group.bytes_per_token
    assert cache.block(5).nbytes == 4 * group.bytes_per_token


@pytest.mark.parametrize("head_dim", [8, 64, 80, 100])
def test_the_size_per_token_is_what_the_native_cache_takes(head_dim: int) -> None:
    """Padding of values included."""
    config = attrs.evolve(tiny_config(), head_dim=head_dim)
    cache = KVCache(
        num_blocks=6,
        block_size=32,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    (group,) = Computer(native_library()).shape(config).kv_groups
    assert cache.data.nbytes == 6 * 32 * group.bytes_per_token
    assert cache.block(5).nbytes == 32 * group.bytes_per_token


def test_each_group_takes_its_layers_memory() -> None:
    for computer in (Computer(None), Computer(native_library())):
        groups = computer.shape(WINDOWED.config).kv_groups
        assert [group.window for group in groups] == [*WINDOWS]
        assert [group.bytes_per_token // groups[0].bytes_per_token for group in groups] == [1, 2, 1]


def torch_backend() -> Backend:
    return TorchBackend(WINDOWED, reload=lambda _: WINDOWED, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def native_backend() -> Backend:
    library = native_library()
    return NativeBackend(
        native_copy(WINDOWED),
        library,
        ThreadPool(library, 2),
        reload=lambda _: native_copy(WINDOWED),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_tokens=256,
        max_logit_rows=4,
    )


MAKE_BACKEND = {"torch": torch_backend, "native": native_backend}


class Poisoner:
    """One sequence whose blocks are poisoned when they are behind the window of their group."""

    def __init__(self, backend: Backend, token_ids: Sequence[int], poisons: bool) -> None:
        self.backend, self.token_ids, self.poisons = backend, list(token_ids), poisons
        self.runner = ModelRunner(backend)
        self.num_prompt_tokens = len(token_ids)
        self.num_given = 0
        self.step = 0
        self.done = 0
        rng = np.random.default_rng(4)
        self.tables = [rng.permutation(number).tolist() for number in NUM_BLOCKS]
        for group, table in enumerate(self.tables):
            for block_id in table:
                self.poison(group, block_id)

    def poison(self, group: int, block_id: int) -> None:
        block = self.backend.kv_block(group, block_id)
        block[...] = HALF_NAN if block.dtype == np.uint16 else np.nan

    def leave(self) -> None:
        """Give blocks behind the windows to somebody who fills them with anything."""
        for group, window in enumerate(WINDOWS):
            if window is not None and self.poisons:
                for column in range(max(0, self.done - window + 1) // BLOCK_SIZE):
                    if self.tables[group][column] >= 0:
                        self.poison(group, self.tables[group][column])
                    if column >= self.num_given:
                        self.tables[group][column] = -1

    def compute(self, count: int, is_new: bool) -> None:
        """The next tokens; the last known one samples another."""
        self.leave()
        end = self.done + count
        num_blocks = -(-end // BLOCK_SIZE)
        blocks = [table[column] for column in range(self.num_given, num_blocks) for table in self.tables]
        work = ScheduledSequence(self.step if is_new else self.sequence_id, self.done, count, blocks)
        new, removed = [], []
        if is_new:
            removed = [self.sequence_id] if self.step else []
            self.sequence_id = self.step
            new = [NewSequence(self.step, list(self.token_ids), self.num_prompt_tokens, GREEDY, seed=0)]
        result = self.runner.run(StepPlan(self.step, [work], new, removed))
        assert not result.failures
        if end == len(self.token_ids):
            self.token_ids.append(result.tokens[0])
        self.num_given, self.done = num_blocks, end
        self.step += 1


GREEDY = SamplingParams(temperature=0, max_tokens=None)
PROMPT = [(place * 29 + place * place * 5 + 3) % WINDOWED.config.vocab_size for place in range(100)]


def whole_answer(make_backend: Callable[[], Backend]) -> list[int]:
    sequence = Poisoner(make_backend(), PROMPT, poisons=False)
    sequence.compute(len(PROMPT), is_new=True)
    while len(sequence.token_ids) < MAX_LEN:
        sequence.compute(1, is_new=False)
    return sequence.token_ids


ANSWERS: dict[str, list[int]] = {}


@pytest.mark.parametrize("name", MAKE_BACKEND)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_blocks_behind_the_window_are_not_read(name: str, data: st.DataObject) -> None:
    """NaN in them changes no token, however the prompt is cut; nor does it matter that the block table has none of them
    when a sequence begins behind them, with what others have computed."""
    if name not in ANSWERS:
        ANSWERS[name] = whole_answer(MAKE_BACKEND[name])
    sequence = Poisoner(MAKE_BACKEND[name](), PROMPT, poisons=True)
    while len(sequence.token_ids) < MAX_LEN:
        missing = len(sequence.token_ids) - sequence.done
        count = min(missing, data.draw(st.sampled_from([100, 50, 17, 16, 1])))
        is_new = sequence.done == 0
        if not is_new and sequence.done % BLOCK_SIZE == 0 and data.draw(st.booleans()):
            is_new = True
            sequence.num_given = 0
        sequence.compute(count, is_new)
    assert sequence.token_ids == ANSWERS[name]


def test_a_block_inside_the_window_is_read() -> None:
    """The test above would notice."""
    for make_backend in MAKE_BACKEND.values():
        for group, window in enumerate(WINDOWS):
            sequence = Poisoner(make_backend(), PROMPT, poisons=True)
            sequence.compute(99, is_new=True)
            first_seen = 0 if window is None else (99 - window + 1) // BLOCK_SIZE
            sequence.poison(group, sequence.tables[group][first_seen])
            with pytest.raises(AssertionError):
                sequence.compute(1, is_new=False)


def test_groups_say_their_windows() -> None:
    for make_backend in MAKE_BACKEND.values():
        assert list(make_backend().kv_cache_groups) == [
            KVCacheGroup(number, window) for number, window in zip(NUM_BLOCKS, WINDOWS, strict=True)
        ]
