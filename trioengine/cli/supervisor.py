"""Several API-server processes on one address, over the same cores: started, watched, drained, ended together."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import attrs
import trio

from trioengine.cli.api_server import LAST_EVENTS_TIMEOUT_S, Serving
from trioengine.cli.api_server_process import DRAIN, ApiServerLaunch, read_report, receive_message
from trioengine.client.cores import Attachment
from trioengine.config import ServerConfig
from trioengine.errors import ApiServerDiedError, EngineClosedError, EngineDeadError, TrioEngineError
from trioengine.runtime.core_handle import describe_exit
from trioengine.server.listeners import close_listeners

END_GRACE_S = 5.0
"""How much longer than its drain an API server may take to end."""
API_SERVER_MODULE = "trioengine.cli.api_server_process"


class ApiServerGroup:
    """API-server processes that live and end together."""

    def __init__(self, config: ServerConfig) -> None:
        """Nothing happens before `run`."""
        self._config = config
        self._listeners: Sequence[socket.socket] = ()
        self._processes: list[_ApiServerProcess] = []
        self._num_serving = 0
        self._is_stopping = False
        self._everything = trio.CancelScope()
        self._failure: TrioEngineError | None = None

    @property
    def pids(self) -> Sequence[int]:
        """The processes that were started."""
        return [process.pid for process in self._processes]

    def drain(self) -> None:
        """Every process refuses new requests and finishes those that run; `run` returns when all have ended.

        One that does not end in time is killed.
        """
        if not self._is_stopping:
            timeout_s = self._config.shutdown_timeout_s + LAST_EVENTS_TIMEOUT_S + END_GRACE_S
            self._everything.deadline = trio.current_time() + timeout_s
        self._is_stopping = True
        # The kernel would go on taking connections for a socket that anybody has open.
        close_listeners(self._listeners)
        for process in self._processes:
            process.drain()

    def fail(self, error: TrioEngineError) -> None:
        """End all processes at once; `run` raises the first such error."""
        self._failure = self._failure or error
        self._everything.cancel()

    async def run(
        self,
        attachments: Sequence[Attachment],
        listeners: Sequence[socket.socket],
        on_serving: Callable[[Serving], None],
    ) -> None:
        """Start a process for each attachment and wait until all have ended. Cancelling kills them.

        `on_serving` is called when the last of them accepts connections. When one ends unasked, the others are killed.

        Raises:
            EngineDeadError: the engine has died; each has told its clients.
            ApiServerDiedError: a process has ended unasked.
            TrioEngineError: why one could not start.
        """
        self._listeners = listeners
        try:
            with self._everything:
                async with trio.open_nursery() as nursery:
                    for index, attachment in enumerate(attachments):
                        fds = [sock.fileno() for sock in listeners]
                        launch = ApiServerLaunch(index, self._config, fds, attachment.to_bytes())
                        process = await _ApiServerProcess.start(launch, attachment.fds)
                        self._processes.append(process)
                        nursery.start_soon(self._watch, process, launch, on_serving)
        finally:
            with trio.CancelScope(shield=True):
                # The kernel ends a killed process without asking anyone, so this wait is short.
                for process in self._processes:
                    await process.kill()
        if self._everything.cancelled_caught and self._failure is None:
            self._failure = ApiServerDiedError("API servers that had been told to end did not, and were killed.")
        if self._failure is not None:
            raise self._failure

    async def _watch(
        self, process: "_ApiServerProcess", launch: ApiServerLaunch, on_serving: Callable[[Serving], None]
    ) -> None:
        error: TrioEngineError | None = None
        with contextlib.suppress(trio.BrokenResourceError):  # It has ended already.
            await process.stream.send_all(launch.to_bytes())
        while (data := await receive_message(process.stream)) is not None:
            report = read_report(data)
            if isinstance(report, TrioEngineError):
                error = report
                continue
            self._num_serving += 1
            if self._num_serving == self._config.api_server_count:
                on_serving(report)
        status = await process.wait()
        if status == 0 and self._is_stopping:
            return
        if error is None:
            error = ApiServerDiedError(f"API server {launch.index} (pid {process.pid}) {describe_exit(status)}.")
        if isinstance(error, (EngineDeadError, EngineClosedError)):
            self._failure = self._failure or error
            self.drain()  # The others find out by themselves, and tell their clients.
        else:
            self.fail(error)


@attrs.define
class _ApiServerProcess:
    """One process, and this end of the pair by which it is led."""

    _process: trio.Process
    _socket: socket.socket
    stream: trio.SocketStream

    @classmethod
    async def start(cls, launch: ApiServerLaunch, fds: Sequence[int]) -> "_ApiServerProcess":
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await trio.lowlevel.open_process(
                    # -P: nothing in the working directory can be taken for a module.
                    [sys.executable, "-P", "-m", API_SERVER_MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    process_group=0,  # A terminal's Ctrl-C reaches the supervisor only.
                    pass_fds=(theirs.fileno(), *launch.listener_fds, *fds),
                )
        except BaseException:
            ours.close()
            raise
        return cls(process, ours, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def drain(self) -> None:
        # Nobody waits for more room than one byte in a socket that its reader empties at once.
        with contextlib.suppress(OSError):
            self._socket.send(DRAIN)

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self.stream.socket.close()
