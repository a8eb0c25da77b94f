"""A core process as others see it: `CoreHandle` is its parent's, which starts and stops it; `BlockingCoreHandle` is the
same for a parent without an event loop; `AttachedCore` is for processes that only use it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import attrs
import trio

from trioengine.errors import EngineDeadError
from trioengine.runtime.launch import CoreLaunch, write_launch
from trioengine.runtime.status_page import StatusPage

CORE_MODULE = "trioengine.runtime.core_process"
TERMINATE_TIMEOUT_S = 1.0


class _Process(Protocol):
    """What `trio.Process` and `subprocess.Popen` have in common."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...


P = TypeVar("P", bound=_Process)


@attrs.frozen
class _Start:
    """What a core process is started with, and what its parent keeps of that."""

    command: Sequence[str]
    options: Mapping[str, Any]
    """Of `subprocess.Popen`."""
    page: StatusPage
    launch_pipe_fd: int
    life_fd: int


@contextlib.contextmanager
def _starting(launch: CoreLaunch, module: str) -> Generator[_Start]:
    """For the moment in which a process starts. `launch.page_fd` is filled in here."""
    with contextlib.ExitStack() as on_failure:
        page = StatusPage.create()
        on_failure.callback(page.close)
        with contextlib.ExitStack() as of_core:
            launch_read_fd, launch_write_fd = os.pipe()
            of_core.callback(os.close, launch_read_fd)
            on_failure.callback(os.close, launch_write_fd)
            life_read_fd, life_write_fd = os.pipe()
            of_core.callback(os.close, life_write_fd)
            on_failure.callback(os.close, life_read_fd)
            write_launch(launch_write_fd, attrs.evolve(launch, page_fd=page.fd))
            yield _Start(
                # -P: nothing in the working directory can be taken for a module.
                [sys.executable, "-P", "-m", module, str(launch_read_fd)],
                {
                    "stdin": subprocess.DEVNULL,
                    "stdout": 2,  # Standard output is the application's.
                    "process_group": 0,  # A terminal's Ctrl-C reaches the parent only.
                    # The core alone holds the end of the last one that writes: who waits to read sees its exit.
                    "pass_fds": (launch_read_fd, page.fd, life_write_fd),
                },
                page,
                launch_write_fd,
                life_read_fd,
            )
        on_failure.pop_all()


class _ParentsHandle(Generic[P]):
    """What a parent knows of a core process, whatever it waits with. `close` must be called."""

    def __init__(self, launch: CoreLaunch, process: P, start: _Start) -> None:
        self._rank = launch.rank
        self._process = process
        self._page = start.page
        self._launch_pipe_fd: int | None = start.launch_pipe_fd
        self._life_fd = start.life_fd
        self._step_timeout_s = launch.config.step_timeout_s

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def attachment(self) -> "CoreAttachment":
        """What another process watches it by, while this is not closed."""
        return CoreAttachment(self._rank, self.pid, self._page.fd, self._life_fd)

    def trouble(self) -> EngineDeadError | None:
        """Why the core cannot be relied on now, if so: it has exited, was stopped, or hangs in a step."""
        if self._process.poll() is not None:
            return self.exit_error()
        trouble = self._page.trouble(step_timeout_s=self._step_timeout_s)
        return None if trouble is None else EngineDeadError(f"The engine core (pid {self.pid}) {trouble}.")

    def exit_error(self) -> EngineDeadError:
        """What a core that has exited leaves to say."""
        return EngineDeadError(f"The engine core (pid {self.pid}) {describe_exit(self._process.returncode)}.")

    def close(self) -> None:
        """Give back the page and the pipe; a core that still runs ends itself then. May be called again."""
        if self._launch_pipe_fd is not None:
            os.close(self._launch_pipe_fd)
            self._launch_pipe_fd = None
            os.close(self._life_fd)
            self._page.close()


def describe_exit(status: int | None) -> str:
    """How a process with this status has ended, as a predicate: "exited with status 1"."""
    if status is None or status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # Real-time signals have no names.
        return f"was killed by signal {-status}"


