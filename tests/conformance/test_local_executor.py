"""`LocalExecutor` keeps the promises of an `Executor`, with a real model's arithmetic on each backend."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import pytest

pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.models.loader import open_checkpoint
from trioengine.models.lora import read_lora
from trioengine.models.native_ops import NativeModel, load_native_model
from trioengine.models.torch_ops import TorchModel
from trioengine.testing.device_backend import device_backend
from trioengine.testing.executor_conformance import (
    CHECKS,
    DRAFT_CHECKS,
    LORA_CHECKS,
    OFFLOAD_CHECKS,
    SHARING_CHECKS,
    STEP_CHECKS,
    Check,
    Subject,
)
from trioengine.testing.fake_device import FakeDevice
from trioengine.testing.lora import write_lora
from trioengine.testing.native import native_library
from trioengine.testing.tiny_model import native_copy, random_model, tiny_config, tiny_model, write_gguf
from trioengine.worker.backend import Backend
from trioengine.worker.executor import LocalExecutor
from trioengine.worker.kv_offload import DiskOffloadStore, MemoryOffloadStore, OffloadStore
from trioengine.worker.native_backend import NativeBackend
from trioengine.worker.torch_backend import TorchBackend

MODEL = tiny_model()
WINDOWED = random_model(
    attrs.evolve(tiny_config(), num_layers=3, layer_windows=(None, 9, 30)),
)
"""Three KV groups."""
NUM_BLOCKS = 24
NUM_SLOTS = 4
MakeStore = Callable[[Backend], OffloadStore | None]


def no_store(backend: Backend) -> None:
    return None


def slot_bytes(backend: Backend) -> Sequence[int]:
    return [backend.kv_block(group, 0).nbytes for group in range(len(backend.kv_cache_groups))]


def memory_store(backend: Backend) -> OffloadStore:
    return MemoryOffloadStore(NUM_SLOTS, slot_bytes(backend))


def torch_subject(model: TorchModel, block_size: int, make_store: MakeStore = no_store) -> Subject:
    num_blocks = [NUM_BLOCKS] * len(model.config.kv_groups)

    def make() -> LocalExecutor:
        backend = TorchBackend(model, reload=lambda _: model, num_blocks=num_blocks, block_size=block_size)
        return LocalExecutor(backend, offload_store=make_store(backend))

    return Subject(make=make, block_size=block_size, vocab_size=model.config.vocab_size)


def device_subject(
    model: TorchModel, block_size: int, make_store: MakeStore = no_store, graph_sizes: Sequence[int] = (3,)
) -> Subject:
    """A GPU's runner, on a device that is always late."""

    def make() -> LocalExecutor:
        backend = device_backend(
            model,
            FakeDevice(),
            num_blocks=NUM_BLOCKS,
            block_size=block_size,
            max_model_len=256,
            graph_sizes=graph_sizes,
        )
        return LocalExecutor(backend, offload_store=make_store(backend), is_asynchronous=True)

    return Subject(make=make, block_size=block_size, vocab_size=model.config.vocab_size)


def native_subject(
    model: NativeModel,
    block_size: int,
    num_threads: int,
    make_store: MakeStore = no_store,
    *,
    is_asynchronous: bool = False,
) -> Subject:
    library = native_library()
    num_blocks = [NUM_BLOCKS] * len(model.config.kv_groups)

    def make() -> LocalExecutor:
        backend = NativeBackend(
            model,
            library,
            ThreadPool(library, num_threads),
            reload=lambda _: model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_tokens=256,
            max_logit_rows=256,
        )
        return LocalExecutor(backend, offload_store=make_store(backend), is_asynchronous=is_asynchronous)

    return Subject(make=make, block_size=block_size, vocab_size=model.config.vocab_size)


@pytest.fixture(scope="module")
def native_model(tmp_path_factory: pytest.TempPathFactory) -> NativeModel:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, MODEL)
    library = native_library()
    return load_native_model(
        open_checkpoint(ModelLocation(ModelKind.GGUF, path, "tiny")), library, ThreadPool(library, 1)
    )


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_torch(check: Check, block_size: int) -> None:
    """The promises that every executor makes."""
    assert check(torch_subject(MODEL, block_size)) is None


