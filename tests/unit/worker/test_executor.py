"""The asynchronous `LocalExecutor`: its thread, what it raises, how it ends. What it computes, the conformance suite
says."""

import threading

import pytest

pytest.importorskip("torch")

from trioengine.config.engine import LogprobsMode
from trioengine.core.executor import NewSequence, ScheduledSequence, StepPlan
from trioengine.errors import RequestError
from trioengine.testing.tiny_model import tiny_model
from trioengine.types.params import SamplingParams
from trioengine.worker.backend import StepBatch
from trioengine.worker.executor import LocalExecutor
from trioengine.worker.torch_backend import TorchBackend

MODEL = tiny_model()
FIRST = StepPlan(0, [ScheduledSequence(0, 0, 2, [0])], [NewSequence(0, [1, 2], 2, SamplingParams(), seed=0)])


class HeldBackend(TorchBackend):
    """Computes when it is let, and then only if nothing is wrong."""

    def __init__(self) -> None:
        super().__init__(MODEL, reload=lambda _: MODEL, num_blocks=[4], block_size=16)
        self.is_let = threading.Event()
        self.error: Exception | None = None
        self.threads: set[str] = set()

    def compute(self, batch: StepBatch) -> None:
        self.threads.add(threading.current_thread().name)
        assert self.is_let.wait(10)
        if self.error is not None:
            raise self.error
        super().compute(batch)


@pytest.fixture
def backend() -> HeldBackend:
    return HeldBackend()


def step_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "trioengine-step"]


def test_listed_tokens_have_no_processed_log_probabilities(backend: HeldBackend) -> None:
    sampling = SamplingParams(logprob_token_ids=(5,))
    LocalExecutor(backend).check_sampling(sampling)
    executor = LocalExecutor(backend, logprobs_mode=LogprobsMode.PROCESSED_LOGPROBS)
    executor.check_sampling(SamplingParams(logprobs=5))
    with pytest.raises(RequestError) as caught:
        executor.check_sampling(sampling)
    assert caught.value.param == "logprob_token_ids"


def test_submit_does_not_wait(backend: HeldBackend) -> None:
    executor = LocalExecutor(backend, is_asynchronous=True)
    executor.submit(FIRST)
    executor.submit(StepPlan(1, [ScheduledSequence(0, 2, 1)]))
    backend.is_let.set()
    assert [executor.result().step, executor.result().step] == [0, 1]
    assert backend.threads == {"trioengine-step"}
    executor.close()


def test_close_waits_for_steps_and_ends_the_thread(backend: HeldBackend) -> None:
    executor = LocalExecutor(backend, is_asynchronous=True)
    executor.submit(FIRST)
    assert len(step_threads()) == 1
    backend.is_let.set()
    executor.close()
    executor.close()
    assert step_threads() == []


def test_what_a_step_raises_comes_out_of_its_result(backend: HeldBackend) -> None:
    """And out of those of later steps, which stand on it; closing is no wait then."""
    executor = LocalExecutor(backend, is_asynchronous=True)
    backend.is_let.set()
    executor.submit(FIRST)
    assert executor.result().step == 0
    backend.error = MemoryError("no room")
    executor.submit(StepPlan(1, [ScheduledSequence(0, 2, 1)]))
    executor.submit(StepPlan(2, [ScheduledSequence(0, 3, 1)]))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            executor.result()
    executor.close()
    assert step_threads() == []


def test_without_a_thread_submit_computes(backend: HeldBackend) -> None:
    executor = LocalExecutor(backend)
    backend.is_let.set()
    executor.submit(FIRST)
    assert backend.threads == {threading.current_thread().name}
    assert executor.result().step == 0
    executor.close()
    assert step_threads() == []
