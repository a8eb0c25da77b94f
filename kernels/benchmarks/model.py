# pyright: basic
"""Decode and prefill of a model with random weights: this engine, or transformers beside it. README.md says how.

One process measures one engine with one model, so that each starts with an empty card. Its rows are added to the file.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from trioengine_kernels.benchmark.cases import MODELS, ModelSizes
from trioengine_kernels.benchmark.machine import NoCardError, open_timer, run_facts
from trioengine_kernels.benchmark.measure import measure_ceilings
from trioengine_kernels.benchmark.rates import Ceilings, Cell, CsvTable

from trioengine import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from trioengine.testing.random_folder import write_random_folder
from trioengine.types.params import RequestOutputKind

COLUMNS = (
    "engine",
    "options",
    "model",
    "dtype",
    "phase",
    "batch",
    "prompt_tokens",
    "output_tokens",
    "tokens_per_s",
    "fraction",
    "roofline_tokens_per_s",
    "step_us",
    "gap_us",
    "start_s",
)
NUM_PROFILED_STEPS = 32


# What is measured


@attrs.frozen
class Decode:
    """How a batch went that was decoded together."""

    tokens_per_s: float
    gap_us: float | None = None
    """Between two steps, in which the card has nothing to do; None is not known."""


class Engine(Protocol):
    """What is measured."""

    def prefill_s(self, prompts: Sequence[Sequence[int]]) -> float:
        """The time until every prompt has one token."""
        ...

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Decode:
        """Decode so many tokens for each prompt."""
        ...


def decode_rate(token_times_s: Sequence[Sequence[float]]) -> float:
    """Tokens per second while all sequences are decoded: from the last first token to the first last one.

    Args:
        token_times_s: for each sequence, when its tokens came.

    Raises:
        ValueError: there is no such time.
    """
    begin = max(times[0] for times in token_times_s)
    end = min(times[-1] for times in token_times_s)
    num_tokens = sum(begin < time_s <= end for times in token_times_s for time_s in times)
    if num_tokens == 0:
        raise ValueError("The sequences were never decoded together: more tokens are needed.")
    return num_tokens / (end - begin)


def gap_between_steps_us(intervals: Sequence[tuple[float, float]], num_steps: int) -> float | None:
    """The median of the longest times with nothing to do, one for each pair of steps that follow each other.

    Args:
        intervals: when the card was busy, in µs; they may overlap.
        num_steps: how many steps they are of.
    """
    idle: list[float] = []
    busy_until = None
    for begin, end in sorted(intervals):
        if busy_until is not None:
            idle.append(max(0.0, begin - busy_until))
        busy_until = end if busy_until is None else max(busy_until, end)
    longest = sorted(idle, reverse=True)[: num_steps - 1]
    return statistics.median(longest) if longest else None


# This engine


class TrioEngine:
    """This engine, in this process."""

    def __init__(self, folder: Path, device: str, dtype: str, options: Mapping[str, object]) -> None:
        arguments = EngineArgs(
            str(folder), device=device, dtype=dtype, enable_prefix_caching=False, disable_log_stats=True, **options
        )
        self._engine = LLMEngine.from_engine_args(arguments, multiprocess=False)
        self._num_requests = 0

    def prefill_s(self, prompts: Sequence[Sequence[int]]) -> float:
        """As `Engine.prefill_s`."""
        start = time.perf_counter()
        times = self._run(prompts, 1)
        return max(each[-1] for each in times) - start

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Decode:
        """As `Engine.decode`; the gap is that of a second batch, under torch's profiler."""
        rate = decode_rate(self._run(prompts, num_tokens))
        return Decode(rate, self._gap_us(prompts) if torch.cuda.is_available() else None)

    def _run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[float]]:
        times = self._add(prompts, num_tokens)
        while self._engine.has_unfinished_requests():
            self._step(times)
        return list(times.values())

    def _add(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, list[float]]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        times: dict[str, list[float]] = {}
        for prompt in prompts:
            self._num_requests += 1
            request_id = self._engine.add_request(str(self._num_requests), {"prompt_token_ids": list(prompt)}, params)
            times[request_id] = []
        return times

    def _step(self, times: Mapping[str, list[float]]) -> None:
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            assert isinstance(output, RequestOutput)
            times[output.request_id].extend([now] * len(output.outputs[0].token_ids))

    def _gap_us(self, prompts: Sequence[Sequence[int]]) -> float | None:
        times = self._add(prompts, 2 * NUM_PROFILED_STEPS)
        while not all(times.values()):
            self._step(times)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            num_before = _num_tokens(times)
            for _ in range(NUM_PROFILED_STEPS):
                self._step(times)
            num_steps = (_num_tokens(times) - num_before) // len(times)
            torch.cuda.synchronize()
        self._engine.abort_request(list(times))
        return gap_between_steps_us(_device_intervals(profile), num_steps)


