"""`LocalExecutor` keeps the promises of an `Executor`, with a real model's arithmetic on each backend."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.models.loader import open_checkpoint
from trioengine.models.native_ops import NativeModel, load_native_model
from trioengine.testing.executor_conformance import CHECKS, Check, Subject
from trioengine.testing.native import native_library
from trioengine.testing.tiny_model import tiny_model, write_gguf
from trioengine.worker.executor import LocalExecutor
from trioengine.worker.native_backend import NativeBackend
from trioengine.worker.torch_backend import TorchBackend

MODEL = tiny_model()
NUM_BLOCKS = 24


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

    def make() -> LocalExecutor:
        backend = TorchBackend(MODEL, reload=lambda: MODEL, num_blocks=[NUM_BLOCKS], block_size=block_size)
        return LocalExecutor(backend)

    assert check(Subject(make=make, block_size=block_size, vocab_size=MODEL.config.vocab_size)) is None


@pytest.mark.parametrize(("block_size", "num_threads"), [(16, 1), (16, 3), (32, 2)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_native(check: Check, block_size: int, num_threads: int, native_model: NativeModel) -> None:
    """The promises that every executor makes."""
    library = native_library()

    def make() -> LocalExecutor:
        backend = NativeBackend(
            native_model,
            library,
            ThreadPool(library, num_threads),
            reload=lambda: native_model,
            num_blocks=[NUM_BLOCKS],
            block_size=block_size,
            max_tokens=256,
            max_logit_rows=32,
        )
        return LocalExecutor(backend)

    assert check(Subject(make=make, block_size=block_size, vocab_size=MODEL.config.vocab_size)) is None
