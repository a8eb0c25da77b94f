"""The shells around `Frontend` for programs without an event loop: a core in this process, or cores in others.

Both carry messages when they are called, and at no other time: no thread, no task. Which of the two is chosen once,
when an engine is opened.
"""

import logging
import math
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol, cast

import attrs
import zmq

from trioengine.checkpoint.locate import ModelLocation
from trioengine.client.interrupts import Interrupts
from trioengine.client.link import DISCONNECT_POLL_S, DISCONNECT_TIMEOUT_S, check_lockstep
from trioengine.config import env
from trioengine.config.engine import EngineConfig
from trioengine.core.engine_core import EngineCore
from trioengine.core.executor import Executor
from trioengine.errors import (
    CodecError,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineStartError,
    PeerUnreachableError,
    TrioEngineError,
)
from trioengine.frontend.frontend import Frontend
from trioengine.runtime.core_handle import CORE_MODULE, TERMINATE_TIMEOUT_S, BlockingCoreHandle
from trioengine.runtime.core_process import BuiltCore
from trioengine.runtime.launch import CoreLaunch
from trioengine.transport.address import create_endpoint
from trioengine.transport.topology import bind_blocking_router, core_identity
from trioengine.transport.zmq_blocking import poll
from trioengine.types.codec import decode, encode, error_from_data
from trioengine.types.messages import EngineDead, Ready, Reply, StepOutput, Stop, ToCore

HEALTH_INTERVAL_S = 1.0
"""How often cores in other processes are looked at, whatever they say."""

_CLIENT = 0

logger = logging.getLogger(__name__)


class BlockingClient(Protocol):
    """Carries messages between a `Frontend` and its cores. For one thread at a time, inside of `interrupts`."""

    @property
    def ready(self) -> Ready:
        """What the first core said when it was ready."""
        ...

    def send(self, core: int, message: ToCore) -> None:
        """Send to a core, behind all aborts that are due, without waiting."""
        ...

    def receive(self, timeout_s: float) -> None:
        """Let the cores go on, and give the front end what comes of it. Waits at most so long for something to come.

        Raises:
            EngineDeadError: a core hangs. What has died is told to the front end.
            KeyboardInterrupt: while it waited. Nothing is lost.
        """
        ...

    def flush(self) -> None:
        """Send the aborts that are due."""
        ...

    def check_health(self) -> None:
        """Return while all cores live and make progress.

        Raises:
            EngineDeadError: they do not.
        """
        ...

    def close(self) -> None:
        """End the cores and give everything back. May be called again."""
        ...


class InprocClient:
    """A core in this process: it computes while someone waits, and only then."""

    def __init__(self, built: BuiltCore, frontend: Frontend, interrupts: Interrupts) -> None:
        """Take over a core."""
        self._built = built
        self._frontend = frontend
        self._interrupts = interrupts
        self._is_closed = False

    @property
    def ready(self) -> Ready:
        """What the core is."""
        return self._built.ready

    @property
    def model_executor(self) -> Executor:
        """What computes: the model is reachable here."""
        return cast(EngineCore, self._built.core).executor

    def send(self, core: int, message: ToCore) -> None:
        """As `BlockingClient`."""
        del core
        self.flush()
        self._handle(message)

    def flush(self) -> None:
        """As `BlockingClient`."""
        for _, aborts in self._frontend.take_aborts():
            self._handle(aborts)

    def receive(self, timeout_s: float) -> None:
        """As `BlockingClient`."""
        core = self._built.core
        if self._advance() or core.has_work or self._frontend.dead_error is not None:
            return
        idle_s = core.idle_timeout_s()  # It waits for a grammar, a file, a deadline of the queue.
        with self._interrupts.waiting():
            poll((), waker=self._built.waker, timeout_s=timeout_s if idle_s is None else min(idle_s, timeout_s))

    def check_health(self) -> None:
        """As `BlockingClient`."""
        if self._frontend.dead_error is not None:
            raise attrs.evolve(self._frontend.dead_error)

    def close(self) -> None:
        """As `BlockingClient`."""
        if not self._is_closed:
            self._is_closed = True
            self._built.close()

    def _advance(self) -> bool:
        """One turn of the core; whether anything came of it."""
        if self._frontend.dead_error is not None:
            return False
        core = self._built.core
        try:
            core.poll()
            if core.has_work:
                core.step()
            return self._deliver()
        except Exception as error:  # A border, as that of a core process: everyone who waits is told.
            self._die(error)
            return False

    def _handle(self, message: ToCore) -> None:
        if self._frontend.dead_error is not None:
            return
        try:
            reply = self._built.core.handle(_CLIENT, message)
        except Exception as error:  # The same border.
            self._die(error)
            return
        if reply is not None:
            self._give(reply)

    def _deliver(self) -> bool:
        """Carry output to the front end and its aborts back until there is neither; whether there was any output."""
        core, has_any = self._built.core, False
        while True:
            self.flush()
            output = core.take_output(_CLIENT)
            replies = core.take_replies(_CLIENT)
            if output is None and not replies:
                return has_any
            has_any = True
            for message in (output, *replies):
                if message is not None:
                    self._give(message)

    def _give(self, message: StepOutput | Reply) -> None:
        for _ in self._frontend.receive(0, message):
            pass

    def _die(self, error: Exception) -> None:
        message = f"The engine core died: {type(error).__name__}: {error}"
        logger.error("%s", message, exc_info=error)
        self._frontend.fail_all(EngineDeadError(message, cause=traceback.format_exc()))


