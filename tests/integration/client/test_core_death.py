"""Cores that die, hang, and are slow to go: what streams, calls and the health check make of it. Real processes."""

import os
import random
import signal
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
import trio

from trioengine.client.engine import Engine, open_engine
from trioengine.client.link import CoreLink
from trioengine.config.engine import EngineConfig
from trioengine.errors import EngineDeadError, EngineGenerateError
from trioengine.frontend import frontend as frontend_module
from trioengine.runtime import core_handle, status_page
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.types.messages import CheckIntegrity, GetLoad, Starting
from trioengine.types.output import RequestOutput
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest

TIMEOUT_S = 60
ENDLESS = SamplingParams(max_tokens=1 << 19, output_kind=RequestOutputKind.DELTA)
SHORT = SamplingParams(max_tokens=6, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_fake_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every test, however it ends: no process."""
    yield
    assert psutil.Process().children(recursive=True) == []


@asynccontextmanager
async def open_scripted(
    model: str, options: Mapping[str, str] | None = None, **config: Any
) -> AsyncGenerator[Engine, None]:
    options = {"pace_s": "0.001"} | dict(options or {})
    with trio.fail_after(TIMEOUT_S):
        async with open_engine(
            EngineConfig(model=model, **config),
            core_module="trioengine.testing.scripted_core",
            core_options=options,
        ) as engine:
            yield engine


def link_of(engine: Engine) -> CoreLink:
    return engine._link


def signal_core(engine: Engine, number: int) -> None:
    handle: Any = link_of(engine)._cores[0]
    os.kill(handle.pid, number)


async def until_unhealthy(engine: Engine) -> EngineDeadError:
    while True:
        try:
            engine.check_health()
        except EngineDeadError as error:
            return error
        await trio.sleep(0.01)


async def until_healthy(engine: Engine) -> None:
    while True:
        try:
            return engine.check_health()
        except EngineDeadError:
            await trio.sleep(0.01)


async def text_of(engine: Engine, prompt: str = "abc", sampling: SamplingParams = SHORT) -> str:
    async with engine.generate(GenerateRequest(prompt, sampling)) as stream:
        return "".join([output.outputs[0].text async for output in stream])


# Death


async def test_a_killed_core_is_the_death_of_everything_that_waits_and_nothing_else(model: str) -> None:
    """Cases 9 (vllm 19881) and 11: tokens first, then the error; calls too; the block goes on."""
    deaths: list[str] = []
    causes: list[str] = []

    async def read(engine: Engine, started: trio.Event) -> None:
        outputs: list[RequestOutput] = []
        try:
            async with engine.generate(GenerateRequest("abc", ENDLESS)) as stream:
                async for output in stream:
                    outputs.append(output)
                    started.set()
        except EngineDeadError as error:
            causes.append(str(error))
            deaths.append("stream")
        text = "".join(output.outputs[0].text for output in outputs)
        assert text
        assert text == ("abc" * len(text))[: len(text)]

    async def read_late(engine: Engine, dead: trio.Event) -> None:
        """It was asleep all the time: what had been generated is there."""
        try:
            async with engine.generate(GenerateRequest("abc", ENDLESS)) as stream:
                await dead.wait()
                output = await anext(stream)
                text = output.outputs[0].text
                assert text
                assert text == ("abc" * len(text))[: len(text)]
                assert not output.finished
                await anext(stream)
        except EngineDeadError:
            deaths.append("late stream")

    async def call(engine: Engine) -> None:
        try:
            await engine.call(GetLoad())
        except EngineDeadError:
            deaths.append("call")

    async with open_scripted(model) as engine:
        async with trio.open_nursery() as nursery:
            dead = trio.Event()
            nursery.start_soon(read_late, engine, dead)
            started = [trio.Event() for _ in range(3)]
            for each in started:
                nursery.start_soon(read, engine, each)
            for each in started:
                await each.wait()
            signal_core(engine, signal.SIGSTOP)
            nursery.start_soon(call, engine)
            await trio.testing.wait_all_tasks_blocked(0.01)
            signal_core(engine, signal.SIGKILL)
            error = await until_unhealthy(engine)
            assert "SIGKILL" in str(error)
            dead.set()
        assert all("SIGKILL" in cause for cause in causes)
        assert sorted(deaths) == ["call", "late stream", "stream", "stream", "stream"]
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await text_of(engine)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await engine.call(GetLoad())
        engine.abort("x")
        await trio.lowlevel.checkpoint()  # Nobody has cancelled the block.


async def test_the_cores_own_words_are_the_cause(model: str) -> None:
    async with open_scripted(model, {"fatal_token": "33"}) as engine:
        with pytest.raises(EngineDeadError, match="this token is the end") as caught:
            await text_of(engine, "ab!")
        assert caught.value.cause is not None
        assert "Traceback" in caught.value.cause


async def test_a_signal_without_a_name_kills_like_any_other(model: str) -> None:
    """Health says so at once, and nothing else is raised."""
    async with open_scripted(model) as engine:
        signal_core(engine, signal.SIGRTMIN + 5)
        error = await until_unhealthy(engine)
        assert f"was killed by signal {signal.SIGRTMIN + 5}." in error.message


async def test_an_exception_of_the_block_wins_over_the_death(model: str) -> None:
    mine, caught = KeyError("mine"), None
    try:
        async with open_scripted(model) as engine:
            signal_core(engine, signal.SIGKILL)
            await until_unhealthy(engine)
            raise mine
    except KeyError as error:
        caught = error
    assert caught is mine


async def test_a_death_error_that_leaves_the_block_is_not_wrapped(model: str) -> None:
    caught = None
    try:
        async with open_scripted(model) as engine:
            signal_core(engine, signal.SIGKILL)
            await text_of(engine, sampling=ENDLESS)
    except EngineDeadError as error:
        caught = error
    assert "SIGKILL" in str(caught)


# Hanging


async def test_a_stopped_core_is_unhealthy_until_it_goes_on(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 10 (vllm 39863). Requests that wait are not failed; new ones are refused meanwhile."""
    async with open_scripted(model) as engine:
        async with engine.generate(GenerateRequest("abc", ENDLESS)) as stream:
            await anext(stream)
            signal_core(engine, signal.SIGSTOP)
            # Short only while the core cannot tick, so that no slow machine is taken for a stopped core.
            monkeypatch.setattr(status_page, "MAX_TICK_AGE_S", 0.5)
            error = await until_unhealthy(engine)
            assert "no sign of life" in str(error)
            with pytest.raises(EngineDeadError, match="no sign of life"):
                await text_of(engine)
            signal_core(engine, signal.SIGCONT)
            monkeypatch.undo()
            await until_healthy(engine)
            num_tokens = (await anext(stream)).num_generated_tokens
            while (await anext(stream)).num_generated_tokens < num_tokens + 100:
                pass
        assert await text_of(engine) == "abcabc"


async def test_a_step_without_end_is_unhealthy(model: str) -> None:
    """After `step_timeout_s`, while the tick goes on. The core cannot hear `Stop`, and is terminated."""
    opening = open_scripted(model, {"hang_token": "33"}, step_timeout_s=0.3, core_stop_timeout_s=0.1)
    async with opening as engine, engine.generate(GenerateRequest("a!", ENDLESS)) as stream:
        await anext(stream)
        error = await until_unhealthy(engine)
        assert "step_timeout_s" in str(error)
        assert "one step" in str(error)
        handle: Any = link_of(engine)._cores[0]
    assert handle._process.returncode == -signal.SIGTERM


async def test_a_core_that_waits_for_work_is_healthy(model: str) -> None:
    """Ticks go on without steps."""
    async with open_scripted(model, step_timeout_s=0.3) as engine:
        assert await text_of(engine) == "abcabc"
        for _ in range(10):
            await trio.sleep(0.05)
            engine.check_health()


async def test_a_core_that_hears_neither_stop_nor_terminate_is_killed(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the ladder. (The fixture sees that it is gone.)"""
    monkeypatch.setattr(core_handle, "TERMINATE_TIMEOUT_S", 0.2)
    options = {"hang_token": "33", "ignores_terminate": "yes"}
    opening = open_scripted(model, options, core_stop_timeout_s=0.1, step_timeout_s=0.1)
    async with opening as engine, engine.generate(GenerateRequest("a!", ENDLESS)):
        await until_unhealthy(engine)
        handle: Any = link_of(engine)._cores[0]
    assert handle._process.returncode == -signal.SIGKILL


async def test_a_core_that_is_asked_to_stop_exits_by_itself(model: str) -> None:
    async with open_scripted(model) as engine:
        handle: Any = link_of(engine)._cores[0]
    assert handle._process.returncode == 0


# Strangers and faults


async def test_garbage_in_either_direction_is_ignored(model: str) -> None:
    """What is no message, and messages that go the other way."""
    async with open_scripted(model) as engine:
        link = link_of(engine)
        socket: Any = link._socket
        for parts in ((b"garbage",), (b"",), (b"\xc1",), (b"a", b"b")):
            socket.send_nowait((link._identities[0], *parts))
        link.send(0, Starting("x", 0.0))  # type: ignore[arg-type]
        assert await text_of(engine) == "abcabc"
        engine.check_health()


async def test_a_failing_request_leaves_the_output_handler_running(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the code that makes text of one request's tokens."""

    class Broken:
        def feed(self, token_id: int) -> str:
            raise ValueError("broken")

        def flush(self) -> str:
            return ""

    async with open_scripted(model) as engine:
        async with (
            engine.generate(GenerateRequest("abc", ENDLESS, request_id="bad")) as bad,
            engine.generate(GenerateRequest("xyz", ENDLESS)) as good,
        ):
            await anext(good)
            state: Any = frontend_of(engine)._ranks[0].children[0]
            assert state.parent.external_id == "bad"
            state._detokenizer = Broken()
            with pytest.raises(EngineGenerateError, match="broken"):
                _ = [output async for output in bad]
            for _ in range(5):
                await anext(good)
        assert await text_of(engine) == "abcabc"
        load = await engine.call(GetLoad())
        assert load.running == 0


def frontend_of(engine: Engine) -> frontend_module.Frontend:
    return engine._frontend


async def test_two_hundred_readers_that_disconnect_at_random_leave_nothing(model: str) -> None:
    """Queued, running, at the hand-over, with and without having read: the core knows none of them."""
    chance = random.Random(7)

    async def read_and_leave(engine: Engine, delay_s: float) -> None:
        with trio.move_on_after(delay_s):
            async with engine.generate(GenerateRequest("abc", ENDLESS)) as stream:
                async for _ in stream:
                    if chance.random() < 0.05:
                        return

    async with open_scripted(model, {"max_num_seqs": "50"}) as engine:
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(read_and_leave, engine, chance.random() * 0.5)
        load = await engine.call(GetLoad())
        assert (load.running, load.waiting) == (0, 0)
        await engine.call(CheckIntegrity())
        assert await text_of(engine) == "abcabc"
        await engine.call(GetLoad())
        frontend = frontend_of(engine)
        assert frontend.num_open_requests == frontend.num_reserved_slots == 0
