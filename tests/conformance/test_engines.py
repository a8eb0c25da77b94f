"""The promises of `EngineClient`, kept by the fake engine, by cores in memory and by a core in a process."""

from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import MockClock

from trioengine.client.engine import open_engine
from trioengine.config.engine import EngineConfig
from trioengine.core.engine_core import EngineCore
from trioengine.testing.core_driver import make_core_config
from trioengine.testing.engine_conformance import CHECKS, Check, Subject
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.testing.fake_executor import FakeExecutor
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
