"""The shared page: what the parent concludes from a few numbers."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from trioengine.runtime import status_page
from trioengine.runtime.status_page import MAX_TICK_AGE_S, StatusPage


class Clock:
    """The monotonic clock of the module under test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(status_page.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def page(clock: Clock) -> Iterator[StatusPage]:
    page = StatusPage.create()
    yield page
    page.close()


def test_a_new_page_is_well(page: StatusPage) -> None:
    """The core has as long to come up as it may be silent."""
    assert page.trouble(step_timeout_s=1.0) is None


def test_without_a_tick_the_core_is_in_trouble_until_it_ticks_again(page: StatusPage, clock: Clock) -> None:
    """Case 10 (vllm 39863)."""
    clock.now += MAX_TICK_AGE_S
    assert page.trouble(step_timeout_s=1.0) is None
    clock.now += 0.5
    assert "5.5 s" in str(page.trouble(step_timeout_s=1.0))
    page.tick()
    assert page.trouble(step_timeout_s=1.0) is None


def test_a_step_that_takes_too_long_is_trouble_until_it_ends(page: StatusPage, clock: Clock) -> None:
    page.begin_step()
    clock.now += 4.0
    page.tick()
    assert page.trouble(step_timeout_s=4.0) is None
    assert "step_timeout_s is 3" in str(page.trouble(step_timeout_s=3.0))
    page.end_step()
    assert page.trouble(step_timeout_s=3.0) is None


def test_a_core_without_work_may_wait_for_ever(page: StatusPage, clock: Clock) -> None:
    page.begin_step()
    page.end_step()
    clock.now += 1e6
    page.tick()
    assert page.trouble(step_timeout_s=1.0) is None


def test_what_one_process_writes_another_reads(page: StatusPage, clock: Clock) -> None:
    """Mapped twice, as in two processes."""
    core = StatusPage(os.dup(page.fd))
    clock.now += 100
    assert page.trouble(step_timeout_s=1.0) is not None
    core.tick()
    assert page.trouble(step_timeout_s=1.0) is None
    core.close()


def test_what_is_written_is_never_seen_half() -> None:
    """A look at a number that is just written, which has cleared it first, was a core without life since the boot."""
    page = StatusPage.create()
    code = """if True:
        import sys
        from trioengine.runtime.status_page import StatusPage
        page = StatusPage(int(sys.argv[1]))
        print(flush=True)
        while True:
            page.tick()
    """
    command = [sys.executable, "-P", "-c", code, str(page.fd)]
    with subprocess.Popen(command, pass_fds=(page.fd,), stdout=subprocess.PIPE) as core:
        assert core.stdout is not None
        assert core.stdout.readline() == b"\n"
        troubles = {page.trouble(step_timeout_s=1.0) for _ in range(300_000)}
        core.kill()
    page.close()
    assert troubles == {None}


def test_closing_gives_memory_and_descriptor_back() -> None:
    page = StatusPage.create()
    page.close()
    page.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(page.fd)


def test_without_memfd_there_is_a_page_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    page = StatusPage.create()
    try:
        assert page.trouble(step_timeout_s=1.0) is None
        assert os.fstat(page.fd).st_size > 0
    finally:
        page.close()
