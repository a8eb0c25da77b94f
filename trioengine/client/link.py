"""`CoreLink`: the tasks and the socket between a `Frontend` and its core processes."""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import attrs
import trio

from trioengine.client.remote_core import HEARTBEAT_INTERVAL_S, RemoteCore
from trioengine.config.engine import EngineConfig
from trioengine.errors import (
    CodecError,
    ConfigError,
    EngineDeadError,
    EngineStartError,
    PeerUnreachableError,
    TrioEngineError,
)
from trioengine.frontend.frontend import AddedRequest, Frontend, PendingCall
from trioengine.observability.stats import StatLogger
from trioengine.transport.interface import FrontEndSocket
from trioengine.transport.topology import core_identity
from trioengine.types.codec import decode, encode, error_from_data
from trioengine.types.messages import (
    CallRequest,
    EngineDead,
    GetLoad,
    Ready,
    Reply,
    Starting,
    StartWave,
    StepOutput,
    Stop,
    ToCore,
)

logger = logging.getLogger(__name__)

DISCONNECT_TIMEOUT_S = 2.0
"""After a core has exited, how long it may take until the socket has noticed."""
DISCONNECT_POLL_S = 0.01
LAST_OUTPUT_TIMEOUT_S = 0.05
"""After that, how long its last messages, all of which are in this process then, may wait for the output handler."""

OnProgress: TypeAlias = Callable[[str, float], None]


class WatchedCore(Protocol):
    """What a link needs of a core's process; see `runtime.core_handle`."""

    def trouble(self) -> EngineDeadError | None: ...

    def exit_error(self) -> EngineDeadError: ...

    async def wait(self) -> None: ...


@attrs.frozen
class LinkClient:
    """Whom a link works for."""

    frontend: Frontend
    stat_loggers: Sequence[StatLogger] = ()
    """Asked to log from time to time; the front end gives them what to."""
    log_stats_interval_s: float = 10.0


def check_lockstep(config: EngineConfig, ready: Ready) -> None:
    """Raise where cores that step together have several clients, each of one rank: nobody could wake the idle ones.

    Raises:
        ConfigError: they do.
    """
    if ready.needs_lockstep and config.data_parallel_rank is not None:
        raise ConfigError(
            "This model's cores compute each step together, so one engine must have them all: leave data_parallel_rank "
            "unset.",
            option="data_parallel_rank",
        )


