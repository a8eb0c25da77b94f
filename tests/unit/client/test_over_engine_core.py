"""The client over the real `EngineCore` with a fake executor, in memory: requests come and go, its books are right."""

import random
import string
from collections.abc import Sequence

import attrs
import pytest
import trio
from trio.testing import MockClock

from trioengine.config.engine import SpeculationConfig, SpeculationMethod
from trioengine.core.engine_core import EngineCore
from trioengine.testing.core_driver import make_core_config
from trioengine.testing.fake_executor import FakeExecutor, generate_alone
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import ScriptedEngine, open_scripted_engine
from trioengine.types.messages import (
    CheckIntegrity,
    CoreLoad,
    GetLoad,
    IsSleeping,
    ModelFacts,
    PauseGeneration,
    PauseMode,
    Ready,
    ResumeGeneration,
    Sleep,
    WakeUp,
)
from trioengine.types.output import CompletionOutput, FinishReason
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


async def test_tokens_of_a_step_behind_the_one_that_completes_the_stop_are_dropped(autojump_clock: MockClock) -> None:
    """Case 24 (vllm 47616): of a step of four tokens, three accepted drafts and one more, three are left, with their
    log probabilities, and the core is told.
    """
    prompt, answer = [5, 6], list(string.ascii_letters.encode())

    def guess(token_ids: Sequence[int]) -> Sequence[int]:
        return answer[len(token_ids) - len(prompt) :]

    def make() -> EngineCore:
        executor = FakeExecutor(
            num_blocks=NUM_BLOCKS,
            block_size=4,
            vocab_size=VOCAB_SIZE,
            scripts={tuple(prompt): answer},
            draft_model=guess,
        )
        return EngineCore(attrs.evolve(CONFIG, speculation=speculation), executor, clock=trio.current_time)

    async def ask(stop: str | None) -> list[CompletionOutput]:
        sampling = SamplingParams(seed=0, max_tokens=50, stop=stop, logprobs=1, output_kind=RequestOutputKind.DELTA)
        async with open_scripted_engine(PACE, make(), READY) as scripted:
            async with scripted.engine.generate(GenerateRequest(prompt, sampling)) as stream:
                outputs = [output.outputs[0] async for output in stream]
            await assert_nothing_is_left(scripted)
        return outputs

    speculation = SpeculationConfig(
        method=SpeculationMethod.DRAFT_MODEL, num_speculative_tokens=3, model="one that is always right"
    )
    whole = await ask(None)
    number, step = next((i, output.token_ids) for i, output in enumerate(whole) if len(output.token_ids) == 4)
    outputs = await ask(chr(step[1]) + chr(step[2]))
    assert outputs[:number] == whole[:number]
    (last,) = outputs[number:]
    assert last.token_ids == step[:3]
    assert [place.chosen.token_id for place in last.logprobs or ()] == list(step[:3])
    assert last.text == chr(step[0])
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, chr(step[1]) + chr(step[2]))


async def test_replies_that_come_later_reach_their_callers(autojump_clock: MockClock) -> None:
    """A pause that waits, and sleep."""
    answered: list[str] = []
    prompt = [3, 4, 5]

    async def ask(scripted: ScriptedEngine) -> None:
        sampling = SamplingParams(seed=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        async with scripted.engine.generate(GenerateRequest(prompt, sampling)) as stream:
            output = await anext(stream)
        assert list(output.outputs[0].token_ids) == generate_alone(prompt, 12, vocab_size=VOCAB_SIZE)
        answered.append("answer")

    async with open_scripted_engine(PACE, make_core(), READY) as scripted:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, scripted)
            await trio.sleep(0.05)
            await scripted.engine.call(PauseGeneration(PauseMode.WAIT))
            answered.append("paused")
            await scripted.engine.call(ResumeGeneration())
            nursery.start_soon(ask, scripted)
            await trio.sleep(0.05)
            await scripted.engine.call(Sleep(2, PauseMode.KEEP))
            assert await scripted.engine.call(IsSleeping())
            answered.append("asleep")
            await scripted.engine.call(WakeUp())
        await assert_nothing_is_left(scripted)
    assert answered == ["answer", "paused", "asleep", "answer"]
