# pyright: basic
"""What the machine code of the Triton kernels takes of a GPU, found out without one.

`python -P -m trioengine_kernels.compile` compiles every variant of every operation and prints one line of CSV for each
and each architecture, with its problems: that it does not compile, spills, or takes more than a program may have. With
any of them, it ends with 1.
"""

import argparse
import contextlib
import csv
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import attrs
from triton import knobs

from trioengine_kernels.variants import SHARED_MEMORY_BYTES, Variant

NUM_REGISTERS = 65_536
"""Of one multiprocessor, and so the most that one program may have."""
SPILLED_BYTES = {89: 32}
"""By compute capability, what a thread may spill. Large tiles of attention are made for other GPUs, and spill a little
on this one: they run, which is what is asked of them there."""
TENSOR_MEMORY_COLUMNS = 512
"""Of one multiprocessor from capability 100 on."""


@attrs.frozen
class Usage:
    """What one program of a variant takes."""

    name: str
    capability: int
    num_threads: int
    registers_per_thread: int
    shared_bytes: int
    tensor_memory_columns: int
    stack_bytes: int
    """Per thread. Registers that did not suffice are spilled to it, and nothing else of a kernel lies there."""

    def problems(self) -> Iterator[str]:
        """Why it should not, or cannot, be launched."""
        if self.stack_bytes > SPILLED_BYTES.get(self.capability, 0):
            yield f"{self.stack_bytes} bytes of stack"
        if self.registers_per_thread * self.num_threads > NUM_REGISTERS:
            yield f"{self.registers_per_thread} registers for each of {self.num_threads} threads"
        if self.shared_bytes > SHARED_MEMORY_BYTES[self.capability]:
            yield f"{self.shared_bytes} bytes of shared memory"
        if self.tensor_memory_columns > TENSOR_MEMORY_COLUMNS:
            yield f"{self.tensor_memory_columns} columns of tensor memory"


def ops_with_kernels() -> list[str]:
    """The packages here that have Triton kernels."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/triton.py"))


def variants_of(op: str) -> list[Variant]:
    """What the engine launches for an operation."""
    return import_module(f"trioengine_kernels.{op}.triton").variants()


def usage_of(variant: Variant, capability: int) -> Usage:
    """Compile, and look at the machine code."""
    compiled = variant.compile(capability)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # The last line: "REG:32 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:928 …". Its SHARED is not what a launch asks for.
    numbers = dict(field.split(":") for field in output.splitlines()[-1].split())
    return Usage(
        name=variant.name,
        capability=capability,
        num_threads=compiled.metadata.num_warps * 32,
        registers_per_thread=int(numbers["REG"]),
        shared_bytes=compiled.metadata.shared,
        tensor_memory_columns=compiled.metadata.tmem_size or 0,
        stack_bytes=int(numbers["STACK"]) + int(numbers["LOCAL"]),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -P -m trioengine_kernels.compile", description=__doc__)
    parser.add_argument("ops", nargs="*", help="operations to compile, all by default", metavar="OP")
    parser.add_argument("--capability", type=int, action="append", choices=[*SHARED_MEMORY_BYTES], default=None)
    options = parser.parse_args(arguments)
    if knobs.runtime.interpret:
        parser.error("with TRITON_INTERPRET there is nothing to compile")
    rows = csv.writer(sys.stdout, lineterminator="\n")
    fields = [field.name for field in attrs.fields(Usage)]
    rows.writerow([*fields, "problems"])
    status = 0
    for op in options.ops or ops_with_kernels():
        for variant in variants_of(op):
            for capability in options.capability or SHARED_MEMORY_BYTES:
                if capability < variant.min_capability:
                    continue
                try:
                    with contextlib.redirect_stdout(sys.stderr):  # To which compilers print what they do not like.
                        usage = usage_of(variant, capability)
                except Exception as error:  # Whatever they say: the other variants are compiled all the same.
                    numbers = [variant.name, capability, *[""] * (len(fields) - 2)]
                    problems = [" ".join(f"{type(error).__name__}: {error}".split())]
                else:
                    numbers, problems = attrs.astuple(usage), [*usage.problems()]
                rows.writerow([*numbers, "; ".join(problems)])
                status |= bool(problems)
    return status


if __name__ == "__main__":
    sys.exit(main())
