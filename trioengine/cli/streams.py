"""The standard streams as a command finds them: some may be closed, and whoever read them may have left."""

import contextlib
import os
import sys

_LAST_STANDARD_FD = 2


def open_missing_streams() -> None:
    """Lead those that are closed nowhere, so that no socket or file of ours gets their numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD_FD:
        os.set_inheritable(fd, True)
    os.close(fd)
    # Python has None where the descriptor was closed when it started.
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def drop_output() -> None:
    """Lead standard output nowhere from now on: Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Write a line on standard error. That nobody can read it, as when a `tee` behind us has ended, is no failure."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
