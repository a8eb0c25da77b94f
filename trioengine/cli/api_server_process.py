"""One of several API-server processes, and how its supervisor talks with it.

They share one socket pair. Down it go the launch and the word to drain; up come the report that it serves and the
error that ended it. When the supervisor closes its end, or is gone, the process ends at once.
"""

import json
import logging
import shutil
import socket
import sys
from collections.abc import Sequence

import attrs
import trio

from trioengine.cli.api_server import ApiServer, Serving, import_server
from trioengine.cli.main import EXIT_FAILURE, single
from trioengine.cli.process import leave_signals_to_parent
from trioengine.client.cores import Attachment
from trioengine.client.engine import attach_engine
from trioengine.config import ServerConfig, env
from trioengine.config.options import from_dict
from trioengine.errors import TrioEngineError
from trioengine.server.listeners import inherited_listener
from trioengine.types.codec import decode, encode, error_from_data, error_to_data, pack, unpack
from trioengine.types.messages import EngineDead

DRAIN = b"D"
_LENGTH_BYTES = 4


@attrs.frozen
class ApiServerLaunch:
    """What an API-server process starts from. Secret: it holds the API keys."""

    index: int
    config: ServerConfig
    listener_fds: Sequence[int]
    attachment: bytes

    def to_bytes(self) -> bytes:
        """The message, its length before it."""
        config = json.dumps(attrs.asdict(self.config))
        return _with_length(pack([self.index, config, list(self.listener_fds), self.attachment]))

    @classmethod
    def from_bytes(cls, data: bytes) -> "ApiServerLaunch":
        """What `to_bytes` was called on, from what follows the length."""
        index, config, listener_fds, attachment = unpack(data)
        return cls(index, from_dict(ServerConfig, json.loads(config)), listener_fds, attachment)


def main(words: Sequence[str]) -> int:
    """Serve as the supervisor at the other end of descriptor `words[0]` says; the exit status."""
    leave_signals_to_parent()
    logging.basicConfig(
        level=env.log_level().upper(), format="%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s"
    )
    with socket.socket(fileno=int(words[0])) as supervisor:
        supervisor.set_inheritable(False)
        try:
            trio.run(_run, supervisor)
        except BaseException as raised:  # A border: the supervisor tells the user what we know, the rest goes on.
            error = single(raised)
            if not isinstance(error, TrioEngineError):
                raise
            supervisor.setblocking(True)
            supervisor.sendall(report_of(error))
            return EXIT_FAILURE
    return 0


def read_report(data: bytes) -> Serving | TrioEngineError:
    """What a process has said: that it serves, or why it has ended."""
    model_name, urls, error = unpack(data)
    if error is None:
        return Serving(model_name, urls)
    message = decode(error)
    assert isinstance(message, EngineDead)
    return error_from_data(message.error)


async def receive_message(stream: trio.abc.ReceiveStream) -> bytes | None:
    """The next message; None when the other process is gone."""
    header = await _receive_exactly(stream, _LENGTH_BYTES)
    return None if header is None else await _receive_exactly(stream, int.from_bytes(header, "big"))


def report_of(outcome: Serving | TrioEngineError) -> bytes:
    """What `read_report` reads, its length before it."""
    if isinstance(outcome, Serving):
        return _with_length(pack([outcome.model_name, list(outcome.urls), None]))
    return _with_length(pack([None, None, encode(EngineDead(error_to_data(outcome)))]))


def _with_length(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def _receive_exactly(stream: trio.abc.ReceiveStream, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            part = await stream.receive_some(num_bytes - len(data))
        except trio.BrokenResourceError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


async def _run(supervisor: socket.socket) -> None:
    # A copy: trio closes it with the stream, and the error is still to be told.
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(supervisor.dup()))
    data = await receive_message(stream)
    if data is None:
        return
    launch = ApiServerLaunch.from_bytes(data)
    listeners = [inherited_listener(fd) for fd in launch.listener_fds]
    # The engine is one, so that its adapters are loaded once.
    server = ApiServer(launch.config if launch.index == 0 else attrs.evolve(launch.config, lora_modules=()))
    attachment = Attachment.from_bytes(launch.attachment)
    is_orphan = False

    async def obey() -> None:
        nonlocal is_orphan
        while await _receive_exactly(stream, len(DRAIN)) == DRAIN:
            server.drain()
        is_orphan = True
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(obey)
        nursery.start_soon(trio.to_thread.run_sync, import_server)

        def report(serving: Serving) -> None:
            supervisor.sendall(report_of(serving))  # Small, and nothing else is under way: it never blocks.

        async with attach_engine(attachment, api_server=launch.index) as engine:
            await server.run(engine, listeners, report)
        nursery.cancel_scope.cancel()
    if is_orphan:
        # The supervisor may have had no time to clean up.
        shutil.rmtree(attachment.metrics_folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
