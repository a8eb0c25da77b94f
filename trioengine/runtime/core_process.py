"""Entry of an engine core process: `python -P -m trioengine.runtime.core_process LAUNCH_FD`.

It reads its `CoreLaunch`, loads the model while it reports progress, says `Ready` and runs the step loop. A daemon
thread beside it ticks, and ends the process when the parent is gone, also in the middle of a step.
"""

import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs

from trioengine.config import env
from trioengine.errors import EngineDeadError, EngineStartError, TrioEngineError
from trioengine.runtime.collector import tune_garbage_collector
from trioengine.runtime.launch import CoreLaunch, read_launch
from trioengine.runtime.status_page import StatusPage
from trioengine.runtime.step_loop import Core, run_step_loop
from trioengine.transport.address import Endpoint
from trioengine.transport.topology import connect_dealer
from trioengine.transport.zmq_blocking import BlockingSocket, Waker, poll
from trioengine.types.codec import encode, error_to_data
from trioengine.types.messages import EngineDead, FromCore, Ready, Starting

logger = logging.getLogger(__name__)

TICK_INTERVAL_S = 0.2
LAST_WORDS_TIMEOUT_S = 2.0

_REFUSED = "The engine has refused the connection. Are the address and the key file those of the engine?"

ReportProgress: TypeAlias = Callable[[str, float], None]


@attrs.frozen
class BuiltCore:
    """A core that can run, and what its front ends must know."""

    core: Core
    ready: Ready
    close: Callable[[], None]
    waker: Waker | None = None
    """Ends the loop's wait when the core's `poll` has something to look for."""


BuildCore: TypeAlias = Callable[[CoreLaunch, ReportProgress], BuiltCore]


def main(build: BuildCore) -> int:
    """Run a core process made by `build`; its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it tells this process what to do.
    logging.basicConfig(level=env.log_level().upper(), format="%(asctime)s %(levelname)s core: %(message)s")
    launch_fd, parent_pid = int(sys.argv[1]), os.getppid()
    try:
        launch = read_launch(launch_fd)
    except EOFError:
        return 1
    page = StatusPage(launch.page_fd)
    watched = (launch_fd, parent_pid, page, launch.endpoints)
    threading.Thread(target=_watch, args=watched, name="watch", daemon=True).start()
    return run_core(build, launch, page)


def run_core(build: BuildCore, launch: CoreLaunch, page: StatusPage) -> int:
    """Build a core and serve its front ends until the first of them says `Stop`, or is gone; the exit status."""
    sockets = [connect_dealer(endpoint, launch.rank) for endpoint in launch.endpoints]
    try:
        return _run(build, launch, sockets, page)
    finally:
        for socket in sockets:
            socket.close()


def _run(build: BuildCore, launch: CoreLaunch, sockets: Sequence[BlockingSocket], page: StatusPage) -> int:
    owner = sockets[0]

    def report(stage: str, fraction: float) -> None:
        nonlocal reported
        if stage != reported.stage or fraction - reported.fraction >= 0.05 or fraction == 1.0:
            reported = Starting(stage, fraction)
            owner.try_send((encode(reported),))

    reported = Starting("starting", 0.0)
    try:
        built = build(launch, report)
    except Exception as error:  # The border of the process: the parent is told, and raises it.
        if not isinstance(error, TrioEngineError):
            # The parent tells its caller in one line. Where in the code it happened, only this log says.
            logger.exception("The engine core could not start.")
            error = EngineStartError(f"The engine core could not start: {type(error).__name__}: {error}")
        _say_last_words(sockets, error)
        return 1
    try:
        tune_garbage_collector()
        for socket in sockets:
            _send_surely(socket, built.ready)
        if not run_step_loop(built.core, sockets, page, built.waker):
            logger.error("%s", _REFUSED if owner.is_refused else "The engine is gone.")
            # The thread that watches for that may come too late.
            _remove(launch.endpoints)
            return 1
    except Exception as error:  # The border of the process, as above.
        message = f"The engine core died: {type(error).__name__}: {error}"
        logger.exception("The engine core died.")
        _say_last_words(sockets, EngineDeadError(message, cause=traceback.format_exc()))
        return 1
    finally:
        built.close()
    return 0


def _send_surely(socket: BlockingSocket, message: FromCore) -> None:
    """Send, waiting while the front end has not read the reports of how loading went."""
    data = encode(message)
    while not (socket.try_send((data,)) or socket.is_peer_gone):
        poll((), full=[socket])


def _say_last_words(sockets: Sequence[BlockingSocket], error: TrioEngineError) -> None:
    """Tell the front ends why this process ends, waiting a moment for them to listen."""
    for socket in sockets:
        socket.try_send((encode(EngineDead(error_to_data(error))),))
    for socket in sockets:
        socket.close(linger_s=LAST_WORDS_TIMEOUT_S)


def _watch(launch_fd: int, parent_pid: int, page: StatusPage, endpoints: Sequence[Endpoint]) -> None:
    """Tick until the parent is gone, then end the process, whatever its other threads do."""
    poller = select.poll()
    poller.register(launch_fd, select.POLLIN | select.POLLHUP)
    page.tick()
    # A process that the parent has forked may keep the pipe open, and the connection, too.
    while not poller.poll(TICK_INTERVAL_S * 1000) and os.getppid() == parent_pid:
        page.tick()
    # The parent writes nothing after the launch, so this is the end of the pipe.
    _remove(endpoints)
    os._exit(1)


def _remove(endpoints: Sequence[Endpoint]) -> None:
    """After the owner has gone: it may have had no time to clean up."""
    for endpoint in endpoints:
        endpoint.remove()


if __name__ == "__main__":
    from trioengine.runtime.build import build_launched_core

    sys.exit(main(build_launched_core))
