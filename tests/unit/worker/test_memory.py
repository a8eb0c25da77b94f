"""Sleep gives memory back to the system; what wakes up computes the same; what cannot wake up sleeps on."""

import gc
import os
from pathlib import Path

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.config.resolve import ResolvedConfig  # noqa: E402
from trioengine.core.executor import BlockCopy, NewSequence, ScheduledSequence, StepPlan  # noqa: E402
from trioengine.errors import CheckpointError, UnavailableError  # noqa: E402
from trioengine.models.loader import open_checkpoint  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import (  # noqa: E402
    folder_tensors,
    random_model,
    tiny_config,
    tiny_model,
    write_folder,
    write_gguf,
)
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker.executor import LocalExecutor  # noqa: E402
from trioengine.worker.loading import Computer, load_executor  # noqa: E402
from trioengine.worker.memory import return_freed_memory  # noqa: E402

MIB = 1 << 20
BOTH = ("weights", "kv_cache")
CONFIG = ResolvedConfig(
    max_model_len=64,
    max_num_batched_tokens=64,
    max_num_seqs=4,
    max_num_logit_rows=4,
    block_size=16,
    num_kv_blocks=(8,),
    num_offload_blocks=0,
    cpu_threads=1,
    async_scheduling=False,
    reasons={},
)
LARGE = attrs.evolve(
    tiny_config(), hidden_size=512, intermediate_size=1536, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=64
)
"""54 MiB of float32."""


@pytest.fixture(params=["torch", "native"])
def computer(request: pytest.FixtureRequest) -> Computer:
    return Computer(None) if request.param == "torch" else Computer(native_library())


@pytest.fixture(scope="module")
def large_location(tmp_path_factory: pytest.TempPathFactory) -> ModelLocation:
    path = tmp_path_factory.mktemp("model") / "large.gguf"
    write_gguf(path, random_model(LARGE))
    return ModelLocation(ModelKind.GGUF, path, "large")


@pytest.fixture
def location(tmp_path: Path) -> ModelLocation:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model())
    return ModelLocation(ModelKind.GGUF, path, "tiny")


def generate(executor: LocalExecutor, step: int = 0, num_tokens: int = 5) -> list[int]:
    """The greedy answer to a prompt; the sequence is not known afterwards."""
    new = NewSequence(1, [5, 6, 7], 3, SamplingParams(temperature=0), seed=0)
    tokens = []
    for number in range(num_tokens):
        work = ScheduledSequence(1, 2 + number, 1) if number else ScheduledSequence(1, 0, 3, [4])
        executor.submit(StepPlan(step + number, [work], () if number else [new]))
        tokens += executor.result().tokens
    executor.submit(StepPlan(step + num_tokens, [], removed=[1]))
    executor.result()
    return tokens


def resident_bytes() -> int:
    """Memory of this process, but for pages of files."""
    gc.collect()
    return_freed_memory()
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Anonymous"].split()[0]) * 1024


def test_level_2_gives_the_weights_memory_back_and_wakes_up_with_the_same(
    large_location: ModelLocation, computer: Computer
) -> None:
    num_bytes = LARGE.num_active_parameters * 4
    executor = load_executor(open_checkpoint(large_location), CONFIG, computer)
    expected = generate(executor)
    awake = resident_bytes()
    executor.sleep(2)
    asleep = resident_bytes()
    assert awake - asleep >= 0.9 * num_bytes
    executor.wake_up(BOTH)
    assert generate(executor) == expected
    assert resident_bytes() - asleep >= 0.9 * num_bytes
    # Nothing is lost by and by.
    executor.sleep(1)
    executor.sleep(2)
    assert resident_bytes() - asleep < 0.1 * num_bytes
    executor.close()


def test_level_1_gives_the_kv_caches_memory_back(location: ModelLocation, computer: Computer) -> None:
    num_blocks = 8000
    config = attrs.evolve(CONFIG, num_kv_blocks=(num_blocks,))
    executor = load_executor(open_checkpoint(location), config, computer)
    expected = generate(executor)
    backend = executor._backend
    assert backend is not None
    for block_id in range(num_blocks):
        backend.kv_block(0, block_id)[...] = 1
    num_bytes = num_blocks * backend.kv_block(0, 0).nbytes
    awake = resident_bytes()
    assert num_bytes > 16 * MIB
    executor.sleep(1)
    assert awake - resident_bytes() >= 0.9 * num_bytes
    executor.wake_up(("kv_cache",))
    assert generate(executor) == expected
    executor.close()


