"""A GPU is found, or it is said why not; its options are kept or refused; its memory is measured and shared out."""

import gc
import importlib.util
import logging
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from trioengine_kernels.kernel_set import reference_kernels  # noqa: E402

from trioengine.checkpoint.locate import ModelLocation  # noqa: E402
from trioengine.config import env  # noqa: E402
from trioengine.config.engine import EngineConfig  # noqa: E402
from trioengine.config.resolve import GPUFacts, GPUMemoryUse, ResolvedConfig  # noqa: E402
from trioengine.errors import ConfigError, EngineStartError  # noqa: E402
from trioengine.models.loader import Checkpoint, open_checkpoint  # noqa: E402
from trioengine.testing.device_computer import device_computer  # noqa: E402
from trioengine.testing.fake_device import FakeDevice  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import (  # noqa: E402
    folder_tensors,
    tiny_config,
    tiny_model,
    write_folder,
    write_gguf,
)
from trioengine.worker import loading  # noqa: E402
from trioengine.worker.device import loading as device_loading  # noqa: E402
from trioengine.worker.device.backend import DeviceBackend  # noqa: E402
from trioengine.worker.device.device import DeviceMemory  # noqa: E402
from trioengine.worker.device.find import NoGPUError, find_gpu  # noqa: E402
from trioengine.worker.device.loading import (  # noqa: E402
    DeviceComputer,
    DeviceKernels,
    DeviceRequest,
    load_device_backends,
    open_gpu,
)
from trioengine.worker.device.memory_profile import MemoryProfile  # noqa: E402
from trioengine.worker.loading import Computer, choose_computer  # noqa: E402

FACTS = GPUFacts("Large", 90, total_bytes=80 * 2**30, free_bytes=79 * 2**30)
OLDER = GPUFacts("Older", 80, total_bytes=80 * 2**30, free_bytes=79 * 2**30)
CONFIG = ResolvedConfig(
    max_model_len=64,
    max_num_batched_tokens=48,
    max_num_seqs=4,
    max_num_logit_rows=32,
    block_size=16,
    num_kv_blocks=(8,),
    num_offload_blocks=0,
    cpu_threads=1,
    reasons={},
    cudagraph_capture_sizes=(1, 2, 4),
)


@pytest.fixture(autouse=True)
def kernels_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIOENGINE_CPU_KERNELS", raising=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write(tmp_path, torch.float32))


def write(folder: Path, dtype: Any) -> ModelLocation:
    model = tiny_model()
    tensors = {name: tensor.to(dtype) for name, tensor in folder_tensors(model).items()}
    return write_folder(folder, model, tensors)


# Which GPU


@attrs.define
class Machine:
    """What a machine is said to have."""

    has_driver: bool = True
    cuda: str | None = "13.0"
    is_available: bool = True
    capabilities: tuple[tuple[int, int], ...] = ((9, 0), (8, 0))
    missing: str | None = None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made, find_spec = Machine(), importlib.util.find_spec
    monkeypatch.setattr(env, "may_have_gpu", lambda: made.has_driver)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == made.missing else find_spec(name, *rest)
    )
    for name, value in {
        "is_available": lambda: made.is_available,
        "device_count": lambda: len(made.capabilities),
        "get_device_capability": lambda index: made.capabilities[index],
        "get_device_name": lambda index: f"Card {index}",
        "mem_get_info": lambda index: (7, 9),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", made.cuda)
    return made


def test_the_facts_of_a_gpu_are_its_own(machine: Machine) -> None:
    assert find_gpu(0) == GPUFacts("Card 0", 90, total_bytes=9, free_bytes=7)
    assert find_gpu(1) == GPUFacts("Card 1", 80, total_bytes=9, free_bytes=7)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda machine, patch: setattr(machine, "has_driver", False), "no GPU of NVIDIA's"),
        (lambda machine, patch: setattr(machine, "missing", "torch"), r"torch is not installed.*trioengine\[gpu\]"),
        (lambda machine, patch: setattr(machine, "missing", "triton"), r"triton is not installed.*trioengine\[gpu\]"),
        (lambda machine, patch: patch.setattr(torch.version, "cuda", None), "built without CUDA"),
        (lambda machine, patch: setattr(machine, "is_available", False), "driver may be older"),
        (lambda machine, patch: setattr(machine, "capabilities", ((7, 5),)), "Card 0 has compute capability 7.5; 8.0"),
    ],
)
def test_why_there_is_none_is_said(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None], reason: str
) -> None:
    change(machine, monkeypatch)
    with pytest.raises(NoGPUError, match=reason):
        find_gpu(0)


