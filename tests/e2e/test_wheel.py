"""The wheel holds all that is needed, and runs outside the repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_generates_outside_the_repository(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    built = subprocess.run(
        [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = tmp_path.glob("trioengine-*.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    assert {entry.name for entry in unpacked.iterdir() if not entry.name.endswith(".dist-info")} == {
        "trioengine",
        "trioengine_kernels",
    }
    # The wheel's packages come before the installed ones; the rest of the environment stays.
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    program = "import trioengine, trioengine_kernels; print(trioengine.__file__, trioengine_kernels.__file__)"
    where = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert where.stdout.count(str(unpacked)) == 2
    command = ["generate", "What is the capital of Japan?", "--chat", "--temperature", "0", "--max-tokens", "16"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trioengine.cli.main", *command],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout
