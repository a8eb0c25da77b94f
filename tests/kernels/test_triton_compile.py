"""Every Triton kernel in every configuration, compiled without a GPU for all architectures that the engine is made for.

Tests interpret kernels (see the root's conftest.py), and what is interpreted is not compiled: so this is done in
processes of its own, one for each architecture.
"""

import contextlib
import csv
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("triton")

from trioengine_kernels.compile import ops_with_kernels, variants_of
from trioengine_kernels.variants import SHARED_MEMORY_BYTES

BROKEN_KERNELS = '''
import triton
import triton.language as tl

from trioengine_kernels.compile import usage_of
from trioengine_kernels.variants import Variant


@triton.jit
def normed(x, out, SIZE: tl.constexpr):
    """All numbers are in registers at once."""
    places = tl.arange(0, SIZE)
    numbers = tl.load(x + places)
    tl.store(out + places, numbers / tl.sum(numbers * numbers))


@triton.jit
def product(x, y, out, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """At least one factor is in shared memory as a whole."""
    places, depths = tl.arange(0, SIZE), tl.arange(0, DEPTH)
    first = tl.load(x + places[:, None] * DEPTH + depths[None, :])
    second = tl.load(y + depths[:, None] * SIZE + places[None, :])
    tl.store(out + places[:, None] * SIZE + places[None, :], tl.dot(first, second))


def show(name, kernel, dtype, num_warps, **constants):
    signature = {argument: dtype for argument in kernel.arg_names if argument not in constants} | {"out": "*fp32"}
    variant = Variant(name=name, kernel=kernel, signature=signature, constants=constants, num_warps=num_warps)
    print(name, *usage_of(variant, 90).problems(), sep=";")


show("fits", normed, "*fp32", 1, SIZE=1024)
show("spills", normed, "*fp32", 1, SIZE=16384)
show("takes shared memory", product, "*fp16", 4, SIZE=64, DEPTH=2048)
'''


def compiling_environment(folder: Path) -> Mapping[str, str]:
    """Nothing is interpreted, and nothing is taken from an earlier run."""
    rest = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return rest | {"TRITON_CACHE_DIR": str(folder / "cache")}


def run(script: str, folder: Path) -> str:
    """What a program prints in which Triton compiles."""
    file = folder / "script.py"
    file.write_text(script)
    command = [sys.executable, "-P", file]
    return subprocess.run(
        command, env=compiling_environment(folder), check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def test_the_first_configuration_of_each_operation_compiles(tmp_path: Path) -> None:
    """For one architecture. The interpreter takes much that the compiler does not."""
    script = """
from trioengine_kernels.compile import ops_with_kernels, usage_of, variants_of
for op in ops_with_kernels():
    print(op, *usage_of(variants_of(op)[0], 90).problems())
"""
    assert run(script, tmp_path).split() == ops_with_kernels()


@pytest.mark.slow
def test_every_configuration_compiles_and_fits(tmp_path: Path) -> None:
    """None spills, or takes more registers or shared memory than one program may have."""
    rows: list[dict[str, str]] = []
    with contextlib.ExitStack() as stack:
        started = []
        for capability in SHARED_MEMORY_BYTES:  # All beside each other.
            table = stack.enter_context((tmp_path / f"{capability}.csv").open("w+"))
            command = [sys.executable, "-P", "-m", "trioengine_kernels.compile", "--capability", str(capability)]
            process = subprocess.Popen(command, env=compiling_environment(tmp_path), stdout=table)
            started.append((stack.enter_context(process), table))
            stack.callback(process.kill)
        for process, table in started:
            process.wait()
            table.seek(0)
            rows += csv.DictReader(table)
    assert [row for row in rows if row["problems"]] == []
    assert {(row["name"], int(row["capability"])) for row in rows} == {
        (variant.name, capability)
        for op in ops_with_kernels()
        for variant in variants_of(op)
        for capability in SHARED_MEMORY_BYTES
        if capability >= variant.min_capability
    }


@pytest.mark.slow
def test_what_does_not_fit_is_found(tmp_path: Path) -> None:
    """A kernel written to spill does, and one written to take too much shared memory."""
    output = run(BROKEN_KERNELS, tmp_path)
    fits, spills, takes_too_much = output.splitlines()
    assert fits == "fits"
    assert re.fullmatch(r"spills;\d+ bytes of stack", spills)
    assert re.fullmatch(r"takes shared memory;.*\d+ bytes of shared memory", takes_too_much)


@pytest.mark.parametrize("op", ops_with_kernels())
def test_an_operation_lists_different_variants_of_all_its_kernels(op: str) -> None:
    variants = variants_of(op)
    names = [variant.name for variant in variants]
    assert len({*names}) == len(names) > 0
    for variant in variants:
        assert {*variant.kernel.arg_names} <= {*variant.constants, *variant.signature}, variant.name


@pytest.mark.parametrize("op", ops_with_kernels())
def test_an_operation_with_a_kernel_is_tested_with_the_interpreter(op: str) -> None:
    """And its reference, which says what is right, lies beside it."""
    imports = re.compile(rf"trioengine_kernels\.{op}(\.triton import|.* import .*\btriton\b)")
    tests = [*Path(__file__).parent.glob("test_triton_*.py")]
    assert [path.name for path in tests if imports.search(path.read_text())]
    assert (Path(__file__).parents[2] / "kernels" / "trioengine_kernels" / op / "reference.py").exists()
