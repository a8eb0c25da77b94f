"""`trioengine serve`: an engine and its HTTP server, from progress while loading to a drain at the end."""

import argparse
import functools
import importlib.util
import logging
import socket
import sys
from collections.abc import Sequence

import attrs
import trio

from trioengine.cli.main import EXIT_INTERRUPTED, SERVER_PACKAGES
from trioengine.cli.options import add_engine_options, add_section, engine_config_from, section_from
from trioengine.cli.process import watch_stop_signals
from trioengine.cli.progress import Progress
from trioengine.cli.systemd import READY, STOPPING, ServiceManager
from trioengine.client import open_engine
from trioengine.client.interface import EngineClient
from trioengine.config import EngineConfig, ServerConfig, env
from trioengine.errors import EngineClosedError, EngineDeadError, TrioEngineError
from trioengine.runtime.collector import tune_garbage_collector
from trioengine.server.listeners import bind_listeners, close_listeners, is_loopback

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 0.5
LAST_EVENTS_TIMEOUT_S = 1.0
"""After the drain's deadline: how long the error events of what is left may take to be written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, and the options of engine and server."""
    add_engine_options(parser)
    add_section(parser, ServerConfig, "server")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Status 0 after a drain, 130 when stopped at once; raises when the engine died."""
    for name in SERVER_PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    return trio.run(_Service(engine_config_from(arguments), server_config_from(arguments)).run)


def server_config_from(arguments: argparse.Namespace) -> ServerConfig:
    """The server's configuration: the command line's, with the keys that the environment holds besides.

    Raises:
        ConfigError: a value cannot work.
    """
    config = section_from(arguments, ServerConfig)
    return attrs.evolve(config, api_key=(*config.api_key, *env.api_keys()))


class _Service:
    """One run of the server, and what ends it."""

    def __init__(self, engine_config: EngineConfig, server_config: ServerConfig) -> None:
        self._engine_config = engine_config
        self._server_config = server_config
        self._service_manager = ServiceManager()
        self._everything = trio.CancelScope()
        self._shutdown = trio.Event()
        self._is_serving = False
        self._exit_status = 0
        self._death: EngineDeadError | EngineClosedError | None = None

    async def run(self) -> int:
        with self._everything:
            async with trio.open_nursery() as nursery:
                await nursery.start(watch_stop_signals, self._stop, self._stop_now)
                await self._run_engine()
                nursery.cancel_scope.cancel()
        return self._exit_status

    def _stop(self) -> None:
        if not self._is_serving:  # Still loading: there is nothing to drain.
            self._stop_now()
            return
        print("Finishing what runs. A second signal stops now.", file=sys.stderr)
        self._begin_drain()

    def _begin_drain(self) -> None:
        self._service_manager.notify(STOPPING)
        self._shutdown.set()

    def _stop_now(self) -> None:
        self._exit_status = EXIT_INTERRUPTED
        self._everything.cancel()

    async def _run_engine(self) -> None:
        progress = Progress()
        # Before the model is loaded, so that a taken port is known at once; nothing listens until it is.
        listeners = self._service_manager.take_listeners() or await bind_listeners(self._server_config)
        try:
            async with trio.open_nursery() as importing:
                # The server's packages take as long to load as the core does, and the core is another process.
                importing.start_soon(trio.to_thread.run_sync, _import_server)
                async with open_engine(self._engine_config, on_progress=progress) as engine:
                    progress.clear()
                    await self._run_server(engine, listeners)
                    if self._death is not None:
                        raise self._death
        finally:
            progress.clear()
            close_listeners(listeners)

    async def _run_server(self, engine: EngineClient, listeners: Sequence[socket.socket]) -> None:
        from trioengine.server import create_app, serve

        stop = trio.Event()
        app = create_app(engine, shutdown=self._shutdown, stop=stop, is_strict=self._server_config.strict)
        timeout_s = self._server_config.shutdown_timeout_s + LAST_EVENTS_TIMEOUT_S
        config = attrs.evolve(self._server_config, shutdown_timeout_s=timeout_s)
        async with trio.open_nursery() as watching:
            watching.start_soon(self._watch_engine, engine)
            watching.start_soon(self._end_drain, stop)
            async with trio.open_nursery() as serving:
                urls = await serving.start(
                    functools.partial(serve, app, config, shutdown=self._shutdown, listeners=listeners)
                )
                self._is_serving = True
                tune_garbage_collector()
                watching.start_soon(self._service_manager.keep_alive, lambda: _is_healthy(engine))
                if not (self._server_config.api_key or _is_private(listeners)):
                    print("Whoever reaches this address may use the engine: there is no --api-key.", file=sys.stderr)
                print(f"Serving {engine.model_name} on {', '.join(urls)}", file=sys.stderr, flush=True)
                self._service_manager.notify(READY)
            watching.cancel_scope.cancel()

    async def _end_drain(self, stop: trio.Event) -> None:
        """What still runs at the drain's deadline ends with an error event."""
        await self._shutdown.wait()
        await trio.sleep(self._server_config.shutdown_timeout_s)
        stop.set()

    async def _watch_engine(self, engine: EngineClient) -> None:
        """A server without an engine ends, after its streams have got their error events."""
        # A core that merely hangs, or was stopped, fails health checks until it goes on; that is not the end.
        while engine.dead_error is None:  # noqa: ASYNC110
            await trio.sleep(HEALTH_INTERVAL_S)
        if self._server_config.keep_alive_on_engine_death:
            logger.error("The engine has died; the server goes on without it: %s", engine.dead_error)
            return
        self._death = engine.dead_error
        self._begin_drain()


def _is_private(listeners: Sequence[socket.socket]) -> bool:
    return is_loopback(listeners) or all(sock.family == socket.AF_UNIX for sock in listeners)


def _is_healthy(engine: EngineClient) -> bool:
    try:
        engine.check_health()
    except TrioEngineError:
        return False
    return True


def _import_server() -> None:
    importlib.import_module("trioengine.server.app")
    importlib.import_module("trioengine.server.serving")
