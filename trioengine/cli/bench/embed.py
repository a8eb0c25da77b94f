"""`bench embed`: embeddings without a server, from texts to vectors in one process and its core."""

import random
import time

import attrs
import trio

from trioengine.cli.bench.load_generator import first_error
from trioengine.cli.bench.offline import taking
from trioengine.cli.bench.report import BenchReport
from trioengine.cli.progress import Progress
from trioengine.client import open_engine
from trioengine.client.interface import EngineClient
from trioengine.config import EngineConfig
from trioengine.types.pooling import EncodeRequest


@attrs.frozen(kw_only=True)
class EmbedBench:
    """Batches of distinct random texts, each all at once; the fastest counts."""

    engine: EngineConfig
    num_prompts: int
    num_input_tokens: int
    num_rounds: int
    seed: int = 0

    async def run(self) -> BenchReport:
        """Open the engine, run the batch and report.

        Raises:
            TrioEngineError: the engine does not start, or refuses a request.
        """
        progress = Progress()
        async with open_engine(taking(self.engine, self.num_prompts), on_progress=progress) as engine:
            progress.clear()
            rng = random.Random(self.seed)
            special = engine.tokenizer.special_token_ids
            ordinary = [token for token in range(engine.tokenizer.vocab_size) if token not in special]
            requests = [EncodeRequest(rng.choices(ordinary, k=self.num_input_tokens)) for _ in range(self.num_prompts)]
            best_s = min([await _embed(engine, requests) for _ in range(self.num_rounds)])
            return BenchReport(
                inputs_per_s=self.num_prompts / best_s,
                tokens_per_s=self.num_prompts * self.num_input_tokens / best_s,
            )


async def _embed(engine: EngineClient, requests: list[EncodeRequest]) -> float:
    """The seconds that all of these take together."""
    started_s = time.monotonic()
    with first_error():
        async with trio.open_nursery() as nursery:
            for request in requests:
                nursery.start_soon(engine.encode, request)
    return time.monotonic() - started_s
