"""The order of requests: by priority, then by arrival, wherever they come from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.config.engine import SchedulingPolicy
from trioengine.core.request import Request, make_request
from trioengine.core.request_queue import RequestQueue, insert_in_order
from trioengine.testing.core_driver import make_core_config, make_core_request

CONFIG = make_core_config(scheduling_policy=SchedulingPolicy.PRIORITY)


def request(priority: int, arrival: int) -> Request:
    return make_request(0, make_core_request(priority=priority), arrival, CONFIG)


@given(priorities=st.lists(st.integers(-2, 2), max_size=12), data=st.data())
def test_whatever_comes_and_goes_the_rest_is_in_order(priorities: list[int], data: st.DataObject) -> None:
    requests = [request(priority, arrival) for arrival, priority in enumerate(priorities)]
    queue, others = RequestQueue(), list[Request]()
    for each in data.draw(st.permutations(requests)):
        queue.add(each)
        insert_in_order(others, each)
    left = [each for each in requests if data.draw(st.booleans())]
    for each in left:
        queue.remove(each)
    expected = sorted(requests, key=lambda each: (each.priority, each.sequence_id))
    assert others == expected
    assert list(queue) == [each for each in expected if each not in left]
    assert len(queue) == len(requests) - len(left)
    assert [queue[position] for position in range(len(queue))] == list(queue)


def test_one_that_is_not_there_cannot_be_taken_out() -> None:
    queue = RequestQueue()
    queue.add(request(0, 1))
    with pytest.raises((AssertionError, IndexError)):
        queue.remove(request(0, 0))
