"""Chaos: cores and clients are killed, stopped, stalled and flooded at random; every promise about lifetimes is kept.

A seed makes a plan, and the plan is printed when a run fails: `run_chaos(plan_of(SEED))` runs it again. Traffic goes on
meanwhile (`testing.chaos`). `python -P tests/integration/client/test_chaos.py FIRST LAST` tries a range of seeds.
"""

import base64
import enum
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
import trio

from trioengine.client.cores import Attachment, Cores, start_cores
from trioengine.client.engine import Engine, attach_engine, open_engine
from trioengine.config.engine import EngineConfig
from trioengine.errors import EngineClosedError, EngineDeadError, TrioEngineError
from trioengine.runtime import status_page
from trioengine.testing import chaos, fake_core
from trioengine.testing.chaos import Traffic
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.types.messages import GetLoad
from trioengine.types.params import SamplingParams
from trioengine.types.request import GenerateRequest

RUN_TIMEOUT_S = 60
END_TIMEOUT_S = 15
"""In which everything that was asked for ends, once no more is asked for."""
DEATH_TIMEOUT_S = 5
"""In which all hear of the death of a core."""
SHORT_TICK_AGE_S = 0.6
"""`MAX_TICK_AGE_S` while a core is stopped."""
DEATH = ("was killed by SIGKILL", "has exited")
"""How a core that was killed is spoken of, by its owner and by others."""
NUM_ROUNDS = 3
QUICK_SEEDS = (16, 34)
SLOW_SEEDS = tuple(range(100, 108))


class Act(enum.StrEnum):
    """What happens to cores and clients."""

    REST = "rest"
    STOP_CORE = "stop a core"
    """Shorter than anyone may notice."""
    HANG_CORE = "stop a core until it is unhealthy"
    STALL_CLIENT = "block a client's event loop"
    STOP_CLIENT = "stop the client process"
    FLOOD = "flood"
    GARBAGE = "send garbage to a core"
    ABORT_ALL = "abort all of a client's requests"


class End(enum.StrEnum):
    """How it ends."""

    DRAIN = "what was begun ends"
    CANCEL = "all tasks are cancelled"
    KILL_CORE = "a core is killed"
    KILL_STOPPED_CORE = "a core that is stopped is killed"
    KILL_CLIENT = "the client process is killed"
    CLOSE = "the block is left while tasks go on"


@attrs.frozen
class Plan:
    """A run, drawn from a seed."""

    seed: int
    num_cores: int
    num_clients: int
    """In this process; 0 is `open_engine`."""
    has_client_process: bool
    core_options: dict[str, str]
    has_aborts: bool
    """Whether requests may end with "abort" that nobody has aborted by name."""
    rounds: tuple[tuple[tuple[Act, int, float], ...], ...]
    """What, to whom (a number, of those that there are), and for how many seconds. After each round all is idle."""
    end: End
    """Of the last round."""
    victim: int


def plan_of(seed: int) -> Plan:
    """The plan of this seed."""
    chance = random.Random(seed)
    num_clients = chance.choice((0, 2, 2))
    has_client_process = num_clients > 0 and chance.random() < 0.6
    ends = [end for end in End if has_client_process or end is not End.KILL_CLIENT]
    core_options = {"pace_s": chance.choice(("0", "0.001", "0.005")), "embeds": "yes"}
    if chance.random() < 0.5:
        core_options["num_blocks"] = "96"
    if chance.random() < 0.5:
        core_options["async_scheduling"] = "yes"
    has_aborts = chance.random() < 0.4
    common = [act for act in Act if act is not Act.HANG_CORE and (has_aborts or act is not Act.ABORT_ALL)]
    rounds = [
        [(chance.choice(common), chance.randrange(100), chance.choice((0.01, 0.05, 0.15))) for _ in range(4)]
        for _ in range(NUM_ROUNDS)
    ]
    # It takes longest, so once only.
    rounds[chance.randrange(NUM_ROUNDS)].append((Act.HANG_CORE, chance.randrange(100), 0.0))
    return Plan(
        seed,
        chance.choice((1, 2)),
        num_clients,
        has_client_process,
        core_options,
        has_aborts,
        tuple(map(tuple, rounds)),
        chance.choice(ends),
        chance.randrange(100),
    )


@attrs.define(eq=False)
class Scene:
    """What a plan is played on."""

    engines: list[Engine]
    cores: Cores | None
    core_pids: list[int]
    client: trio.Process | None = None

    def check_health(self) -> None:
        """All clients agree that all is well."""
        for engine in self.engines:
            engine.check_health()
        if self.cores is not None:
            self.cores.check_health()


