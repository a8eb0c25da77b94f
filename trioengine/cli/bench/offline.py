"""`bench offline`: batches without a server, from requests to outputs in one process and its core."""

import random
import time

import attrs
import trio

from trioengine.cli.bench.load_generator import first_error
from trioengine.cli.bench.report import BenchReport, StreamTimes, report_streams
from trioengine.cli.progress import Progress
from trioengine.client import open_engine
from trioengine.client.interface import EngineClient
from trioengine.config import EngineConfig
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import GenerateRequest


@attrs.frozen(kw_only=True)
class OfflineBench:
    """A batch: so many requests with distinct random prompts, all at once.

    With `num_repeats` each prompt is the same tokens again and again, `num_input_tokens` in all.
    """

    engine: EngineConfig
    num_prompts: int
    num_input_tokens: int
    num_output_tokens: int
    num_repeats: int = 1
    seed: int = 0

    async def run(self) -> BenchReport:
        """Open the engine, warm it up with one short request, run the batch and report.

        Raises:
            TrioEngineError: the engine does not start, or refuses a request.
        """
        progress = Progress()
        async with open_engine(taking(self.engine, self.num_prompts), on_progress=progress) as engine:
            progress.clear()
            rng = random.Random(self.seed)
            await _generate(engine, self._request(engine, rng, 16, 2), StreamTimes(sent_s=0.0))
            requests = [
                self._request(engine, rng, self.num_input_tokens, self.num_output_tokens)
                for _ in range(self.num_prompts)
            ]
            times = [StreamTimes(sent_s=0.0) for _ in requests]
            started_s = time.monotonic()
            with first_error():
                async with trio.open_nursery() as nursery:
                    for request, its_times in zip(requests, times, strict=True):
                        nursery.start_soon(_generate, engine, request, its_times)
            return report_streams(times, time.monotonic() - started_s)

    def _request(
        self, engine: EngineClient, rng: random.Random, num_input_tokens: int, num_output_tokens: int
    ) -> GenerateRequest:
        special = engine.tokenizer.special_token_ids
        ordinary = [token for token in range(engine.tokenizer.vocab_size) if token not in special]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=num_output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        part = rng.choices(ordinary, k=-(-num_input_tokens // self.num_repeats))
        return GenerateRequest((part * self.num_repeats)[:num_input_tokens], sampling)


def taking(config: EngineConfig, num_requests: int) -> EngineConfig:
    """The same engine, whose queue has room for so many requests at once."""
    limit = config.max_num_queued_reqs
    return config if limit is None else attrs.evolve(config, max_num_queued_reqs=max(limit, num_requests))


async def _generate(engine: EngineClient, request: GenerateRequest, times: StreamTimes) -> None:
    times.sent_s = time.monotonic()
    async with engine.generate(request) as outputs:
        times.num_prompt_tokens = outputs.num_prompt_tokens
        async for output in outputs:
            if output.outputs[0].token_ids:
                times.outputs_s.append(time.monotonic())
            times.num_output_tokens = output.num_generated_tokens
