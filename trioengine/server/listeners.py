"""The sockets that a server listens on. Imports nothing of the server's, so they can be had before it is loaded."""

import socket
from collections.abc import Sequence

import trio

from trioengine.config.server import ServerConfig
from trioengine.errors import ServerStartError


async def bind_listeners(config: ServerConfig) -> list[socket.socket]:
    """Sockets bound to the configured address, for `serve`, which closes them; nothing listens yet.

    For whoever has long work to do before it serves, and wants to know first that the address can be had.

    Raises:
        ServerStartError: it cannot be bound. No socket is left.
    """
    sockets: list[socket.socket] = []
    try:
        addresses = await trio.socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in addresses:
            # As plain sockets: a write that fits the kernel's buffer is one call on one of these.
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
    except OSError as error:
        close_listeners(sockets)
        raise ServerStartError(f"Cannot listen on {config.host} port {config.port}: {error}") from error
    return sockets


def close_listeners(sockets: Sequence[socket.socket]) -> None:
    """Close those that are still open. No task may be waiting on the others."""
    for sock in sockets:
        if sock.fileno() != -1:
            trio.lowlevel.notify_closing(sock)
            sock.close()
