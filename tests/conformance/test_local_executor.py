"""`LocalExecutor` keeps the promises of an `Executor`, with a real model's arithmetic."""

import pytest

pytest.importorskip("torch")

from trioengine.testing.executor_conformance import CHECKS, Check, Subject
from trioengine.testing.tiny_model import tiny_model
from trioengine.worker.executor import LocalExecutor
from trioengine.worker.torch_backend import TorchBackend

MODEL = tiny_model()


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check, block_size: int) -> None:
    """The promises that every executor makes."""

    def make() -> LocalExecutor:
        backend = TorchBackend(MODEL, num_blocks=24, block_size=block_size)
        return LocalExecutor(backend, num_blocks=24, block_size=block_size)

    assert check(Subject(make=make, block_size=block_size, vocab_size=MODEL.config.vocab_size)) is None
