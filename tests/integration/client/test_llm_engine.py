"""`LLMEngine` over a core in this process and over core processes: steps, failures, death, Ctrl-C, and what is left."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from trioengine.client.blocking import SyncMPClient
from trioengine.client.llm_engine import LLMEngine
from trioengine.client.llm_inputs import EngineArgs, LoRARequest
from trioengine.client.llm_outputs import RequestOutput
from trioengine.config.engine import EngineConfig
from trioengine.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineStartError,
    RequestError,
)
from trioengine.observability.loggers import StatLoggerFactory
from trioengine.observability.stats import IterationStats
from trioengine.runtime import status_page
from trioengine.testing.blocking_adapter import build_fake_core_here
from trioengine.testing.fake_core import MODULE
from trioengine.testing.fake_executor import generate_alone
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.types.messages import AddLoRA, CheckIntegrity, GetLoad, ListLoRAs
from trioengine.types.output import FinishReason
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import Deadlines

SCRIPTED = "trioengine.testing.scripted_core"
PROMPT = [5, 6, 7]
ENDLESS = SamplingParams(max_tokens=100_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_fake_model(tmp_path_factory.mktemp("model")))


class Opener:
    """Opens engines over fake cores, in this process or in others."""

    def __init__(self, model: str, multiprocess: bool) -> None:
        self._model = model
        self._multiprocess = multiprocess
        self.opened: list[LLMEngine] = []

    def __call__(self, *, stat_loggers: Sequence[StatLoggerFactory] = (), **config: Any) -> LLMEngine:
        engine = LLMEngine(
            EngineConfig(model=self._model, **config),
            multiprocess=self._multiprocess,
            core_module=MODULE,
            core_options={"pace_s": "0.0005"},
            stat_loggers=stat_loggers,
        )
        self.opened.append(engine)
        return engine


@pytest.fixture(scope="module", params=[False, True], ids=["in process", "multiprocess"])
def open_engine(request: pytest.FixtureRequest, model: str) -> Iterator[Opener]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("trioengine.runtime.build.build_engine_core", build_fake_core_here)
        opener = Opener(model, request.param)
        yield opener
        for engine in opener.opened:
            engine.close()


@pytest.fixture(scope="module")
def engine(open_engine: Opener) -> LLMEngine:
    """One for all tests that leave it as they find it."""
    return open_engine(enable_lora=True, max_loras=2)


def sampling(
    num_tokens: int = 5, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY, **more: Any
) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=num_tokens, ignore_eos=True, output_kind=kind, **more)


def right_tokens(num_tokens: int = 5, seed: int = 1) -> tuple[int, ...]:
    return tuple(generate_alone(PROMPT, num_tokens, seed=seed, vocab_size=257))


def run(engine: LLMEngine) -> list[RequestOutput]:
    """All outputs until nothing is left to do."""
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def is_right(engine: LLMEngine) -> bool:
    engine.add_request("right?", PROMPT, sampling())
    (output,) = run(engine)
    return output.outputs[0].token_ids == right_tokens()


# Requests


def test_requests_are_answered_step_by_step(engine: LLMEngine) -> None:
    """Several at once, of each kind, with several answers; then nothing is left, and a step returns nothing."""
    for kind in RequestOutputKind:
        engine.add_request(kind.name, PROMPT, sampling(5, kind))
    engine.add_request("two", PROMPT, sampling(n=2))
    assert engine.get_num_unfinished_requests() == 4
    outputs = run(engine)
    by_name = {name: [output for output in outputs if output.request_id == name] for name in ("DELTA", "CUMULATIVE")}
    assert sum((output.outputs[0].token_ids for output in by_name["DELTA"]), ()) == right_tokens()
    assert by_name["CUMULATIVE"][-1].outputs[0].token_ids == right_tokens()
    assert len(by_name["DELTA"]) > 1
    (final,) = [output for output in outputs if output.request_id == "FINAL_ONLY"]
    assert final.outputs[0].token_ids == right_tokens()
    (two,) = [output for output in outputs if output.request_id == "two"]
    assert [choice.token_ids for choice in two.outputs] == [right_tokens(), right_tokens(seed=2)]
    for output in (final, two):
        assert output.finished
        assert output.metrics is not None
        assert output.metrics.finish_reason == "length"
    assert engine.get_num_unfinished_requests() == 0
    assert engine.step() == []


def test_an_interval_makes_outputs_larger_and_loses_nothing(engine: LLMEngine) -> None:
    engine.add_request("mine", PROMPT, sampling(12, RequestOutputKind.DELTA, stream_interval=5))
    sizes = [len(output.outputs[0].token_ids) for output in run(engine)]
    assert sum(sizes) == 12
    assert all(size >= 5 for size in sizes[1:-1])


def test_an_aborted_request_has_no_output_any_more(engine: LLMEngine) -> None:
    """Neither this one nor a new one of its name gets what was left; the core knows nothing of it."""
    engine.add_request("mine", "abc", ENDLESS)
    while not engine.step():
        pass
    engine.abort_request(["mine", "nobody"])
    assert not engine.has_unfinished_requests()
    load = engine.call(GetLoad())
    assert (load.running, load.waiting) == (0, 0)
    engine.add_request("mine", PROMPT, sampling())
    (output,) = run(engine)
    assert output.outputs[0].token_ids == right_tokens()
    engine.call(CheckIntegrity())


def test_a_deadline_ends_one_request_only(engine: LLMEngine) -> None:
    """Its error names it; with a handler nothing is raised."""
    deadlines = Deadlines(total_s=0.05)
    engine.add_request("late", "abc", ENDLESS, deadlines=deadlines)
    engine.add_request("mine", PROMPT, sampling())
    outputs: list[Any] = []
    with pytest.raises(DeadlineExceededError) as caught:  # noqa: PT012 (which step raises it, nobody knows)
        while True:
            outputs += engine.step()
    assert "late" in caught.value.__notes__[0]
    assert [output.outputs[0].token_ids for output in outputs if output.request_id == "mine"] == [right_tokens()]
    failed: list[str] = []
    engine.add_request("again", "abc", ENDLESS, deadlines=deadlines)
    while engine.has_unfinished_requests():
        engine.step(lambda request_id, _: failed.append(request_id))
    assert failed == ["again"]


def test_wrong_requests_are_refused_before_anything_runs(engine: LLMEngine) -> None:
    for prompt, params, path in (
        ("abc", SamplingParams(temperature=-1), "temperature"),
        ({"text": "abc"}, SamplingParams(), "prompt"),
        ({"prompt": "abc", "multi_modal_data": {"image": 1}}, SamplingParams(), "prompt.multi_modal_data"),
        ([999_999], SamplingParams(), "prompt[0]"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.add_request("wrong", prompt, params)
        assert caught.value.param == path
    assert not engine.has_unfinished_requests()
    assert is_right(engine)


# Operations


def test_operations_are_the_clients(engine: LLMEngine, tmp_path: Path) -> None:
    """Those with vLLM's signatures; `tests/conformance` checks what each does."""
    assert engine.get_supported_tasks() == ("generate",)
    assert engine.collective_rpc("echo", kwargs={"a": 1}) == [{"a": 1}]
    engine.sleep(level=2)
    assert engine.is_sleeping()
    assert engine.is_paused()
    engine.wake_up()
    assert engine.reset_prefix_cache()
    adapter = LoRARequest("mine", 7, str(tmp_path))
    assert engine.list_loras() == set()
    engine.add_request("with", PROMPT, sampling(), lora_request=adapter)
    (output,) = run(engine)
    assert output.lora_request == adapter
    assert engine.list_loras() == {7}
    assert not engine.add_lora(adapter)
    with pytest.raises(RequestError, match="another adapter"):
        engine.add_request("other", PROMPT, sampling(), lora_request=LoRARequest("mine", 8, "/elsewhere"))
    assert engine.pin_lora(7)
    assert engine.remove_lora(7)
    assert not engine.remove_lora(7)
    assert engine.run_operation(engine.operations.is_paused()) is False
    assert is_right(engine)


