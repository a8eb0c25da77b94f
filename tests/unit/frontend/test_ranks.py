"""Several cores behind one front end: each has its own slots, its own numbering and its own weights."""

import pytest

from trioengine.errors import EngineDeadError, RequestError
from trioengine.frontend.frontend import PendingCall
from trioengine.testing.frontend_driver import FrontendDriver
from trioengine.types.codec import encode_reply
from trioengine.types.messages import CoreLoad, GetLoad, ModelFacts, Ready, Reply, SchedulerStats
from trioengine.types.output import FinishReason

READY = Ready(ModelFacts(1000, 257, ()), 1, 1, {}, needs_lockstep=True)


def stats(*, waiting: int = 0, running: int = 0, kv_cache_usage: float = 0.0) -> SchedulerStats:
    return SchedulerStats(running, waiting, kv_cache_usage, 0, 0, 0, 0, 0, 0)


def test_requests_are_spread_and_slots_are_of_each_core() -> None:
    front = FrontendDriver(num_cores=3)
    requests = [front.add() for _ in range(6)]
    assert [(request.rank, request.slot) for request in requests] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    front.step((0, "b"), rank=1)
    front.step((0, "a"), rank=0)
    assert [request.read().outputs[0].text for request in requests] == ["a", "b", "", "", "", ""]
    front.frontend.abort_all()
    assert front.aborts() == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    for rank in range(3):
        front.finish(0, 1, rank=rank, reason=FinishReason.ABORT)
    assert front.frontend.num_reserved_slots == 0


def test_all_answers_of_a_request_are_computed_by_one_core() -> None:
    front = FrontendDriver(num_cores=2)
    requests = [front.add(n=3), front.add(), front.add()]
    assert [request.rank for request in requests] == [0, 1, 1]  # Three are on their way to the first.
    assert requests[0].slots == [0, 1, 2]


def test_what_a_core_says_of_itself_decides() -> None:
    front = FrontendDriver(num_cores=2)
    front.step(rank=0, stats=stats(waiting=2))
    front.step(rank=1, stats=stats(running=5))
    assert [front.add().rank for _ in range(4)] == [1, 1, 1, 0]
    front.step(rank=0, stats=stats())
    assert front.add().rank == 0


def test_ranks_and_sessions() -> None:
    front = FrontendDriver(num_cores=2)
    assert front.add(request={"data_parallel_rank": 1, "session_id": "s"}).rank == 1
    assert [front.add(request={"session_id": "s"}).rank for _ in range(5)] == [1] * 5
    with pytest.raises(RequestError) as caught:
        front.add(request={"data_parallel_rank": 2})
    assert caught.value.param == "data_parallel_rank"
    assert front.frontend.num_open_requests == front.frontend.num_queued_requests == 6


def test_all_cores_are_woken_only_where_they_compute_in_step() -> None:
    """All, the request's own too: see `core.lockstep`."""
    front = FrontendDriver(num_cores=3)
    assert list(front.add().added.wakes) == []
    for rank in range(3):
        front.frontend.set_ready(rank, READY)
    assert list(front.add(request={"data_parallel_rank": 1}).added.wakes) == [0, 1, 2]


def test_outputs_are_numbered_by_each_core() -> None:
    front = FrontendDriver(num_cores=2)
    requests = [front.add(), front.add()]
    for _ in range(3):
        front.step((0, "a"), rank=0)
    front.step((0, "b"), rank=1)
    assert front.frontend.dead_error is None
    front._sequences[1] += 1
    front.step((0, "b"), rank=1)
    assert isinstance(front.frontend.dead_error, EngineDeadError)
    assert all(isinstance(request.sink.error, EngineDeadError) for request in requests)


def test_weights_have_a_version_in_each_core() -> None:
    front = FrontendDriver(num_cores=2)
    requests = [front.add(), front.add()]
    front.step((0, "a"), rank=0)
    front.step((0, "a"), rank=1, weight_version="7")
    assert [request.read().weight_version for request in requests] == [None, "7"]
    later = [front.add(n=2), front.add()]
    front.step((1, "a"), (2, "a"), rank=0)
    front.step((1, "a"), (0, "a"), rank=1)
    assert [request.read().weight_version for request in later] == [None, "7"]
    assert requests[1].read().weight_version == "7"


def test_calls_are_answered_whatever_the_core() -> None:
    front = FrontendDriver(num_cores=2)
    values: list[object] = []
    errors: list[Exception] = []
    calls = [
        front.frontend.add_call(GetLoad(), PendingCall(GetLoad, values.append, errors.append), rank) for rank in (0, 1)
    ]
    for rank in (1, 0):
        load = CoreLoad(rank, 0, 0, 0)
        assert list(front.frontend.receive(rank, Reply(calls[rank].call_id, encode_reply(GetLoad, load)))) == []
    assert values == [CoreLoad(1, 0, 0, 0), CoreLoad(0, 0, 0, 0)]
    assert errors == []


def test_a_fault_in_the_text_at_an_abort_is_the_requests_own() -> None:
    front = FrontendDriver()
    broken, other = front.add(request={"request_id": "x"}), front.add(request={"request_id": "x"})
    broken.added.state.children[0]._detokenizer = object()  # type: ignore[attr-defined]
    front.frontend.abort("x")
    assert broken.sink.error is not None
    assert other.read().outputs[0].finish_reason is FinishReason.ABORT
    assert sorted(front.aborts()) == [(0, 0), (0, 1)]
    assert front.frontend.num_open_requests == 0
