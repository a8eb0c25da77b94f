"""The native backend under the address, undefined-behaviour and thread sanitizers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trioengine_kernels.native import compiler as native

pytestmark = pytest.mark.slow

SUITES = ["products", "attention", "elementwise", "encoder", "experts", "lora", "program", "sampling"]

RUN_TESTS = """
import sys
from pathlib import Path
import numpy as np
import pytest
from trioengine_kernels.native import buffers, library

library.PREBUILT = Path(sys.argv[1])
# Each matrix by itself, exactly as large as it is, so that a read behind its end is seen.
library.Library.allocate = lambda self, num_bytes: np.empty(num_bytes, np.uint8)
sys.exit(pytest.main(["-q", "-x", "-s", "--import-mode=importlib", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""

POOL_STRESS = r"""
#include "te.h"
#include <stdatomic.h>
#include <stdio.h>

static int64_t sums[64];       /* of operation i, written by its chunks... */
static _Atomic int32_t calls;
static int64_t parts[64][32];

static void run(void *context, int32_t op, int32_t chunk, int32_t thread)
{
    (void)context;
    (void)thread;
    /* Reads what the chunks of the operation before wrote, without locks. */
    int64_t before = 0;
    for (int i = 0; op > 0 && i < 32; i++)
        before += parts[op - 1][i];
    parts[op][chunk] = before + 1;
    atomic_fetch_add(&calls, 1);
}

int main(void)
{
    int32_t chunks[6] = {32, 32, 32, 32, 32, 32};
    for (int round = 0; round < 20; round++) {
        TePool *pool = te_pool_create(1 + round % 5);
        for (int step = 0; step < 200; step++)
            te_pool_run(pool, run, 0, 6, chunks);
        te_pool_destroy(pool);
    }
    sums[0] = parts[5][0];
    printf("%d %lld\n", atomic_load(&calls), (long long)sums[0]);
    return 0;
}
"""


@pytest.fixture(scope="module")
def gcc():
    """gcc, whose sanitizers' libraries can be loaded into a Python that was built without."""
    try:
        compiler = native.find_compiler()
    except native.NativeUnavailableError as error:
        pytest.skip(str(error))
    version = subprocess.run([*compiler.command, "--version"], capture_output=True, check=True).stdout
    if b"Free Software Foundation" not in version or sys.platform != "linux":
        pytest.skip("Needs gcc on Linux.")
    return compiler


def runtime(compiler, name):
    """The path of a sanitizer's library."""
    command = [*compiler.command, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"{name} is not installed.")
    return path


def test_no_address_is_wrong_and_no_behaviour_undefined(gcc, tmp_path):
    """The other tests of this backend pass under both sanitizers."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
    native.build(tmp_path / "sanitized.so", gcc, flags)
    tests = [str(Path(__file__).parent / f"test_native_{name}.py") for name in SUITES]
    preload = f"{runtime(gcc, 'libasan.so')} {runtime(gcc, 'libubsan.so')}"
    result = subprocess.run(
        [sys.executable, "-P", "-c", RUN_TESTS, str(tmp_path / "sanitized.so"), *tests],
        env={**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    assert "passed" in result.stdout


def test_the_pools_threads_do_not_race(gcc, tmp_path):
    (tmp_path / "stress.c").write_text(POOL_STRESS)
    command = [*gcc.command, "-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{native.SOURCES}"]
    program = str(tmp_path / "stress")
    built = subprocess.run(
        [*command, str(tmp_path / "stress.c"), str(native.SOURCES / "pool.c"), "-o", program],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-5000:]
    # Each chunk is one more than the 32 of the operation before together.
    assert result.stdout.split() == [str(20 * 200 * 6 * 32), str(sum(32**i for i in range(6)))]