def test_statistics_are_told_and_logged(open_engine: Opener) -> None:
    """Also those of aborted requests, once."""

    class Counter:
        def __init__(self) -> None:
            self.finished: list[str] = []
            self.num_tokens = self.num_logs = self.num_closed = 0

        def record(self, stats: IterationStats) -> None:
            self.finished += [each.finish_reason for each in stats.finished]
            self.num_tokens += stats.num_generated_tokens

        def log(self) -> None:
            self.num_logs += 1

        def close(self) -> None:
            self.num_closed += 1

    counter = Counter()

    def make(config: EngineConfig, *, num_cores: int, model_name: str) -> Counter:
        return counter

    engine = open_engine(stat_loggers=[make], disable_log_stats=True)
    assert is_right(engine)
    engine.add_request("mine", PROMPT, ENDLESS)
    engine.step()
    engine.abort_request("mine")
    engine.do_log_stats()
    engine.close()
    assert counter.finished == ["length", "abort"]
    assert counter.num_tokens >= 5
    assert (counter.num_logs, counter.num_closed) == (1, 1)


def test_what_one_core_forgets_of_adapters_all_forget(model: str) -> None:
    """Each makes room by its own use, but a request may go to any."""
    with LLMEngine(EngineConfig(model=model, data_parallel_size=2), core_module=MODULE) as engine:
        for name in ("a", "b"):
            engine.call(AddLoRA(name, f"/{name}"))
        for rank, name in enumerate(("b", "a")):
            engine.add_request(
                name, PROMPT, sampling(), lora_request=LoRARequest(name, 1, f"/{name}"), data_parallel_rank=rank
            )
        while engine.has_unfinished_requests():
            engine.step()
        engine.call(AddLoRA("c", "/c"))
        assert [info.name for info in engine.call(ListLoRAs())] == ["c"]
        engine.call(AddLoRA("a", "/a"))
        assert [info.name for info in engine.call(ListLoRAs())] == ["c", "a"]


