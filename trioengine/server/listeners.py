"""The sockets that a server listens on. Imports nothing of the server's, so they can be had before it is loaded."""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

import trio

from trioengine.config.server import ServerConfig
from trioengine.errors import ServerStartError


async def bind_listeners(config: ServerConfig) -> list[socket.socket]:
    """Sockets bound to the configured address, for `serve`, which closes them; those bound here do not listen yet.

    `fd` and `uds` stand before host and port. For whoever has long work to do before it serves, and wants to know
    first that the address can be had.

    Raises:
        ServerStartError: it cannot be bound. No socket is left.
    """
    if config.fd is not None:
        return [inherited_listener(config.fd)]
    if config.uds is not None:
        return [_UnixListener(config.uds, int(config.uds_mode, 8))]
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


def inherited_listener(fd: int) -> socket.socket:
    """The bound stream socket that this process has got as a descriptor. Processes it starts do not get it.

    Raises:
        ServerStartError: it is something else.
    """
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise ServerStartError(f"Descriptor {fd} is no socket: {error}") from error
    if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
        sock.detach()
        raise ServerStartError(f"Descriptor {fd} is no socket that HTTP can be served on.")
    return sock


def is_loopback(sockets: Sequence[socket.socket]) -> bool:
    """Whether only this machine can connect, by TCP."""
    addresses = [sock.getsockname()[0] for sock in sockets if sock.family in (socket.AF_INET, socket.AF_INET6)]
    return bool(addresses) and all(address == "::1" or address.startswith("127.") for address in addresses)


class _UnixListener(socket.socket):
    """Bound to a path, which it removes when it is closed, unless another server has taken the place meanwhile."""

    def __init__(self, path: str, mode: int) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = path
        self._inode: int | None = None
        try:
            _remove_stale(path)
            # Until it listens, nobody can connect, whatever the mode is that it is made with.
            self.bind(path)
            self._inode = os.stat(path).st_ino
            os.chmod(path, mode)
        except OSError as error:
            self.close()
            raise ServerStartError(f"Cannot listen on {path}: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._inode is not None and os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        self._inode = None
        super().close()


def _remove_stale(path: str) -> None:
    """Remove the socket that an ended server has left. One that somebody listens on, and other files, stay."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket")
    if _is_bound(path):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _is_bound(path: str) -> bool:
    """Whether a process has this socket, also one that loads its model and does not listen yet. Linux tells."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    return any(line.endswith((f" {path}", f" {os.path.abspath(path)}")) for line in lines)


def close_listeners(sockets: Sequence[socket.socket]) -> None:
    """Close those that are still open. No task may be waiting on the others."""
    for sock in sockets:
        if sock.fileno() != -1:
            trio.lowlevel.notify_closing(sock)
            sock.close()