def _num_tokens(times: Mapping[str, list[float]]) -> int:
    return sum(map(len, times.values()))


def _device_intervals(profile: torch.profiler.profile) -> list[tuple[float, float]]:
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == torch.profiler.DeviceType.CUDA
    ]


# transformers


class Generate:
    """transformers' `generate`: one batch of equally long prompts."""

    def __init__(self, folder: Path, device: str, dtype: str, _: Mapping[str, object]) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.model.to(device)
        self.make_config = GenerationConfig

    def prefill_s(self, prompts: Sequence[Sequence[int]]) -> float:
        """As `Engine.prefill_s`."""
        return self._generate_s(prompts, 1)

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Decode:
        """As `Engine.decode`."""
        seconds = self._generate_s(prompts, num_tokens) - self._generate_s(prompts, 1)
        return Decode(len(prompts) * (num_tokens - 1) / max(seconds, 1e-9))

    def _generate_s(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        ids = torch.tensor(prompts, device=self.model.device)
        config = self.make_config(max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        start = time.perf_counter()
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        output = output.cpu()  # Waits for the card.
        seconds = time.perf_counter() - start
        assert output.shape == (len(prompts), len(prompts[0]) + num_tokens)
        return seconds


class ContinuousBatching(Generate):
    """transformers' own continuous batching."""

    def __init__(self, folder: Path, device: str, dtype: str, options: Mapping[str, object]) -> None:
        super().__init__(folder, device, dtype, options)
        self.limits: dict[str, Any] = {}
        if device == "cpu":
            from transformers import ContinuousBatchingConfig

            # By default its cache takes nearly all memory.
            self.limits["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)

    def prefill_s(self, prompts: Sequence[Sequence[int]]) -> float:
        """As `Engine.prefill_s`; without the manager's own start."""
        begin, times = self._run(prompts, 1)
        return max(each[-1] for each in times) - begin

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Decode:
        """As `Engine.decode`."""
        return Decode(decode_rate(self._run(prompts, num_tokens)[1]))

    def _run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[list[float]]]:
        """When the first request was taken up, and the times of all tokens."""
        config = self.make_config(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        results = self.model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=config,
            record_timestamps=True,
            **self.limits,
        )
        if len(results) != len(prompts) or any(len(each.generated_tokens) != num_tokens for each in results.values()):
            raise RuntimeError("transformers' continuous batching has not finished every request.")
        return min(each.lifespan[0] for each in results.values()), [each.timestamps for each in results.values()]


ENGINES = {"trioengine": TrioEngine, "generate": Generate, "continuous": ContinuousBatching}


# The least time


def decode_step_s(sizes: ModelSizes, batch: int, context: int, ceilings: Ceilings, dtype: str) -> float:
    """The least time of a decode step: all weights are read once, and the keys and values of every sequence."""
    itemsize = getattr(torch, dtype).itemsize
    num_weights = _layer_weights(sizes) + sizes.vocab_size * sizes.hidden_size
    kv_bytes = batch * context * 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * itemsize
    num_flops = 2 * num_weights * batch + _attention_flops(sizes, batch * context)
    return ceilings.roofline_s(num_weights * itemsize + kv_bytes, num_flops, dtype)


def prefill_step_s(sizes: ModelSizes, num_prompts: int, prompt_tokens: int, ceilings: Ceilings, dtype: str) -> float:
    """The least time of prompts, each with the logits of its last token."""
    itemsize = getattr(torch, dtype).itemsize
    head = sizes.vocab_size * sizes.hidden_size
    num_pairs = num_prompts * prompt_tokens * (prompt_tokens + 1) // 2
    num_flops = 2 * num_prompts * (_layer_weights(sizes) * prompt_tokens + head) + _attention_flops(sizes, num_pairs)
    return ceilings.roofline_s((_layer_weights(sizes) + head) * itemsize, num_flops, dtype)


def _layer_weights(sizes: ModelSizes) -> int:
    attention = (2 * sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim * sizes.hidden_size
    return sizes.num_layers * (attention + 3 * sizes.intermediate_size * sizes.hidden_size)


def _attention_flops(sizes: ModelSizes, num_pairs: int) -> int:
    return 4 * num_pairs * sizes.num_layers * sizes.num_heads * sizes.head_dim


# The program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; its exit status."""
    options = _parse(arguments)
    sizes = next(model for model in MODELS if model.name == options.model)
    try:
        timer = open_timer(options.device)
    except NoCardError as error:
        print(error, file=sys.stderr)
        return 2
    folder = options.models / f"{sizes.name}-{options.dtype}"
    if not (folder / "model.safetensors").exists():
        write_random_folder(folder, sizes, options.dtype)
    ceilings = measure_ceilings(options.device, getattr(torch, options.dtype), timer)
    gc.collect()
    torch.cuda.empty_cache()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("a") as file:
        table = CsvTable(file, COLUMNS, run_facts(options.device, options.commit))
        for row in _rows(options, sizes, folder, ceilings):
            table.add(row)
            print(*(f"{name}={value}" for name, value in row.items() if value is not None), sep="  ", flush=True)
    return 0


def _rows(
    options: argparse.Namespace, sizes: ModelSizes, folder: Path, ceilings: Ceilings
) -> Iterator[Mapping[str, Cell]]:
    sizes_of_engine = {
        "max_num_seqs": max(options.batch),
        "max_model_len": max(options.prompt_tokens + options.output_tokens, options.prefill_tokens + 1) + 64,
    }
    start = time.perf_counter()
    engine: Engine = ENGINES[options.engine](folder, options.device, options.dtype, sizes_of_engine | dict(options.set))
    start_s = time.perf_counter() - start
    rng = random.Random(0)

    def prompts(count: int, num_tokens: int) -> list[list[int]]:
        return [rng.choices(range(sizes.vocab_size), k=num_tokens) for _ in range(count)]

    settings = " ".join(f"{name}={value}" for name, value in options.set)
    common: dict[str, Cell] = {
        "engine": options.engine,
        "options": settings or None,
        "model": sizes.name,
        "dtype": options.dtype,
    }
    for batch in options.batch:
        engine.decode(prompts(batch, 16), 4)  # What is slow the first time.
        decode = engine.decode(prompts(batch, options.prompt_tokens), options.output_tokens)
        context = options.prompt_tokens + options.output_tokens // 2
        least_s = decode_step_s(sizes, batch, context, ceilings, options.dtype)
        yield {
            **common,
            "phase": "decode",
            "batch": batch,
            "prompt_tokens": options.prompt_tokens,
            "output_tokens": options.output_tokens,
            "tokens_per_s": round(decode.tokens_per_s, 1),
            "fraction": round(least_s * decode.tokens_per_s / batch, 3),
            "roofline_tokens_per_s": round(batch / least_s, 1),
            "step_us": round(batch / decode.tokens_per_s * 1e6, 1),
            "gap_us": None if decode.gap_us is None else round(decode.gap_us, 1),
            "start_s": round(start_s, 2),
        }
    for count in (1, options.prefill_prompts):
        engine.prefill_s(prompts(count, options.prefill_tokens))
        seconds = engine.prefill_s(prompts(count, options.prefill_tokens))
        least_s = prefill_step_s(sizes, count, options.prefill_tokens, ceilings, options.dtype)
        yield {
            **common,
            "phase": "prefill",
            "batch": count,
            "prompt_tokens": options.prefill_tokens,
            "tokens_per_s": round(count * options.prefill_tokens / seconds, 1),
            "fraction": round(least_s / seconds, 3),
            "roofline_tokens_per_s": round(count * options.prefill_tokens / least_s, 1),
            "start_s": round(start_s, 2),
        }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decode and prefill of a model with random weights.")
    parser.add_argument("--engine", choices=tuple(ENGINES), required=True)
    parser.add_argument("--model", choices=[model.name for model in MODELS if not model.num_experts], required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each sequence that is decoded")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--prefill-prompts", type=int, default=8, help="at once, after one alone")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the benchmark out")
    parser.add_argument("--output", type=Path, required=True, help="rows are added to this file")
    parser.add_argument(
        "--models",
        type=Path,
        default=Path(tempfile.gettempdir()) / "trioengine-random-models",
        help="where the weights are written, and found again",
    )
    parser.add_argument("--commit", help="where this is no clone of the repository")
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of this engine, as EngineConfig names it; again for more. The least time stays the model's own",
    )
    options = parser.parse_args(arguments)
    if options.set and options.engine != "trioengine":
        parser.error("--set is for --engine trioengine.")
    return options


def _setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())