def test_two_cores_share_the_requests(model: str) -> None:
    """Several cores are processes without being asked; operations run on all."""
    config = EngineConfig(model=model, data_parallel_size=2)
    with LLMEngine.from_engine_args(config, core_module=MODULE) as engine:
        for number in range(4):
            engine.add_request(str(number), PROMPT, sampling(), data_parallel_rank=number % 2)
        assert [output.outputs[0].token_ids for output in run(engine)] == [right_tokens()] * 4
        assert engine.collective_rpc("echo") == [{}, {}]
        with pytest.raises(RequestError):
            engine.add_request("none", PROMPT, sampling(), data_parallel_rank=2)
    with pytest.raises(ConfigError, match="multiprocess"):
        LLMEngine(config, multiprocess=False)


def test_engine_args_are_vllms(model: str) -> None:
    args = EngineArgs(model=model, tensor_parallel_size=1, dtype="auto", max_num_seqs=8)
    with LLMEngine.from_engine_args(args, multiprocess=True, core_module=MODULE) as engine:
        assert engine.config.max_num_seqs == 8
        assert is_right(engine)


# Death


def open_scripted(model: str, **options: str) -> LLMEngine:
    return LLMEngine(
        EngineConfig(model=model, startup_timeout_s=float(options.pop("startup_timeout_s", "60"))),
        multiprocess=True,
        core_module=SCRIPTED,
        core_options={"pace_s": "0.001", **options},
    )


def core_pid(engine: LLMEngine) -> int:
    assert isinstance(engine.engine_core, SyncMPClient)
    return engine.engine_core.core_pids[0]


