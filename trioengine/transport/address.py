"""Where a front end's socket lives: a private directory for an ipc socket, or loopback TCP with keys.

Knows nothing of ZeroMQ sockets; making an endpoint opens nothing but the directory.
"""

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import attrs
import zmq

MAX_DIRECTORY_BYTES = 99
"""A path of a Unix socket ends at 107 bytes, one byte of which ends it."""

_SOCKET_NAME = "zmq"


@attrs.frozen
class CurveKeys:
    """The front end's CURVE key pair (Z85). Whoever holds the public key can connect, so it is a secret too."""

    public_key: str = attrs.field(repr=False)
    secret_key: str | None = attrs.field(default=None, repr=False)
    """None in the copy that a core gets."""


@attrs.frozen
class Endpoint:
    """Address of one front end's ROUTER, plain data that may be sent to another process (never in its arguments).

    As a context manager it removes its directory at the end.
    """

    address: str
    directory: str | None = None
    """Private directory that holds the ipc socket and nothing else."""
    curve: CurveKeys | None = None

    def for_core(self) -> "Endpoint":
        """The copy for a core: it can connect, and remove the directory if it survives, but not pose as front end."""
        return self if self.curve is None else attrs.evolve(self, curve=CurveKeys(self.curve.public_key))

    def remove(self) -> None:
        """Delete the directory and the socket in it. May be called again, by either process, before or after close."""
        if self.directory is None:
            return
        directory = Path(self.directory)
        try:
            (directory / _SOCKET_NAME).unlink(missing_ok=True)
            directory.rmdir()
        except OSError:
            return  # gone already, or no longer ours to delete: neither is worth failing a shutdown

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def create_endpoint(environ: Mapping[str, str]) -> Endpoint:
    """A new endpoint that no other process has, however many make one at the same moment.

    It is an ipc socket in a new directory (mode 0700) under the first of XDG_RUNTIME_DIR, TMPDIR and /tmp where that
    is possible and its path is short enough; otherwise loopback TCP on a free port (known once bound) with CURVE keys,
    because any user of the machine can reach a port.
    """
    for base in _base_directories(environ):
        directory = _create_private_directory(base)
        if directory is not None:
            return Endpoint(address=f"ipc://{directory}/{_SOCKET_NAME}", directory=directory)
    public_key, secret_key = zmq.curve_keypair()
    return Endpoint(
        address="tcp://127.0.0.1:*", curve=CurveKeys(public_key.decode("ascii"), secret_key.decode("ascii"))
    )


def _base_directories(environ: Mapping[str, str]) -> Iterator[str]:
    yield from (base for name in ("XDG_RUNTIME_DIR", "TMPDIR") if os.path.isabs(base := environ.get(name, "")))
    yield "/tmp"


def _create_private_directory(base: str) -> str | None:
    try:
        directory = tempfile.mkdtemp(prefix="trioengine-", dir=base)
    except (OSError, ValueError):  # not there, not writable, full; or no path at all
        return None
    try:
        is_short = len(directory.encode()) <= MAX_DIRECTORY_BYTES
    except UnicodeEncodeError:  # a name that is not UTF-8, which a ZeroMQ address has to be
        is_short = False
    # Some file systems (mounted Windows drives) give every directory the same mode.
    if is_short and stat.S_IMODE(os.stat(directory).st_mode) == stat.S_IRWXU:
        return directory
    os.rmdir(directory)
    return None
