"""The bundled model answers a question: reader, loader, tokenizer, template, decoder and executor together."""

import pytest

torch = pytest.importorskip("torch")

from trioengine.checkpoint.locate import resolve_model  # noqa: E402
from trioengine.config import env  # noqa: E402
from trioengine.config.resolve import ResolvedConfig  # noqa: E402
from trioengine.core.executor import NewSequence, ScheduledSequence, StepPlan  # noqa: E402
from trioengine.models.loader import open_checkpoint  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.tokenizer.chat_template import render_chat  # noqa: E402
from trioengine.tokenizer.tokenizer import load_tokenizer  # noqa: E402
from trioengine.types.params import SamplingParams  # noqa: E402
from trioengine.worker.loading import Computer, load_executor  # noqa: E402


@pytest.mark.parametrize("name", ["torch", "native"])
def test_the_capital_of_japan_is_tokyo(name: str) -> None:
    """Greedy, the prompt in two chunks, until the model's end token."""
    location = resolve_model(None, cache_dir=env.cache_dir())
    tokenizer = load_tokenizer(location)
    prompt = render_chat(tokenizer, [{"role": "user", "content": "What is the capital of Japan?"}]).token_ids
    executor = load_executor(
        open_checkpoint(location),
        ResolvedConfig(
            max_model_len=128,
            max_num_batched_tokens=128,
            max_num_seqs=1,
            max_num_logit_rows=8,
            block_size=16,
            num_kv_blocks=(8,),
            num_offload_blocks=0,
            cpu_threads=torch.get_num_threads(),
            reasons={},
        ),
        Computer(None if name == "torch" else native_library()),
    )
    sequence = NewSequence(0, prompt, len(prompt), SamplingParams(temperature=0), seed=0)
    executor.submit(StepPlan(0, [ScheduledSequence(0, 0, 20, range(8))], [sequence]))
    executor.result()
    answer: list[int] = []
    first, end = 20, len(prompt)
    while not answer or (answer[-1] not in tokenizer.eos_token_ids and len(answer) < 20):
        executor.submit(StepPlan(1 + len(answer), [ScheduledSequence(0, first, end - first)]))
        answer += executor.result().tokens
        first, end = end, end + 1
    executor.close()
    assert tokenizer.decode(answer) == "The capital of Japan is Tokyo."
