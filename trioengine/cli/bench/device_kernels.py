# pyright: basic
"""`bench kernels --device cuda`: each operation of the Triton kernels, beside what this card was measured to give."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from trioengine.errors import BenchError

if TYPE_CHECKING:
    from trioengine_kernels.benchmark.rates import Ceilings, Cell, RunFacts

_DEVICE = "cuda"


@attrs.frozen
class DeviceKernelsReport:
    """How fast each operation is. One whose output was wrong has no speed, and its row says so."""

    facts: "RunFacts"
    ceilings: "Ceilings"
    rows: "Sequence[Mapping[str, Cell]]"

    def to_json(self) -> str:
        """One JSON object, on one line."""
        rates = {name: round(rate / 1e12, 1) for name, rate in self.ceilings.flops_per_s.items()}
        return json.dumps(
            {
                **attrs.asdict(self.facts),
                "copy_gb_per_s": round(self.ceilings.copy_bytes_per_s / 1e9, 1),
                "tflop_per_s": rates,
                "ops": self.rows,
            }
        )

    def to_table(self) -> str:
        """A line for each operation, shape and implementation."""
        rates = ", ".join(f"{rate / 1e12:.0f} TFLOP/s {name}" for name, rate in self.ceilings.flops_per_s.items())
        lines = [
            f"{self.facts.card}; {self.ceilings.copy_bytes_per_s / 1e9:.0f} GB/s copied, {rates}",
            f"{'operation':<18}{'shape':<34}{'':<26}{'µs':>10}{'GB/s':>9}{'TFLOP/s':>9}{'fraction':>10}",
        ]
        for row in self.rows:
            name = f"{row['op']:<18}{row['shape']:<34}{row['config']:<26}"
            if row["failure"] is not None:
                lines.append(f"{name}{row['failure']}")
                continue
            fraction = f"{row['fraction']:.0%}"
            lines.append(
                f"{name}{row['us']:>10}{row['gb_per_s']:>9}{_shown(row['tflop_per_s']):>9}{fraction:>7}"
                f" {str(row['roofline'])[:3]}"
            )
        return "\n".join(lines)


@attrs.frozen(kw_only=True)
class DeviceKernelsBench:
    """The Triton kernels alone, in this process."""

    ops: Sequence[str] = ()
    """Which; none is all."""

    async def run(self) -> DeviceKernelsReport:
        """Check and measure. Blocks for minutes.

        Raises:
            BenchError: there is no card, or no such operation.
        """
        try:
            from trioengine_kernels.benchmark.cases import OPS
            from trioengine_kernels.benchmark.machine import NoCardError, open_suite, open_timer, run_facts
            from trioengine_kernels.benchmark.measure import measure, measure_ceilings
        except ModuleNotFoundError as error:
            raise BenchError(f"{error.name} is missing: pip install 'trioengine[gpu]'.") from error
        if unknown := set(self.ops) - OPS.keys():
            raise BenchError(f"There is no operation {min(unknown)!r}; there are {', '.join(OPS)}.")
        try:
            timer = open_timer(_DEVICE)
        except NoCardError as error:
            raise BenchError(f"There are no kernels to measure: {error}") from error
        suite = open_suite(_DEVICE)
        ceilings = measure_ceilings(_DEVICE, suite.dtype, timer)
        rows = [rate.row(ceilings) for rate in measure(suite, timer, self.ops)]
        return DeviceKernelsReport(run_facts(_DEVICE), ceilings, rows)


def _shown(value: object) -> str:
    return "" if value is None else str(value)
