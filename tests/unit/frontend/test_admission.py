"""What may wait for its first output is limited, and counted exactly once each way."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import EngineDeadError, EngineGenerateError, UnavailableError
from trioengine.frontend.admission import AdmissionLimits
from trioengine.testing.frontend_driver import DrivenRequest, FrontendDriver
from trioengine.types.codec import error_to_data
from trioengine.types.messages import Finished
from trioengine.types.output import FinishReason


def test_ten_times_more_than_the_queue_takes() -> None:
    """Case 20 (vllm 2901): the others are refused at once, and told when to come again."""
    front = FrontendDriver(admission=AdmissionLimits(max_num_queued_reqs=10))
    taken: list[DrivenRequest] = []
    for _ in range(100):
        with contextlib.suppress(UnavailableError):
            taken.append(front.add())
    assert len(taken) == front.frontend.num_queued_requests == 10
    with pytest.raises(UnavailableError, match="10 requests wait") as caught:
        front.frontend.check_admission()
    assert caught.value.retry_after_s > 0
    assert caught.value.status == 503
    front.step((taken[3].slot, "x"), (taken[4].slot, "x"))
    front.frontend.check_admission(2)
    with pytest.raises(UnavailableError):
        front.frontend.check_admission(3)


def test_tokens_of_prompts_are_limited_too() -> None:
    front = FrontendDriver(admission=AdmissionLimits(max_num_queued_tokens=10))
    first, _ = front.add("x" * 6, n=2), front.add("x" * 4)
    front.frontend.check_admission(5, 0)
    with pytest.raises(UnavailableError, match="10 prompt tokens wait"):
        front.frontend.check_admission(1, 1)
    with pytest.raises(UnavailableError):
        front.add("x")
    front.step((first.slots[1], "x"))  # The prompt is computed.
    front.add("x" * 6)


def test_what_finds_nothing_waiting_is_taken_however_large() -> None:
    front = FrontendDriver(admission=AdmissionLimits(max_num_queued_reqs=1, max_num_queued_tokens=1))
    request = front.add("xxx", n=3)
    with pytest.raises(UnavailableError):
        front.frontend.check_admission()
    front.frontend.abort_all()
    front.frontend.check_admission(100, 100)
    assert not request.added.state.is_open


def test_no_limit() -> None:
    front = FrontendDriver()
    for _ in range(2000):
        front.add()
    front.frontend.check_admission(10**6, 10**9)


@given(st.data())
def test_each_is_freed_once_however_it_ends(data: st.DataObject) -> None:
    front = FrontendDriver()
    waiting: dict[int, DrivenRequest] = {}
    reserved: list[int] = []
    for _ in range(data.draw(st.integers(0, 20))):
        action = data.draw(st.sampled_from(["add", "row", "drop", "abort", "finish", "fail"]))
        if action == "add":
            request = front.add(request={"request_id": data.draw(st.sampled_from("ab"))}, max_tokens=900)
            waiting[request.slot] = request
            reserved.append(request.slot)
        elif action == "abort":
            front.frontend.abort("a")
            waiting = {s: r for s, r in waiting.items() if r.added.state.external_id != "a"}
        elif reserved:
            slot = data.draw(st.sampled_from(reserved))
            if action == "row":
                front.step((slot, "x"))
            elif action == "drop" and slot in waiting:
                front.frontend.drop(waiting[slot].added.state)
            elif action in ("finish", "fail"):
                error = error_to_data(EngineGenerateError("no")) if action == "fail" else None
                front.step(finished=[Finished(slot, FinishReason.ABORT, error=error)])
                reserved.remove(slot)
            else:
                continue
            waiting.pop(slot, None)
        assert front.frontend.num_queued_requests == len(waiting)
        assert front.frontend._queue.num_tokens == len(waiting)
    front.frontend.fail_all(EngineDeadError("gone"))
    assert front.frontend.num_queued_requests == front.frontend._queue.num_tokens == 0
    assert front.frontend.num_open_requests == 0