def test_more_cores_than_gpus_are_refused(machine: Machine) -> None:
    """Whether a GPU was asked for or not: other cores have one."""
    with pytest.raises(ConfigError, match="torch sees 2, too few for core 2") as caught:
        find_gpu(2)
    assert caught.value.option == "data_parallel_size"


# What computes


def test_a_gpu_computes_where_there_is_one(machine: Machine, checkpoint: Checkpoint, monkeypatch: Any) -> None:
    opened: list[tuple[GPUFacts, int]] = []

    def note(config: EngineConfig, checkpoint: Checkpoint, facts: GPUFacts, index: int) -> DeviceComputer:
        opened.append((facts, index))
        device = device_computer().device
        assert device is not None
        return device

    monkeypatch.setattr(device_loading, "open_gpu", note)
    computer = choose_computer(EngineConfig(), checkpoint, 1)
    assert computer.name == "cuda"
    assert opened == [(find_gpu(1), 1)]
    assert choose_computer(EngineConfig(device="cpu"), checkpoint) == Computer(native_library())  # type: ignore[arg-type]
    assert len(opened) == 1


def test_without_one_the_processors_compute(machine: Machine, checkpoint: Checkpoint, caplog: Any) -> None:
    """A GPU that cannot be used is said so; where there is no driver there is nothing to say."""
    with caplog.at_level(logging.WARNING):
        machine.has_driver = False
        assert choose_computer(EngineConfig(), checkpoint) == Computer(native_library())
        assert not caplog.records
        machine.has_driver, machine.is_available = True, False
        assert choose_computer(EngineConfig(), checkpoint) == Computer(native_library())
    (record,) = caplog.records
    assert "driver may be older" in record.getMessage()
    with pytest.raises(ConfigError, match=r"device cuda cannot be had\. .*driver may be older") as caught:
        choose_computer(EngineConfig(device="cuda"), checkpoint)  # type: ignore[arg-type]
    assert caught.value.option == "device"


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"dtype": "half"}, "dtype"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"quantization": "fp8"}, "quantization"),
        ({"attention_backend": "FLASH_ATTN"}, "attention_backend"),
        ({"cudagraph_capture_sizes": (1, 2)}, "cudagraph_capture_sizes"),
        ({"dtype": "float32", "deterministic": True, "enforce_eager": True, "gpu_memory_utilization": 0.5}, None),
        ({"dtype": "float"}, None),
        ({"block_size": 8, "deterministic": True}, "deterministic"),
    ],
    ids=str,
)
def test_a_cpu_refuses_what_it_cannot_keep(
    checkpoint: Checkpoint, options: dict[str, Any], refused: str | None
) -> None:
    config = EngineConfig(device="cpu", **options)  # type: ignore[arg-type]
    if refused is None:
        assert choose_computer(config, checkpoint) == Computer(native_library())
    else:
        with pytest.raises(ConfigError, match=r"needs a GPU|native CPU kernels") as caught:
            choose_computer(config, checkpoint)
        assert caught.value.option == refused


# Types of numbers, and attention


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DeviceComputer]:
    """`open_gpu`, where there is none."""
    monkeypatch.setattr(device_loading, "CudaDevice", lambda index: FakeDevice())

    def open_one(checkpoint: Checkpoint, facts: GPUFacts = FACTS, **options: Any) -> DeviceComputer:
        return open_gpu(EngineConfig(**options), checkpoint, facts, 0)

    return open_one


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_the_number_type_is_the_checkpoints(
    tmp_path: Path, opened: Callable[..., DeviceComputer], stored: str, dtype: str
) -> None:
    checkpoint = open_checkpoint(write(tmp_path, getattr(torch, stored)))
    computer = opened(checkpoint)
    assert (computer.dtype, computer.cache_dtype) == (getattr(torch, dtype),) * 2
    assert opened(checkpoint, dtype="float").dtype == torch.float32
    assert opened(checkpoint, dtype="half").cache_dtype == torch.float16


