"""Many streams at once give the tokens that each gives alone."""

import pytest
import trio

from trioengine import ChatPrompt, Engine, GenerateRequest, RequestOutputKind, SamplingParams, open_engine
from trioengine.checkpoint.locate import resolve_model
from trioengine.config import env
from trioengine.types.messages import CheckIntegrity

NUM_STREAMS = 32
NUM_TOKENS = 16
MARGIN = 1e-3

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)


async def generate(engine: Engine, prompt: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt ids and generated ids."""
    request = GenerateRequest(ChatPrompt([{"role": "user", "content": prompt}]), GREEDY)
    async with engine.generate(request) as outputs:
        output = await anext(outputs)
    assert output.finished
    return output.prompt_token_ids, output.outputs[0].token_ids


def margin_between_best_two(token_ids: tuple[int, ...]) -> float:
    """Logit of the most likely next token minus that of the second, computed in one prefill."""
    torch = pytest.importorskip("torch")
    from trioengine_kernels.paged_attention import plan_attention

    from trioengine.models.decoder import DecoderInput
    from trioengine.models.loader import load_model
    from trioengine.worker.kv_cache import allocate_kv_cache

    model = load_model(resolve_model(None, cache_dir=env.cache_dir()))
    num_tokens, block_size = len(token_ids), 16
    num_blocks = -(-num_tokens // block_size)
    positions = torch.arange(num_tokens)
    attention = plan_attention(
        torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
        block_size=block_size,
    )
    step = DecoderInput(torch.tensor(token_ids), positions, positions, attention, positions[-1:])
    with torch.inference_mode():
        logits = model.decoder.forward(step, allocate_kv_cache(model.config, num_blocks, block_size))
    best = torch.topk(logits[0], 2).values
    return float(best[0] - best[1])


async def test_32_streams_at_once_give_the_tokens_that_each_gives_alone() -> None:
    """They may differ only where the two best logits are within 1e-3: sums in another order round differently."""
    pytest.importorskip("torch")
    prompts = [f"Write {number + 2} words about the number {number * 37}." for number in range(NUM_STREAMS)]
    together: dict[str, tuple[int, ...]] = {}

    async with open_engine() as engine:
        alone = {prompt: await generate(engine, prompt) for prompt in prompts}

        async def one(prompt: str) -> None:
            together[prompt] = (await generate(engine, prompt))[1]

        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(one, prompt)
        await engine.call(CheckIntegrity())

    assert len(together) == NUM_STREAMS
    for prompt, (prompt_ids, expected) in alone.items():
        got = together[prompt]
        if got != expected:
            place = next(i for i in range(NUM_TOKENS) if got[i] != expected[i])
            assert margin_between_best_two(prompt_ids + expected[:place]) < MARGIN, prompt
