"""`bench kernels`: each operation of the native CPU kernels, beside what this machine's memory was measured to give."""

import json

import attrs
from trioengine_kernels.native.benchmark import Bandwidth, OpRate, measure_bandwidth, measure_ops
from trioengine_kernels.native.library import NativeUnavailableError, ThreadPool, load_library

from trioengine.config import env
from trioengine.errors import BenchError


@attrs.frozen
class KernelsReport:
    """How fast each operation is."""

    kernels: str
    """Which of the kernels this processor runs."""
    num_threads: int
    bandwidth: Bandwidth
    ops: tuple[OpRate, ...]

    def to_json(self) -> str:
        """One JSON object, on one line."""
        return json.dumps(
            {
                "kernels": self.kernels,
                "num_threads": self.num_threads,
                "read_gb_per_s": round(self.bandwidth.read_bytes_per_s / 1e9, 3),
                "copy_gb_per_s": round(self.bandwidth.copy_bytes_per_s / 1e9, 3),
                "ops": [self._figures(op) for op in self.ops],
            }
        )

    def to_table(self) -> str:
        """A line for each operation and number of tokens."""
        read, copied = self.bandwidth.read_bytes_per_s / 1e9, self.bandwidth.copy_bytes_per_s / 1e9
        lines = [
            f"{self.kernels} kernels, {self.num_threads} threads; {read:.1f} GB/s read, {copied:.1f} GB/s copied",
            f"{'operation':<22}{'tokens':>8}{'µs':>12}{'GB/s':>9}{'of reads':>10}{'GFLOP/s':>10}",
        ]
        for op in self.ops:
            figures = self._figures(op)
            share = figures["share_of_read"]
            lines.append(
                f"{op.name:<22}{op.num_tokens:>8}{figures['us']:>12}{_shown(figures['gb_per_s']):>9}"
                f"{'' if share is None else f'{share:.0%}':>10}{_shown(figures['gflop_per_s']):>10}"
            )
        return "\n".join(lines)

    def _figures(self, op: OpRate) -> dict[str, str | int | float | None]:
        has_bytes, has_flops = op.num_bytes > 0, op.num_flops > 0
        return {
            "name": op.name,
            "num_tokens": op.num_tokens,
            "us": round(op.seconds * 1e6, 2),
            "gb_per_s": round(op.bytes_per_s / 1e9, 2) if has_bytes else None,
            "share_of_read": round(op.bytes_per_s / self.bandwidth.read_bytes_per_s, 3) if has_bytes else None,
            "gflop_per_s": round(op.flops_per_s / 1e9, 2) if has_flops else None,
        }


@attrs.frozen(kw_only=True)
class KernelsBench:
    """The native CPU kernels alone, in this process."""

    num_threads: int | None = None
    """None is one for each processor."""

    async def run(self) -> KernelsReport:
        """Measure every operation. Blocks for about half a minute.

        Raises:
            BenchError: there are no native kernels on this machine, or not so many threads.
        """
        try:
            library = load_library(env.cache_dir() / "native")
        except NativeUnavailableError as error:
            raise BenchError(f"There are no native kernels to measure: {error}") from error
        try:
            pool = ThreadPool(library, self.num_threads or env.hardware_facts().num_cpus)
        except ValueError as error:
            raise BenchError(f"--cpu-threads cannot be {self.num_threads}: {error}") from error
        try:
            bandwidth = measure_bandwidth(library, pool)
            ops = tuple(measure_ops(library, pool))
        finally:
            pool.close()
        return KernelsReport(library.isa.name, pool.num_threads, bandwidth, ops)


def _shown(value: str | int | float | None) -> str:
    return "" if value is None else str(value)