@asynccontextmanager
async def open_scene(plan: Plan, model: str) -> AsyncGenerator[Scene, None]:
    """Cores, and clients of them."""
    config = EngineConfig(model=model, data_parallel_size=plan.num_cores, max_num_queued_reqs=150)
    cores_of: dict[str, Any] = {"core_module": fake_core.MODULE, "core_options": plan.core_options}
    async with AsyncExitStack() as stack:
        cores = None
        client = None
        if not plan.num_clients:
            engines = [await stack.enter_async_context(open_engine(config, **cores_of))]
            handles: Any = engines[0]._link._cores
        else:
            num_clients = plan.num_clients + plan.has_client_process
            cores = await stack.enter_async_context(start_cores(config, num_clients=num_clients, **cores_of))
            handles = cores.link._cores
            if plan.has_client_process:
                client = await _start_client(plan, cores.attachments[-1])
                stack.push_async_callback(_end_client, client)
            engines = [
                await stack.enter_async_context(attach_engine(attachment))
                for attachment in cores.attachments[: plan.num_clients]
            ]
            await cores.wait_ready()
            if client is not None:
                assert client.stdout is not None
                assert await client.stdout.receive_some(), await _errors_of(client)  # It has started.
        yield Scene(engines, cores, [handle.pid for handle in handles], client)


async def _start_client(plan: Plan, attachment: Attachment) -> trio.Process:
    process = await trio.lowlevel.open_process(
        [sys.executable, "-P", "-m", chaos.MODULE, f"{plan.seed}-process", *["aborts"] * plan.has_aborts],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=attachment.fds,
    )
    assert process.stdin is not None
    await process.stdin.send_all(base64.b64encode(attachment.to_bytes()) + b"\n")
    return process


async def _errors_of(process: trio.Process) -> str:
    """What it has to say, of which it exits now or never."""
    if process.poll() is None:
        process.terminate()
    assert process.stderr is not None
    return b"".join([data async for data in process.stderr]).decode()


async def _end_client(process: trio.Process) -> None:
    """Killed, so none of this waits for long."""
    if process.poll() is None:
        process.kill()
    with trio.CancelScope(shield=True):
        await process.wait()
    streams: Any = (process.stdin, process.stdout, process.stderr)
    for stream in streams:
        stream.close()


async def run_chaos(plan: Plan, model: str) -> list[Traffic]:
    """Play a plan. Raises AssertionError or TooSlowError where a promise is not kept that others than readers hear."""
    chance = random.Random(f"{plan.seed}-acts")
    excused: list[str] = []
    """Parts of the messages of `EngineDeadError` and `EngineClosedError` that have a reason to come now."""

    def is_excused(error: Exception) -> bool:
        is_death = isinstance(error, EngineDeadError | EngineClosedError)
        return is_death and any(part in str(error) for part in excused)

    # Outside of the scene, so that tasks may go on while it ends.
    async with trio.open_nursery() as workers:
        async with open_scene(plan, model) as scene:
            traffics = [
                Traffic(engine, f"{plan.seed}-{number}", has_aborts=plan.has_aborts, is_excused=is_excused)
                for number, engine in enumerate(scene.engines)
            ]
            for number, acts in enumerate(plan.rounds, start=1):
                scopes = [trio.CancelScope() for _ in traffics]
                are_over = [trio.Event() for _ in traffics]
                for each in zip(traffics, scopes, are_over, strict=True):
                    each[0].is_stopping = False
                    workers.start_soon(_run_traffic, *each)
                for act, target, duration_s in acts:
                    await _act(scene, traffics, chance, act, target, duration_s, excused)
                is_last = number == len(plan.rounds)
                end = plan.end if is_last else chance.choice((End.DRAIN, End.CANCEL))
                if end is End.CLOSE:
                    excused.extend(("closed", *DEATH))
                    break
                if end in (End.KILL_CORE, End.KILL_STOPPED_CORE):
                    excused.extend(DEATH)
                    await _kill_core(scene, end, scene.core_pids[plan.victim % len(scene.core_pids)])
                if end is End.KILL_CLIENT and scene.client is not None:
                    scene.client.kill()
                if end is End.CANCEL:
                    for scope in scopes:
                        scope.cancel()
                async with trio.open_nursery() as nursery:
                    if end is End.KILL_CLIENT:
                        nursery.start_soon(_resume_again_and_again, traffics[0])
                    await _end_workers(traffics, are_over)
                    nursery.cancel_scope.cancel()
                if end not in (End.KILL_CORE, End.KILL_STOPPED_CORE):
                    with trio.fail_after(END_TIMEOUT_S):
                        await _check_all_is_well(scene, traffics, end, is_last=is_last)
        for traffic in traffics:
            traffic.is_stopping = True
    return traffics


