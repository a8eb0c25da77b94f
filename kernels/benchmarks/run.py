# pyright: basic
"""Measures the operations of the card in this machine and adds a line of CSV for each. README.md says how.

Ends with 1 where an operation failed or its output was wrong; its line says so and has no speed.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from trioengine_kernels.benchmark.cases import MODELS, OPS
from trioengine_kernels.benchmark.machine import NoCardError, open_suite, open_timer, run_facts
from trioengine_kernels.benchmark.measure import measure, measure_ceilings
from trioengine_kernels.benchmark.rates import FIGURES, CsvTable, RunFacts

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; its exit status."""
    options = _parse(arguments)
    try:
        timer = open_timer(options.device)
    except NoCardError as error:
        print(error, file=sys.stderr)
        return 2
    suite = open_suite(options.device, getattr(torch, options.dtype))
    suite = attrs.evolve(suite, models=[model for model in MODELS if not options.model or model.name in options.model])
    facts = run_facts(options.device, options.commit)
    path = options.output or RESULTS / f"{slug_of(facts)}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    with path.open("a") as file:
        table = CsvTable(file, FIGURES, facts)
        ceilings = measure_ceilings(options.device, suite.dtype, timer)
        for rate in (*ceilings.rates(), *measure(suite, timer, options.op)):
            row = rate.row(ceilings)
            table.add(row)
            num_failed += rate.failure is not None
            print(*(f"{name}={value}" for name, value in row.items() if value is not None), sep="  ", flush=True)
    print(f"{path}: {num_failed} failed", file=sys.stderr)
    return int(num_failed > 0)


def slug_of(facts: RunFacts) -> str:
    """A file name of card and commit."""
    return re.sub(r"[^a-z0-9.]+", "-", f"{facts.card}-{facts.commit}".lower())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the operations of the card in this machine.")
    parser.add_argument("--op", action="append", choices=tuple(OPS), default=[], help="again for more; default: all")
    names = tuple(model.name for model in MODELS)
    parser.add_argument("--model", action="append", choices=names, default=[], help="the shapes of this one only")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the benchmark out")
    parser.add_argument(
        "--output", type=Path, help="rows are added to it; default: results/<card>-<commit>.csv beside this file"
    )
    parser.add_argument("--commit", help="where this is no clone of the repository")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