@attrs.define(eq=False)
class _Core:
    """A core process, as far as it is known here."""

    rank: int
    handle: BlockingCoreHandle
    ready: Ready | None = None
    last_words: TrioEngineError | None = None

    @property
    def identity(self) -> bytes:
        """What it is called by the socket."""
        return core_identity(self.rank)


class SyncMPClient:
    """Cores in processes of their own, over ZeroMQ. They compute also while nobody waits."""

    def __init__(
        self,
        config: EngineConfig,
        location: ModelLocation,
        draft_location: ModelLocation | None,
        frontend: Frontend,
        interrupts: Interrupts,
        *,
        core_module: str = CORE_MODULE,
        core_options: Mapping[str, str] | None = None,
    ) -> None:
        """Start the cores and wait until they take requests.

        Args:
            config: as `open_engine`'s; all cores run on this machine.
            location: of the model.
            draft_location: of `config.draft_model`.
            frontend: for as many cores.
            interrupts: of the engine.
            core_module: another core's entry module, for tests; `core_options` is for it.

        Raises:
            CheckpointError, ConfigError, EngineStartError: one cannot start; no process is left behind.
        """
        if config.has_remote_cores:
            raise ConfigError("Cores on other machines need `open_engine`.", option="data_parallel_size_local")
        self._config = config
        self._frontend = frontend
        self._interrupts = interrupts
        self._cores: list[_Core] = []
        self._numbers = {core_identity(rank): number for number, rank in enumerate(config.local_ranks)}
        self._stack = ExitStack()
        self._looked_at_s = time.monotonic()
        self._pid = os.getpid()
        try:
            with interrupts:
                self._start(location, draft_location, core_module, core_options or {})
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> Ready:
        """What the first core said when it was ready."""
        ready = self._cores[0].ready
        assert ready is not None
        return ready

    @property
    def core_pids(self) -> Sequence[int]:
        """The core processes."""
        return [core.handle.pid for core in self._cores]

    def send(self, core: int, message: ToCore) -> None:
        """As `BlockingClient`. To a core that has gone it does nothing: whoever waits is told."""
        self._check_process()
        self.flush()
        self._send(self._cores[core], message)

    def flush(self) -> None:
        """As `BlockingClient`."""
        for core, aborts in self._frontend.take_aborts():
            self._send(self._cores[core], aborts)

    def receive(self, timeout_s: float) -> None:
        """As `BlockingClient`."""
        if not self._drain() and self._frontend.dead_error is None:
            self._wait(min(timeout_s, HEALTH_INTERVAL_S))
            self._drain()
        self.flush()
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= HEALTH_INTERVAL_S and self._frontend.dead_error is None:
            self._looked_at_s = now_s
            self._raise_trouble()

    def check_health(self) -> None:
        """As `BlockingClient`."""
        self._check_process()
        if self._frontend.dead_error is None:
            self._drain()
            for core in self._cores:
                if core.handle.wait(0):
                    self._bury(core)
        if self._frontend.dead_error is not None:
            raise attrs.evolve(self._frontend.dead_error)
        self._raise_trouble()

    def close(self) -> None:
        """As `BlockingClient`: ask, wait, terminate, wait, kill."""
        # A core that loads reads no messages, so it is not worth waiting for.
        is_ready = all(core.ready is not None for core in self._cores)
        timeout_s = self._config.core_stop_timeout_s if is_ready else 0.0
        for core in self._cores:
            self._send(core, Stop())
        left = self._wait_for_exits(self._cores, timeout_s)
        for core in left:
            core.handle.terminate()
        for core in self._wait_for_exits(left, TERMINATE_TIMEOUT_S):
            core.handle.kill()
        self._cores = []
        self._stack.close()

    def _start(
        self,
        location: ModelLocation,
        draft_location: ModelLocation | None,
        core_module: str,
        core_options: Mapping[str, str],
    ) -> None:
        endpoint = self._stack.enter_context(create_endpoint(env.variables()))
        self._router, endpoint = bind_blocking_router(endpoint)
        self._stack.callback(self._router.close)
        self._poller = zmq.Poller()
        self._poller.register(self._router.zmq_socket, zmq.POLLIN)
        for rank in self._config.local_ranks:
            launch = CoreLaunch(
                endpoints=(endpoint.for_core(),),
                rank=rank,
                page_fd=-1,
                config=self._config,
                model=location,
                draft_model=draft_location,
                options=core_options,
            )
            handle = BlockingCoreHandle.start(launch, core_module)
            self._stack.callback(handle.close)
            self._cores.append(_Core(rank, handle))
            self._poller.register(handle.life_fd, zmq.POLLIN)
        self._wait_ready()

    def _wait_ready(self) -> None:
        timeout_s = self._config.startup_timeout_s
        deadline_s = time.monotonic() + timeout_s
        while any(core.ready is None for core in self._cores):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                missing = ", ".join(str(core.rank) for core in self._cores if core.ready is None)
                who = "The engine core was" if len(self._cores) == 1 else f"The engine cores of rank {missing} were"
                raise EngineStartError(f"{who} not ready after {timeout_s:g} s (startup_timeout_s).")
            self._wait(left_s)
            self._drain()
            for core in self._cores:
                if core.last_words is not None:
                    raise core.last_words
            if self._frontend.dead_error is not None:
                raise EngineStartError(f"{self._frontend.dead_error} Its log says more.")
        for core in self._cores:
            if core.ready is not None and core.ready.model != self.ready.model:
                raise EngineStartError(
                    f"The core of rank {core.rank} runs another model than that of {self._cores[0].rank}."
                )
        check_lockstep(self._config, self.ready)

    def _wait(self, timeout_s: float) -> None:
        """Until a message has come, a core has exited, or the time is out."""
        with self._interrupts.waiting():
            events = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        for core in self._cores:
            if core.handle.life_fd in events:
                self._bury(core)

    def _bury(self, core: _Core) -> None:
        """A core has exited: hear what it had sent, then tell everyone."""
        core.handle.wait(DISCONNECT_TIMEOUT_S)
        deadline_s = time.monotonic() + DISCONNECT_TIMEOUT_S
        # The socket forgets a core when it has read the last of what it sent.
        while self._is_connected(core) and time.monotonic() < deadline_s:
            self._router.zmq_socket.poll(round(1000 * DISCONNECT_POLL_S))
            self._drain()
        self._drain()
        error = core.last_words or core.handle.exit_error()
        self._frontend.fail_all(
            error if isinstance(error, EngineDeadError) else EngineDeadError(f"The engine core died: {error}")
        )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosedError("This process was forked off the engine's, which has the cores: open another here.")

    def _raise_trouble(self) -> None:
        for core in self._cores:
            if (trouble := core.handle.trouble()) is not None:
                raise trouble

    def _is_connected(self, core: _Core) -> bool:
        try:
            self._router.send((core.identity, b""))
        except PeerUnreachableError:
            return False
        return True

    def _send(self, core: _Core, message: ToCore) -> None:
        try:
            self._router.send((core.identity, encode(message)))
        except PeerUnreachableError:
            return

    def _drain(self) -> bool:
        """Handle all messages that are here; whether there were any."""
        messages = self._router.drain()
        for identity, *parts in messages:
            number = self._numbers.get(identity)
            if number is not None and parts:
                self._handle(number, parts[-1])
        return bool(messages)

    def _handle(self, number: int, data: bytes) -> None:
        core = self._cores[number]
        try:
            message = decode(data)
        except CodecError:
            return
        match message:
            case StepOutput() | Reply():
                for _ in self._frontend.receive(number, message):
                    pass
            case Ready():
                core.ready = message
                self._frontend.set_ready(number, message)
            case EngineDead():
                core.last_words = error_from_data(message.error)
            case _:
                pass  # How loading goes.

    def _wait_for_exits(self, cores: Sequence[_Core], timeout_s: float) -> Sequence[_Core]:
        """Those that are left then."""
        deadline_s = time.monotonic() + timeout_s
        return [core for core in cores if not core.handle.wait(deadline_s - time.monotonic())]
