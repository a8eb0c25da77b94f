"""What systemd and a service it has started tell each other: sockets, readiness, life (sd_notify(3)).

Where it did not start this process nothing is passed and nothing is sent.
"""

import contextlib
import socket
from collections.abc import Callable

import trio

from trioengine.config import env
from trioengine.server.listeners import inherited_listener

FIRST_PASSED_FD = 3
READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"


class ServiceManager:
    """systemd as the environment describes it, which is then cleared: children are no services of their own."""

    def __init__(self) -> None:
        self._address = env.notify_socket()
        self._watchdog_timeout_s = env.watchdog_timeout_s()
        self._num_sockets = env.num_passed_sockets()
        env.forget_service_manager()

    def take_listeners(self) -> list[socket.socket]:
        """The listening sockets of socket activation, which the caller closes. Call it once.

        Raises:
            ServerStartError: one is no stream socket.
        """
        return [inherited_listener(fd) for fd in range(FIRST_PASSED_FD, FIRST_PASSED_FD + self._num_sockets)]

    def notify(self, state: str) -> None:
        """Say this, if anybody wants to know and listens. Never waits."""
        if self._address is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.sendto(state.encode(), self._address)

    async def keep_alive(self, is_healthy: Callable[[], bool]) -> None:
        """Say twice in the watchdog's time that all is well, as long as it is. Returns at once where there is none."""
        if self._watchdog_timeout_s is None:
            return
        while True:
            if is_healthy():
                self.notify(ALIVE)
            await trio.sleep(self._watchdog_timeout_s / 2)
