"""Profiles: files that a trace viewer loads, with the steps and the operations in them."""

import json
from pathlib import Path

import attrs
import pytest

torch = pytest.importorskip("torch")

from trioengine.config.resolve import ResolvedConfig  # noqa: E402
from trioengine.core.executor import NewSequence, ScheduledSequence, StepPlan  # noqa: E402
from trioengine.errors import RequestError, UnavailableError  # noqa: E402
from trioengine.models.loader import Checkpoint, open_checkpoint  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import folder_tensors, tiny_model, write_folder  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker import profile as profile_module  # noqa: E402
from trioengine.worker.executor import LocalExecutor  # noqa: E402
from trioengine.worker.loading import Computer, load_executor  # noqa: E402
from trioengine.worker.profile import TimedProfile  # noqa: E402

CONFIG = ResolvedConfig(
    max_model_len=64,
    max_num_batched_tokens=64,
    max_num_seqs=4,
    max_num_logit_rows=64,
    block_size=16,
    num_kv_blocks=(8,),
    num_offload_blocks=0,
    cpu_threads=2,
    async_scheduling=False,
    reasons={},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    model = tiny_model()
    return open_checkpoint(write_folder(tmp_path_factory.mktemp("tiny"), model, folder_tensors(model)))


def load(checkpoint: Checkpoint, kind: str, folder: Path) -> LocalExecutor:
    config = attrs.evolve(CONFIG, async_scheduling=kind == "asynchronous")
    computer = Computer(None if kind == "torch" else native_library())
    return load_executor(checkpoint.version.open(), config, computer, profile_dir=str(folder))


def run_steps(executor: LocalExecutor, number: int) -> list[int]:
    new = [NewSequence(number, [1, 2, 3], 3, SamplingParams(temperature=0), seed=0)]
    executor.submit(StepPlan(2 * number, [ScheduledSequence(number, 0, 3, [number])], new))
    executor.submit(StepPlan(2 * number + 1, [ScheduledSequence(number, 3, 1)]))
    return [executor.result().tokens[0] for _ in range(2)]


@pytest.mark.parametrize("kind", ["native", "asynchronous", "torch"])
def test_a_profile_has_the_steps_and_their_operations(checkpoint: Checkpoint, kind: str, tmp_path: Path) -> None:
    """The folder is made; steps before and after are not in it, and tokens are the same while it records."""
    executor = load(checkpoint, kind, tmp_path / "new" / "folder")
    alone = run_steps(executor, 0)
    executor.start_profile("before-release")
    assert run_steps(executor, 1) == alone
    path = Path(executor.stop_profile())
    assert run_steps(executor, 2) == alone
    assert path.parent == tmp_path / "new" / "folder"
    assert path.name.startswith("before-release-")
    events = json.loads(path.read_text())["traceEvents"]
    steps = [event for event in events if event["name"] == "step" and event["ph"] == "X"]
    assert len(steps) == 2
    names = {event["name"] for event in events}
    assert {"linear", "attention", "rms_norm"} <= names if kind != "torch" else "aten::linear" in names
    if kind != "torch":
        assert [(step["args"]["step"], step["args"]["tokens"]) for step in steps] == [(2, 3), (3, 1)]
        inner = [event for event in events if event["name"] != "step"]
        ends = [event["ts"] + event["dur"] for event in inner]
        assert min(event["ts"] for event in inner) >= steps[0]["ts"]
        assert max(ends) <= steps[1]["ts"] + steps[1]["dur"]
    executor.start_profile(None)
    second = executor.stop_profile()
    assert second != str(path)
    executor.close()


def test_a_folder_that_cannot_be_written_is_said(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    executor = load(checkpoint, "native", tmp_path / "file")
    with pytest.raises(UnavailableError, match="file"):
        executor.start_profile(None)
    with pytest.raises(RequestError):
        executor.stop_profile()
    executor.close()


def test_a_record_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile_module, "MAX_EVENTS", 2)
    profile = TimedProfile()
    for _ in range(5):
        with profile.span("x", number=1):
            pass
    profile.write(tmp_path / "x.json")
    trace = json.loads((tmp_path / "x.json").read_text())
    assert len(trace["traceEvents"]) == 2
    assert trace["otherData"]["num_dropped_events"] == 3
