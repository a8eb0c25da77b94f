"""`bench serve`: loads any OpenAI-compatible server with streamed completions."""

import random
import time

import attrs

from trioengine.cli.bench.load_generator import (
    CompletionLoad,
    CompletionTimes,
    Connection,
    ServerAddress,
    find_model,
    joined,
    random_prompt,
    run_load,
    stream_completion,
)
from trioengine.cli.bench.report import BenchReport, report_streams
from trioengine.errors import BenchError


@attrs.frozen(kw_only=True)
class ServedBench:
    """A load: so many requests with distinct random prompts, so many at once."""

    base_url: str
    concurrency: int
    num_prompts: int
    num_input_tokens: int
    num_output_tokens: int
    seed: int = 0
    num_prefix_tokens: int = 0
    """Tokens that come before each prompt and are the same in all."""
    warms_prefix: bool = False
    """Whether a request that is not measured sends them once before."""

    async def run(self) -> BenchReport:
        """Warm the server up with one request, then load it and report.

        Prompts are token ids, so that their length is exact; where the server takes only text, `prefill_tokens_per_s`
        counts what its usage says.

        Raises:
            BenchError: a request failed.
        """
        address = ServerAddress.from_url(self.base_url)
        rng = random.Random(self.seed)
        async with Connection(address) as connection:
            load = CompletionLoad(model=await find_model(connection), num_output_tokens=self.num_output_tokens)
        takes_tokens = await _takes_tokens(address, attrs.evolve(load, num_output_tokens=1), rng)
        prefix = random_prompt(rng, self.num_prefix_tokens, takes_tokens=takes_tokens)
        num_warming = 1 if self.warms_prefix else 0
        prompts = [
            joined(prefix, random_prompt(rng, self.num_input_tokens, takes_tokens=takes_tokens))
            for _ in range(num_warming + self.num_prompts)
        ]
        await run_load(address, load, prompts[:num_warming], concurrency=1)
        started_s = time.monotonic()
        times = await run_load(address, load, prompts[num_warming:], concurrency=self.concurrency)
        return report_streams([*times], time.monotonic() - started_s)


async def _takes_tokens(address: ServerAddress, load: CompletionLoad, rng: random.Random) -> bool:
    """Whether the server takes prompts of token ids; the request that finds out warms it up."""
    async with Connection(address) as connection:
        body = load.body(random_prompt(rng, 16, takes_tokens=True))
        try:
            await stream_completion(connection, body, CompletionTimes(sent_s=0.0))
        except BenchError:
            return False
        return True
