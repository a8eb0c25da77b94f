"""Two core processes whose steps are collective: an idle rank's empty steps release the other's barrier."""

from pathlib import Path

import pytest
import trio

from trioengine.client.engine import Engine, open_engine
from trioengine.client.llm_engine import LLMEngine
from trioengine.config.engine import EngineConfig
from trioengine.errors import ConfigError
from trioengine.testing.fake_executor import generate_alone
from trioengine.testing.fake_tokenizer import write_fake_model
from trioengine.types.messages import CheckIntegrity, CoreLoad, GetLoad, Sleep, WakeUp
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest

MODULE = "trioengine.testing.lockstep_core"  # Which loads torch: not in this process.
TIMEOUT_S = 60
PROMPT = [1, 2, 3]


async def generate(engine: Engine, rank: int, num_tokens: int) -> None:
    """A request on a rank, whose tokens are those that it gets alone."""
    sampling = SamplingParams(seed=7, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    async with engine.generate(GenerateRequest(PROMPT, sampling, data_parallel_rank=rank)) as stream:
        token_ids = (await anext(stream)).outputs[0].token_ids
    assert list(token_ids) == generate_alone(PROMPT, num_tokens, seed=7, vocab_size=257)


async def test_dummy_steps_release_a_gloo_barrier(tmp_path: Path) -> None:
    """Requests on either rank are computed while the other has none, and on both at once, begun at any time and left
    in the middle; between waves both ranks are idle: they answer calls, and sleep."""
    config = EngineConfig(model=str(write_fake_model(tmp_path)), data_parallel_size=2)
    options = {"store": str(tmp_path / "store")}
    with trio.fail_after(TIMEOUT_S):
        async with open_engine(config, core_module=MODULE, core_options=options) as engine:
            for rank in (0, 1, 0, 0):
                await generate(engine, rank, 20)
            await engine.call(CheckIntegrity())
            async with trio.open_nursery() as nursery:
                for index in range(20):
                    nursery.start_soon(generate, engine, index % 2, 5 + index)
            endless = SamplingParams(max_tokens=100_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
            async with engine.generate(GenerateRequest(PROMPT, endless, data_parallel_rank=1)) as stream:
                await anext(stream)
            await engine.call(Sleep())
            await engine.call(WakeUp())
            await generate(engine, 1, 3)
            load = await engine.call(GetLoad())
            assert load == CoreLoad(0, 0, load.total_blocks, load.total_blocks)


def test_one_rank_alone_is_refused(tmp_path: Path) -> None:
    """Others would have to wake it for their steps, and cannot. By a loop of trio's, and without one."""
    options = {"store": str(tmp_path / "store")}
    config = EngineConfig(model=str(write_fake_model(tmp_path)), data_parallel_rank=0)

    async def open_it() -> None:
        with trio.fail_after(TIMEOUT_S):
            async with open_engine(config, core_module=MODULE, core_options=options):
                pytest.fail("opened")

    def open_blocking() -> None:
        LLMEngine(config, multiprocess=True, core_module=MODULE, core_options=options)

    for opening in (lambda: trio.run(open_it), open_blocking):
        with pytest.raises(ConfigError) as caught:
            opening()
        assert caught.value.option == "data_parallel_rank"
        (tmp_path / "store").unlink(missing_ok=True)
