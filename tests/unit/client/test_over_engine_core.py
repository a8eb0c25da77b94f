"""The client over the real `EngineCore` with a fake executor, in memory: requests come and go, its books are right."""

import random

import pytest
import trio
from trio.testing import MockClock

from trioengine.core.engine_core import EngineCore
from trioengine.testing.core_driver import make_core_config
from trioengine.testing.fake_executor import FakeExecutor, generate_alone
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import ScriptedEngine, open_scripted_engine
from trioengine.types.messages import CheckIntegrity, CoreLoad, GetLoad, ModelFacts, Ready
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest

VOCAB_SIZE = 200
CONFIG = make_core_config(
    max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, block_size=4, vocab_size=VOCAB_SIZE
)
NUM_BLOCKS = 40
READY = Ready(ModelFacts(64, VOCAB_SIZE, (7,)), NUM_BLOCKS, 4, {})
PACE = Script(pace_s=0.01)


def make_core() -> EngineCore:
    executor = FakeExecutor(num_blocks=NUM_BLOCKS, block_size=4, vocab_size=VOCAB_SIZE)
    return EngineCore(CONFIG, executor, clock=trio.current_time)


async def assert_nothing_is_left(scripted: ScriptedEngine) -> None:
    """Within a step, as messages keep their order."""
    load = await scripted.engine.call(GetLoad())
    assert load == CoreLoad(running=0, waiting=0, free_blocks=NUM_BLOCKS, total_blocks=NUM_BLOCKS)
    await scripted.engine.call(CheckIntegrity())
    assert scripted.frontend.num_open_requests == 0
    await trio.sleep(1)
    assert scripted.frontend.num_reserved_slots == 0


@pytest.mark.parametrize("seed", range(3))
async def test_two_hundred_readers_that_leave_at_random(seed: int, autojump_clock: MockClock) -> None:
    """Queued, in prefill, in decode, preempted; by deadline, by break, by abort. Those that stay get their answer."""
    chance = random.Random(seed)
    num_answers = 0

    async def use(scripted: ScriptedEngine, number: int) -> None:
        nonlocal num_answers
        await trio.sleep(chance.random())
        prompt = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 30))]
        max_tokens = chance.randint(1, 30)
        sampling = SamplingParams(seed=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        request = GenerateRequest(prompt, sampling, request_id=f"{number % 50}")
        num_outputs = chance.choice([1, 3, 100])
        tokens: list[int] = []
        with trio.move_on_after(chance.choice([0.001, 0.05, 0.5, 100])):
            async with scripted.engine.generate(request) as stream:
                async for output in stream:
                    tokens += output.outputs[0].token_ids
                    num_outputs -= 1
                    if num_outputs == 0:
                        break
                    if chance.random() < 0.01:
                        scripted.engine.abort(f"{number % 50}")
        assert tokens == generate_alone(prompt, max_tokens, vocab_size=VOCAB_SIZE)[: len(tokens)]
        num_answers += len(tokens) == max_tokens

    async with open_scripted_engine(PACE, make_core(), READY) as scripted:
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(use, scripted, number)
        await assert_nothing_is_left(scripted)
    assert num_answers > 10
