"""Whose turn it is to send, of an HTTP/2 connection's streams."""

import priority
import pytest

from trioengine.server.http2 import StreamTurns


def test_streams_take_turns() -> None:
    turns = StreamTurns()
    for stream_id in (1, 3, 5):
        turns.insert_stream(stream_id)
    assert [next(turns) for _ in range(6)] == [1, 3, 5, 1, 3, 5]
    turns.block(3)
    assert [next(turns) for _ in range(4)] == [1, 5, 1, 5]
    turns.unblock(3)
    turns.unblock(3)
    assert [next(turns) for _ in range(3)] == [1, 5, 3]
    turns.remove_stream(1)
    assert [next(turns) for _ in range(3)] == [5, 3, 5]


def test_new_streams_with_short_answers_do_not_keep_one_waiting() -> None:
    """h2load with ten streams on a connection: one of the first took as long as all 2000 together."""
    turns = StreamTurns()
    turns.insert_stream(1)
    served: list[int] = []
    for stream_id in range(3, 43, 2):
        turns.insert_stream(stream_id)
        served.append(next(turns))
        if served[-1] != 1:
            turns.remove_stream(served[-1])
    assert served.count(1) >= 5


def test_without_a_stream_there_is_no_turn() -> None:
    turns = StreamTurns()
    with pytest.raises(priority.DeadlockError):
        next(turns)
    with pytest.raises(priority.MissingStreamError):
        turns.unblock(1)
    turns.insert_stream(1)
    turns.block(1)
    with pytest.raises(priority.DeadlockError):
        next(turns)
    turns.reprioritize(stream_id=9, depends_on=None, weight=1, exclusive=False)
    turns.remove_stream(1)
    with pytest.raises(priority.MissingStreamError):
        turns.unblock(1)
