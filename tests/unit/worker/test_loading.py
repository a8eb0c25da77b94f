"""What computes is chosen, said and loaded: the native kernels, else torch, else a clear error."""

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import Isa, NativeUnavailableError  # noqa: E402

from trioengine.checkpoint.locate import ModelKind, ModelLocation  # noqa: E402
from trioengine.config.engine import EngineConfig, Quantization  # noqa: E402
from trioengine.config.resolve import KVGroupShape, ResolvedConfig  # noqa: E402
from trioengine.core.executor import NewSequence, ScheduledSequence, StepPlan  # noqa: E402
from trioengine.errors import CheckpointError, ConfigError, EngineStartError  # noqa: E402
from trioengine.models.config import LongRopeScaling, Rope  # noqa: E402
from trioengine.models.loader import open_checkpoint  # noqa: E402
from trioengine.models.torch_ops import load_torch_model  # noqa: E402
from trioengine.runtime.build import build_engine_core  # noqa: E402
from trioengine.testing.logits import torch_logits  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import folder_tensors, tiny_model, write_folder, write_gguf  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker import loading  # noqa: E402
from trioengine.worker.loading import (  # noqa: E402
    NATIVE_FLOPS_PER_CPU_PER_S,
    Computer,
    choose_computer,
    load_executor,
)

CONFIG = ResolvedConfig(
    max_model_len=64,
    max_num_batched_tokens=64,
    max_num_seqs=4,
    max_num_logit_rows=64,
    block_size=16,
    num_kv_blocks=(8,),
    num_offload_blocks=0,
    cpu_threads=1,
    reasons={},
)
TORCH = Computer(None)
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(autouse=True)
def kernels_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And GPUs hidden."""
    monkeypatch.delenv("TRIOENGINE_CPU_KERNELS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(params=["torch", "native"])
def computer(request: pytest.FixtureRequest) -> Computer:
    return TORCH if request.param == "torch" else Computer(native_library())


@pytest.fixture
def location(tmp_path: Path) -> ModelLocation:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model())
    return ModelLocation(ModelKind.GGUF, path, "tiny")


def test_a_cache_that_cannot_be_written_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, location: ModelLocation, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("TRIOENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trioengine_kernels.native.library.PREBUILT", tmp_path / "nothing.so")
    with caplog.at_level(logging.WARNING):
        assert choose_computer(EngineConfig(), open_checkpoint(location)) == TORCH
    assert "Set TRIOENGINE_CACHE to a folder that can be written." in caplog.text


def test_an_executor_loads_and_computes(location: ModelLocation, computer: Computer) -> None:
    reports: list[tuple[str, float]] = []
    executor = load_executor(open_checkpoint(location), CONFIG, computer, report=lambda *stage: reports.append(stage))
    assert reports == sorted(reports)
    assert reports[-1] == ("loading the weights", 1.0)
    assert executor.kv_cache_groups[0].num_blocks == 8
    executor.submit(
        StepPlan(0, [ScheduledSequence(3, 0, 2, [5])], [NewSequence(3, [1, 2], 2, SamplingParams(), seed=0)])
    )
    assert len(executor.result().tokens) == 1
    executor.close()


def test_frequencies_that_depend_on_the_context_are_those_of_max_model_len(
    location: ModelLocation, computer: Computer
) -> None:
    checkpoint, prompt = open_checkpoint(location), [1, 2, 3, 4, 5, 6, 7, 8]
    scaling = LongRopeScaling(
        short_factors=(1.0,) * 4, long_factors=(9.0,) * 4, original_max_position_embeddings=32, attention_factor=1.2
    )
    changed = attrs.evolve(checkpoint.config, layer_ropes=(Rope(10000.0, scaling),) * 2)
    checkpoint = attrs.evolve(checkpoint, config=changed)
    found: list[int] = []
    for max_model_len in (32, 64):
        executor = load_executor(checkpoint, attrs.evolve(CONFIG, max_model_len=max_model_len), computer)
        executor.submit(StepPlan(0, [ScheduledSequence(3, 0, 8, [5])], [NewSequence(3, prompt, 8, GREEDY, seed=0)]))
        found.append(executor.result().tokens[0])
        executor.close()
        expected = torch_logits(load_torch_model(checkpoint, max_length=max_model_len), prompt)
        assert found[-1] == expected[-1].argmax()
    assert found[0] != found[1]


def test_torch_gets_its_threads(location: ModelLocation) -> None:
    load_executor(open_checkpoint(location), CONFIG, TORCH)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("name", "kv_bytes"), [("torch", 2 * 2 * (8 + 8) * 4), ("native", 2 * 2 * (8 + 16) * 2)])
def test_the_shape_of_a_model_is_that_of_its_configuration(name: str, kv_bytes: int) -> None:
    shape = (TORCH if name == "torch" else Computer(native_library())).shape(tiny_model().config)
    assert shape.kv_groups == [KVGroupShape(kv_bytes)]
    assert shape.num_parameters == 2 * (48 * (48 + 2 * 16) + 48 * 48 + 3 * 48 * 80) + 2 * 211 * 48
    assert (shape.vocab_size, shape.max_position_embeddings) == (211, 512)


def test_a_damaged_file_is_a_checkpoint_error(location: ModelLocation, computer: Computer) -> None:
    location.path.write_bytes(location.path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        load_executor(open_checkpoint(location), CONFIG, computer)


@pytest.mark.parametrize(
    ("computer", "place"),
    [
        ("torch", "trioengine.worker.torch_backend.TorchKVCache"),
        ("native", "trioengine.worker.native_backend.KVCache"),
    ],
    indirect=["computer"],
)
def test_too_little_memory_is_a_start_error(
    location: ModelLocation, computer: Computer, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr(place, no_memory)
    with pytest.raises(EngineStartError, match="not enough memory"):
        load_executor(open_checkpoint(location), CONFIG, computer)


def test_the_native_kernels_compute_where_they_can(location: ModelLocation, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_computer(EngineConfig(), open_checkpoint(location)) == Computer(native_library())
    assert not caplog.records


def no_library(cache_dir: Path) -> None:
    raise NativeUnavailableError("There is no C compiler.")


@pytest.mark.parametrize("obstacle", ["off", "block_size", "compiler"])
def test_torch_computes_where_they_cannot_and_the_log_says_why(
    obstacle: str, location: ModelLocation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(block_size=8 if obstacle == "block_size" else 16)
    monkeypatch.setenv("TRIOENGINE_CPU_KERNELS", "off" if obstacle == "off" else "on")
    if obstacle == "compiler":
        monkeypatch.setattr(loading, "load_library", no_library)
    with caplog.at_level(logging.WARNING):
        assert choose_computer(config, open_checkpoint(location)) == TORCH
    (record,) = caplog.records
    reason = {"off": "TRIOENGINE_CPU_KERNELS is off", "block_size": "block_size", "compiler": "no C compiler"}[obstacle]
    assert reason in record.getMessage()
    assert "slower" in record.getMessage()


def test_without_kernels_and_torch_nothing_starts(location: ModelLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_library", no_library)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineStartError, match=r"no C compiler.*trioengine\[torch\]"):
        choose_computer(EngineConfig(), open_checkpoint(location))


def test_quantization_is_refused_where_it_cannot_be_had(
    location: ModelLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, checkpoint = EngineConfig(quantization=Quantization.INT8), open_checkpoint(location)
    with pytest.raises(ConfigError, match=r"tiny\.gguf") as caught:
        choose_computer(config, checkpoint)
    assert caught.value.option == "quantization"
    monkeypatch.setenv("TRIOENGINE_CPU_KERNELS", "off")
    folder = attrs.evolve(location, kind=ModelKind.FOLDER)
    with pytest.raises(ConfigError, match="native CPU kernels") as caught:
        choose_computer(config, attrs.evolve(checkpoint, version=attrs.evolve(checkpoint.version, location=folder)))
    assert caught.value.option == "quantization"


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_folder_is_loaded_and_quantized(tmp_path: Path, quantization: str | None) -> None:
    """bfloat16, as most folders are: the greedy token is torch's, or near it where weights are quantized."""
    model = tiny_model()
    tensors = {name: tensor.bfloat16() for name, tensor in folder_tensors(model).items()}
    built = build_engine_core(EngineConfig(quantization=quantization), write_folder(tmp_path, model, tensors))
    executor = built.core.executor
    executor.submit(StepPlan(0, [ScheduledSequence(3, 0, 2, [5])], [NewSequence(3, [1, 2], 2, GREEDY, seed=0)]))
    expected = torch_logits(model, [1, 2])[-1].argsort()[::-1]
    assert executor.result().tokens[0] in expected[: 1 if quantization is None else 5]
    built.close()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_an_engine_offloads_as_it_is_told(location: ModelLocation, tmp_path: Path, is_on_disk: bool) -> None:
    folder = tmp_path / "offload"
    built = build_engine_core(
        EngineConfig(kv_offload_bytes=1 << 20, kv_offload_path=str(folder) if is_on_disk else None), location
    )
    (group,) = Computer(native_library()).shape(tiny_model().config).kv_groups
    assert built.core.executor.num_offload_blocks == (1 << 20) // (16 * group.bytes_per_token)
    assert folder.exists() == is_on_disk
    assert "num_offload_blocks" in built.ready.reasons
    built.close()


