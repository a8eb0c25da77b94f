"""Records what is computed, as a Chrome trace: a JSON file for chrome://tracing and Perfetto."""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import attrs

from trioengine.errors import RequestError, UnavailableError

MAX_EVENTS = 2_000_000
"""Of one profile: later ones are dropped. Some 200 MB."""


class Profile(Protocol):
    """A record that goes on."""

    def span(self, name: str, **facts: int) -> contextlib.AbstractContextManager[object]:
        """Records how long the block takes, under this name."""
        ...

    def write(self, path: Path) -> None:
        """End the record and write it. OSError: it cannot be."""
        ...


@attrs.define(eq=False)
class TimedProfile:
    """A record of what is told to it."""

    _events: list[dict[str, object]] = attrs.field(factory=list[dict[str, object]], init=False)
    _num_dropped: int = attrs.field(default=0, init=False)

    @contextmanager
    def span(self, name: str, **facts: int) -> Generator[None]:
        """As `Profile.span`."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(name, start, time.monotonic_ns(), **facts)

    def add(self, name: str, start_ns: int, end_ns: int, **facts: int) -> None:
        """Record something that began and ended at these times of the monotonic clock."""
        if len(self._events) >= MAX_EVENTS:
            self._num_dropped += 1
            return
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "ts": start_ns / 1000,
                "dur": (end_ns - start_ns) / 1000,
                "pid": os.getpid(),
                "tid": 1,  # One thread computes one step after the other.
                "args": facts,
            }
        )

    def write(self, path: Path) -> None:
        """As `Profile.write`."""
        trace = {
            "traceEvents": self._events,
            "displayTimeUnit": "ms",
            "otherData": {"num_dropped_events": self._num_dropped},
        }
        with path.open("w") as file:
            json.dump(trace, file)


class Profilable(Protocol):
    """What computes."""

    def start_profile(self) -> Profile:
        """Begin a record of its own operations. Called where they are computed, as is all of `Profile`."""
        ...

    def end_profile(self) -> None:
        """Record no more."""
        ...


class Profiler:
    """The record of one executor, if there is one now."""

    def __init__(self, folder: str | None) -> None:
        """`folder`: where files are written; None is the folder for temporary files."""
        self._folder = Path(tempfile.gettempdir() if folder is None else folder).expanduser()
        self._profile: Profile | None = None
        self._path = self._folder
        self._numbers: Iterator[int] = iter(range(1, 1 << 62))

    def start(self, model: Profilable, prefix: str | None) -> None:
        """Begin.

        Raises:
            RequestError: it has begun.
            UnavailableError: the folder cannot be written.
        """
        if self._profile is not None:
            raise RequestError("A profile is being recorded. Stop it first.")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK):
                raise PermissionError("it is not writable")
        except OSError as error:
            raise UnavailableError(f"Profiles cannot be written into {self._folder}: {error}") from error
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = f"{prefix or 'trioengine'}-{stamp}-{os.getpid()}-{next(self._numbers)}.trace.json"
        self._path = self._folder / name
        self._profile = model.start_profile()

    def stop(self, model: Profilable) -> str:
        """End and write the file; its path.

        Raises:
            RequestError: none has begun.
            UnavailableError: it cannot be written; the record is lost.
        """
        if self._profile is None:
            raise RequestError("No profile is being recorded.")
        profile, self._profile = self._profile, None
        model.end_profile()
        try:
            profile.write(self._path)
        except OSError as error:
            raise UnavailableError(f"The profile could not be written: {error}") from error
        return str(self._path)

    def span(self, name: str, **facts: int) -> contextlib.AbstractContextManager[object]:
        """As `Profile.span`; nothing where no profile is recorded."""
        return contextlib.nullcontext() if self._profile is None else self._profile.span(name, **facts)
