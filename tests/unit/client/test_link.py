"""What the link does by itself: deadlines, the log of statistics, and what it says when a core dies."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioengine.client.link import CoreLink, LinkClient
from trioengine.client.remote_core import ANSWER_TIMEOUT_S, RemoteCore
from trioengine.errors import DeadlineExceededError, EngineDeadError, EngineStartError
from trioengine.frontend.frontend import Frontend
from trioengine.observability.stats import IterationStats
from trioengine.testing.memory_link import MemoryRouter
from trioengine.testing.scripted_core import Script
from trioengine.testing.scripted_engine import FakeCoreHandle, ScriptedEngine, open_scripted_engine
from trioengine.transport.topology import core_identity
from trioengine.types.codec import error_to_data
from trioengine.types.messages import EngineDead, GetLoad
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.request import Deadlines, GenerateRequest

NEVER = Script(max_num_seqs=0, pace_s=0.25)
"""All requests wait."""
SLOW = Script(pace_s=10.0)


def request(**deadlines: float) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1000, output_kind=RequestOutputKind.DELTA)
    return GenerateRequest("abc", sampling, deadlines=Deadlines(**deadlines))


async def seconds_until_the_deadline(scripted: ScriptedEngine, wanted: GenerateRequest) -> float:
    """How long a request lives that a deadline ends. Its core knows nothing of it then."""
    started_s = trio.current_time()
    async with scripted.engine.generate(wanted) as stream:
        with pytest.raises(DeadlineExceededError):
            _ = [output async for output in stream]
        duration_s = trio.current_time() - started_s
    return duration_s


@pytest.mark.parametrize("name", ["total_s", "queue_s", "first_token_s"])
async def test_a_request_that_is_never_computed_ends_at_its_deadline(name: str, autojump_clock: MockClock) -> None:
    async with open_scripted_engine(NEVER) as scripted:
        assert await seconds_until_the_deadline(scripted, request(**{name: 5.0})) == pytest.approx(5.0)
        load = await scripted.engine.call(GetLoad())
        assert (load.running, load.waiting) == (0, 0)
        assert scripted.frontend.num_open_requests == 0


async def test_an_earlier_deadline_that_comes_later_is_kept(autojump_clock: MockClock) -> None:
    """The task that minds deadlines sleeps until the first one's, and is woken."""
    durations: list[float] = []

    async def ask(scripted: ScriptedEngine, deadline_s: float) -> None:
        durations.append(await seconds_until_the_deadline(scripted, request(total_s=deadline_s)))

    async with open_scripted_engine(NEVER) as scripted, trio.open_nursery() as nursery:
        for deadline_s in (100.0, 5.0, 50.0, 1.0):
            nursery.start_soon(ask, scripted, deadline_s)
            await wait_all_tasks_blocked()
    assert durations == pytest.approx([1.0, 5.0, 50.0, 100.0])


async def test_the_time_between_tokens_counts_from_the_newest(autojump_clock: MockClock) -> None:
    """A step takes 10 s, so 15 s are never over, and 3 s are after the first token."""
    async with open_scripted_engine(SLOW) as scripted:
        async with scripted.engine.generate(request(inter_token_s=15.0)) as stream:
            for _ in range(5):
                await anext(stream)
        started_s = trio.current_time()
        async with scripted.engine.generate(request(inter_token_s=3.0)) as stream:
            await anext(stream)
            first_s = trio.current_time()
            with pytest.raises(DeadlineExceededError, match="inter_token_s"):
                await anext(stream)
        assert first_s > started_s
        assert trio.current_time() - first_s == pytest.approx(3.0)


async def test_deadlines_that_are_kept_disturb_nobody(autojump_clock: MockClock) -> None:
    async with open_scripted_engine(Script(pace_s=0.1)) as scripted:
        wanted = GenerateRequest("abc", SamplingParams(max_tokens=6), deadlines=Deadlines(total_s=100.0, queue_s=1.0))
        async with scripted.engine.generate(wanted) as stream:
            assert [output async for output in stream][-1].outputs[0].text == "abcabc"
        await trio.sleep(1000.0)
        scripted.engine.check_health()
        assert scripted.frontend.next_deadline_s is None


class Logger:
    """Counts."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.times_logged_s: list[float] = []

    def record(self, stats: IterationStats) -> None:
        self.num_recorded += 1

    def log(self) -> None:
        self.times_logged_s.append(trio.current_time())

    def close(self) -> None:
        raise AssertionError("whoever opened it closes it")


async def test_statistics_are_logged_at_intervals_and_when_asked(autojump_clock: MockClock) -> None:
    logger = Logger()
    async with open_scripted_engine(stat_loggers=[logger]) as scripted:
        started_s = trio.current_time()
        async with scripted.engine.generate(GenerateRequest("abc", SamplingParams(max_tokens=3))) as stream:
            assert [output async for output in stream]
        assert logger.num_recorded > 0
        await trio.sleep(35.0)
        assert [time_s - started_s for time_s in logger.times_logged_s] == pytest.approx([10.0, 20.0, 30.0])
        scripted.engine.do_log_stats()
        assert len(logger.times_logged_s) == 4
        assert scripted.engine.stat_loggers == [logger]


async def test_the_cause_of_a_death_is_in_the_log_and_in_the_error(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The core's traceback; never in the error's message, which clients of a server may see."""
    error = EngineDeadError("The engine core died: ZeroDivisionError", cause="Traceback: in schedule()")
    async with open_scripted_engine(SLOW) as scripted, scripted.engine.generate(request()) as stream:
        scripted.send(EngineDead(error_to_data(error)))
        scripted.kill()
        with pytest.raises(EngineDeadError) as caught:
            _ = [output async for output in stream]
        assert caught.value.cause == "Traceback: in schedule()"
        assert "Traceback" not in str(caught.value)
        with pytest.raises(EngineDeadError) as refused:
            await scripted.engine.is_sleeping()
        assert refused.value.cause == caught.value.cause
    assert caplog.text.count("Traceback: in schedule()") == 1


async def test_a_remote_core_is_well_while_it_answers(autojump_clock: MockClock) -> None:
    """A step may take its time; an answer that is lost says that messages were."""
    core = RemoteCore(3, step_timeout_s=100.0)
    await trio.sleep(1000.0)
    assert core.trouble() is None  # It loads.
    core.note_ready()
    first, second, third = core.ask(), core.ask(), core.ask()
    await trio.sleep(100.0 + ANSWER_TIMEOUT_S)
    assert core.trouble() is None
    await trio.sleep(0.1)
    assert "rank 3 has not answered" in str(core.trouble())
    assert core.note_answer(first)
    assert core.trouble() is None
    assert core.note_answer(second)
    assert not core.note_answer(third + 1)
    core.note_gone()
    await core.wait()
    assert "no longer connected" in str(core.trouble())


async def test_a_core_that_cannot_be_understood_is_not_waited_for(autojump_clock: MockClock) -> None:
    """One of another version would be ready without anybody knowing."""
    router = MemoryRouter()
    link = CoreLink(router, {3: FakeCoreHandle()}, LinkClient(Frontend(clock=trio.current_time)))
    started_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        link.start(nursery)
        router.deliver([core_identity(3), b"ready, says another version"])
        with pytest.raises(EngineStartError, match=r"rank 3 .* another version"):
            await link.wait_ready(lambda _stage, _fraction: None, timeout_s=600)
        nursery.cancel_scope.cancel()
    assert trio.current_time() == started_s
