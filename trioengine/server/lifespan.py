"""Runs an ASGI application's lifespan around a server: startup before it listens, shutdown after its last request."""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio
from hypercorn.typing import ASGIFramework, ASGIReceiveEvent, ASGISendEvent, LifespanScope

from trioengine.errors import ServerStartError

STARTUP_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


class _Lifespan:
    def __init__(self, app: ASGIFramework) -> None:
        self.state: dict[str, object] = {}
        self.failure: str | None = None
        self.has_ended = False
        self.started = trio.Event()
        self.stopped = trio.Event()
        self.to_app, self._from_server = trio.open_memory_channel[ASGIReceiveEvent](2)
        self._app = app

    async def run(self) -> None:
        scope: LifespanScope = {
            "type": "lifespan",
            "asgi": {"spec_version": "2.0", "version": "3.0"},
            "state": self.state,
        }
        try:
            await self._app(scope, self._from_server.receive, self._receive_from_app)
        except* Exception:
            # A border: ASGI says that an application that raises here does not know lifespans and is served without.
            # Later it is a failure of the application's own tasks, which the log must show.
            level = logging.ERROR if self.started.is_set() else logging.DEBUG
            logger.log(level, "The application's lifespan raised", exc_info=True)
        finally:
            self.has_ended = True
            self.started.set()
            self.stopped.set()

    async def _receive_from_app(self, message: ASGISendEvent) -> None:
        match message["type"]:
            case "lifespan.startup.complete":
                self.started.set()
            case "lifespan.startup.failed":
                self.failure = message["message"] or "no reason given"
                self.started.set()
            case "lifespan.shutdown.complete":
                self.stopped.set()
            case "lifespan.shutdown.failed":
                logger.error("The application's shutdown failed: %s", message["message"])
                self.stopped.set()
            case other:
                raise ValueError(f"not a lifespan message: {other}")


@asynccontextmanager
async def open_lifespan(app: ASGIFramework, shutdown_timeout_s: float) -> AsyncGenerator[dict[str, object]]:
    """The lifespan's state, with the application started. On a normal exit the application is shut down.

    An exception in the block, or a cancellation, ends the lifespan at once without telling the application.

    Raises:
        ServerStartError: the application says that its startup failed, or takes over a minute for it.
    """
    lifespan = _Lifespan(app)
    failure: str | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifespan.run)
        lifespan.to_app.send_nowait({"type": "lifespan.startup"})
        with trio.move_on_after(STARTUP_TIMEOUT_S) as startup:
            await lifespan.started.wait()
        failure = f"not done after {STARTUP_TIMEOUT_S:g} s" if startup.cancelled_caught else lifespan.failure
        if failure is None:
            yield lifespan.state
            if not lifespan.has_ended:
                lifespan.to_app.send_nowait({"type": "lifespan.shutdown"})
                with trio.move_on_after(shutdown_timeout_s) as stopping:
                    await lifespan.stopped.wait()
                if stopping.cancelled_caught:
                    logger.error("The application's shutdown was not done after %g s", shutdown_timeout_s)
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise ServerStartError(f"The application's startup failed: {failure}")
