"""What was measured of operations, beside what the card was measured to give. Knows no device."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO, TypeAlias

import attrs

Cell: TypeAlias = str | int | float | None


@attrs.frozen(kw_only=True)
class OpRate:
    """One operation in one shape: how fast it is, or why nothing is said about that."""

    op: str
    shape: str
    """Of which model, and how many rows."""
    dtype: str
    """Of activations."""
    config: str
    """Which implementation, and what else tells it from others of the same shape."""
    num_bytes: int = 0
    """The fewest that have to be moved: each input read once, each output written once."""
    num_flops: int = 0
    """Of matrix products; 0 where there are none."""
    error: float | None = None
    """‖output − reference‖ / ‖reference‖; of integers the share that differs."""
    seconds: float | None = None
    """None where the output was wrong or something failed: a wrong result has no speed."""
    failure: str | None = None

    def row(self, ceilings: "Ceilings") -> Mapping[str, Cell]:
        """Figures by their names, `FIGURES`."""
        row: dict[str, Cell] = dict.fromkeys(FIGURES)
        row |= {"op": self.op, "shape": self.shape, "dtype": self.dtype, "config": self.config}
        row |= {"error": None if self.error is None else float(f"{self.error:.2e}"), "failure": self.failure}
        if self.seconds is not None:
            memory_s, matrix_s = ceilings.memory_s(self.num_bytes), ceilings.matrix_s(self.num_flops, self.dtype)
            row |= {
                "us": round(self.seconds * 1e6, 2),
                "gb_per_s": round(self.num_bytes / self.seconds / 1e9, 1),
                "tflop_per_s": round(self.num_flops / self.seconds / 1e12, 2) if self.num_flops else None,
                "fraction": round(max(memory_s, matrix_s) / self.seconds, 3),
                "roofline": "memory" if memory_s >= matrix_s else "matrix",
            }
        return row


@attrs.frozen
class Ceilings:
    """What one card was measured to give, in the same run as the operations."""

    copy_bytes_per_s: float
    """Of a large copy, in memory; each byte counts twice, as it is read and written."""
    flops_per_s: Mapping[str, float]
    """Of a large matrix product by the vendor's library, by the name of its type."""

    def rates(self) -> Iterator[OpRate]:
        """The same as rates of operations, for a table."""
        size = 1 << 30
        yield OpRate(
            op="copy",
            shape="large",
            dtype="uint8",
            config="torch",
            num_bytes=2 * size,
            seconds=2 * size / self.copy_bytes_per_s,
        )
        for dtype, rate in self.flops_per_s.items():
            num_flops = 2 * 8192**3
            yield OpRate(
                op="matmul", shape="large", dtype=dtype, config="torch", num_flops=num_flops, seconds=num_flops / rate
            )

    def roofline_s(self, num_bytes: int, num_flops: int, dtype: str) -> float:
        """The shortest time in which so much can be moved and computed (Williams et al., 2009, "Roofline")."""
        return max(self.memory_s(num_bytes), self.matrix_s(num_flops, dtype))

    def memory_s(self, num_bytes: int) -> float:
        """The time that moving takes."""
        return num_bytes / self.copy_bytes_per_s

    def matrix_s(self, num_flops: int, dtype: str) -> float:
        """The time that computing takes; 0 for what has no matrix products."""
        return num_flops / self.flops_per_s[dtype] if num_flops else 0.0


FIGURES: Sequence[str] = (
    "op",
    "shape",
    "dtype",
    "config",
    "us",
    "gb_per_s",
    "tflop_per_s",
    "fraction",
    "roofline",
    "error",
    "failure",
)
"""`fraction` is the time that the card needs at least over the time taken, `roofline` what decides that least time."""


@attrs.frozen
class RunFacts:
    """What belongs beside every figure."""

    card: str
    commit: str
    torch: str
    triton: str


class CsvTable:
    """Rows in a file, each written at once: what was measured stays when the rest is not."""

    def __init__(self, file: TextIO, columns: Sequence[str], facts: RunFacts) -> None:
        """Args:
        file: open for writing; gets a header where it is empty, so that several runs may share it.
        columns: of the rows; those of `facts` follow them.
        facts: of this run.
        """
        self._file = file
        self._facts = attrs.asdict(facts)
        self._writer = csv.DictWriter(file, [*columns, *self._facts], lineterminator="\n")
        if file.tell() == 0:
            self._writer.writeheader()

    def add(self, row: Mapping[str, Cell]) -> None:
        """Write a row. ValueError: it has a column that the table has not."""
        self._writer.writerow({**row, **self._facts})
        self._file.flush()
