"""A command whose standard streams are closed, or whose reader has left."""

import io
import subprocess
import sys

import pytest

from trioengine.cli.streams import say
from trioengine.testing.served_process import trioengine_command

SHOW_FDS = """
import os, sys
from trioengine.cli.streams import open_missing_streams
open_missing_streams()
assert sys.stdin.read() == ""
print("x", flush=True)
print("x", file=sys.stderr, flush=True)
for fd in range(3):
    assert os.get_inheritable(fd)
sys.exit(os.open(os.devnull, os.O_RDONLY))
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_leads_nowhere_and_its_number_goes_to_no_file(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-P", "-c", SHOW_FDS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3, done.stderr


def test_a_command_runs_without_any_stream() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *trioengine_command(), "models"], timeout=60, check=False
    )
    assert done.returncode == 0


def test_a_line_that_nobody_can_read_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenPipe(io.StringIO):
        def write(self, text: str, /) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    say("Serving")
    monkeypatch.undo()
    assert sys.stderr.writable()