async def _run_traffic(traffic: Traffic, scope: trio.CancelScope, is_over: trio.Event) -> None:
    with scope:
        await traffic.run()
    is_over.set()


async def _resume_again_and_again(traffic: Traffic) -> None:
    """A client that was killed may have left a pause, also one that the core has not read yet."""
    while True:
        await traffic.resume()
        await trio.sleep(0.02)


async def _end_workers(traffics: Sequence[Traffic], are_over: Sequence[trio.Event]) -> None:
    for traffic in traffics:
        traffic.is_stopping = True
    with trio.move_on_after(END_TIMEOUT_S) as scope:
        for each in are_over:
            await each.wait()
    # Copied, for all of it is cancelled before it is printed.
    in_progress = [list(traffic.in_progress.values()) for traffic in traffics] if scope.cancelled_caught else []
    assert not in_progress, in_progress


async def _kill_core(scene: Scene, end: End, pid: int) -> None:
    """And all hear of it: health, later requests, later calls; with the cause."""
    if end is End.KILL_STOPPED_CORE:
        os.kill(pid, signal.SIGSTOP)
        await trio.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    with trio.fail_after(DEATH_TIMEOUT_S):
        await _until(lambda: not any(_is_well(engine.check_health) for engine in scene.engines))
        await _until(lambda: all(engine.errored for engine in scene.engines))
    for engine in scene.engines:
        with pytest.raises(EngineDeadError, match="|".join(DEATH)):
            await engine.call(GetLoad())
        with pytest.raises(EngineDeadError, match="|".join(DEATH)):
            await engine.generate(GenerateRequest([1])).__aenter__()
    if scene.cores is not None:
        cores = scene.cores
        with trio.fail_after(DEATH_TIMEOUT_S):
            await _until(lambda: cores.dead_error is not None)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            cores.check_health()


async def _act(
    scene: Scene,
    traffics: Sequence[Traffic],
    chance: random.Random,
    act: Act,
    target: int,
    duration_s: float,
    excused: list[str],
) -> None:
    core = scene.core_pids[target % len(scene.core_pids)]
    traffic = traffics[target % len(traffics)]
    match act:
        case Act.REST:
            await trio.sleep(duration_s)
        case Act.STOP_CORE:
            os.kill(core, signal.SIGSTOP)
            await trio.sleep(duration_s)
            os.kill(core, signal.SIGCONT)
        case Act.HANG_CORE:
            excused.append("no sign of life")  # It is said to new requests only: `Traffic` looks.
            os.kill(core, signal.SIGSTOP)
            # Short only while the core cannot tick, so that no slow machine is taken for a stopped core.
            normal, status_page.MAX_TICK_AGE_S = status_page.MAX_TICK_AGE_S, SHORT_TICK_AGE_S
            try:
                with trio.fail_after(DEATH_TIMEOUT_S):
                    await _until(lambda: all(not _is_well(engine.check_health) for engine in scene.engines))
                for engine in scene.engines:
                    assert engine.is_running, "a core that is stopped is not dead"
            finally:
                os.kill(core, signal.SIGCONT)
                status_page.MAX_TICK_AGE_S = normal
            with trio.fail_after(DEATH_TIMEOUT_S):
                await _until(lambda: _is_well(scene.check_health))
        case Act.STALL_CLIENT:
            chaos.stall(duration_s)
        case Act.STOP_CLIENT:
            if scene.client is not None:
                scene.client.send_signal(signal.SIGSTOP)
            await trio.sleep(duration_s)
            if scene.client is not None:
                scene.client.send_signal(signal.SIGCONT)
        case Act.FLOOD:
            with trio.move_on_after(duration_s * 4):
                await traffic.flood(chance, 200)
        case Act.GARBAGE:
            link: Any = traffic.engine._link
            for parts in ((b"garbage",), (b"",), (b"\xc1",), (b"a", b"b")):
                link._socket.send_nowait((link._identities[target % len(scene.core_pids)], *parts))
        case Act.ABORT_ALL:
            traffic.engine.abort_all()


async def _check_all_is_well(scene: Scene, traffics: Sequence[Traffic], end: End, *, is_last: bool) -> None:
    """After everybody in this process has left. The client process goes on until the last round has ended."""
    scene.check_health()
    for traffic in traffics:
        await traffic.resume()  # Each for itself: what it asked for last comes first.
    if scene.client is not None and is_last:
        assert scene.client.stdin is not None
        await scene.client.stdin.aclose()
        status = await scene.client.wait()
        assert end is End.KILL_CLIENT or status == 0, await _errors_of(scene.client)
        await _until_idle(traffics[0])
    for traffic in traffics:
        if scene.client is None or is_last:
            await traffic.check_idle()
        await traffic.check_answers()
        await traffic.check_books()


