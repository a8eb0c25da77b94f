"""`trioengine serve`: an engine and its HTTP server, from progress while loading to a drain at the end."""

import argparse
import functools
import importlib.util
import socket
from collections.abc import Callable, Sequence

import attrs
import trio

from trioengine.cli.api_server import ApiServer, Serving, import_server
from trioengine.cli.main import EXIT_INTERRUPTED, SERVER_PACKAGES
from trioengine.cli.options import add_engine_options, add_section, engine_config_from, section_from
from trioengine.cli.process import watch_stop_signals
from trioengine.cli.progress import Progress
from trioengine.cli.streams import say
from trioengine.cli.supervisor import ApiServerGroup
from trioengine.cli.systemd import READY, STOPPING, ServiceManager
from trioengine.cli.vllm_options import add_vllm_options, tell_ignored
from trioengine.client.cores import Cores, start_cores
from trioengine.client.engine import open_engine
from trioengine.config import EngineConfig, ServerConfig, env
from trioengine.errors import ConfigError, TrioEngineError
from trioengine.server.listeners import bind_listeners, close_listeners, is_loopback
from trioengine.server.tls import load_server_tls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, and the options of engine and server."""
    add_engine_options(parser)
    add_section(parser, ServerConfig, "server")
    add_vllm_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Status 0 after a drain, 130 when stopped at once; raises when the engine died."""
    for name in SERVER_PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    tell_ignored(arguments)
    engine_config, server_config = engine_config_from(arguments), server_config_from(arguments)
    # What loading the model would only delay.
    load_server_tls(server_config)
    if server_config.lora_modules and not engine_config.enable_lora:
        raise ConfigError("lora_modules needs enable_lora.", option="lora_modules")
    return trio.run(_Service(engine_config, server_config).run)


def server_config_from(arguments: argparse.Namespace) -> ServerConfig:
    """The server's configuration: the command line's, with what the environment and a file hold besides.

    Raises:
        ConfigError: a value cannot work.
    """
    config = section_from(arguments, ServerConfig)
    if config.chat_template is not None:
        # Before the model is loaded, so that a wrong one is known at once. Few need what is imported for it.
        from trioengine.openai.chat_settings import read_chat_template

        config = attrs.evolve(config, chat_template=read_chat_template(config.chat_template))
    return attrs.evolve(config, api_key=(*config.api_key, *env.api_keys()))


class _Service:
    """One run of the command, and what ends it."""

    def __init__(self, engine_config: EngineConfig, server_config: ServerConfig) -> None:
        self._engine_config = engine_config
        self._server_config = server_config
        self._service_manager = ServiceManager()
        self._progress = Progress()
        self._everything = trio.CancelScope()
        self._server: ApiServer | ApiServerGroup | None = None
        """None as long as nobody is served."""
        self._exit_status = 0

    async def run(self) -> int:
        async with trio.open_nursery() as watching:
            # Until the end: a signal that comes while the rest is given back must not cut that short.
            await watching.start(watch_stop_signals, self._stop, self._stop_now)
            with self._everything:
                await self._serve()
            watching.cancel_scope.cancel()
        return self._exit_status

    async def _serve(self) -> None:
        # Before the model is loaded, so that a taken port is known at once; nothing listens until it is.
        listeners = self._service_manager.take_listeners() or await bind_listeners(self._server_config)
        try:
            if self._server_config.api_server_count == 1:
                await self._serve_here(listeners)
            else:
                await self._serve_in_processes(listeners)
        finally:
            self._progress.clear()
            close_listeners(listeners)

    def _stop(self) -> None:
        if self._server is None:  # Still loading: there is nothing to drain.
            self._stop_now()
            return
        say("Finishing what runs. A second signal stops now.")
        self._service_manager.notify(STOPPING)
        self._server.drain()

    def _stop_now(self) -> None:
        self._exit_status = EXIT_INTERRUPTED
        self._everything.cancel()

    async def _serve_here(self, listeners: Sequence[socket.socket]) -> None:
        server = ApiServer(self._server_config)
        async with trio.open_nursery() as nursery:
            # The server's packages take as long to load as the core does, and the core is another process.
            nursery.start_soon(trio.to_thread.run_sync, import_server)
            async with open_engine(self._engine_config, on_progress=self._progress) as engine:
                self._progress.clear()
                nursery.start_soon(self._service_manager.keep_alive, functools.partial(_is_well, engine.check_health))
                await server.run(engine, listeners, functools.partial(self._begin, server, listeners))
            nursery.cancel_scope.cancel()

    async def _serve_in_processes(self, listeners: Sequence[socket.socket]) -> None:
        count = self._server_config.api_server_count
        group = ApiServerGroup(self._server_config)
        async with (
            start_cores(self._engine_config, num_clients=count, on_progress=self._progress) as cores,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._service_manager.keep_alive, functools.partial(_is_well, cores.check_health))
            nursery.start_soon(self._show_progress, cores, group)
            await group.run(cores.attachments, listeners, functools.partial(self._begin, group, listeners))
            nursery.cancel_scope.cancel()

    async def _show_progress(self, cores: Cores, group: ApiServerGroup) -> None:
        """The processes wait for the cores by themselves; what is wrong with one is said once."""
        try:
            await cores.wait_ready(self._progress)
        except TrioEngineError as error:
            group.fail(error)

    def _begin(self, server: ApiServer | ApiServerGroup, listeners: Sequence[socket.socket], serving: Serving) -> None:
        self._progress.clear()
        self._server = server
        if not (self._server_config.api_key or _is_private(listeners)):
            say("Whoever reaches this address may use the engine: there is no --api-key.")
        say(f"Serving {serving.model_name} on {', '.join(serving.urls)}")
        self._service_manager.notify(READY)


def _is_private(listeners: Sequence[socket.socket]) -> bool:
    return is_loopback(listeners) or all(sock.family == socket.AF_UNIX for sock in listeners)


def _is_well(check_health: Callable[[], None]) -> bool:
    try:
        check_health()
    except TrioEngineError:
        return False
    return True
