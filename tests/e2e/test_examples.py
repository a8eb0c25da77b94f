"""The programs in docs/examples do what the documents say."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run(name: str) -> str:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-P", str(EXAMPLES / name)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trio_program_of_15_lines_embeds_the_engine_sets_a_deadline_and_goes_on() -> None:
    lines = [line for line in (EXAMPLES / "embed.py").read_text().splitlines() if line.strip()]
    output = run("embed.py")

    assert len(lines) <= 15
    told, rest = output.split("\n...and the program goes on.")
    assert told
    assert rest.strip() == ""


def test_a_blocking_script_answers() -> None:
    """It has no `__main__` guard, and needs none."""
    assert "Tokyo" in run("blocking.py")
