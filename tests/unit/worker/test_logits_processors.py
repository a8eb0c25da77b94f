"""Custom logits processors: found by entry point, arguments checked, and their failures stay with their request."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool  # noqa: E402

from trioengine.core.executor import NO_TOKEN, NewSequence, ScheduledSequence, StepPlan, StepResult  # noqa: E402
from trioengine.errors import RequestError  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import native_copy, tiny_model  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker.backend import Backend  # noqa: E402
from trioengine.worker.executor import LocalExecutor  # noqa: E402
from trioengine.worker.logits_processors import LogitsProcessors  # noqa: E402
from trioengine.worker.native_backend import NativeBackend  # noqa: E402
from trioengine.worker.torch_backend import TorchBackend  # noqa: E402

MODEL = tiny_model()
PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(temperature=0)

PACKAGE = """
class Multiples:
    def __init__(self, arguments):
        self.number = arguments["of"]

    @staticmethod
    def validate(arguments):
        if not isinstance(arguments.get("of"), int):
            raise ValueError("`of` must be an integer")

    def __call__(self, prompt_token_ids, output_token_ids, logits):
        logits[[token for token in range(len(logits)) if token % self.number]] = -float("inf")
"""


class Recorder:
    """Forces the tokens of a script, and records what it is called with."""

    calls: list[tuple[list[int], list[int]]]
    failing_call: int | None = None

    def __init__(self, arguments: Mapping[str, object]) -> None:
        script = arguments["script"]
        assert isinstance(script, list)
        self._script: list[int] = script

    @classmethod
    def validate(cls, arguments: Mapping[str, object]) -> None:
        """Any will do."""

    def __call__(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], logits: NDArray[np.float32]
    ) -> None:
        self.calls.append((list(prompt_token_ids), list(output_token_ids)))
        if len(output_token_ids) == self.failing_call:
            raise KeyError("lost")
        logits[self._script[len(output_token_ids)]] = logits.max() + 1


@pytest.fixture(autouse=True)
def forget_calls() -> None:
    Recorder.calls = []
    Recorder.failing_call = None


def torch_backend() -> Backend:
    return TorchBackend(MODEL, reload=lambda _: MODEL, num_blocks=[16], block_size=16)


def native_backend() -> Backend:
    library = native_library()
    return NativeBackend(
        native_copy(MODEL),
        library,
        ThreadPool(library, 1),
        reload=lambda _: native_copy(MODEL),
        num_blocks=[16],
        block_size=16,
        max_tokens=64,
        max_logit_rows=16,
    )


@pytest.fixture(params=[torch_backend, native_backend])
def executor(request: pytest.FixtureRequest) -> LocalExecutor:
    return LocalExecutor(request.param(), logits_processors=LogitsProcessors({"recorder": Recorder}))


def scripted(*script: int) -> SamplingParams:
    return attrs.evolve(GREEDY, logits_processors={"recorder": {"script": script}}, logprobs=0)


def run(executor: LocalExecutor, step: int, work: Sequence[ScheduledSequence], *sampling: SamplingParams) -> StepResult:
    """A step; with parameters its sequences are new."""
    new = [NewSequence(i, PROMPT, len(PROMPT), params, seed=i) for i, params in enumerate(sampling)]
    executor.submit(StepPlan(step, work, new))
    return executor.result()


def prompts(number: int) -> list[ScheduledSequence]:
    return [ScheduledSequence(i, 0, len(PROMPT), [i]) for i in range(number)]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogitsProcessors:
    """Of a package that has a right and a broken entry point."""
    (tmp_path / "some_processors.py").write_text(PACKAGE)
    folder = tmp_path / "some_processors-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: some-processors\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[trioengine.logits_processors]\nmultiples = some_processors:Multiples\nbroken = some_processors:Missing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return LogitsProcessors.installed()


def test_a_package_brings_a_rule(installed: LogitsProcessors) -> None:
    """The request that names it gets tokens by its rule, its neighbour others."""
    sampling = SamplingParams(logits_processors={"multiples": {"of": 7}})
    installed.check(sampling)
    executor = LocalExecutor(torch_backend(), logits_processors=installed)
    executor.check_sampling(sampling)
    for step, work in enumerate((prompts(2), *([ScheduledSequence(i, n, 1) for i in (0, 1)] for n in range(5, 9)))):
        result = run(executor, step, work, *((sampling, GREEDY) if step == 0 else ()))
        assert result.tokens[0] % 7 == 0
        assert not result.failures


@pytest.mark.parametrize(
    ("processors", "param", "said"),
    [
        ({"multiple": {"of": 7}}, "logits_processors.multiple", "installed: multiples"),
        ({"broken": {}}, "logits_processors.broken", "installed: multiples"),
        ({"multiples": {"of": "seven"}}, "logits_processors.multiples", "`of` must be an integer"),
        ({"multiples": "[7]"}, "logits_processors.multiples", "JSON object"),
        ({"multiples": "{"}, "logits_processors.multiples", "arguments"),
    ],
)
def test_unknown_names_and_wrong_arguments_are_refused(
    installed: LogitsProcessors, processors: Mapping[str, str], param: str, said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        installed.check(SamplingParams(logits_processors=processors))
    assert caught.value.param == param
    assert said in caught.value.message


def test_an_entry_point_that_cannot_be_imported_is_in_the_log(
    installed: LogitsProcessors, caplog: pytest.LogCaptureFixture
) -> None:
    LogitsProcessors.installed()
    assert "'broken' cannot be imported" in caplog.text


def test_where_none_is_installed_all_are_unknown() -> None:
    with pytest.raises(RequestError, match="installed: none"):
        LocalExecutor(torch_backend()).check_sampling(scripted(1))


def test_a_processor_sees_prompt_and_output_and_drafts(executor: LocalExecutor) -> None:
    """Each draft's place has a call of its own; log probabilities are of the logits before it."""
    result = run(executor, 0, prompts(1), scripted(7, 8, 9, 10))
    assert result.tokens == [7]
    assert Recorder.calls == [(PROMPT, [])]
    work = ScheduledSequence(0, 5, 3, draft_token_ids=[8, 30])
    result = run(executor, 1, [work])
    assert (result.tokens, result.num_accepted) == ([9], {0: 1})
    assert Recorder.calls[1:] == [(PROMPT, [7]), (PROMPT, [7, 8]), (PROMPT, [7, 8, 30])]
    assert [each.token_ids for each in result.logprobs[0]] == [[8], [9]]
    assert all(each.rank > 1 for each in result.logprobs[0])


def test_other_rules_come_after_a_processor(executor: LocalExecutor) -> None:
    sampling = attrs.evolve(scripted(7, 8), allowed_token_ids=(20, 21))
    assert run(executor, 0, prompts(1), sampling).tokens[0] in (20, 21)


def test_an_exception_fails_its_request_only(executor: LocalExecutor) -> None:
    alone = [run(executor, 0, prompts(1), GREEDY).tokens[0]]
    executor.submit(StepPlan(1, [], removed=[0]))
    executor.result()
    Recorder.failing_call = 1
    result = run(executor, 2, prompts(2), GREEDY, scripted(7, 8, 9))
    assert (result.tokens, list(result.failures)) == ([*alone, 7], [])
    result = run(executor, 3, [ScheduledSequence(0, 5, 1), ScheduledSequence(1, 5, 1)])
    assert result.tokens[0] != NO_TOKEN
    assert result.tokens[1] == NO_TOKEN
    assert [failure.sequence_id for failure in result.failures] == [1]
    assert "'recorder' failed: KeyError: 'lost'" in result.failures[0].message


def test_an_exception_behind_a_rejected_draft_means_nothing(executor: LocalExecutor) -> None:
    run(executor, 0, prompts(1), scripted(7, 8, 9))
    Recorder.failing_call = 3
    result = run(executor, 1, [ScheduledSequence(0, 5, 3, draft_token_ids=[30, 31])])
    assert (result.tokens, list(result.failures)) == ([8], [])


def test_a_processor_that_cannot_be_made_fails_its_request(executor: LocalExecutor) -> None:
    result = run(executor, 0, prompts(2), attrs.evolve(GREEDY, logits_processors={"recorder": {}}), GREEDY)
    assert [failure.sequence_id for failure in result.failures] == [0]
    assert "KeyError" in result.failures[0].message
    assert result.tokens[1] != NO_TOKEN


@pytest.mark.parametrize("executor_backend", [torch_backend, native_backend])
def test_a_processor_that_forbids_everything_or_makes_no_numbers_fails_its_request(
    executor_backend: Callable[[], Backend],
) -> None:
    class Filler(Recorder):
        def __call__(
            self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], logits: NDArray[np.float32]
        ) -> None:
            logits[:] = np.float32(self._script[0])

    for value, said in (("nan", "not a number"), ("-inf", "No token is allowed")):
        filler = LocalExecutor(executor_backend(), logits_processors=LogitsProcessors({"filler": Filler}))
        sampling = attrs.evolve(GREEDY, logits_processors={"filler": {"script": [value]}})
        result = run(filler, 0, prompts(2), sampling, GREEDY)
        (failure,) = result.failures
        assert said in failure.message
        assert result.tokens[1] != NO_TOKEN