def test_of_a_gguf_file_it_is_bfloat16(tmp_path: Path, opened: Callable[..., DeviceComputer]) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    location = attrs.evolve(write(tmp_path, torch.float16), path=tmp_path / "tiny.gguf", kind=loading.ModelKind.GGUF)
    assert opened(open_checkpoint(location)).dtype == torch.bfloat16


def test_the_cache_has_the_same_type_or_8_bits(checkpoint: Checkpoint, opened: Callable[..., DeviceComputer]) -> None:
    half = opened(checkpoint, kv_cache_dtype="bfloat16")
    fp8 = opened(checkpoint, kv_cache_dtype="fp8")
    assert fp8.cache_dtype == opened(checkpoint, kv_cache_dtype="fp8_e4m3").cache_dtype == torch.float8_e4m3fn
    assert half.kv_bytes(checkpoint.config) == 2 * fp8.kv_bytes(checkpoint.config) == 2 * 2 * 8 * 2
    for facts, value, problem in [(FACTS, "float16", "activations are bfloat16"), (OLDER, "fp8", "Older has 8.0")]:
        with pytest.raises(ConfigError, match=problem) as caught:
            opened(checkpoint, facts, kv_cache_dtype=value)
        assert caught.value.option == "kv_cache_dtype"


def test_attention_that_cannot_be_had_is_refused(checkpoint: Checkpoint, opened: Callable[..., DeviceComputer]) -> None:
    """Before weights are read, with the name of the option."""
    with pytest.raises(ConfigError, match="FLASHINFER") as caught:
        opened(checkpoint, attention_backend="FLASHINFER", dtype="float16")
    assert caught.value.option == "attention_backend"
    with pytest.raises(ConfigError, match="deterministic") as caught:
        opened(checkpoint, attention_backend="TORCH_SDPA", deterministic=True)
    kernels = opened(checkpoint, attention_backend="TORCH_SDPA").kernels_for(checkpoint.config, 16)
    assert (
        kernels.kernels.paged_attention
        is not opened(checkpoint).kernels_for(checkpoint.config, 16).kernels.paged_attention
    )


# Memory


