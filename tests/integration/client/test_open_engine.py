"""`open_engine` with real processes: how it opens, what leaves its block, and that nothing stays behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from trioengine.checkpoint.locate import FetchProgress, ModelLocation
from trioengine.client.engine import Engine, open_engine
from trioengine.config.engine import EngineConfig
from trioengine.errors import CheckpointError, EngineClosedError, EngineDeadError, EngineStartError
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.transport.address import create_endpoint
from trioengine.transport.topology import bind_router
from trioengine.types.messages import GetLoad
from trioengine.types.output import FinishReason
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest

TIMEOUT_S = 60
CORE_MODULE = "trioengine.testing.scripted_core"
ENDLESS = SamplingParams(max_tokens=1 << 19, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_fake_model(tmp_path_factory.mktemp("model")))


@asynccontextmanager
async def open_scripted(
    model: str, options: Mapping[str, str] | None = None, **config: Any
) -> AsyncGenerator[Engine, None]:
    options = {"pace_s": "0.001"} | dict(options or {})
    config_ = EngineConfig(model=model, **config)
    with trio.fail_after(TIMEOUT_S):
        async with open_engine(config_, core_module=CORE_MODULE, core_options=options) as engine:
            yield engine


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def first_text(engine: Engine, prompt: str = "abc") -> str:
    sampling = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY)
    async with engine.generate(GenerateRequest(prompt, sampling)) as stream:
        return (await anext(stream)).outputs[0].text


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every test, however it ends: no process."""
    yield
    assert children() == []


# Opening and closing


async def test_progress_is_reported_while_it_opens(model: str) -> None:
    stages: list[tuple[str, float]] = []
    config = EngineConfig(model=model, served_model_name="mine")
    async with open_engine(
        config, on_progress=lambda stage, fraction: stages.append((stage, fraction)), core_module=CORE_MODULE
    ) as engine:
        assert engine.model_name == "mine"
        assert engine.ready.num_blocks > 0
    assert ("pretending", 0.5) in stages


async def test_with_a_seed_requests_without_one_draw_the_same_again(model: str) -> None:
    drawn: list[int] = []
    for _ in range(2):
        async with open_engine(EngineConfig(model=model, seed=0), core_module=CORE_MODULE) as engine:
            drawn += [engine.input_processor.process(GenerateRequest("a")).seed for _ in range(2)]
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


async def test_opening_and_closing_five_times_leaks_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 13 (vllm 9727): no file, socket, thread, process or directory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    process = psutil.Process()

    async def open_and_close() -> None:
        async with open_scripted(model) as engine:
            assert await first_text(engine) == "abc"
            assert children()

    await open_and_close()  # What Python and libraries keep for good is there now.
    threads = set(threading.enumerate())
    num_fds = process.num_fds()
    num_maps = sum("trioengine" in each.path for each in process.memory_maps())
    for _ in range(4):
        await open_and_close()
    assert process.num_fds() <= num_fds
    assert sum("trioengine" in each.path for each in process.memory_maps()) <= num_maps
    assert os.listdir(tmp_path) == []
    # Trio keeps idle threads of its own for a while.
    assert [each.name for each in set(threading.enumerate()) - threads if "Trio" not in each.name] == []


async def test_two_engines_live_in_one_process(model: str) -> None:
    """And one that dies is not felt by the other."""
    async with open_scripted(model) as first, open_scripted(model) as second:
        assert await first_text(first, "abc") == "abc"
        assert await first_text(second, "xyz") == "xyz"
        os.kill(core_pid(first), signal.SIGKILL)
        await until_unhealthy(first)
        assert await first_text(second) == "abc"


def core_pid(engine: Engine) -> int:
    handle: Any = engine._link._cores[0]
    return handle.pid


async def until_unhealthy(engine: Engine) -> EngineDeadError:
    while True:
        try:
            engine.check_health()
        except EngineDeadError as error:
            return error
        await trio.sleep(0.01)


def test_thirty_two_engines_have_addresses_of_their_own() -> None:
    """Case 14: made at the same moment by several processes, all bound."""
    code = (
        "from trioengine.transport.address import create_endpoint; import os\n"
        "for _ in range(8): print(create_endpoint(os.environ).address)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    addresses = [address for process in processes for address in process.communicate()[0].split()]
    try:
        assert len(set(addresses)) == 32
    finally:
        for address in addresses:
            Path(address.removeprefix("ipc://")).parent.rmdir()
    endpoints = [create_endpoint(os.environ) for _ in range(32)]
    routers = [bind_router(endpoint) for endpoint in endpoints]
    for endpoint, router in zip(endpoints, routers, strict=True):
        router.socket.close()
        endpoint.remove()


async def test_closing_ends_what_is_open_in_other_tasks(model: str) -> None:
    """Streams that are read, and requests that come later."""
    errors: list[str] = []

    async def read(engine: Engine, started: trio.Event) -> None:
        try:
            async with engine.generate(GenerateRequest("abc", ENDLESS)) as stream:
                async for _ in stream:
                    started.set()
        except EngineClosedError:
            errors.append("read")

    async with trio.open_nursery() as nursery, open_scripted(model) as engine:
        started = trio.Event()
        nursery.start_soon(read, engine, started)
        await started.wait()
    with pytest.raises(EngineClosedError):
        await first_text(engine)
    with pytest.raises(EngineClosedError):
        await engine.call(GetLoad())
    with pytest.raises(EngineClosedError):
        engine.check_health()
    assert errors == ["read"]


# What leaves the block


async def test_an_exception_of_the_block_leaves_it_as_itself(model: str) -> None:
    mine, caught = KeyError("mine"), None
    try:
        async with open_scripted(model) as engine:
            assert await first_text(engine) == "abc"
            raise mine
    except KeyError as error:
        caught = error
    assert caught is mine


async def test_a_group_that_the_user_raised_stays_a_group(model: str) -> None:
    mine = ExceptionGroup("mine", [KeyError("x")])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_scripted(model):
            raise mine
    assert caught.value is mine


async def test_an_exception_wins_over_a_cancelled_scope_around_the_block(model: str) -> None:
    mine, caught = KeyError("mine"), None
    try:
        with trio.CancelScope() as scope:
            async with open_scripted(model):
                scope.cancel()
                raise mine
    except KeyError as error:
        caught = error
    assert caught is mine


async def test_a_cancelled_block_is_cancelled(model: str) -> None:
    with trio.CancelScope() as scope:
        async with open_scripted(model):
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_leaving_a_block_in_a_cancelled_scope_kills_the_core(model: str) -> None:
    with trio.CancelScope() as scope:
        async with open_scripted(model) as engine:
            pid = core_pid(engine)
            scope.cancel()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.02, 0.1, 0.3, 0.6])
async def test_cancelling_while_it_opens_leaves_no_process(model: str, delay_s: float) -> None:
    """Before, while and after the process starts. (The fixture looks for it.)"""
    with trio.move_on_after(delay_s) as scope:
        async with open_scripted(model, {"load_s": "30"}):
            pytest.fail("opened")
    assert scope.cancelled_caught


# Failing to open


async def test_why_a_core_cannot_start_is_one_message(model: str) -> None:
    with pytest.raises(EngineStartError, match="out of paper") as caught:
        async with open_scripted(model, {"start_error": "out of paper"}):
            pytest.fail("opened")
    assert "\n" not in str(caught.value)


async def test_a_core_that_exits_without_a_word_is_a_start_error(model: str) -> None:
    with pytest.raises(EngineStartError, match="status 3"):
        async with open_scripted(model, {"exit_status": "3"}):
            pytest.fail("opened")


async def test_a_core_that_is_killed_while_it_loads_is_a_start_error(model: str) -> None:
    def kill(stage: str, fraction: float) -> None:
        for core in children():
            core.kill()

    config = EngineConfig(model=model)
    with pytest.raises(EngineStartError, match="SIGKILL"):
        async with open_engine(config, on_progress=kill, core_module=CORE_MODULE, core_options={"load_s": "30"}):
            pytest.fail("opened")


async def test_a_core_that_takes_too_long_to_load_is_a_start_error(model: str) -> None:
    with pytest.raises(EngineStartError, match="startup_timeout_s"):
        async with open_scripted(model, {"load_s": "30"}, startup_timeout_s=0.3):
            pytest.fail("opened")


async def test_a_broken_model_file_is_a_checkpoint_error_of_the_real_core(tmp_path: Path) -> None:
    """Case 16 (vllm 25568): as itself, with the path. Only the core finds it: the folder's tokenizer is whole."""
    folder = write_fake_model(tmp_path / "model")
    (folder / "config.json").write_text('{"architectures": ["PoetForCausalLM"]}')
    with pytest.raises(CheckpointError, match=r"config\.json"):
        async with open_engine(EngineConfig(model=str(folder))):
            pytest.fail("opened")


