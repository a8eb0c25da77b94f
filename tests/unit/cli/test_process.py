"""Which signals stop a command, and which hasten its end."""

import os
import signal
from collections.abc import Generator, Sequence

import pytest
import trio
import trio.testing

from trioengine.cli.process import watch_stop_signals


@pytest.fixture
def nohup() -> Generator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


async def heard(*sent: signal.Signals) -> Sequence[str]:
    calls: list[str] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(watch_stop_signals, lambda: calls.append("first"), lambda: calls.append("second"))
        for stop_signal in sent:
            os.kill(os.getpid(), stop_signal)
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return calls


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_second_signal_hastens_the_end(first: signal.Signals) -> None:
    assert await heard(first) == ["first"]
    assert await heard(first, signal.SIGTERM, signal.SIGINT) == ["first", "second", "second"]


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
async def test_a_terminal_that_is_closed_hastens_nothing(first: signal.Signals) -> None:
    """Its shell and the kernel send one each, and systemd (SendSIGHUP) one behind SIGTERM."""
    assert await heard(first, signal.SIGHUP, signal.SIGHUP) == ["first"]


@pytest.mark.usefixtures("nohup")
async def test_below_nohup_a_closed_terminal_is_nothing() -> None:
    assert await heard(signal.SIGHUP) == []
    assert await heard(signal.SIGTERM, signal.SIGINT) == ["first", "second"]
