"""`LocalExecutor` over a backend that begins steps: no thread, errors where they belong, what comes between steps."""

import json
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trioengine.core.executor import NewSequence, ScheduledSequence, StepPlan  # noqa: E402
from trioengine.errors import UnavailableError  # noqa: E402
from trioengine.testing.device_backend import device_backend  # noqa: E402
from trioengine.testing.fake_device import FakeDevice  # noqa: E402
from trioengine.testing.tiny_model import tiny_model  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker.executor import LocalExecutor  # noqa: E402
from trioengine.worker.torch_backend import TorchBackend  # noqa: E402

MODEL = tiny_model(vocab_size=61)
SAMPLING = SamplingParams(temperature=1.0)
FIRST = StepPlan(0, [ScheduledSequence(0, 0, 2, [0])], [NewSequence(0, [1, 2], 2, SAMPLING, seed=0)])


def second() -> StepPlan:
    return StepPlan(1, [ScheduledSequence(0, 2, 1)])


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def executor(device: FakeDevice, tmp_path: Path) -> LocalExecutor:
    backend = device_backend(MODEL, device, num_blocks=4)
    return LocalExecutor(backend, is_asynchronous=True, profile_dir=str(tmp_path))


def expected() -> list[list[int]]:
    executor = LocalExecutor(TorchBackend(MODEL, reload=lambda _: MODEL, num_blocks=[4], block_size=16))
    executor.submit(FIRST)
    executor.submit(second())
    return [list(executor.result().tokens) for _ in range(2)]


def test_submit_begins_and_result_waits(executor: LocalExecutor, device: FakeDevice) -> None:
    """In the caller's thread, whatever the core changes meanwhile."""
    threads = threading.active_count()
    executor.submit(FIRST)
    plan = second()
    executor.submit(plan)
    plan.scheduled[0].num_computed_tokens = plan.scheduled[0].num_tokens = 99
    assert device.num_queued == 2
    assert threading.active_count() == threads
    results = [executor.result() for _ in range(2)]
    assert [result.step for result in results] == [0, 1]
    assert [list(result.tokens) for result in results] == expected()
    executor.close()


def test_what_comes_between_steps_waits_for_those_that_were_submitted(
    executor: LocalExecutor, device: FakeDevice
) -> None:
    """Their results stay to be fetched."""
    executor.submit(FIRST)
    executor.submit(second())
    (reply,) = executor.collective_rpc("check_weights", "{}")
    assert len(json.loads(reply)) == 8
    assert device.num_queued == 0
    num_waits = device.num_synchronizations
    assert [list(executor.result().tokens) for _ in range(2)] == expected()
    assert device.num_synchronizations == num_waits
    executor.close()


def test_steps_are_in_a_profile(executor: LocalExecutor) -> None:
    executor.start_profile("device")
    executor.submit(FIRST)
    executor.result()
    trace = json.loads(Path(executor.stop_profile()).read_text())
    assert "step" in {event.get("name") for event in trace["traceEvents"]}
    executor.close()


def test_what_a_step_raises_comes_out_of_its_result(
    executor: LocalExecutor, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And closing is no error then."""
    executor.submit(FIRST)
    assert executor.result().step == 0

    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(device, "copy_to_device", fail)
    executor.submit(second())
    executor.submit(StepPlan(2, [ScheduledSequence(0, 3, 1)]))
    with pytest.raises(RuntimeError, match="device lost"):
        executor.result()
    executor.close()
    executor.close()


def test_graphs_that_do_not_fit_leave_nothing_of_the_weights(
    executor: LocalExecutor, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once there is memory, they wake up as if nothing had been."""
    executor.sleep(2)
    executor.wake_up(["kv_cache"])

    def no_memory(work: object, beside: object = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(device, "capture", no_memory)
        with pytest.raises(UnavailableError, match="memory"):
            executor.wake_up(["weights"])
    assert list(executor._computed.weight_arrays()) == []
    executor.wake_up(["weights"])
    for plan in (FIRST, second()):
        executor.submit(plan)
    assert [list(executor.result().tokens) for _ in range(2)] == expected()
    assert device.num_replays == 1


def test_loading_blocks_is_begun_like_a_step(device: FakeDevice) -> None:
    """Behind what was begun before, and with the numbers that were there then; nobody waits."""
    backend = device_backend(MODEL, device, num_blocks=4)
    before = backend.kv_block(0, 1)
    data = np.arange(before.nbytes, dtype=np.uint32).astype(np.uint8)
    num_waits = device.num_synchronizations
    for block_id, content in ((1, data), (2, data), (2, None)):
        backend.write_kv_block(0, block_id, content)
    expected_bytes = data.copy()
    data[:] = 0  # Its owner may use it for others now.
    assert (device.num_synchronizations, device.num_queued) == (num_waits, 3)
    assert (backend.kv_block(0, 1).reshape(-1) == expected_bytes).all()
    assert not backend.kv_block(0, 2).any()
    assert backend.kv_block(0, 1).shape == before.shape


def test_closing_gives_the_devices_memory_back(
    executor: LocalExecutor, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: another engine of this process looks for free memory."""
    calls: list[str] = []
    backend = executor._computed
    for name in ("synchronize", "return_memory"):
        monkeypatch.setattr(device, name, partial(calls.append, name))
    executor.close()
    assert list(backend.weight_arrays()) == []
    assert calls[0] == "synchronize"
    assert calls[-1] == "return_memory"
    executor.close()


def test_close_waits_for_the_steps(executor: LocalExecutor, device: FakeDevice) -> None:
    executor.submit(FIRST)
    executor.submit(second())
    executor.close()
    assert device.num_queued == 0
