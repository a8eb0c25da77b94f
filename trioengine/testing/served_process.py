"""`trioengine serve` as a user starts it: a real process with a real core, for end-to-end tests."""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
_URL = re.compile(r"Serving \S+ on (https?://\S+)")


class ServedProcess:
    """A server process that has said its URL."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.process = process
        self._log = log
        self.url = self._wait_for_url()

    def log_text(self) -> str:
        """What it has written to standard error so far."""
        return Path(self._log.name).read_text(errors="replace")

    def core_pids(self) -> list[int]:
        """The core processes that it has started."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for listing in children for pid in listing.read_text().split()]

    def stop(self, stop_signal: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit status."""
        self.process.send_signal(stop_signal)
        return self.process.wait(STOP_TIMEOUT_S)

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            found = _URL.search(self.log_text())
            if found:
                return found.group(1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(0.05)
                raise AssertionError(f"The server ended with status {status}:\n{self.log_text()}")
        raise AssertionError(f"The server did not start:\n{self.log_text()}")


@contextlib.contextmanager
def served_process(*arguments: str, command: Sequence[str] | None = None) -> Generator[ServedProcess]:
    """A running `trioengine serve --port 0` with these further arguments; killed at the end if it still runs.

    Another command must write to standard error, as that one does, that it serves something on a URL.
    """
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(
            [*(command or (*trioengine_command(), "serve", "--port", "0")), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            yield ServedProcess(process, log)
        finally:
            process.kill()
            process.wait()


def trioengine_command() -> Sequence[str]:
    """The command `trioengine` of this installation."""
    return [sys.executable, "-P", "-m", "trioengine.cli.main"]
