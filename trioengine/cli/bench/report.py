"""`BenchReport`: what a benchmark found, as a table for people and one JSON object for programs."""

import json

import attrs

from trioengine.cli.bench.statistics import covered_s, gaps, percentile_ms

MIN_OUTPUTS_PER_TOKEN = 0.95
"""Below this the engine has merged tokens, and its figures per token flatter it."""


@attrs.frozen(kw_only=True)
class BenchReport:
    """The figures that a benchmark has; the others are None and left out."""

    output_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    inputs_per_s: float | None = None
    tokens_per_s: float | None = None
    cpu_us_per_token: float | None = None
    cpu_us_per_chunk: float | None = None
    cpu_us_per_request: float | None = None
    outputs_per_token: float | None = None
    delivery_p50_ms: float | None = None
    delivery_p99_ms: float | None = None
    abort_ms: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None

    def figures(self) -> dict[str, float]:
        """Name -> figure, of those there are."""
        named = {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}
        return {name: round(value, 3) for name, value in named.items() if value is not None}

    def to_json(self) -> str:
        """One JSON object, on one line."""
        return json.dumps(self.figures())

    def to_table(self) -> str:
        """A line for each figure, and a warning where they do not count."""
        figures = self.figures()
        width = max(map(len, figures), default=0)
        lines = [f"{name:<{width}}  {value:>12,.3f}" for name, value in figures.items()]
        if self.outputs_per_token is not None and self.outputs_per_token < MIN_OUTPUTS_PER_TOKEN:
            lines.append(
                f"outputs_per_token is below {MIN_OUTPUTS_PER_TOKEN}: tokens were merged, so nothing here counts."
            )
        return "\n".join(lines)


@attrs.define
class StreamTimes:
    """When one request was sent, and when each of its outputs came."""

    sent_s: float
    outputs_s: list[float] = attrs.field(factory=list[float])
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


def report_streams(streams: list[StreamTimes], wall_s: float) -> BenchReport:
    """Throughput and latencies of requests that all finished.

    `prefill_tokens_per_s` is prompt tokens by the time in which at least one request waited for its first token: exact
    one at a time, and a lower bound where others decode meanwhile.
    """
    started = [stream for stream in streams if stream.outputs_s]
    waits = [(stream.sent_s, stream.outputs_s[0]) for stream in started]
    first_s = [end - start for start, end in waits]
    between_s = [gap for stream in started for gap in gaps(stream.outputs_s)]
    prefilling_s = covered_s(waits)
    num_prompt_tokens = sum(stream.num_prompt_tokens for stream in started)
    return BenchReport(
        output_tokens_per_s=sum(stream.num_output_tokens for stream in streams) / wall_s,
        prefill_tokens_per_s=num_prompt_tokens / prefilling_s if num_prompt_tokens and prefilling_s else None,
        ttft_p50_ms=percentile_ms(first_s, 50),
        ttft_p99_ms=percentile_ms(first_s, 99),
        itl_p50_ms=percentile_ms(between_s, 50),
        itl_p99_ms=percentile_ms(between_s, 99),
    )
