"""Prompts that take long to tokenize, with a real tokenizer and a real core process."""

import trio

from trioengine.client.engine import open_engine
from trioengine.config.engine import EngineConfig
from trioengine.types.params import SamplingParams
from trioengine.types.request import GenerateRequest

SHORT = SamplingParams(max_tokens=2)


async def test_short_prompts_are_not_held_up_by_the_tokenization_of_a_long_one() -> None:
    """Case 19 (vllm 1026): 20 of them, one after the other, are answered while 200,000 words are tokenized."""
    order: list[str] = []
    with trio.fail_after(60):
        async with open_engine(EngineConfig(), core_module="trioengine.testing.scripted_core") as engine:

            async def ask(name: str, prompt: str) -> None:
                async with engine.generate(GenerateRequest(prompt, SHORT)) as stream:
                    order.append(name)
                    assert stream.num_prompt_tokens >= len(prompt.split())
                    assert [output async for output in stream][-1].finished

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, "long", "word and " * 100_000)
                await trio.testing.wait_all_tasks_blocked()
                for _ in range(20):
                    await ask("short", "a word")
    assert order == ["short"] * 20 + ["long"]