async def _until_idle(traffic: Traffic) -> None:
    """What a process has left behind is found by the system, and then by the core; there may be a pause among it."""
    while (load := await traffic.engine.call(GetLoad())).running or load.waiting:
        await traffic.resume()
        await trio.sleep(0.005)
    await traffic.resume()


def _is_well(check: Callable[[], None]) -> bool:
    try:
        check()
    except TrioEngineError:
        return False
    return True


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (nobody tells)
        await trio.sleep(0.005)


async def play(seed: int, model: str) -> None:
    """Play a seed's plan, and look at what is left of it."""
    plan = plan_of(seed)
    children, threads = psutil.Process().children(recursive=True), set(threading.enumerate())
    try:
        with trio.fail_after(RUN_TIMEOUT_S):
            traffics = await run_chaos(plan, model)
        faults = [fault for traffic in traffics for fault in traffic.faults]
        assert not faults, faults
        assert sum(sum(traffic.counts.values()) for traffic in traffics) > 0
        assert psutil.Process().children(recursive=True) == children
        assert os.listdir(os.environ["XDG_RUNTIME_DIR"]) == []
        # Trio keeps threads for what is asked of them next.
        assert all("Trio" in thread.name for thread in set(threading.enumerate()) - threads)
    except BaseException:
        print(f"\nChaos failed: {plan}", file=sys.stderr)
        raise


async def play_all(seeds: Sequence[int], model: str) -> None:
    """One after the other in one process, which gets back what each has taken."""
    await play(seeds[0], model)  # What Python and libraries keep for good is there now.
    num_fds = psutil.Process().num_fds()
    for seed in seeds[1:]:
        await play(seed, model)
        assert psutil.Process().num_fds() <= num_fds, plan_of(seed)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model's folder, and a folder of its own for sockets."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return str(write_fake_model(tmp_path / "model"))


async def test_chaos(model: str) -> None:
    """A few seeds."""
    children = psutil.Process().children(recursive=True)
    await play_all(QUICK_SEEDS, model)
    assert psutil.Process().children(recursive=True) == children


@pytest.mark.slow
async def test_more_chaos(model: str) -> None:
    """More of them."""
    children = psutil.Process().children(recursive=True)
    await play_all(SLOW_SEEDS, model)
    assert psutil.Process().children(recursive=True) == children


@pytest.mark.slow
async def test_chaos_with_a_real_model() -> None:
    """Tokens are those of the same requests alone, whatever happens to their neighbours and to the core."""
    prompts = ([1, 2, 3], list(range(40, 90)), list(range(40, 100)), [500] * 20)
    config = EngineConfig(max_model_len=256, max_num_seqs=8, cpu_threads=1, data_parallel_size=2)
    with trio.fail_after(RUN_TIMEOUT_S):
        async with open_engine(config) as engine, trio.open_nursery() as workers:
            alone: dict[tuple[int, ...], tuple[int, ...]] = {}
            sampling = SamplingParams(seed=chaos.REAL_SEED, max_tokens=60, ignore_eos=True)
            for prompt in prompts:
                async with engine.generate(GenerateRequest(prompt, sampling)) as stream:
                    alone[tuple(prompt)] = [output async for output in stream][-1].outputs[0].token_ids

            def expected(prompt: Sequence[int], num_tokens: int, _seed: int) -> Sequence[int]:
                return alone[tuple(prompt)][:num_tokens]

            traffic = Traffic(engine, "real", expected, prompts)
            scene = Scene([engine], None, [handle.pid for handle in engine._link._cores])  # type: ignore[attr-defined]
            for number in range(2):
                scopes, are_over = [trio.CancelScope()], [trio.Event()]
                traffic.is_stopping = False
                workers.start_soon(_run_traffic, traffic, scopes[0], are_over[0])
                for act in (Act.STOP_CORE, Act.FLOOD, Act.REST, Act.STALL_CLIENT, Act.STOP_CORE):
                    await _act(scene, [traffic], random.Random(number), act, number, 0.2, [])
                if number:
                    scopes[0].cancel()
                await _end_workers([traffic], are_over)
                await _check_all_is_well(scene, [traffic], End.DRAIN, is_last=True)
            assert traffic.faults == []
            assert traffic.counts["read"] > 0


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = str(Path(folder, "run"))
        os.mkdir(os.environ["XDG_RUNTIME_DIR"], 0o700)
        for each in range(int(sys.argv[1]), int(sys.argv[2])):
            print(each, plan_of(each).end, file=sys.stderr)
            trio.run(play, each, str(write_fake_model(Path(folder, str(each)))))
