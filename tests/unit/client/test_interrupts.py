"""Ctrl-C during blocking work: who hears of it, and when."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import trio

from trioengine.client.interrupts import Interrupts
from trioengine.errors import EngineClosedError


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def python_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    is_restored = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)
    assert is_restored


def test_it_is_raised_when_the_work_is_done() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with Interrupts():
            interrupt()
            done.append("work")
    assert done == ["work"]


def test_it_is_raised_where_work_allows_it_and_once() -> None:
    interrupts, done = Interrupts(), list[str]()
    with interrupts:
        with interrupts:
            interrupt()
            done.append("inner")
        done.append("outer")
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()
    assert done == ["inner", "outer"]


def test_a_wait_ends_at_once() -> None:
    interrupts = Interrupts()
    with interrupts:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
            with interrupts.waiting():
                interrupt()
                raise AssertionError("it went on")
        interrupt()
        with pytest.raises(KeyboardInterrupt):  # noqa: SIM117
            with interrupts.waiting():
                raise AssertionError("it waited")


def test_two_engines_do_not_forget_it() -> None:
    """Blocking work inside blocking work of another engine."""
    outer, inner = Interrupts(), Interrupts()
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with outer:
            with inner:
                interrupt()
            done.append("outer")
    assert done == ["outer"]


def test_a_process_that_ignores_it_goes_on_ignoring_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as interrupts:
        interrupt()
        interrupts.check()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


async def test_other_threads_change_nothing() -> None:
    def work() -> object:
        with Interrupts() as interrupts, interrupts.waiting():
            return signal.getsignal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    assert await trio.to_thread.run_sync(work) is handler


def test_threads_take_turns() -> None:
    """However often each has entered; who waits is not in the way of Ctrl-C."""
    interrupts, done = Interrupts(), list[int]()

    def work() -> None:
        with interrupts:
            for number in range(100):
                with interrupts:
                    done.append(number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with interrupts:
            for thread in threads:
                thread.start()
            interrupt()
            work()
            assert done == [*range(100)]
    for thread in threads:
        thread.join()
    assert done == [*range(100)] * 5


async def test_who_closes_makes_another_thread_leave() -> None:
    interrupts, is_inside, done = Interrupts(), threading.Event(), list[str]()

    def work() -> None:
        with pytest.raises(EngineClosedError), interrupts:  # noqa: PT012
            is_inside.set()
            while True:
                interrupts.check()
                done.append("work")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, work)
        await trio.to_thread.run_sync(is_inside.wait)
        with interrupts.last():
            num_done = len(done)
        assert len(done) == num_done
