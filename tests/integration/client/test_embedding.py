"""What an engine promises to the application around it: it takes nothing global, and lives in any nursery."""

import gc
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import psutil
import pytest
import trio

from trioengine.client.engine import Engine, open_engine
from trioengine.config.engine import EngineConfig
from trioengine.errors import EngineClosedError, EngineDeadError
from trioengine.testing.fake_core import MODULE
from trioengine.testing.fake_executor import generate_alone
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.types.messages import GetLoad
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest

TIMEOUT_S = 60
ENDLESS = SamplingParams(max_tokens=100_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(model=str(write_fake_model(tmp_path_factory.mktemp("model"))), log_stats_interval_s=0.1)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every test, however it ends: no process."""
    yield
    assert psutil.Process().children(recursive=True) == []


async def tokens_of(engine: Engine, seed: int) -> tuple[int, ...]:
    sampling = SamplingParams(seed=seed, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    async with engine.generate(GenerateRequest([1, 2, 3], sampling)) as stream:
        return (await anext(stream)).outputs[0].token_ids


def right_tokens(seed: int) -> tuple[int, ...]:
    return tuple(generate_alone([1, 2, 3], num_tokens=4, seed=seed, vocab_size=257))


def globals_of_the_process() -> list[object]:
    """What belongs to the application: signals, the collector, logging, hooks, filters of warnings, the registry of
    metrics, which another test of this process may have imported."""
    metrics: Any = sys.modules.get("prometheus_client")
    return [
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)],
        signal.set_wakeup_fd(-1),
        gc.get_threshold(),
        gc.get_freeze_count(),
        [logging.root.level, list(logging.root.handlers), list(logging.getLogger("trioengine").handlers)],
        [sys.excepthook, threading.excepthook, sys.unraisablehook],
        list(warnings.filters),
        None if metrics is None else sorted(metrics.REGISTRY._names_to_collectors),
    ]


async def test_an_engine_takes_nothing_that_is_the_applications(config: EngineConfig) -> None:
    """Case 15 (vllm 24885): no handler of a signal; nor any other thing that a process has once only."""
    gc.unfreeze()  # What another test of this process froze is freed one by one, and would change the count.
    wakeup_fd = signal.set_wakeup_fd(-1)  # Trio's own: put back below.
    signal.set_wakeup_fd(wakeup_fd)
    with trio.fail_after(TIMEOUT_S):
        before = globals_of_the_process()
        async with open_engine(config, core_module=MODULE) as engine:
            assert await tokens_of(engine, 1) == right_tokens(1)
            await engine.sleep()
            await engine.wake_up()
            engine.do_log_stats()
            during = globals_of_the_process()
        after = globals_of_the_process()
    signal.set_wakeup_fd(wakeup_fd)
    # Reading the wake-up descriptor has taken it away.
    before[1] = during[1] = after[1] = None
    assert before == during == after


async def test_engines_of_one_process_share_no_statistics(config: EngineConfig) -> None:
    """Each has counters of its own, whatever the others count."""
    with trio.fail_after(TIMEOUT_S):
        async with open_engine(config, core_module=MODULE) as busy, open_engine(config, core_module=MODULE) as idle:
            assert await tokens_of(busy, 2) == right_tokens(2)
            assert busy.stat_loggers
            assert not set(map(id, busy.stat_loggers)) & set(map(id, idle.stat_loggers))
            assert (busy.num_open_requests, idle.num_open_requests) == (0, 0)
            load = await idle.call(GetLoad())
            assert (load.running, load.waiting) == (0, 0)


async def test_engines_opened_at_the_same_moment_do_not_meet(config: EngineConfig) -> None:
    """Case 14 (vllm 45064), with processes: each answers for itself."""
    answers: dict[int, tuple[int, ...]] = {}

    async def use(number: int) -> None:
        async with open_engine(config, core_module=MODULE) as engine:
            answers[number] = await tokens_of(engine, number)

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(use, number)
    assert answers == {number: right_tokens(number) for number in range(4)}


async def test_an_engine_in_a_nursery_ends_with_it(config: EngineConfig) -> None:
    """A sibling's exception cancels the engine's task in the midst of an answer; it leaves the nursery as itself."""

    async def serve(task_status: trio.TaskStatus[Engine] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_engine(config, core_module=MODULE) as engine:
            task_status.started(engine)
            async with engine.generate(GenerateRequest([1], ENDLESS)) as stream:
                async for _ in stream:
                    pass

    engines: list[Engine] = []

    async def fail_beside_it() -> None:
        async with trio.open_nursery() as nursery:
            engines.append(await nursery.start(serve))
            assert await tokens_of(engines[0], 3) == right_tokens(3)
            raise KeyError("mine")

    with trio.fail_after(TIMEOUT_S):
        with pytest.raises(ExceptionGroup) as caught:
            await fail_beside_it()
    assert [repr(error) for error in caught.value.exceptions] == ["KeyError('mine')"]
    with pytest.raises(EngineClosedError):
        await tokens_of(engines[0], 3)


async def test_an_engine_may_be_closed_from_another_task_than_the_readers(config: EngineConfig) -> None:
    """As frameworks do whose start and stop are hooks: the stack is closed while requests run."""
    with trio.fail_after(TIMEOUT_S):
        ended: list[type[BaseException]] = []

        async def read(engine: Engine, started: trio.Event) -> None:
            try:
                async with engine.generate(GenerateRequest([1], ENDLESS)) as stream:
                    async for _ in stream:
                        started.set()
            except (EngineClosedError, EngineDeadError) as error:
                ended.append(type(error))

        async with trio.open_nursery() as nursery:
            async with AsyncExitStack() as stack:
                engine = await stack.enter_async_context(open_engine(config, core_module=MODULE))
                started = trio.Event()
                nursery.start_soon(read, engine, started)
                await started.wait()
            await trio.testing.wait_all_tasks_blocked()
        assert ended == [EngineClosedError]