def test_a_killed_core_is_the_death_of_the_engine(model: str) -> None:
    """Of a request that waits, of calls, of later requests; closing works all the same."""
    with open_scripted(model) as engine:
        engine.add_request("mine", "abc", ENDLESS)
        while not engine.step():
            pass
        os.kill(core_pid(engine), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            run(engine)
        for use in (
            engine.check_health,
            lambda: engine.call(GetLoad()),
            lambda: engine.add_request("later", "abc", ENDLESS),
        ):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                use()
        assert not engine.has_unfinished_requests()


def test_a_dying_cores_last_words_are_its_error(model: str) -> None:
    with open_scripted(model, fatal_token="33") as engine:
        engine.add_request("mine", "abc!", ENDLESS)
        with pytest.raises(EngineDeadError) as caught:
            run(engine)
        assert caught.value.cause is not None
        assert "Traceback" in caught.value.cause


def test_a_core_in_this_process_that_fails_is_dead(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it died of is in the error and in the log."""
    monkeypatch.setattr("trioengine.runtime.build.build_engine_core", build_fake_core_here)
    with LLMEngine(EngineConfig(model=model)) as engine:
        executor = engine.model_executor
        assert is_right(engine)

        def fail(_: object) -> None:
            raise RuntimeError("out of paper")

        monkeypatch.setattr(executor, "submit", fail)
        engine.add_request("mine", "abc", ENDLESS)
        with pytest.raises(EngineDeadError, match="out of paper") as caught:
            run(engine)
        assert "Traceback" in (caught.value.cause or "")
        assert "Traceback" in caplog.text
        with pytest.raises(EngineDeadError, match="out of paper"):
            engine.add_request("later", "abc", ENDLESS)


def test_a_core_that_is_stopped_is_an_error_until_it_goes_on(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_page, "MAX_TICK_AGE_S", 0.6)
    monkeypatch.setattr("trioengine.client.blocking.HEALTH_INTERVAL_S", 0.05)
    with LLMEngine(EngineConfig(model=model), multiprocess=True, core_module=MODULE) as engine:
        engine.add_request("mine", PROMPT, ENDLESS)
        engine.step()
        os.kill(core_pid(engine), signal.SIGSTOP)
        try:
            with pytest.raises(EngineDeadError, match="no sign of life"):
                run(engine)
        finally:
            os.kill(core_pid(engine), signal.SIGCONT)
        engine.abort_request("mine")
        with pytest.raises(AttributeError):
            _ = engine.model_executor
        monkeypatch.setattr(status_page, "MAX_TICK_AGE_S", 60.0)
        assert is_right(engine)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start_error": "out of paper"}, "out of paper"),
        ({"exit_status": "3"}, "status 3"),
        ({"load_s": "30", "startup_timeout_s": "0.3"}, "startup_timeout_s"),
    ],
)
def test_why_a_core_cannot_start(model: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(EngineStartError, match=words):
        open_scripted(model, **options)
    assert not [each for each in psutil.Process().children() if SCRIPTED in each.cmdline()]


# The end


def test_opening_and_closing_five_times_leaks_nothing(
    open_engine: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 13 (vllm 9727): no file, socket, thread, process or directory; whether closed or dropped."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    process = psutil.Process()

    def open_and_end(*, is_closed: bool) -> None:
        engine = open_engine()
        assert is_right(engine)
        if is_closed:
            engine.close()
            engine.close()

    open_and_end(is_closed=True)  # What Python and libraries keep for good is there now.
    open_engine.opened.pop()
    num_fds, num_threads = process.num_fds(), threading.active_count()
    cores = set(process.children())
    for number in range(5):
        open_and_end(is_closed=bool(number % 2))
        open_engine.opened.pop()
    assert set(process.children()) <= cores
    assert process.num_fds() <= num_fds
    assert threading.active_count() <= num_threads
    assert os.listdir(tmp_path) == []


def test_a_closed_engine_says_so(open_engine: Opener) -> None:
    engine = open_engine()
    engine.add_request("mine", PROMPT, ENDLESS)
    engine.close()
    for use in (engine.check_health, lambda: engine.call(GetLoad()), lambda: engine.add_request("x", "abc", ENDLESS)):
        with pytest.raises(EngineClosedError):
            use()


def test_threads_take_turns_and_closing_ends_who_is_there(open_engine: Opener) -> None:
    """Each gets the answers to its own requests."""
    engine, is_inside, errors = open_engine(), threading.Event(), list[BaseException]()

    def work(num_rounds: int) -> None:
        try:
            for _ in range(num_rounds):
                with engine.interrupts:
                    assert is_right(engine)
            is_inside.set()
            with engine.interrupts:
                while num_rounds == 0:
                    engine.add_request("mine", PROMPT, ENDLESS)
                    run(engine)
        except BaseException as error:
            errors.append(error)

    def start(num_rounds: int) -> threading.Thread:
        thread = threading.Thread(target=work, args=(num_rounds,))
        thread.start()
        return thread

    for thread in [start(5) for _ in range(4)]:
        thread.join()
    assert errors == []
    is_inside.clear()
    thread = start(0)
    is_inside.wait()
    engine.close()
    thread.join()
    assert [type(error) for error in errors] == [EngineClosedError]


def test_a_copy_that_fork_makes_does_not_end_the_cores(model: str) -> None:
    """Nor does it wait for them: their answers come here."""
    with open_scripted(model) as engine:
        child = os.fork()
        if child == 0:
            num_refused = 0
            for use in (
                engine.check_health,
                lambda: engine.call(GetLoad()),
                lambda: engine.add_request("child's", "abc", ENDLESS),
            ):
                try:
                    use()
                except EngineClosedError as error:
                    num_refused += "forked" in str(error)
            engine.close()
            os._exit(0 if num_refused == 3 else 1)
        assert os.waitpid(child, 0)[1] == 0
        engine.add_request("mine", "abc", SamplingParams(max_tokens=3))
        assert run(engine)[-1].outputs[0].finish_reason is FinishReason.LENGTH


# Ctrl-C. Only a program of its own has a main thread that may be interrupted at any moment.


def run_script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("multiprocess", [False, True])
def test_ctrl_c_at_any_moment_leaves_a_usable_engine(model: str, tmp_path: Path, multiprocess: bool) -> None:
    """Many times, while requests are added, computed, or waited for: no stale output comes afterwards, the core's books
    are right, and the signal is the program's own again.
    """
    out = run_script(
        tmp_path,
        f"""
        import os, random, signal, threading
        import trioengine.runtime.build as build
        from trioengine.client import llm, llm_engine
        from trioengine.testing.blocking_adapter import build_fake_core_here
        from trioengine.testing.fake_executor import generate_alone
        from trioengine.types.messages import AddLoRA, CheckIntegrity, GetLoad, ListLoRAs
        from trioengine import LLM, SamplingParams
        from functools import partial

        build.build_engine_core = build_fake_core_here
        llm.LLMEngine = partial(llm_engine.LLMEngine, core_module="trioengine.testing.fake_core")
        chance = random.Random(0)
        model = LLM({model!r}, multiprocess={multiprocess})
        short = SamplingParams(seed=1, max_tokens=5, ignore_eos=True)
        endless = SamplingParams(max_tokens=100_000, ignore_eos=True)
        expected = tuple(generate_alone([5, 6, 7], 5, seed=1, vocab_size=257))
        num_interrupts = 0
        for _ in range(20):
            timer = threading.Timer(chance.random() * 0.03, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                model.generate([[1, 2, 3]] * chance.randint(1, 30), endless, use_tqdm=False)
            except KeyboardInterrupt:
                num_interrupts += 1
            timer.join()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert not model.llm_engine.has_unfinished_requests()
            load = model.llm_engine.call(GetLoad())
            assert (load.running, load.waiting) == (0, 0), load
            model.llm_engine.call(CheckIntegrity())
            (output,) = model.generate([[5, 6, 7]], short, use_tqdm=False)
            assert output.outputs[0].token_ids == expected
        model.close()
        print(num_interrupts)
        """,
    )
    assert out.split() == ["20"]


def test_ctrl_c_while_it_opens_leaves_no_process(model: str, tmp_path: Path) -> None:
    out = run_script(
        tmp_path,
        f"""
        import os, signal, threading, psutil
        from trioengine import EngineConfig, LLMEngine

        for delay_s in (0.0, 0.02, 0.1, 0.3):
            timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                LLMEngine(EngineConfig(model={model!r}), multiprocess=True, core_module={SCRIPTED!r},
                          core_options={{"load_s": "30"}})
            except KeyboardInterrupt:
                print(len(psutil.Process().children(recursive=True)))
            timer.join()
        """,
    )
    assert out.split() == ["0"] * 4


def test_the_handler_of_the_application_decides(engine: LLMEngine) -> None:
    """An application whose handler does not raise is not interrupted, and hears of the signal once."""
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with engine.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert heard == []
            engine.add_request("mine", PROMPT, sampling())
            (output,) = run(engine)
        assert output.outputs[0].token_ids == right_tokens()
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
