"""Where a front end's socket lives: a private directory for an ipc socket, loopback TCP with keys, or a port of this
machine for cores on others, with keys from a file.

Knows nothing of ZeroMQ sockets; making an endpoint opens nothing but the directory.
"""

import json
import os
import socket
import stat
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import attrs
import zmq

from trioengine.errors import ConfigError

MAX_DIRECTORY_BYTES = 99
"""A path of a Unix socket ends at 107 bytes, one byte of which ends it."""

_SOCKET_NAME = "zmq"
_ANY_PORT = "*"


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
        if self.curve is None:
            return self
        # Bound to all addresses of this machine, it is reached at this one.
        address = self.address.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:")
        return attrs.evolve(self, address=address, curve=CurveKeys(self.curve.public_key))

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
    return Endpoint(address=f"tcp://127.0.0.1:{_ANY_PORT}", curve=_new_keys())


def create_network_endpoint(address: str, keys: CurveKeys) -> Endpoint:
    """An endpoint for cores on other machines, at a fixed port; for the core's side, where `keys` have no secret.

    Raises:
        ConfigError: the address is not tcp://HOST:PORT.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:9]) <= 65535
    if not address.startswith("tcp://") or not host or not is_port:
        raise ConfigError(f"The address must be tcp://HOST:PORT, not {address!r}.")
    return Endpoint(address, curve=keys)


def read_or_make_keys(path: str) -> CurveKeys:
    """The keys in a file, which is made (mode 0600) where it is missing.

    Raises:
        ConfigError: it cannot be read or made, or has no keys.
    """
    keys = _new_keys()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_keys(path)
    except OSError as error:
        raise ConfigError(f"The key file cannot be made: {error}") from None
    with os.fdopen(descriptor, "w") as file:
        json.dump(attrs.asdict(keys), file)
    return keys


def read_keys(path: str) -> CurveKeys:
    """The keys in a file.

    Raises:
        ConfigError: it cannot be read, or has no keys.
    """
    try:
        keys = CurveKeys(**json.loads(Path(path).read_bytes()))
        zmq.curve_public(str(keys.secret_key).encode())
    except OSError as error:
        raise ConfigError(f"The key file cannot be read: {error}") from None
    except (TypeError, ValueError, zmq.ZMQError):
        raise ConfigError(f"{path} is no key file.") from None
    return keys


@contextmanager
def fixed_port(endpoint: Endpoint) -> Generator[Endpoint]:
    """The endpoint with a port that nobody else gets during the block, if any port will do. It is bound elsewhere."""
    if not endpoint.address.endswith(f":{_ANY_PORT}"):
        yield endpoint
        return
    # A port that is bound is given to nobody who asks for any; ZeroMQ may bind it again as long as nobody listens.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        yield attrs.evolve(endpoint, address=f"tcp://127.0.0.1:{place.getsockname()[1]}")


def _new_keys() -> CurveKeys:
    public_key, secret_key = zmq.curve_keypair()
    return CurveKeys(public_key.decode("ascii"), secret_key.decode("ascii"))


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