class CoreHandle(_ParentsHandle[trio.Process]):
    """One core process. `close` must be called; `stop` is the way to end it that waits."""

    @classmethod
    async def start(cls, launch: CoreLaunch, module: str = CORE_MODULE) -> "CoreHandle":
        """A new core process, which begins to load. `launch.page_fd` is filled in here.

        A user's script needs no `__main__` guard: the process imports `module` only.
        """
        with _starting(launch, module) as start:
            process = await trio.lowlevel.open_process(list(start.command), **start.options)
        return cls(launch, process, start)

    async def wait(self) -> None:
        """Wait until the process has exited."""
        await self._process.wait()

    async def stop(self, *, timeout_s: float) -> None:
        """End the process, which has been asked to: wait, terminate, wait, kill. When it returns or raises, it is gone.

        When cancelled, it kills at once.
        """
        try:
            with trio.move_on_after(timeout_s):
                await self._process.wait()
                return
            self._process.terminate()
            with trio.move_on_after(TERMINATE_TIMEOUT_S):
                await self._process.wait()
        finally:
            if self._process.returncode is None:
                self._process.kill()
                with trio.CancelScope(shield=True):
                    # The kernel ends a killed process without asking anyone, so this wait is short.
                    await self._process.wait()


class BlockingCoreHandle(_ParentsHandle["subprocess.Popen[Any]"]):
    """One core process of a parent without an event loop. `close` must be called, once the process has exited."""

    @classmethod
    def start(cls, launch: CoreLaunch, module: str = CORE_MODULE) -> "BlockingCoreHandle":
        """As `CoreHandle.start`."""
        with _starting(launch, module) as start:
            process = subprocess.Popen(start.command, **start.options)
        return cls(launch, process, start)

    @property
    def life_fd(self) -> int:
        """Readable when the process has exited, for whoever waits for several things."""
        return self._life_fd

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has exited, not longer than this; whether it has."""
        poller = select.poll()
        poller.register(self._life_fd, select.POLLIN | select.POLLHUP)
        if poller.poll(max(0.0, timeout_s) * 1000):
            self._process.wait()  # It is on its last way through the kernel.
        return self._process.poll() is not None

    def terminate(self) -> None:
        """Ask the process, as the system does, to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process. When this returns, it is gone."""
        self._process.kill()
        self._process.wait()


@attrs.frozen
class CoreAttachment:
    """A core process, for a process that did not start it. The descriptors are to be inherited (`pass_fds`)."""

    rank: int
    pid: int
    page_fd: int
    """Its status page."""
    life_fd: int
    """The end of a pipe at which reading ends when the core has exited."""

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors."""
        return self.page_fd, self.life_fd


class AttachedCore:
    """A core process that somebody else has started, watched. `close` must be called."""

    def __init__(self, attachment: CoreAttachment, step_timeout_s: float) -> None:
        """Watch it through copies of the attachment's descriptors."""
        self._pid = attachment.pid
        self._step_timeout_s = step_timeout_s
        self._life_fd: int | None = os.dup(attachment.life_fd)
        self._page = StatusPage(os.dup(attachment.page_fd))
        self._life = select.poll()
        self._life.register(self._life_fd, select.POLLIN | select.POLLHUP)

    def trouble(self) -> EngineDeadError | None:
        """Why the core cannot be relied on now, if so: it has exited, was stopped, or hangs in a step."""
        if self._life.poll(0):
            return self.exit_error()
        trouble = self._page.trouble(step_timeout_s=self._step_timeout_s)
        return None if trouble is None else EngineDeadError(f"The engine core (pid {self._pid}) {trouble}.")

    def exit_error(self) -> EngineDeadError:
        """What a core that has exited leaves to say."""
        return EngineDeadError(f"The engine core (pid {self._pid}) has exited.")

    async def wait(self) -> None:
        """Wait until the process has exited."""
        assert self._life_fd is not None, "it is closed"
        await trio.lowlevel.wait_readable(self._life_fd)

    def close(self) -> None:
        """Give back what it is watched by. May be called again; nobody may wait any more."""
        if self._life_fd is not None:
            os.close(self._life_fd)
            self._life_fd = None
            self._page.close()
