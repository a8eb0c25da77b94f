"""`trioengine bench`: what the front end, the engine, a server or the kernels cost and deliver.

Figures go to standard output, as a table or, with `--json`, as one JSON object.
"""

import argparse
from typing import Protocol

from trioengine.cli.options import add_engine_options, engine_config_from, positive_int
from trioengine.errors import BenchError


class Report(Protocol):
    """What a benchmark found."""

    def to_json(self) -> str:
        """One JSON object, on one line."""
        ...

    def to_table(self) -> str:
        """Lines for people."""
        ...


class Benchmark(Protocol):
    """What each benchmark is: values that say what to do, and one way to do it."""

    async def run(self) -> Report:
        """Measure."""
        ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark, and its options."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    frontend = benchmarks.add_parser(
        "frontend", help="everything but the model: a scripted core, ZeroMQ, detokenizing, delivery"
    )
    _add_counts(frontend, streams="streams at once", tokens="tokens of each stream")
    frontend.add_argument(
        "--mode",
        choices=("client", "http", "ws"),
        required=True,
        help="read in process, over HTTP, or over WebSockets, which streams share",
    )
    frontend.add_argument(
        "--pace-ms", type=float, default=0.0, metavar="X", help="time between steps; 0 is as fast as they are taken"
    )
    frontend.add_argument(
        "--api-server-count",
        type=positive_int,
        default=1,
        metavar="N",
        help="API-server processes; with several their CPU counts, in steps of 10 ms. Default: 1",
    )
    serve = benchmarks.add_parser("serve", help="load an OpenAI-compatible server")
    serve.add_argument("--base-url", required=True, metavar="URL", help="like http://127.0.0.1:8000")
    _add_counts(serve, concurrency="requests at once")
    serve.add_argument(
        "--prefix-len",
        type=positive_int,
        default=0,
        metavar="N",
        help="tokens before each prompt that all have in common",
    )
    serve.add_argument("--warm-prefix", action="store_true", help="send them once before the load")
    offline = benchmarks.add_parser("offline", help="a batch without a server")
    serve.add_argument("--seed", type=int, default=0, metavar="N", help="of the random prompts. Default: 0")
    for load in (serve, offline):
        _add_counts(load, num_prompts="requests", input_len="tokens of each prompt", output_len="tokens of each answer")
    offline.add_argument(
        "--repeats",
        type=positive_int,
        default=1,
        metavar="N",
        help="times that a prompt says the same, which models then go on with, for speculation. Default: 1",
    )
    add_engine_options(offline)
    embed = benchmarks.add_parser("embed", help="embeddings without a server")
    _add_counts(embed, num_prompts="texts, all at once", input_len="tokens of each")
    embed.add_argument(
        "--rounds", type=positive_int, default=3, metavar="N", help="times they are embedded; the fastest counts"
    )
    add_engine_options(embed)
    core = benchmarks.add_parser("core", help="planning steps and taking in their results, without a device")
    _add_counts(core, num_seqs="requests that generate at once", steps="steps to measure")
    kernels = benchmarks.add_parser("kernels", help="the kernels alone, operation by operation")
    kernels.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="the native CPU kernels, or an NVIDIA card's. Default: cpu",
    )
    kernels.add_argument(
        "--cpu-threads", type=positive_int, metavar="N", help="threads that compute. Default: one for each processor"
    )
    kernels.add_argument(
        "--op", action="append", default=[], metavar="NAME", help="this operation of the card only; again for more"
    )
    for benchmark in (frontend, serve, offline, embed, core, kernels):
        benchmark.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Status 0, also where the figures do not count: they say so."""
    import trio

    report = trio.run(_benchmark(arguments).run)
    print(report.to_json() if arguments.json else report.to_table())
    return 0


def _benchmark(arguments: argparse.Namespace) -> Benchmark:
    """The benchmark that the command line asks for. Imported late: `--help` needs none of them."""
    match arguments.benchmark:
        case "frontend":
            from trioengine.cli.bench.frontend import FrontendBench, Mode

            return FrontendBench(
                num_streams=arguments.streams,
                num_tokens=arguments.tokens,
                mode=Mode(arguments.mode),
                pace_s=arguments.pace_ms / 1000,
                num_servers=arguments.api_server_count,
            )
        case "serve":
            from trioengine.cli.bench.served import ServedBench

            return ServedBench(
                base_url=arguments.base_url,
                concurrency=arguments.concurrency,
                num_prefix_tokens=arguments.prefix_len,
                warms_prefix=arguments.warm_prefix,
                **_load_values(arguments),
            )
        case "embed":
            from trioengine.cli.bench.embed import EmbedBench

            return EmbedBench(
                engine=engine_config_from(arguments),
                num_prompts=arguments.num_prompts,
                num_input_tokens=arguments.input_len,
                num_rounds=arguments.rounds,
                seed=_seed(arguments),
            )
        case "core":
            from trioengine.cli.bench.core import CoreBench

            return CoreBench(num_seqs=arguments.num_seqs, num_steps=arguments.steps)
        case "kernels" if arguments.device == "cuda":
            from trioengine.cli.bench.device_kernels import DeviceKernelsBench

            if arguments.cpu_threads is not None:
                raise BenchError("--cpu-threads is for --device cpu.")
            return DeviceKernelsBench(ops=arguments.op)
        case "kernels":
            from trioengine.cli.bench.kernels import KernelsBench

            if arguments.op:
                raise BenchError("--op is for --device cuda.")
            return KernelsBench(num_threads=arguments.cpu_threads)
        case _:
            from trioengine.cli.bench.offline import OfflineBench

            return OfflineBench(
                engine=engine_config_from(arguments), num_repeats=arguments.repeats, **_load_values(arguments)
            )


def _load_values(arguments: argparse.Namespace) -> dict[str, int]:
    return {
        "num_prompts": arguments.num_prompts,
        "num_input_tokens": arguments.input_len,
        "num_output_tokens": arguments.output_len,
        "seed": _seed(arguments),
    }


def _seed(arguments: argparse.Namespace) -> int:
    """Of the random prompts, and of the engine where there is one."""
    return getattr(arguments, "seed", 0)


def _add_counts(parser: argparse.ArgumentParser, **counts: str) -> None:
    for name, help_text in counts.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=positive_int, required=True, metavar="N", help=help_text)