async def test_a_broken_gguf_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\3\0\0\0" + b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"broken\.gguf"):
        async with open_engine(EngineConfig(model=str(path))):
            pytest.fail("opened")


# Programs of users


def run_script(path: Path, text: str, **options: Any) -> "subprocess.Popen[str]":
    path.write_text(textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


async def test_a_script_needs_no_main_guard(model: str, tmp_path: Path) -> None:
    """Case 13 (vllm 8893): the core imports its own module and nothing of the user's."""
    process = run_script(
        tmp_path / "script.py",
        f"""
        import trio
        from trioengine.client import open_engine
        from trioengine.config import EngineConfig
        from trioengine.types.request import GenerateRequest

        async def main():
            config = EngineConfig(model={model!r})
            async with open_engine(config, core_module={CORE_MODULE!r}) as engine:
                with trio.move_on_after(30) as scope:
                    async with engine.generate(GenerateRequest("abc")) as stream:
                        async for output in stream:
                            text = output.outputs[0].text
            print(text, scope.cancelled_caught)

        print("script")
        trio.run(main)
        """,
    )
    out, err = await trio.to_thread.run_sync(process.communicate)
    assert out.split() == ["script", "abcabcabcabcabca", "False"], err
    assert process.returncode == 0


@pytest.mark.parametrize("with_a_fork", [False, True])
async def test_the_core_of_a_killed_process_ends(model: str, tmp_path: Path, with_a_fork: bool) -> None:
    """Case 12 (vllm 55510): kill -9 of the parent, also while a step hangs; a fork of it may live on, and all its
    descriptors."""
    process = run_script(
        tmp_path / "script.py",
        f"""
        import os
        import time
        import trio
        from trioengine.client import open_engine
        from trioengine.config import EngineConfig
        from trioengine.types.request import GenerateRequest

        async def main():
            config = EngineConfig(model={model!r})
            async with open_engine(config, core_module={CORE_MODULE!r}, core_options={{"hang_token": "33"}}) as engine:
                async with engine.generate(GenerateRequest("abc!")) as stream:
                    await anext(stream)
                    fork = os.fork() if {with_a_fork} else os.getpid()
                    if fork == 0:
                        time.sleep(60)
                        os._exit(0)
                    print(engine._link._cores[0].pid, fork, flush=True)
                    await trio.sleep_forever()

        trio.run(main)
        """,
    )
    assert process.stdout is not None
    pids = (await trio.to_thread.run_sync(process.stdout.readline)).split()
    core, fork = (psutil.Process(int(pid)) for pid in pids)
    assert core.is_running()
    process.kill()
    try:
        with trio.fail_after(5):
            while core.is_running() and core.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 (no child of ours)
                await trio.sleep(0.05)
    finally:
        fork.kill()
        process.communicate()


async def test_cancelling_ends_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that fetches the model is told, so that it does not go on behind the caller's back."""
    ended = threading.Event()

    def fetch(name: str | None, *, progress: Callable[[FetchProgress], None], **_: object) -> ModelLocation:
        try:
            while True:
                progress(FetchProgress(1, 2))
        finally:
            ended.set()

    monkeypatch.setattr("trioengine.client.cores.resolve_model", fetch)
    stages: list[tuple[str, float]] = []
    with trio.CancelScope() as scope:

        def report(stage: str, fraction: float) -> None:
            stages.append((stage, fraction))
            scope.cancel()

        async with open_engine(on_progress=report):
            pytest.fail("opened")
    assert scope.cancelled_caught
    assert await trio.to_thread.run_sync(ended.wait, 10)
    assert stages[0] == ("fetching the model", 0.5)


async def test_ctrl_c_reaches_the_program_and_not_the_core(model: str) -> None:
    """The core is in a process group of its own."""
    async with open_scripted(model) as engine:
        assert os.getpgid(core_pid(engine)) == core_pid(engine)
        os.kill(core_pid(engine), signal.SIGINT)
        assert await first_text(engine) == "abc"


async def test_a_request_is_the_same_through_a_real_process(model: str) -> None:
    async with open_scripted(model) as engine:
        sampling = SamplingParams(max_tokens=100, stop="cab", output_kind=RequestOutputKind.FINAL_ONLY)
        async with engine.generate(GenerateRequest("abc", sampling, request_id="mine")) as stream:
            output = await anext(stream)
    (choice,) = output.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", FinishReason.STOP, "cab")
    assert output.request_id == "mine"
