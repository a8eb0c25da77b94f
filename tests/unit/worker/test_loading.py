"""`load_executor`: progress, threads and errors."""

import pytest

torch = pytest.importorskip("torch")

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.config.resolve import ResolvedConfig  # noqa: E402
from trioengine.core.executor import NewSequence, ScheduledSequence, StepPlan  # noqa: E402
from trioengine.errors import CheckpointError, EngineStartError  # noqa: E402
from trioengine.testing.tiny_model import tiny_model, write_gguf  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker.loading import load_executor, model_shape  # noqa: E402

CONFIG = ResolvedConfig(
    max_model_len=64,
    max_num_batched_tokens=64,
    max_num_seqs=4,
    block_size=4,
    num_kv_blocks=8,
    cpu_threads=1,
    reasons={},
)


@pytest.fixture
def location(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model())
    return ModelLocation(ModelKind.GGUF, path, "tiny")


def test_an_executor_loads_and_computes(location) -> None:
    fractions = []
    executor = load_executor(location, CONFIG, fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert executor.num_blocks == 8
    assert torch.get_num_threads() == 1
    executor.submit(
        StepPlan(0, [ScheduledSequence(3, 0, 2, [5])], [NewSequence(3, [1, 2], 2, SamplingParams(), seed=0)])
    )
    assert len(executor.result().tokens) == 1
    executor.close()


def test_the_shape_of_a_model_is_that_of_its_configuration() -> None:
    config = tiny_model().config
    shape = model_shape(config)
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert shape.num_parameters == 2 * (48 * (48 + 2 * 16) + 48 * 48 + 3 * 48 * 80) + 2 * 211 * 48
    assert (shape.vocab_size, shape.max_position_embeddings) == (211, 512)


def test_a_damaged_file_is_a_checkpoint_error(location) -> None:
    location.path.write_bytes(location.path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        load_executor(location, CONFIG)


def test_too_little_memory_is_a_start_error(location, monkeypatch) -> None:
    def no_memory(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("trioengine.worker.torch_backend.allocate_kv_cache", no_memory)
    with pytest.raises(EngineStartError, match="not enough memory"):
        load_executor(location, CONFIG)