class CoreLink:
    """Carries messages both ways for one `Frontend`, and minds its deadlines and its statistics.

    Cores are counted from 0, as the front end does, whatever their ranks. The link's tasks never raise: what goes wrong
    is the engine's death, and so is the death of any core.
    """

    def __init__(self, socket: FrontEndSocket, cores: Mapping[int, WatchedCore], client: LinkClient) -> None:
        """A link with these cores, by rank."""
        self._socket = socket
        self._frontend = client.frontend
        self.client = client
        self._cores = tuple(cores.values())
        self._ranks = tuple(cores)
        self._identities = tuple(map(core_identity, cores))
        self._core_of_identity = {identity: core for core, identity in enumerate(self._identities)}
        self._aborts_due = trio.Event()
        self._startup_changed = trio.Event()
        self._progress: Starting | None = None
        self._readies: dict[int, Ready] = {}
        self._last_words: dict[int, TrioEngineError] = {}
        self._deadline_moved = trio.Event()
        self._awake_at_s = math.inf

    def start(self, nursery: trio.Nursery) -> None:
        """Start the link's tasks."""
        tasks: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("output handler", self._handle_outputs),
            ("aborts", self._send_aborts),
            ("deadlines", self._expire_deadlines),
        ]
        if self.client.stat_loggers:
            tasks.append(("statistics", self._log_stats))
        for core, watched in enumerate(self._cores):
            tasks.append((f"watcher of core {core}", partial(self._watch_exit, core)))
            if isinstance(watched, RemoteCore):
                tasks.append((f"heartbeat of core {core}", partial(self._ask_remote, core, watched)))
        for name, task in tasks:
            nursery.start_soon(self._guard, task, name=f"engine {name}")

    async def wait_ready(self, on_progress: OnProgress, *, timeout_s: float) -> Sequence[Ready]:
        """Wait until all cores take requests. Progress is that of the first one.

        Raises:
            EngineStartError: one exited without a word, or took too long; or they do not run the same model.
            TrioEngineError: why one could not start, as itself.
        """
        with trio.move_on_after(timeout_s):
            while not self.is_ready:
                await self._startup_changed.wait()
                self._startup_changed = trio.Event()
                for error in self._last_words.values():
                    raise error
                if self._frontend.dead_error is not None:
                    raise EngineStartError(f"{self._frontend.dead_error} Its log says more.")
                if self._progress is not None:
                    progress, self._progress = self._progress, None
                    on_progress(progress.stage, progress.fraction)
            readies = [self._readies[core] for core in range(len(self._cores))]
            for rank, ready in zip(self._ranks, readies, strict=True):
                if ready.model != readies[0].model:
                    raise EngineStartError(f"The core of rank {rank} runs another model than that of {self._ranks[0]}.")
            return readies
        missing = [str(rank) for core, rank in enumerate(self._ranks) if core not in self._readies]
        who = "The engine core was" if len(self._cores) == 1 else f"The engine cores of rank {', '.join(missing)} were"
        raise EngineStartError(f"{who} not ready after {timeout_s:g} s (startup_timeout_s).")

    @property
    def is_ready(self) -> bool:
        """Whether all cores have taken requests."""
        return len(self._readies) == len(self._cores)

    def send(self, core: int, message: ToCore) -> None:
        """Send to a core without waiting, behind all aborts that are due.

        To a core that has gone it does nothing: its watcher says so to all.
        """
        self._send_due_aborts()
        self._send(core, message)

    def send_request(self, added: AddedRequest) -> None:
        """Send a request that was registered with the front end."""
        self._send_due_aborts()
        for message in added.messages:
            self._send(added.rank, message)
        for core in added.wakes:
            self._send(core, StartWave())
        self._note_deadlines()

    def aborts_are_due(self) -> None:
        """The front end has aborts to send. They leave together once the tasks that run now have had their turn."""
        self._aborts_due.set()

    def stop_cores(self) -> None:
        """Tell all cores to end."""
        for core in range(len(self._cores)):
            self._send(core, Stop())

    def trouble(self) -> EngineDeadError | None:
        """Why one of the cores cannot be relied on now, if so."""
        for core in self._cores:
            if (trouble := core.trouble()) is not None:
                return trouble
        return None

    def _send_due_aborts(self) -> None:
        for core, aborts in self._frontend.take_aborts():
            self._send(core, aborts)

    def _send(self, core: int, message: ToCore) -> bool:
        """Send, and whether the core is there."""
        try:
            self._socket.send_nowait((self._identities[core], encode(message)))
        except PeerUnreachableError:
            logger.debug("The core of rank %d is not there for a %s.", self._ranks[core], type(message).__name__)
            return False
        return True

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except Exception as error:  # A border: a fault of ours must not cancel the application's block.
            logger.exception("The engine client failed.")
            self._die(EngineDeadError(f"The engine client failed: {type(error).__name__}: {error}"))

    # From the cores

    async def _handle_outputs(self) -> None:
        """The output handler."""
        while True:
            messages = [await self._socket.receive(), *self._socket.receive_ready_nowait()]
            for identity, *parts in messages:
                core = self._core_of_identity.get(identity)
                if core is None or not parts:
                    continue  # A stranger.
                await self._handle(core, parts[-1])

    async def _handle(self, core: int, data: bytes) -> None:
        try:
            message = decode(data)
        except CodecError as error:
            logger.warning("Ignored a message: %s", error)
            if core not in self._readies:
                # It is nobody else's: only a core has the identity of one. Another version would never become ready.
                self._last_words[core] = EngineStartError(
                    f"The engine core of rank {self._ranks[core]} cannot be understood. Is it of another version?"
                )
                self._startup_changed.set()
            return
        match message:
            case StepOutput() | Reply():
                for _ in self._frontend.receive(core, message):
                    await trio.lowlevel.checkpoint()
                if self._frontend.has_aborts:
                    self.aborts_are_due()
                self._note_deadlines()
                # Readers run between two steps, so that they take one output for each. Twice, because Trio runs the
                # tasks of one turn in any order: after the second all have run that were awake at the first.
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
            case EngineDead():
                self._last_words[core] = error_from_data(message.error)
                self._startup_changed.set()
            case Starting():
                if core == 0:
                    self._progress = message
                    self._startup_changed.set()
            case Ready():
                self._readies[core] = message
                self._frontend.set_ready(core, message)
                self._startup_changed.set()
            case _:
                logger.warning("Ignored a %s, which is not for a front end.", type(message).__name__)

    async def _watch_exit(self, core: int) -> None:
        watched = self._cores[core]
        await watched.wait()
        with trio.move_on_after(DISCONNECT_TIMEOUT_S):
            while self._is_connected(core):  # noqa: ASYNC110 (nobody tells)
                await trio.sleep(DISCONNECT_POLL_S)
        await trio.sleep(LAST_OUTPUT_TIMEOUT_S)
        error = self._last_words.get(core)
        if error is None:
            error = watched.exit_error()
        self._die(error if isinstance(error, EngineDeadError) else EngineDeadError(f"The engine core died: {error}"))

    def _is_connected(self, core: int) -> bool:
        """Whether the socket still knows the core. It forgets it when it has read the last of what the core sent."""
        try:
            self._socket.send_nowait((self._identities[core], b""))
        except PeerUnreachableError:
            return False
        return True

    async def _ask_remote(self, core: int, remote: RemoteCore) -> None:
        """Ask a core that has no status page here how it does, again and again: an answer is its sign of life."""
        while core not in self._readies:  # noqa: ASYNC110 (once, at the start)
            await trio.sleep(HEARTBEAT_INTERVAL_S)
        remote.note_ready()
        while self._frontend.dead_error is None:
            pending = PendingCall(GetLoad, partial(self._note_answer, remote, remote.ask()), lambda _: None)
            request: CallRequest = self._frontend.add_call(GetLoad(), pending, core)
            if not self._send(core, request):
                remote.note_gone()
                return
            await trio.sleep(HEARTBEAT_INTERVAL_S)

    def _note_answer(self, remote: RemoteCore, number: int, _: object) -> None:
        if not remote.note_answer(number):
            self._die(EngineDeadError(f"The connection to {remote} was interrupted."))

    def _die(self, error: EngineDeadError) -> None:
        if self._frontend.dead_error is None:
            logger.error("%s", error if error.cause is None else f"{error}\n{error.cause}")
        self._frontend.fail_all(error)
        self._startup_changed.set()

    # Towards the cores

    async def _send_aborts(self) -> None:
        while True:
            await self._aborts_due.wait()
            self._aborts_due = trio.Event()
            self._send_due_aborts()

    async def _expire_deadlines(self) -> None:
        """Sleep until the next deadline; whoever brings it forward wakes this."""
        while True:
            next_s = self._frontend.next_deadline_s
            self._awake_at_s = math.inf if next_s is None else next_s
            with trio.move_on_at(self._awake_at_s):
                await self._deadline_moved.wait()
            self._deadline_moved = trio.Event()
            self._frontend.expire(trio.current_time())
            if self._frontend.has_aborts:
                self.aborts_are_due()

    async def _log_stats(self) -> None:
        while True:
            await trio.sleep(self.client.log_stats_interval_s)
            for stat_logger in self.client.stat_loggers:
                stat_logger.log()

    def _note_deadlines(self) -> None:
        next_s = self._frontend.next_deadline_s
        if next_s is not None and next_s < self._awake_at_s:
            self._deadline_moved.set()
