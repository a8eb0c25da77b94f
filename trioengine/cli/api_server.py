"""The HTTP server of one process over an open engine: until it is told to drain, or its engine has died."""

import functools
import importlib
import logging
import socket
from collections.abc import Callable, Sequence

import attrs
import trio

from trioengine.client.interface import EngineClient
from trioengine.config import ServerConfig
from trioengine.errors import EngineClosedError, EngineDeadError
from trioengine.runtime.collector import tune_garbage_collector

HEALTH_INTERVAL_S = 0.5
LAST_EVENTS_TIMEOUT_S = 1.0
"""After the drain's deadline: how long the error events of what is left may take to be written."""

logger = logging.getLogger(__name__)


@attrs.frozen
class Serving:
    """What a server that accepts connections says of itself."""

    model_name: str
    urls: Sequence[str]


class ApiServer:
    """One run of the server."""

    def __init__(self, config: ServerConfig) -> None:
        """Nothing happens before `run`."""
        self._config = config
        self._shutdown = trio.Event()
        self._death: EngineDeadError | EngineClosedError | None = None

    def drain(self) -> None:
        """Refuse new requests, let those that run finish until the timeout, then return from `run`."""
        self._shutdown.set()

    async def run(
        self, engine: EngineClient, listeners: Sequence[socket.socket], on_serving: Callable[[Serving], None]
    ) -> None:
        """Serve on `listeners`, which are closed in the end. Cancelling ends everything at once.

        Raises:
            EngineDeadError: the engine has died, and what was running has been told. Not with
                `keep_alive_on_engine_death`.
            RequestError: one of `lora_modules` cannot be loaded.
        """
        from trioengine.server import create_app, open_responses, serve
        from trioengine.server.responses import store_limits

        for module in self._config.lora_modules:
            name, _, folder = module.partition("=")
            await engine.add_lora(name, folder)
        stop = trio.Event()
        timeout_s = self._config.shutdown_timeout_s + LAST_EVENTS_TIMEOUT_S
        config = attrs.evolve(self._config, shutdown_timeout_s=timeout_s)
        async with open_responses(store_limits(self._config), stop=stop) as responses:
            app = create_app(engine, self._config, shutdown=self._shutdown, stop=stop, responses=responses)
            async with trio.open_nursery() as watching:
                watching.start_soon(self._watch_engine, engine)
                watching.start_soon(self._end_drain, stop)
                async with trio.open_nursery() as serving:
                    urls = await serving.start(
                        functools.partial(serve, app, config, shutdown=self._shutdown, listeners=listeners)
                    )
                    tune_garbage_collector()
                    on_serving(Serving(engine.model_name, urls))
                watching.cancel_scope.cancel()
        if self._death is not None:
            raise self._death

    async def _end_drain(self, stop: trio.Event) -> None:
        """What still runs at the drain's deadline ends with an error event."""
        await self._shutdown.wait()
        await trio.sleep(self._config.shutdown_timeout_s)
        stop.set()

    async def _watch_engine(self, engine: EngineClient) -> None:
        """A server without an engine ends, after its streams have got their error events."""
        # A core that merely hangs, or was stopped, fails health checks until it goes on; that is not the end.
        while engine.dead_error is None:  # noqa: ASYNC110
            await trio.sleep(HEALTH_INTERVAL_S)
        if self._config.keep_alive_on_engine_death:
            logger.error("The engine has died; the server goes on without it: %s", engine.dead_error)
            return
        self._death = engine.dead_error
        self._shutdown.set()


def import_server() -> None:
    """Load the server's packages, which takes a while in which other things can be done."""
    importlib.import_module("trioengine.server.app")
    importlib.import_module("trioengine.server.serving")
