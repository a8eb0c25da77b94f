"""The threads that compile: what one job does is never another's trouble."""

import threading
from collections.abc import Callable

import pytest

from trioengine.core.structured.compiler import MAX_NUM_STUCK, CompilerThreads, Job
from trioengine.errors import CheckpointError, RequestError, UnavailableError

PATIENCE_S = 30


class Woken:
    """Collects what `take_ended` returns, woken as the core's loop is."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.ended: list[Job[str, str]] = []

    def wait(self, threads: CompilerThreads[str, str], num_ended: int) -> list[Job[str, str]]:
        while len(self.ended) < num_ended:
            assert self.event.wait(PATIENCE_S)
            self.event.clear()
            self.ended += threads.take_ended()
        return self.ended


def make_threads(
    compile_key: Callable[[str], str], *, time_limit_s: float = PATIENCE_S, prepare: Callable[[], object] = lambda: None
) -> tuple[CompilerThreads[str, str], Woken]:
    woken = Woken()
    return CompilerThreads(compile_key, wake=woken.event.set, time_limit_s=time_limit_s, prepare=prepare), woken


def test_a_job_ends_with_what_was_compiled() -> None:
    threads, woken = make_threads(str.upper)
    job = threads.submit("a")
    assert woken.wait(threads, 1) == [job]
    assert (job.compiled, job.error) == ("A", None)
    assert threads.take_ended() == []
    threads.close()


def test_errors_are_the_jobs_own() -> None:
    class PanicException(BaseException):
        """What native code raises is no `Exception`."""

    def compile_key(key: str) -> str:
        match key:
            case "refused":
                raise RequestError("no", param="p")
            case "broken":
                raise PanicException("oh")
            case "deep":
                raise RecursionError
            case _:
                return key

    threads, woken = make_threads(compile_key)
    jobs = [threads.submit(key) for key in ("refused", "broken", "deep", "fine")]
    woken.wait(threads, 4)
    assert [type(job.error) for job in jobs] == [RequestError, RequestError, RequestError, type(None)]
    assert jobs[3].compiled == "fine"
    threads.close()


def test_a_preparation_that_fails_is_made_again_for_the_next_job() -> None:
    failures = [CheckpointError("damaged")]

    def prepare() -> None:
        if failures:
            raise failures.pop()

    threads, woken = make_threads(str, prepare=prepare)
    first = threads.submit("a")
    woken.wait(threads, 1)
    second = threads.submit("b")
    woken.wait(threads, 2)
    assert isinstance(first.error, CheckpointError)
    assert second.compiled == "b"
    threads.close()


def test_a_job_past_its_time_fails_and_blocks_nobody() -> None:
    release = threading.Event()

    stuck: list[threading.Thread] = []

    def compile_key(key: str) -> str:
        if key.startswith("slow"):
            stuck.append(threading.current_thread())
            assert release.wait(PATIENCE_S)
        return key

    threads, woken = make_threads(compile_key, time_limit_s=0.2)
    slow = [threads.submit(f"slow {index}") for index in range(MAX_NUM_STUCK)]
    woken.wait(threads, MAX_NUM_STUCK)
    assert all(isinstance(job.error, RequestError) and "0.2 s" in job.error.message for job in slow)
    with pytest.raises(UnavailableError):
        threads.submit("quick")
    release.set()
    for thread in stuck:
        thread.join(PATIENCE_S)
    quick = threads.submit("quick")
    woken.wait(threads, MAX_NUM_STUCK + 1)
    assert quick.compiled == "quick"
    assert all(job.compiled is None for job in slow)
    threads.close()


def test_a_job_that_nobody_wants_is_left_out() -> None:
    release, compiled = threading.Event(), list[str]()

    def compile_key(key: str) -> str:
        assert release.wait(PATIENCE_S)
        compiled.append(key)
        return key

    threads, woken = make_threads(compile_key)
    running = [threads.submit("a"), threads.submit("b")]
    unwanted, last = threads.submit("c"), threads.submit("d")
    unwanted.is_wanted = False
    release.set()
    woken.wait(threads, 3)
    assert sorted(compiled) == ["a", "b", "d"]
    assert {job.compiled for job in [*running, last]} == {"a", "b", "d"}
    threads.close()


def test_threads_end_when_closed() -> None:
    before = set(threading.enumerate())
    threads, woken = make_threads(str)
    threads.submit("a")
    woken.wait(threads, 1)
    own = set(threading.enumerate()) - before
    threads.close()
    threads.close()
    for thread in own:
        thread.join(PATIENCE_S)
    assert own
    assert not any(thread.is_alive() for thread in own)
