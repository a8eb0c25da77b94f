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
from collections.abc import Callable
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
from trioengine.transport.zmq_blocking import BlockingSocket, Waker
from trioengine.types.codec import encode, error_to_data
from trioengine.types.messages import EngineDead, FromCore, Ready, Starting

logger = logging.getLogger(__name__)

TICK_INTERVAL_S = 0.2
LAST_WORDS_TIMEOUT_S = 2.0

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
    launch_fd = int(sys.argv[1])
    try:
        launch = read_launch(launch_fd)
    except EOFError:
        return 1
    page = StatusPage(launch.page_fd)
    threading.Thread(target=_watch, args=(launch_fd, page, launch.endpoint), name="watch", daemon=True).start()
    socket = connect_dealer(launch.endpoint, launch.rank)
    try:
        return _run(build, launch, socket, page)
    finally:
        socket.close()


def _run(build: BuildCore, launch: CoreLaunch, socket: BlockingSocket, page: StatusPage) -> int:
    def send(message: FromCore) -> None:
        socket.try_send((encode(message),))

    def report(stage: str, fraction: float) -> None:
        nonlocal reported
        if stage != reported.stage or fraction - reported.fraction >= 0.05 or fraction == 1.0:
            reported = Starting(stage, fraction)
            send(reported)

    reported = Starting("starting", 0.0)
    try:
        built = build(launch, report)
    except Exception as error:  # The border of the process: the parent is told, and raises it.
        if not isinstance(error, TrioEngineError):
            # The parent tells its caller in one line. Where in the code it happened, only this log says.
            logger.exception("The engine core could not start.")
            error = EngineStartError(f"The engine core could not start: {type(error).__name__}: {error}")
        _say_last_words(socket, error)
        return 1
    try:
        tune_garbage_collector()
        send(built.ready)
        run_step_loop(built.core, [socket], page, built.waker)
    except Exception as error:  # The border of the process, as above.
        message = f"The engine core died: {type(error).__name__}: {error}"
        logger.exception("The engine core died.")
        _say_last_words(socket, EngineDeadError(message, cause=traceback.format_exc()))
        return 1
    finally:
        built.close()
    return 0


def _say_last_words(socket: BlockingSocket, error: TrioEngineError) -> None:
    """Tell the front end why this process ends, waiting a moment for it to listen."""
    socket.try_send((encode(EngineDead(error_to_data(error))),))
    socket.close(linger_s=LAST_WORDS_TIMEOUT_S)


def _watch(launch_fd: int, page: StatusPage, endpoint: Endpoint) -> None:
    """Tick until the parent is gone, then end the process, whatever its other threads do."""
    poller = select.poll()
    poller.register(launch_fd, select.POLLIN | select.POLLHUP)
    page.tick()
    while not poller.poll(TICK_INTERVAL_S * 1000):
        page.tick()
    # The parent writes nothing after the launch, so this is the end of the pipe. It may have had no time to clean up.
    endpoint.remove()
    os._exit(1)


if __name__ == "__main__":
    from trioengine.runtime.build import build_launched_core

    sys.exit(main(build_launched_core))
