"""`CoreHandle`: a core process as its parent sees it: started, watched, and stopped by a ladder."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import attrs
import trio

from trioengine.errors import EngineDeadError
from trioengine.runtime.launch import CoreLaunch, write_launch
from trioengine.runtime.status_page import StatusPage

CORE_MODULE = "trioengine.runtime.core_process"
TERMINATE_TIMEOUT_S = 1.0


class CoreHandle:
    """One core process. `close` must be called; `stop` is the way to end it that waits."""

    def __init__(self, process: trio.Process, page: StatusPage, launch_pipe_fd: int, step_timeout_s: float) -> None:
        self._process = process
        self._page = page
        self._launch_pipe_fd: int | None = launch_pipe_fd
        self._step_timeout_s = step_timeout_s

    @classmethod
    async def start(cls, launch: CoreLaunch, module: str = CORE_MODULE) -> "CoreHandle":
        """A new core process, which begins to load. `launch.page_fd` is filled in here.

        A user's script needs no `__main__` guard: the process imports `module` only.
        """
        page = StatusPage.create()
        read_fd, write_fd = os.pipe()
        try:
            write_launch(write_fd, attrs.evolve(launch, page_fd=page.fd))
            process = await trio.lowlevel.open_process(
                # -P: nothing in the working directory can be taken for a module.
                [sys.executable, "-P", "-m", module, str(read_fd)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # Standard output is the application's.
                process_group=0,  # A terminal's Ctrl-C reaches the parent only.
                pass_fds=(read_fd, page.fd),
            )
        except BaseException:
            os.close(write_fd)
            page.close()
            raise
        finally:
            os.close(read_fd)
        return cls(process, page, write_fd, launch.config.step_timeout_s)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def trouble(self) -> EngineDeadError | None:
        """Why the core cannot be relied on now, if so: it has exited, was stopped, or hangs in a step."""
        if self._process.poll() is not None:
            return self.exit_error()
        trouble = self._page.trouble(step_timeout_s=self._step_timeout_s)
        return None if trouble is None else EngineDeadError(f"The engine core (pid {self.pid}) {trouble}.")

    def exit_error(self) -> EngineDeadError:
        """What a core that has exited leaves to say."""
        status = self._process.returncode
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"exited with status {status}"
        return EngineDeadError(f"The engine core (pid {self.pid}) {how}.")

    async def wait(self) -> None:
        """Wait until the process has exited."""
        await self._process.wait()

    async def stop(self, ask: Callable[[], None], *, timeout_s: float) -> None:
        """End the process: ask, wait, terminate, wait, kill. When it returns or raises, the process is gone.

        When cancelled, it does not go on asking: it kills at once.
        """
        try:
            ask()
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

    def close(self) -> None:
        """Give back the page and the pipe; a core that still runs ends itself then. May be called again."""
        if self._launch_pipe_fd is not None:
            os.close(self._launch_pipe_fd)
            self._launch_pipe_fd = None
            self._page.close()
