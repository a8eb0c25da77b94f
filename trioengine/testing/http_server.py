"""Runs `serve` on a free loopback port for the length of a test's block."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from socket import socket
from ssl import SSLContext

import attrs
import trio
from hypercorn.typing import ASGIFramework

from trioengine.config.server import ServerConfig
from trioengine.server.serving import serve

TIME_LIMIT_S = 30.0


@attrs.frozen
class RunningServer:
    """A server that listens."""

    url: str
    shutdown: trio.Event
    """Set it to make the server drain."""
    stopped: trio.Event
    """Set once `serve` has returned or was cancelled."""


@asynccontextmanager
async def open_server(
    app: ASGIFramework,
    config: ServerConfig | None = None,
    *,
    listeners: Sequence[socket] | None = None,
    tls: SSLContext | None = None,
) -> AsyncGenerator[RunningServer]:
    """A running server; by default on a free port. Leaving the block cancels it; so do 30 s."""
    shutdown, stopped = trio.Event(), trio.Event()

    async def run(*, task_status: trio.TaskStatus[list[str]]) -> None:
        try:
            await serve(
                app,
                config or ServerConfig(port=0),
                shutdown=shutdown,
                listeners=listeners,
                tls=tls,
                task_status=task_status,
            )
        finally:
            stopped.set()

    with trio.fail_after(TIME_LIMIT_S):
        async with trio.open_nursery() as nursery:
            urls = await nursery.start(run)
            yield RunningServer(urls[0], shutdown, stopped)
            nursery.cancel_scope.cancel()
