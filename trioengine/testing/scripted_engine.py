"""`open_scripted_engine`: the client, front end and link as they are, over a scripted core in memory.

No process, no socket, no thread: under `MockClock` it is deterministic, and every await in it can be cancelled.
"""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import attrs
import trio

from trioengine.client.engine import Engine
from trioengine.client.link import CoreLink, LinkClient
from trioengine.config.engine import EngineConfig
from trioengine.errors import EngineClosedError, EngineDeadError
from trioengine.frontend.frontend import Frontend
from trioengine.observability.stats import StatLogger
from trioengine.runtime.step_loop import Core
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.testing.memory_link import MemoryDealer, MemoryRouter
from trioengine.testing.scripted_core import Script, ScriptedCore, scripted_ready
from trioengine.transport.topology import core_identity
from trioengine.types.codec import decode, encode, error_to_data
from trioengine.types.messages import EngineCoreRequest, EngineDead, FromCore, Ready, Stop, ToCore

MODEL_NAME = "scripted"


class FakeCoreHandle:
    """The process of a core that has none (a `client.link.WatchedCore`)."""

    def __init__(self) -> None:
        self.exited = trio.Event()
        self.scripted_trouble: EngineDeadError | None = None
        """What `trouble` says while the core lives."""

    def trouble(self) -> EngineDeadError | None:
        return self.exit_error() if self.exited.is_set() else self.scripted_trouble

    def exit_error(self) -> EngineDeadError:
        return EngineDeadError("The scripted core has exited.")

    async def wait(self) -> None:
        await self.exited.wait()


@attrs.frozen
class ScriptedEngine:
    """An engine, and what a test may look at and do behind its back."""

    engine: Engine
    frontend: Frontend
    handle: FakeCoreHandle
    received: list[ToCore]
    """Everything that the core has been sent, in order."""
    send: Callable[[FromCore], None]
    """Say something in the core's name."""
    kill: Callable[[], None]
    """The core is gone from one moment to the next, with what it has not sent."""

    @property
    def num_adds(self) -> int:
        """Requests that the core has been sent."""
        return sum(isinstance(message, EngineCoreRequest) for message in self.received)


@asynccontextmanager
async def open_scripted_engine(
    script: Script | None = None,
    core: Core | None = None,
    ready: Ready | None = None,
    *,
    stat_loggers: Sequence[StatLogger] = (),
) -> AsyncGenerator[ScriptedEngine, None]:
    """An open engine whose core follows the script, in tasks of this block; ended when the block is left.

    With another `core`, the script's pace alone counts, and `ready` is what that core is.
    """
    script = Script() if script is None else script
    if core is None:
        core = ScriptedCore(attrs.evolve(script, pace_s=0.0), clock=trio.current_time)
    router, handle = MemoryRouter(), FakeCoreHandle()
    frontend = Frontend(clock=trio.current_time, stat_loggers=stat_loggers)
    dealer = router.connect(core_identity(0))
    received: list[ToCore] = []
    async with trio.open_nursery() as nursery:
        core_scope = trio.CancelScope()
        nursery.start_soon(_run_core, core, script.pace_s, dealer, handle, received, core_scope)
        link = CoreLink(router, {0: handle}, LinkClient(frontend, stat_loggers))
        link.start(nursery)
        engine = Engine(EngineConfig(), MODEL_NAME, ready or scripted_ready(), FakeTokenizer(), link)
        yield ScriptedEngine(
            engine,
            frontend,
            handle,
            received,
            send=lambda message: router.deliver([core_identity(0), encode(message)]),
            kill=core_scope.cancel,
        )
        frontend.fail_all(EngineClosedError("The engine is closed."))
        nursery.cancel_scope.cancel()


async def _run_core(
    core: Core,
    pace_s: float,
    dealer: MemoryDealer,
    handle: FakeCoreHandle,
    received: list[ToCore],
    scope: trio.CancelScope,
) -> None:
    """The step loop of `runtime`, with awaits where that one blocks."""
    with scope:
        try:
            await _run_steps(core, pace_s, dealer, received)
        except RuntimeError as error:  # As the border of a core process: the front end is told.
            dealer.try_send((encode(EngineDead(error_to_data(EngineDeadError(f"The engine core died: {error}")))),))
    dealer.close()
    handle.exited.set()


async def _run_steps(core: Core, pace_s: float, dealer: MemoryDealer, received: list[ToCore]) -> None:
    unsent: deque[bytes] = deque()
    while True:
        await trio.lowlevel.checkpoint()
        if unsent:
            await dealer.wait_writable()
        elif not core.has_work:
            await dealer.wait_readable()
        core.poll()
        for parts in dealer.drain():
            message = decode(parts[-1])
            assert isinstance(message, ToCore)
            received.append(message)
            if isinstance(message, Stop):
                return
            reply = core.handle(0, message)
            if reply is not None:
                unsent.append(encode(reply))
        if core.has_work:
            await trio.sleep(pace_s)
            core.step()
        while unsent and dealer.try_send((unsent[0],)):
            unsent.popleft()
        if not unsent:
            output = core.take_output(0)
            unsent.extend(encode(message) for message in (output, *core.take_replies(0)) if message is not None)
            while unsent and dealer.try_send((unsent[0],)):
                unsent.popleft()
