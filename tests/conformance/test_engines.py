"""The promises of `EngineClient`, kept by the fake engine, a core in memory and a core in a process."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from trioengine.client.engine import open_engine
from trioengine.config.engine import EngineConfig
from trioengine.testing.engine_conformance import CHECKS, Check, Subject
from trioengine.testing.fake_engine import FakeEngine, ScriptedReply
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import open_scripted_engine


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
