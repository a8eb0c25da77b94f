"""The promises of `EngineClient`, kept by the fake engine, by cores in memory and by a core in a process."""

from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import MockClock

from trioengine.client.engine import Engine, open_engine
from trioengine.config.engine import EngineConfig
from trioengine.core.engine_core import EngineCore
from trioengine.testing.core_driver import make_core_config
from trioengine.testing.engine_conformance import CHECKS, OPERATION_CHECKS, Check, Subject
from trioengine.testing.fake_core import BLOCK_SIZE, MODULE, NUM_BLOCKS, VOCAB_SIZE, fake_core_config, fake_ready
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.testing.fake_executor import FakeExecutor, new_weight
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import open_scripted_engine
from trioengine.types.messages import CheckIntegrity, ModelFacts, Ready
from trioengine.types.params import SamplingParams


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_fake_engine(check: Check, autojump_clock: MockClock) -> None:
    engine, endless_engine = FakeEngine(), FakeEngine(ScriptedReply(deltas=("a", "b"), go_on=trio.Event()))
    await check(Subject(engine, endless_engine))
    assert engine.live == endless_engine.live == set()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_core_in_memory(check: Check, autojump_clock: MockClock) -> None:
    async with open_scripted_engine(Script(pace_s=0.01, num_cached_tokens=3)) as scripted:
        await check(Subject(scripted.engine, scripted.engine))
        assert scripted.frontend.num_open_requests == 0


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_engine_core_in_memory(check: Check, autojump_clock: MockClock) -> None:
    """The real core, which finds the prompts of requests before in its prefix cache."""
    config = attrs.evolve(
        make_core_config(max_num_seqs=32, max_num_batched_tokens=64, max_model_len=4096, block_size=4, vocab_size=257),
        enable_prefix_caching=True,
    )
    core = EngineCore(config, FakeExecutor(num_blocks=8192, block_size=4, vocab_size=257), clock=trio.current_time)
    ready = Ready(ModelFacts(4096, 257, (256,)), 8192, 4, {})
    # The fake executor's tokens depend on the seed whatever the temperature.
    sampling = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
    async with open_scripted_engine(Script(pace_s=0.01), core, ready) as scripted:
        engine = scripted.engine
        await check(Subject(engine, engine, sampling, attrs.evolve(sampling, max_tokens=4000)))
        await engine.call(CheckIntegrity())
        assert scripted.frontend.num_open_requests == 0


@pytest.mark.parametrize("check", OPERATION_CHECKS, ids=lambda check: check.__name__)
async def test_operations_of_the_fake_engine(check: Check, autojump_clock: MockClock) -> None:
    engine, endless_engine = FakeEngine(), FakeEngine(ScriptedReply(deltas=("a", "b"), go_on=trio.Event()))
    await check(Subject(engine, endless_engine))
    assert engine.live == endless_engine.live == set()


@pytest.mark.parametrize("check", OPERATION_CHECKS, ids=lambda check: check.__name__)
async def test_operations_of_an_engine_core_in_memory(check: Check, autojump_clock: MockClock) -> None:
    executor = FakeExecutor(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE, max_loras=fake_core_config().max_loras
    )
    core = EngineCore(fake_core_config(), executor, clock=trio.current_time)
    async with open_scripted_engine(Script(pace_s=0.01), core, fake_ready()) as scripted:
        await check(fake_core_subject(scripted.engine))
        await scripted.engine.call(CheckIntegrity())
        assert scripted.frontend.num_open_requests == 0


@pytest.mark.parametrize("num_cores", [1, 2])
async def test_everything_of_engine_cores_in_processes(num_cores: int, tmp_path: Path) -> None:
    """All checks on one engine, one after the other; with two cores, between which its requests are balanced."""
    config = EngineConfig(model=str(write_fake_model(tmp_path / "model")), data_parallel_size=num_cores)
    async with open_engine(config, core_module=MODULE, core_options={"pace_s": "0.0005"}) as engine:
        for check in (*CHECKS, *OPERATION_CHECKS):
            await check(fake_core_subject(engine))
        await engine.call(CheckIntegrity())
        assert engine.num_open_requests == 0


def fake_core_subject(engine: Engine) -> Subject:
    """The fake executor's tokens depend on the seed whatever the temperature."""
    sampling = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
    return Subject(
        engine,
        engine,
        sampling,
        attrs.evolve(sampling, max_tokens=100_000),
        new_weights=(new_weight(7),),
        rpc_method="echo",
    )


async def test_core_in_a_process(tmp_path: Path) -> None:
    """All checks on one engine, one after the other."""
    config = EngineConfig(model=str(write_fake_model(tmp_path / "model")))
    async with open_engine(
        config,
        core_module="trioengine.testing.scripted_core",
        core_options={"pace_s": "0.001", "num_cached_tokens": "3"},
    ) as engine:
        for check in CHECKS:
            await check(Subject(engine, engine))
        assert engine.num_open_requests == 0