def test_a_sleeping_offload_store_is_empty(location: ModelLocation, computer: Computer, tmp_path: Path) -> None:
    """A load of what it held fails, is reported, and leaves nothing of others in the block."""
    config = attrs.evolve(CONFIG, num_offload_blocks=3)
    for path in (None, str(tmp_path / "offload")):
        executor = load_executor(open_checkpoint(location), config, computer, kv_offload_path=path)
        assert executor.num_offload_blocks == 3
        backend = executor._backend
        assert backend is not None
        backend.kv_block(0, 5)[...] = 1
        copy = BlockCopy(0, 5, 2)
        executor.submit(StepPlan(0, [], saves=[copy]))
        assert not executor.result().failed_loads
        backend.kv_block(0, 5)[...] = 2
        executor.submit(StepPlan(1, [], loads=[copy]))
        assert not executor.result().failed_loads
        assert (backend.kv_block(0, 5) == 1).all()
        executor.sleep(1)
        executor.wake_up(BOTH)
        backend.kv_block(0, 5)[...] = 2
        executor.submit(StepPlan(2, [], loads=[copy]))
        assert executor.result().failed_loads == [copy]
        assert not np.any(backend.kv_block(0, 5))
        executor.close()


@pytest.mark.parametrize("change", ["gone", "other", "damaged"])
def test_a_file_that_changed_does_not_wake_up(location: ModelLocation, computer: Computer, change: str) -> None:
    """The executor sleeps on, and wakes up when the file is what it was."""
    executor = load_executor(open_checkpoint(location), CONFIG, computer)
    expected = generate(executor)
    executor.sleep(2)
    kept = location.path.with_name("kept")
    location.path.rename(kept)
    if change == "other":
        write_gguf(location.path, tiny_model(seed=1))
    elif change == "damaged":
        location.path.write_bytes(kept.read_bytes()[:-1000])
    for tags in (BOTH, ("weights",)):
        with pytest.raises(CheckpointError, match="gone or not what it was"):
            executor.wake_up(tags)
    kept.rename(location.path)
    executor.wake_up(BOTH)
    assert generate(executor) == expected
    executor.close()


def test_a_folder_wakes_up_when_its_weights_are_the_same(tmp_path: Path, computer: Computer) -> None:
    model = tiny_model()
    location = write_folder(tmp_path, model, folder_tensors(model))
    executor = load_executor(open_checkpoint(location), CONFIG, computer)
    expected = generate(executor)
    executor.sleep(2)
    (tmp_path / "README.md").write_text("What is not read may change.")
    executor.wake_up(BOTH)
    assert generate(executor) == expected
    executor.sleep(2)
    stat = (tmp_path / "config.json").stat()
    os.utime(tmp_path / "config.json", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(CheckpointError):
        executor.wake_up(BOTH)
    executor.close()


def test_too_little_memory_to_wake_up_is_said_and_can_be_tried_again(
    location: ModelLocation, computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = load_executor(open_checkpoint(location), CONFIG, computer)
    expected = generate(executor)
    executor.sleep(2)

    def no_memory(*arguments: object, **named: object) -> None:
        raise MemoryError

    module = "torch_backend.TorchKVCache" if computer.library is None else "native_backend.KVCache"
    with monkeypatch.context() as patch:
        patch.setattr(f"trioengine.worker.{module}", no_memory)
        with pytest.raises(UnavailableError, match="not enough memory"):
            executor.wake_up(BOTH)
    executor.wake_up(BOTH)
    assert generate(executor) == expected
    executor.close()


def test_what_is_awake_stays_as_it_is(location: ModelLocation, computer: Computer) -> None:
    executor = load_executor(open_checkpoint(location), CONFIG, computer)
    backend = executor._backend
    assert backend is not None
    backend.kv_block(0, 3)[...] = 1
    executor.wake_up(BOTH)
    assert (backend.kv_block(0, 3) == 1).all()
    executor.close()
