"""Serves an ASGI application over HTTP: listens, guards every connection, drains on shutdown.

`serve` owns the accept loop and one task per connection; `connection.py` says what happens in that task. Installs no
signal handler, changes no logging, keeps no global state: several servers can run in one process.
"""

import errno
import logging
import socket
import ssl
import sys
from collections.abc import Sequence

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework

from trioengine.config.server import ServerConfig
from trioengine.errors import ServerStartError
from trioengine.server.access import AccessRules
from trioengine.server.connection import Connection, Service
from trioengine.server.gate import Gate
from trioengine.server.lifespan import open_lifespan
from trioengine.server.listeners import bind_listeners, close_listeners, is_loopback
from trioengine.server.tls import load_server_tls

ACCEPT_RETRY_S = 0.1
_BACKLOG = 1024
_NOT_A_LISTENER = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP, errno.EFAULT})

logger = logging.getLogger(__name__)


async def serve(
    app: ASGIFramework,
    config: ServerConfig,
    *,
    shutdown: trio.Event | None = None,
    listeners: Sequence[socket.socket] | None = None,
    tls: ssl.SSLContext | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` until `shutdown` is set and the last request has ended.

    When `shutdown` is set, nothing more is accepted and idle connections close. Requests in flight get
    `config.shutdown_timeout_s`, their responses say `connection: close`; then their handlers are cancelled. Cancelling
    `serve` ends everything at once. Either way no task, socket or descriptor is left.

    Args:
        app: any ASGI 3 application. Its handlers run in their connection's nursery, and a client's disconnect
            arrives as `http.disconnect` at once; a handler that goes on for a second after that is cancelled.
        listeners: bound stream sockets to listen on instead of the configured address. `serve` closes them.
        tls: a server-side context with its certificate loaded, instead of `config.ssl_certfile`. Its ALPN protocols
            are set here.
        task_status: gets the addresses as URLs once connections are accepted.

    Raises:
        ConfigError: `config.http2` without TLS, or a certificate that cannot be loaded.
        ServerStartError: the address cannot be bound, or the application's startup failed.
    """
    tls = load_server_tls(config, tls)
    sockets = await bind_listeners(config) if listeners is None else list(listeners)
    try:
        _listen(sockets)
        rules = AccessRules(config, is_loopback=is_loopback(sockets))
        shutdown = trio.Event() if shutdown is None else shutdown
        async with open_lifespan(app, config.shutdown_timeout_s) as state:
            service = Service(
                app=ASGIWrapper(Gate(app, config, rules, shutdown)),
                config=config,
                tls=tls,
                hypercorn_config=_hypercorn_config(config),
                context=WorkerContext(max_requests=None),
                state=state,
            )
            await _Server(service, sockets).run(shutdown, task_status)
    finally:
        close_listeners(sockets)


class _Server:
    """The accept loops and the set of open connections."""

    def __init__(self, service: Service, sockets: Sequence[socket.socket]) -> None:
        self._service = service
        self._sockets = sockets
        self._connections: set[Connection] = set()
        self._one_has_ended = trio.Event()

    async def run(self, shutdown: trio.Event, task_status: trio.TaskStatus[list[str]]) -> None:
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as accepting:
                for sock in self._sockets:
                    accepting.start_soon(self._accept, sock, nursery)
                task_status.started([_url(sock, is_tls=self._service.tls is not None) for sock in self._sockets])
                await shutdown.wait()
                accepting.cancel_scope.cancel()
            close_listeners(self._sockets)
            await self._drain()

    async def _drain(self) -> None:
        await self._service.context.terminated.set()
        for connection in list(self._connections):
            connection.begin_shutdown()
        with trio.move_on_after(self._service.config.shutdown_timeout_s):
            while self._connections:
                await self._one_has_ended.wait()
        if self._connections:
            logger.warning("%d connections were cut at the end of the shutdown timeout", len(self._connections))
        for connection in self._connections:
            connection.abort()

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            while len(self._connections) >= self._service.config.max_connections:
                await self._one_has_ended.wait()
            await trio.lowlevel.wait_readable(listener)
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue  # Another process took it, or the client has gone already.
            except OSError as error:
                if error.errno in _NOT_A_LISTENER:
                    raise
                # Out of descriptors or memory, or a network error that Linux reports here: the listener itself is
                # fine, and what ended connections give back will do.
                logger.warning("Cannot accept connections now: %s", error)
                await trio.sleep(ACCEPT_RETRY_S)
                continue
            nursery.start_soon(self._run_connection, sock)

    async def _run_connection(self, sock: socket.socket) -> None:
        connection = Connection(sock, self._service)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            self._one_has_ended.set()
            self._one_has_ended = trio.Event()


def _listen(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.setblocking(False)
        try:
            sock.listen(_BACKLOG)
        except OSError as error:
            raise ServerStartError(f"Cannot listen on {sock.getsockname()}: {error}") from error


def _url(sock: socket.socket, *, is_tls: bool) -> str:
    scheme = "https" if is_tls else "http"
    if sock.family == socket.AF_UNIX:
        return f"{scheme}+unix://{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{scheme}://{host}:{port}"


def _hypercorn_config(config: ServerConfig) -> HypercornConfig:
    hypercorn_config = HypercornConfig()
    # Without targets Hypercorn makes no loggers: what there is to say is logged here, by `logging`'s own rules.
    hypercorn_config.accesslog = None
    hypercorn_config.errorlog = None
    hypercorn_config.include_server_header = False
    hypercorn_config.h11_max_incomplete_size = config.max_header_bytes
    hypercorn_config.h2_max_header_list_size = config.max_header_bytes
    # Over a number of requests Hypercorn ends an HTTP/2 connection under the streams that are still open.
    hypercorn_config.keep_alive_max_requests = sys.maxsize
    return hypercorn_config