def test_the_files_are_closed_when_they_are_loaded(location: ModelLocation, computer: Computer) -> None:
    """A file of many gigabytes is not part of the process's memory."""
    executor = load_executor(open_checkpoint(location), CONFIG, computer)
    assert str(location.path) not in Path("/proc/self/maps").read_text()
    executor.close()


def test_the_native_kernels_estimate_larger_steps() -> None:
    native, plain = Computer(native_library()).hardware_facts(), TORCH.hardware_facts()
    assert native.flops_per_s > plain.flops_per_s
    assert (native.num_cpus, native.ram_bytes) == (plain.num_cpus, plain.ram_bytes)


@pytest.mark.parametrize("isa", list(Isa))
def test_a_step_is_as_large_as_the_processors_kernels_are_fast(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native_library()
    monkeypatch.setattr(type(library), "isa", isa)
    facts = Computer(library).hardware_facts()
    assert facts.flops_per_s == facts.num_cpus * NATIVE_FLOPS_PER_CPU_PER_S[isa]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # Importing it now fails.
from pathlib import Path
from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.config import EngineConfig
from trioengine.core.executor import NewSequence, ScheduledSequence, StepPlan
from trioengine.runtime.build import build_engine_core
from trioengine.types.params import SamplingParams
built = build_engine_core(EngineConfig(cpu_threads=2), ModelLocation(ModelKind.GGUF, Path(sys.argv[1]), "tiny"))
executor = built.core.executor
rules = SamplingParams(temperature=0.5, top_p=0.9, repetition_penalty=1.1, logit_bias={3: 1.0}, min_tokens=2)
executor.submit(StepPlan(0, [ScheduledSequence(3, 0, 2, [5])], [NewSequence(3, [1, 2], 2, rules, seed=0)]))
print(len(executor.result().tokens), built.ready.num_blocks > 0)
"""


def test_the_native_kernels_compute_without_torch(location: ModelLocation) -> None:
    """The base install serves a GGUF."""
    native_library()  # Built, where it was not, outside of the time limit below.
    command = [sys.executable, "-P", "-c", WITHOUT_TORCH, str(location.path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("1 True\n", "")