class CountedDevice(FakeDevice):
    """Its memory is what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0
        self.now = self.peak = 0

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1000 - self.taken, 1000, self.peak)

    def reset_peak(self) -> None:
        self.peak = self.now


def test_what_weights_and_steps_take_is_measured() -> None:
    """What is there, and at their peaks what all steps take together, as each may need its own memory."""
    device = CountedDevice()
    device.taken = 100  # By others.
    profile = MemoryProfile(device)
    device.taken, device.now = 400, 290
    profile.weights_are_there()
    device.taken, device.now = 430, 310

    def step(extra: int) -> None:
        device.peak = device.now + extra

    assert profile.measure(partial(step, 70)) == GPUMemoryUse(300, 30 + 70)
    device.taken = 0  # Another process has ended.
    assert profile.measure(lambda: None) == GPUMemoryUse(300, 0)


def loaded(checkpoint: Checkpoint, computer: Computer, **options: Any) -> Any:
    assert computer.device is not None
    options = {"with_memory": lambda use: CONFIG, **options}
    return load_device_backends(checkpoint, None, CONFIG, computer.device, DeviceRequest(), **options)


def test_the_largest_step_is_measured_before_there_is_a_cache(checkpoint: Checkpoint, monkeypatch: Any) -> None:
    """With one block for each group, and beside the largest graph; then the sizes are final."""
    steps: list[tuple[int, int]] = []
    sizes: list[tuple[Any, Any]] = []
    real = DeviceBackend.__init__

    def noted(self: Any, model: Any, device: Any, kernels: Any, options: Any, **rest: Any) -> None:
        sizes.append((tuple(options.num_blocks), tuple(options.graph_sizes)))
        real(self, model, device, kernels, options, **rest)

    monkeypatch.setattr(DeviceBackend, "__init__", noted)
    monkeypatch.setattr(DeviceBackend, "compute_largest_step", lambda self, *step: steps.append(step))
    stages: list[str] = []
    uses: list[GPUMemoryUse] = []

    def with_memory(use: GPUMemoryUse) -> ResolvedConfig:
        uses.append(use)
        return attrs.evolve(CONFIG, num_kv_blocks=(20,))

    made = loaded(
        checkpoint, device_computer(), with_memory=with_memory, report=lambda stage, fraction: stages.append(stage)
    )
    assert steps == [(2, 32), (12, 32), (40, 32), (48, 32)]
    assert sizes == [((1,), (4,)), ((20,), (1, 2, 4))]
    assert made.config.num_kv_blocks == (20,)
    # What comes later: penalties of five rows.
    assert uses == [GPUMemoryUse(0, 5 * 211 * 33 // 8)]
    assert list(dict.fromkeys(stages)) == [
        "loading the weights",
        "compiling kernels and measuring memory",
        "recording graphs",
    ]


def test_what_was_measured_is_forgotten(checkpoint: Checkpoint, monkeypatch: Any) -> None:
    """At once, not when Python looks for cycles: the cache is made in its memory."""
    made: list[weakref.ref[DeviceBackend]] = []
    real = DeviceBackend.__init__

    def noted(self: Any, *args: Any, **options: Any) -> None:
        made.append(weakref.ref(self))
        real(self, *args, **options)

    def with_memory(_: GPUMemoryUse) -> ResolvedConfig:
        assert [each() for each in made] == [None]
        return CONFIG

    monkeypatch.setattr(DeviceBackend, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        assert loaded(checkpoint, device_computer(), with_memory=with_memory).backend is made[1]()
    finally:
        gc.enable()


def test_attention_that_cannot_be_recorded_means_no_graphs(checkpoint: Checkpoint, caplog: Any) -> None:
    computer, device = device_computer(), FakeDevice()
    assert computer.device is not None
    kernels = DeviceKernels(reference_kernels(), can_be_recorded=False)
    changed = attrs.evolve(computer.device, device=device, choose_kernels=lambda needs: kernels)
    with caplog.at_level(logging.WARNING):
        loaded(checkpoint, Computer(None, changed))
    (record,) = caplog.records
    assert "No graphs" in record.getMessage()


@pytest.mark.parametrize(
    ("place", "num_fitting", "advice"),
    [
        ("trioengine.worker.device.loading.load_device_model", 0, "its weights.*quantization"),
        ("trioengine.worker.device.backend.DeviceBackend.compute_largest_step", 0, "max_num_batched_tokens"),
        ("trioengine.worker.device.graphs.DecodeGraphs.record", 0, "max_num_seqs"),
        ("trioengine.worker.device.graphs.DecodeGraphs.record", 1, "gpu_memory_utilization"),
    ],
)
def test_memory_that_is_missing_is_an_error_that_says_for_what(
    checkpoint: Checkpoint, monkeypatch: Any, place: str, num_fitting: int, advice: str
) -> None:
    calls: list[object] = []

    def no_memory(*args: object, **kwargs: object) -> None:
        calls.append(args)
        if len(calls) > num_fitting:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(place, no_memory)
    with pytest.raises(EngineStartError, match=f"Fake is too small for .*{advice}"):
        loaded(checkpoint, device_computer())


def test_the_shape_of_a_model_has_the_caches_numbers() -> None:
    shape = device_computer(cache_dtype=torch.float8_e4m3fn).shape(tiny_config())
    assert [group.bytes_per_token for group in shape.kv_groups] == [2 * 2 * 2 * 8]
    facts = device_computer(total_bytes=2**20).hardware_facts()
    assert facts.gpu == GPUFacts("Fake", 90, 2**20, 2**20)
