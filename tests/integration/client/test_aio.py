"""The engine from asyncio programs: requests, errors and cancellation cross, and everything ends with the block."""

import asyncio
import errno
import os
import signal
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

import trioengine.aio
from trioengine.aio.engine import Engine
from trioengine.client.interface import EngineClient
from trioengine.config.engine import EngineConfig
from trioengine.errors import EngineClosedError, EngineDeadError, EngineStartError, RequestError, UnavailableError
from trioengine.testing.fake_core import MODULE
from trioengine.testing.fake_executor import generate_alone
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.types.messages import GetLoad
from trioengine.types.output import FinishReason
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest

TIMEOUT_S = 60
ENDLESS = SamplingParams(max_tokens=100_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_fake_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every test, however it ends: no process, no thread of a Trio run, no handler of a signal."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert psutil.Process().children(recursive=True) == []
    assert [thread.name for thread in threading.enumerate() if thread.name == "trioengine-aio"] == []
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


@asynccontextmanager
async def open_fake(model: str, **config: Any) -> AsyncGenerator[Engine, None]:
    config = EngineConfig(model=model, **config)
    async with trioengine.aio.open_engine(config, core_module=MODULE, core_options={"pace_s": "0.001"}) as engine:
        yield engine


async def tokens_of(engine: Engine, seed: int, num_tokens: int = 20) -> tuple[int, ...]:
    sampling = SamplingParams(seed=seed, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async with engine.generate(GenerateRequest([1, 2, 3], sampling)) as stream:
        assert (stream.num_prompt_tokens, stream.warnings) == (3, ())
        outputs = [output async for output in stream]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return sum((output.outputs[0].token_ids for output in outputs), ())


def right_tokens(seed: int, num_tokens: int = 20) -> tuple[int, ...]:
    return tuple(generate_alone([1, 2, 3], num_tokens=num_tokens, seed=seed, vocab_size=257))


async def until_idle(engine: Engine) -> None:
    while (load := await engine.call(GetLoad())).running or load.waiting:  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(0.005)


def test_it_has_everything_that_the_engine_has() -> None:
    assert {name for name in dir(EngineClient) if name[0] != "_"} <= set(dir(Engine))


def test_many_requests_run_at_once_and_operations_work(model: str) -> None:
    async def main() -> None:
        stages: list[tuple[str, float]] = []
        opening = trioengine.aio.open_engine(
            EngineConfig(model=model), on_progress=lambda *stage: stages.append(stage), core_module=MODULE
        )
        async with opening as engine:
            assert stages
            answers = await asyncio.gather(*(tokens_of(engine, seed) for seed in range(20)))
            assert answers == [right_tokens(seed) for seed in range(20)]
            assert (engine.is_running, engine.is_stopped, engine.errored) == (True, False, False)
            await engine.check_health()
            await engine.check_admission(2)
            await engine.do_log_stats()
            assert engine.model_name
            assert engine.get_supported_tasks() == ("generate",)
            await engine.sleep()
            assert await engine.is_sleeping()
            await engine.wake_up()
            assert await engine.collective_rpc("echo", x=[1]) == ({"x": [1]},)
            assert engine.renderer.render(GenerateRequest("ab").prompt).token_ids == (97, 98)

    run(main())


def test_cancelling_a_task_aborts_its_request(model: str) -> None:
    """While it is read, while it is entered, and while a call waits."""

    async def read(engine: Engine, started: asyncio.Event) -> None:
        async with engine.generate(GenerateRequest([1], ENDLESS)) as stream:
            async for _ in stream:
                started.set()

    async def main() -> None:
        async with open_fake(model) as engine:
            started = asyncio.Event()
            task = asyncio.create_task(read(engine, started))
            await started.wait()
            assert (await engine.call(GetLoad())).running == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for num_turns in range(4):
                entering = asyncio.create_task(read(engine, asyncio.Event()))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                entering.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await entering
            await until_idle(engine)
            async with engine.generate(GenerateRequest([1], ENDLESS)) as stream:
                await anext(stream)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(engine.pause_generation(mode="wait"), 0.02)
                await engine.resume_generation()
                await anext(stream)
            await until_idle(engine)
            assert await tokens_of(engine, 3) == right_tokens(3)

    run(main())


def test_a_slow_reader_gets_larger_outputs_and_every_token(model: str) -> None:
    async def main() -> None:
        async with open_fake(model) as engine:
            sampling = SamplingParams(seed=1, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
            tokens: tuple[int, ...] = ()
            num_outputs = 0
            async with engine.generate(GenerateRequest([1, 2, 3], sampling)) as stream:
                async for output in stream:
                    tokens += output.outputs[0].token_ids
                    num_outputs += 1
                    await asyncio.sleep(0.03)
            assert tokens == right_tokens(1, 200)
            assert num_outputs < 100

    run(main())


def test_errors_are_raised_on_this_side(model: str) -> None:
    async def main() -> None:
        async with open_fake(model, max_num_queued_reqs=1) as engine:
            with pytest.raises(RequestError) as refused:
                async with engine.generate(GenerateRequest("a", SamplingParams(temperature=float("nan")))):
                    pytest.fail("entered")
            assert refused.value.param == "temperature"
            await engine.pause_generation()
            async with engine.generate(GenerateRequest([1], ENDLESS)):
                with pytest.raises(UnavailableError):
                    await engine.check_admission()
            await engine.resume_generation()
            with pytest.raises(RequestError, match="level"):
                await engine.sleep(7)
            mine = KeyError("mine")
            with pytest.raises(KeyError) as raised:
                async with engine.generate(GenerateRequest([1], ENDLESS)):
                    raise mine
            assert raised.value is mine
            async with engine.generate(GenerateRequest([1], ENDLESS, request_id="x")) as stream:
                await anext(stream)
                engine.abort("x")
                *_, last = [output async for output in stream]
                assert last.outputs[0].finish_reason is FinishReason.ABORT
            with pytest.raises(EngineClosedError):
                await anext(stream)
            with pytest.raises(RuntimeError, match="once"):
                await stream.__aenter__()
            with pytest.raises(RuntimeError, match="Enter"):
                await anext(engine.generate(GenerateRequest("a")))

    run(main())


def test_the_death_of_the_core_reaches_readers_and_callers(model: str) -> None:
    async def main() -> None:
        async with open_fake(model) as engine:
            async with engine.generate(GenerateRequest([1], ENDLESS)) as stream:
                await anext(stream)
                call = asyncio.create_task(engine.sleep(mode="wait"))
                await engine.call(GetLoad())
                (core,) = psutil.Process().children()
                os.kill(core.pid, signal.SIGKILL)
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    _ = [output async for output in stream]
                with pytest.raises(EngineDeadError):
                    await call
            assert engine.errored
            with pytest.raises(EngineDeadError):
                await engine.check_health()

    run(main())


def test_closing_ends_what_other_tasks_have_open(model: str) -> None:
    async def main() -> None:
        async def read() -> None:
            async with engine.generate(GenerateRequest([1], ENDLESS)) as stream:
                async for _ in stream:
                    started.set()

        started = asyncio.Event()
        async with open_fake(model) as engine:
            task = asyncio.create_task(read())
            await started.wait()
        with pytest.raises(EngineClosedError):
            await task
        with pytest.raises(EngineClosedError):
            await engine.call(GetLoad())
        with pytest.raises(EngineClosedError):
            async with engine.generate(GenerateRequest([1], ENDLESS)):
                pytest.fail("entered")
        engine.abort("anything")
        assert engine.is_stopped

    run(main())


def test_an_engine_that_cannot_start_says_so(model: str) -> None:
    async def main() -> None:
        options = {"start_error": "out of paper"}
        with pytest.raises(EngineStartError, match="out of paper"):
            async with trioengine.aio.open_engine(
                EngineConfig(model=model), core_module="trioengine.testing.scripted_core", core_options=options
            ):
                pytest.fail("opened")

    run(main())


@pytest.mark.parametrize("delay_s", [0.001, 0.05, 0.4])
def test_cancelling_while_it_opens_leaves_nothing(model: str, delay_s: float) -> None:
    """No process and no thread; the fixture looks."""

    async def open_it() -> None:
        async with trioengine.aio.open_engine(
            EngineConfig(model=model), core_module="trioengine.testing.scripted_core", core_options={"load_s": "30"}
        ):
            pytest.fail("opened")

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(open_it(), delay_s)

    run(main())


def test_cancelling_before_the_thread_has_begun_leaves_nothing(model: str) -> None:
    """No process and no thread; the fixture looks."""

    async def main() -> None:
        async def open_it() -> None:
            async with open_fake(model):
                pytest.fail("opened")

        task = asyncio.create_task(open_it())
        await asyncio.sleep(0)  # It runs up to its first wait, which is for the thread.
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_cancelling_again_and_again_waits_for_the_end_all_the_same(model: str) -> None:
    """As libraries do whose cancellation lasts, in the midst of an answer; the fixture looks for what is left."""

    async def main() -> None:
        started = asyncio.Event()

        async def use_it() -> None:
            async with open_fake(model) as engine, engine.generate(GenerateRequest("abc", ENDLESS)) as stream:
                async for _ in stream:
                    started.set()

        task = asyncio.create_task(use_it())
        await started.wait()
        while not task.done():
            task.cancel()
            await asyncio.sleep(0.001)
        assert task.cancelled()

    run(main())


def test_a_thread_that_cannot_begin_says_so(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    async def main() -> None:
        with pytest.raises(OSError, match="too many open files"):
            async with open_fake(model):
                pytest.fail("opened")

    monkeypatch.setattr("trioengine.aio.portal.trio.run", fail)
    run(main())


def test_tasks_of_another_loop_are_refused(model: str) -> None:
    """They would wait for what only the engine's own loop is told."""

    async def use(engine: Engine) -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await tokens_of(engine, 1)
        for coroutine in (engine.call(GetLoad()), engine.check_health()):
            with pytest.raises(RuntimeError, match="another event loop"):
                await coroutine

    async def main() -> None:
        async with open_fake(model) as engine:
            await asyncio.to_thread(asyncio.run, use(engine))
            assert await tokens_of(engine, 1) == right_tokens(1)

    run(main())


def test_two_engines_live_in_one_loop_and_exceptions_of_the_block_stay_themselves(model: str) -> None:
    async def main() -> None:
        mine, caught = KeyError("mine"), None
        try:
            async with open_fake(model) as first, open_fake(model) as second:
                answers = await asyncio.gather(tokens_of(first, 1), tokens_of(second, 2))
                assert answers == [right_tokens(1), right_tokens(2)]
                raise mine
        except KeyError as error:
            caught = error
        assert caught is mine

    run(main())