@pytest.mark.parametrize(("block_size", "graph_sizes"), [(4, ()), (16, (3,))])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_device(check: Check, block_size: int, graph_sizes: Sequence[int]) -> None:
    """The promises that every executor makes, with and without graphs."""
    assert check(device_subject(MODEL, block_size, graph_sizes=graph_sizes)) is None


@pytest.mark.parametrize(("block_size", "num_threads"), [(16, 1), (16, 3), (32, 2)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_native(check: Check, block_size: int, num_threads: int, native_model: NativeModel) -> None:
    """The promises that every executor makes."""
    assert check(native_subject(native_model, block_size, num_threads)) is None


@pytest.mark.parametrize("check", [*CHECKS, *OFFLOAD_CHECKS], ids=lambda check: check.__name__)
def test_asynchronous(check: Check, native_model: NativeModel) -> None:
    """The same, where a thread computes the steps."""
    subject = native_subject(native_model, 16, 2, memory_store, is_asynchronous=True)
    assert check(subject) is None


@pytest.mark.parametrize("check", [*STEP_CHECKS, *DRAFT_CHECKS, *SHARING_CHECKS], ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", ["torch", "native", "device"])
def test_groups_of_layers_with_windows(check: Check, backend: str) -> None:
    """The same, where each group of layers has blocks of its own."""
    match backend:
        case "torch":
            subject = torch_subject(WINDOWED, 16)
        case "native":
            subject = native_subject(native_copy(WINDOWED), 16, 2)
        case _:
            subject = device_subject(WINDOWED, 16)
    assert check(subject) is None


@pytest.mark.parametrize("check", OFFLOAD_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("backend", ["torch", "native", "device"])
def test_offload(check: Check, store: str, backend: str, tmp_path: Path) -> None:
    """The promises of every executor with an offload store."""

    def disk_store(backend: Backend) -> OffloadStore:
        return DiskOffloadStore(NUM_SLOTS, slot_bytes(backend), tmp_path / "offload")

    make_store = memory_store if store == "memory" else disk_store
    match backend:
        case "torch":
            subject = torch_subject(WINDOWED, 4, make_store)
        case "native":
            subject = native_subject(native_copy(WINDOWED), 16, 2, make_store)
        case _:
            subject = device_subject(WINDOWED, 4, make_store)
    assert check(subject) is None


@pytest.mark.parametrize("check", LORA_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", ["torch", "native", "asynchronous", "device"])
def test_adapters(check: Check, backend: str, tmp_path: Path) -> None:
    """The promises of every executor with slots for adapters."""
    paths = [str(write_lora(tmp_path / str(seed), MODEL.config, rank=seed, seed=seed)) for seed in (3, 16)]
    library = native_library()

    def make() -> LocalExecutor:
        made: Backend
        if backend == "torch":
            made = TorchBackend(MODEL, reload=lambda _: MODEL, num_blocks=[NUM_BLOCKS], block_size=16)
        elif backend == "device":
            made = device_backend(
                MODEL, FakeDevice(), num_blocks=NUM_BLOCKS, max_model_len=256, max_loras=2, graph_sizes=(3,)
            )
        else:
            made = NativeBackend(
                native_copy(MODEL),
                library,
                ThreadPool(library, 2),
                reload=lambda _: native_copy(MODEL),
                num_blocks=[NUM_BLOCKS],
                block_size=16,
                max_tokens=256,
                max_logit_rows=256,
                max_loras=2,
            )
        reader = partial(read_lora, config=MODEL.config, max_rank=16)
        return LocalExecutor(made, read_lora=reader, is_asynchronous=backend == "asynchronous")

    subject = Subject(make=make, block_size=16, vocab_size=MODEL.config.vocab_size, lora_paths=paths)
    assert check(subject) is None
