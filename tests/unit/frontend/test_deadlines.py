"""A request whose time is over ends alone, after its output; a token costs the deadlines nothing."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioengine.errors import DeadlineExceededError
from trioengine.testing.frontend_driver import DrivenRequest, FrontendDriver
from trioengine.types.codec import error_to_data
from trioengine.types.messages import Finished
from trioengine.types.output import FinishReason
from trioengine.types.request import Deadlines


def add(front: FrontendDriver, *, waited_s: float = 0.0, n: int = 1, **deadlines: float) -> DrivenRequest:
    return front.add(n=n, waited_s=waited_s, max_tokens=900, request={"deadlines": Deadlines(**deadlines)})


def test_without_deadlines_nothing_expires() -> None:
    front = FrontendDriver()
    request = add(front)
    assert front.frontend.next_deadline_s is None
    front.expire_at(1e9)
    assert request.sink.error is None


@pytest.mark.parametrize("name", ["total_s", "first_token_s"])
def test_a_deadline_without_a_token(name: str) -> None:
    front = FrontendDriver()
    request, other = add(front, **{name: 5.0}), add(front, total_s=7.0)
    assert front.frontend.next_deadline_s == 5.0
    front.expire_at(4.9)
    assert request.sink.error is None
    front.expire_at(5.0)
    assert isinstance(request.sink.error, DeadlineExceededError)
    assert f"deadlines.{name} is 5" in str(request.sink.error)
    assert other.sink.error is None
    assert front.aborts() == [(0, request.slot)]
    assert front.frontend.num_open_requests == 1
    assert front.frontend.next_deadline_s == 7.0


def test_output_that_waits_comes_before_the_error() -> None:
    front = FrontendDriver()
    request = front.add(stop="xyz", request={"deadlines": Deadlines(total_s=5.0)})
    front.step((request.slot, "abx"))
    front.expire_at(5.0)
    assert isinstance(request.sink.error, DeadlineExceededError)
    assert request.read().outputs[0].text == "abx"


def test_a_first_token_ends_that_deadline_and_starts_the_next() -> None:
    front = FrontendDriver()
    request = add(front, first_token_s=100.0, inter_token_s=2.0)
    assert front.frontend.next_deadline_s == 100.0
    front.now_s = 50.0
    front.step((request.slot, "a"))
    assert front.frontend.next_deadline_s == 52.0
    for now_s in (51.0, 52.5, 53.5):
        front.now_s = now_s
        front.step((request.slot, "a"))
        front.frontend.expire(now_s)
        assert request.sink.error is None
    front.expire_at(55.4)
    assert request.sink.error is None
    front.expire_at(55.5)
    assert "inter_token_s" in str(request.sink.error)


def test_tokens_do_not_touch_the_heap() -> None:
    front = FrontendDriver()
    request = add(front, inter_token_s=2.0, total_s=1e6)
    front.step((request.slot, "a"))
    heap = front.frontend._deadlines._heap
    before = list(heap)
    for now_s in range(1000):
        front.now_s = float(now_s)
        front.step((request.slot, "a" if now_s < 800 else "ab"))
    assert heap == before


def test_entries_of_requests_that_have_ended_do_not_pile_up() -> None:
    front = FrontendDriver()
    last = add(front, total_s=1e9)
    for _ in range(1000):
        request = add(front, total_s=1e6)
        front.step((request.slot, "a"), finished=[Finished(request.slot, FinishReason.LENGTH)])
    assert len(front.frontend._deadlines._heap) < 100
    assert front.frontend.next_deadline_s == 1e9
    front.finish(last.slot)
    assert front.frontend._deadlines._heap == []
    assert front.frontend.next_deadline_s is None


def test_what_a_request_waited_here_counts() -> None:
    front = FrontendDriver()
    front.now_s = 100.0
    add(front, waited_s=2.0, total_s=5.0)
    assert front.frontend.next_deadline_s == 103.0
    with pytest.raises(DeadlineExceededError, match=r"before it was sent: deadlines\.total_s is 2\."):
        add(front, waited_s=2.0, total_s=2.0, queue_s=3.0)
    assert front.frontend.num_open_requests == 1


@pytest.mark.parametrize(
    ("deadlines", "timeout_s"),
    [
        ({}, None),
        ({"queue_s": 5.0}, 4.0),
        ({"queue_s": 5.0, "first_token_s": 4.0, "total_s": 3.0}, 2.0),
        ({"total_s": 9.0, "queue_s": 8.0}, 7.0),
        ({"inter_token_s": 3.0}, None),
    ],
)
def test_the_core_drops_what_it_could_not_begin_in_time(deadlines: Any, timeout_s: float | None) -> None:
    """Case 20 (vllm 2901): the queue's deadline is the core's to keep, as only it knows when it begins."""
    front = FrontendDriver()
    request = add(front, waited_s=1.0, n=2, **deadlines)
    assert [message.queue_timeout_s for message in request.messages] == [timeout_s] * 2
    if deadlines.keys() == {"queue_s"}:
        assert front.frontend.next_deadline_s is None


def test_a_deadline_of_one_answer_ends_all() -> None:
    front = FrontendDriver()
    request = add(front, n=3, inter_token_s=2.0, first_token_s=10.0)
    a, b, c = request.slots
    front.step((a, "1"), (b, "1"))
    front.now_s = 1.0
    front.step((a, "2"))
    front.expire_at(1.9)
    assert request.sink.error is None
    front.expire_at(2.0)  # The second answer's.
    assert isinstance(request.sink.error, DeadlineExceededError)
    assert sorted(front.aborts()) == [(0, a), (0, b), (0, c)]
    front.finish(a, b, c)
    assert front.frontend.num_reserved_slots == 0


def test_an_answer_that_has_ended_has_no_deadline() -> None:
    front = FrontendDriver()
    request = add(front, n=2, inter_token_s=2.0)
    a, b = request.slots
    front.step((a, "1"), (b, "1"), finished=[Finished(a, FinishReason.LENGTH)])
    front.now_s = 1.5
    front.step((b, "2"))
    front.expire_at(3.0)
    assert request.sink.error is None
    front.expire_at(3.5)
    assert isinstance(request.sink.error, DeadlineExceededError)
    assert front.aborts() == [(0, b)]


@settings(max_examples=40)
@given(st.data())
def test_each_expires_exactly_when_its_time_is_over(data: st.DataObject) -> None:
    """Against a model that looks at every request at every moment."""
    front = FrontendDriver()
    limits = st.none() | st.integers(1, 8).map(float)
    live: dict[int, tuple[DrivenRequest, Deadlines, float, float | None]] = {}
    for now in range(data.draw(st.integers(1, 30))):
        front.now_s = float(now)
        if data.draw(st.booleans()):
            deadlines = Deadlines(
                total_s=data.draw(limits), first_token_s=data.draw(limits), inter_token_s=data.draw(limits)
            )
            request = front.add(max_tokens=900, request={"deadlines": deadlines})
            live[request.slot] = (request, deadlines, front.now_s, None)
        for slot in data.draw(st.sets(st.sampled_from(sorted(live))) if live else st.just(set[int]())):
            request, deadlines, arrival_s, _ = live[slot]
            front.step((slot, "a"))
            live[slot] = (request, deadlines, arrival_s, front.now_s)
        due: set[int] = set()
        times: list[float] = []
        for slot, (_, deadlines, arrival_s, last_s) in live.items():
            ends = [arrival_s + deadlines.total_s] if deadlines.total_s else []
            if last_s is None and deadlines.first_token_s:
                ends.append(arrival_s + deadlines.first_token_s)
            if last_s is not None and deadlines.inter_token_s:
                ends.append(last_s + deadlines.inter_token_s)
            if ends and min(ends) <= now:
                due.add(slot)
            times += ends
        next_s = front.frontend.next_deadline_s
        assert not times or (next_s is not None and next_s <= min(times))
        front.frontend.expire(front.now_s)
        assert {slot for slot, (request, *_) in live.items() if request.sink.error is not None} == due
        assert {slot for _, slot in front.aborts()} == due
        front.finish(*due, reason=FinishReason.ABORT)
        for slot in due:
            del live[slot]


def test_what_the_core_drops_ends_with_the_callers_deadline() -> None:
    """The core knows how long it waited only."""
    front = FrontendDriver()
    request = add(front, queue_s=9.0, total_s=5.0)
    error = error_to_data(DeadlineExceededError("The request waited for 5 s."))
    front.step(finished=[Finished(request.slot, FinishReason.ABORT, error=error)])
    assert str(request.sink.error) == "The request's deadline has passed before it was begun: deadlines.total_s is 5."
