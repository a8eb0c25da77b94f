"""`CoreLink`: the tasks and the socket between a `Frontend` and its core process."""

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

import trio

from trioengine.errors import CodecError, EngineDeadError, EngineStartError, PeerUnreachableError, TrioEngineError
from trioengine.frontend.frontend import Frontend
from trioengine.transport.interface import FrontEndSocket
from trioengine.types.codec import decode, encode, error_from_data
from trioengine.types.messages import EngineDead, Ready, Reply, Starting, StepOutput, Stop, ToCore

logger = logging.getLogger(__name__)

DISCONNECT_TIMEOUT_S = 2.0
"""After a core has exited, how long it may take until the socket has noticed."""
DISCONNECT_POLL_S = 0.01
LAST_OUTPUT_TIMEOUT_S = 0.05
"""After that, how long its last messages, all of which are in this process then, may wait for the output handler."""

OnProgress: TypeAlias = Callable[[str, float], None]


class WatchedCore(Protocol):
    """What a link needs of its core's process; see `runtime.core_handle.CoreHandle`."""

    def trouble(self) -> EngineDeadError | None: ...

    def exit_error(self) -> EngineDeadError: ...

    async def wait(self) -> None: ...

    async def stop(self, ask: Callable[[], None], *, timeout_s: float) -> None: ...


class CoreLink:
    """Carries messages both ways for one `Frontend`. Its tasks never raise: what goes wrong is the engine's death."""

    def __init__(self, socket: FrontEndSocket, identity: bytes, core: WatchedCore, frontend: Frontend) -> None:
        self._socket = socket
        self._identity = identity
        self._core = core
        self._frontend = frontend
        self._aborts_due = trio.Event()
        self._startup_changed = trio.Event()
        self._progress: Starting | None = None
        self._ready: Ready | None = None
        self._last_words: TrioEngineError | None = None

    def start(self, nursery: trio.Nursery) -> None:
        """Start the link's tasks."""
        for task in (self._handle_outputs, self._send_aborts, self._watch_exit):
            nursery.start_soon(self._guard, task, name=f"engine {task.__name__.strip('_')}")

    async def wait_ready(self, on_progress: OnProgress, *, timeout_s: float) -> Ready:
        """Wait until the core takes requests.

        Raises:
            EngineStartError: it exited without a word, or took too long.
            TrioEngineError: why it could not start, as itself.
        """
        with trio.move_on_after(timeout_s):
            while self._ready is None:
                await self._startup_changed.wait()
                self._startup_changed = trio.Event()
                if self._last_words is not None:
                    raise self._last_words
                if self._frontend.dead_error is not None:
                    raise EngineStartError(f"{self._frontend.dead_error} Its log says more.")
                if self._progress is not None:
                    progress, self._progress = self._progress, None
                    on_progress(progress.stage, progress.fraction)
            return self._ready
        raise EngineStartError(f"The engine core was not ready after {timeout_s:g} s (startup_timeout_s).")

    def send(self, message: ToCore) -> None:
        """Send to the core without waiting, behind all aborts that are due.

        To a core that has gone it does nothing: its watcher says so to all.
        """
        aborts = self._frontend.take_aborts()
        if aborts is not None:
            self._send(aborts)
        self._send(message)

    def aborts_are_due(self) -> None:
        """The front end has aborts to send. They leave together once the tasks that run now have had their turn."""
        self._aborts_due.set()

    def trouble(self) -> EngineDeadError | None:
        """Why the core cannot be relied on now, if so."""
        return self._core.trouble()

    async def stop(self, *, timeout_s: float) -> None:
        """End the core process; see `CoreHandle.stop`."""
        await self._core.stop(lambda: self.send(Stop()), timeout_s=timeout_s)

    def _send(self, message: ToCore) -> None:
        try:
            self._socket.send_nowait((self._identity, encode(message)))
        except PeerUnreachableError:
            logger.debug("The engine core is not there for a %s.", type(message).__name__)

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except Exception as error:  # A border: a fault of ours must not cancel the application's block.
            logger.exception("The engine client failed.")
            self._die(EngineDeadError(f"The engine client failed: {type(error).__name__}: {error}"))

    async def _handle_outputs(self) -> None:
        """The output handler."""
        while True:
            messages = [await self._socket.receive(), *self._socket.receive_ready_nowait()]
            for identity, *parts in messages:
                if identity != self._identity or not parts:
                    continue  # A stranger.
                await self._handle(parts[-1])

    async def _handle(self, data: bytes) -> None:
        try:
            message = decode(data)
        except CodecError as error:
            logger.warning("Ignored a message: %s", error)
            return
        match message:
            case StepOutput() | Reply():
                for _ in self._frontend.receive(message):
                    await trio.lowlevel.checkpoint()
                if self._frontend.has_aborts:
                    self.aborts_are_due()
                # Readers run between two steps, so that they take one output for each. Twice, because Trio runs the
                # tasks of one turn in any order: after the second all have run that were awake at the first.
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
            case EngineDead():
                self._last_words = error_from_data(message.error)
                self._startup_changed.set()
            case Starting():
                self._progress = message
                self._startup_changed.set()
            case Ready():
                self._ready = message
                self._startup_changed.set()
            case _:
                logger.warning("Ignored a %s, which is not for a front end.", type(message).__name__)

    async def _send_aborts(self) -> None:
        while True:
            await self._aborts_due.wait()
            self._aborts_due = trio.Event()
            aborts = self._frontend.take_aborts()
            if aborts is not None:
                self._send(aborts)

    async def _watch_exit(self) -> None:
        await self._core.wait()
        with trio.move_on_after(DISCONNECT_TIMEOUT_S):
            while self._is_connected():  # noqa: ASYNC110 (nobody tells)
                await trio.sleep(DISCONNECT_POLL_S)
        await trio.sleep(LAST_OUTPUT_TIMEOUT_S)
        error = self._last_words
        if error is None:
            error = self._core.exit_error()
        self._die(error if isinstance(error, EngineDeadError) else EngineDeadError(f"The engine core died: {error}"))

    def _is_connected(self) -> bool:
        """Whether the socket still knows the core. It forgets it when it has read the last of what the core sent."""
        try:
            self._socket.send_nowait((self._identity, b""))
        except PeerUnreachableError:
            return False
        return True

    def _die(self, error: EngineDeadError) -> None:
        self._frontend.fail_all(error)
        self._startup_changed.set()
