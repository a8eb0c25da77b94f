"""What systemd passes and hears, with a socket in its place."""

import os
import socket
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from trioengine.cli import systemd
from trioengine.cli.systemd import ALIVE, READY, ServiceManager
from trioengine.config import env

VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")


@pytest.fixture(autouse=True)
def _no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        # Set first, so that what the code removes is restored.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield sock


def test_it_hears_what_is_said(listening: socket.socket) -> None:
    manager = ServiceManager()
    manager.notify(READY)
    assert listening.recv(100) == b"READY=1"
    listening.close()
    manager.notify(READY)


def test_an_abstract_address_begins_with_a_zero_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "@somewhere")
    assert env.notify_socket() == "\0somewhere"
    monkeypatch.setenv("NOTIFY_SOCKET", "nowhere")
    assert env.notify_socket() is None


async def test_without_it_nothing_happens() -> None:
    manager = ServiceManager()
    manager.notify(READY)
    assert manager.take_listeners() == []
    assert await manager.keep_alive(lambda: True) is None


def test_passed_sockets_are_taken_and_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        passed = os.dup(listener.fileno())
        monkeypatch.setattr(systemd, "FIRST_PASSED_FD", passed)
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        [taken] = ServiceManager().take_listeners()
        with taken:
            assert taken.getsockname() == listener.getsockname()
            assert not os.get_inheritable(taken.fileno())
    assert not any(name in os.environ for name in VARIABLES)
    assert ServiceManager().take_listeners() == []


def test_sockets_of_another_process_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert ServiceManager().take_listeners() == []


async def test_the_watchdog_hears_twice_in_its_time_and_only_of_health(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    is_healthy = True
    manager = ServiceManager()
    with trio.move_on_after(9.5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.keep_alive, lambda: is_healthy)
            await trio.sleep(4.5)
            is_healthy = False
    heard = [listening.recv(100) for _ in range(5)]
    assert heard == [ALIVE.encode()] * 5
    with pytest.raises(BlockingIOError):
        listening.recv(100)
