"""Which core computes a request: the one it names, its session's, or the least loaded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import RequestError
from trioengine.frontend.load_balancer import LoadBalancer, RankLoad

LOADS = st.lists(
    st.builds(
        RankLoad,
        waiting=st.integers(0, 5),
        running=st.integers(0, 5),
        in_flight=st.integers(0, 5),
        kv_cache_usage=st.sampled_from([0.0, 0.5, 1.0]),
    ),
    min_size=1,
    max_size=5,
)


@given(LOADS, st.data())
def test_the_rank_that_a_request_names_is_taken(loads: list[RankLoad], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(loads) - 1))
    balancer = LoadBalancer()
    assert balancer.choose(loads, rank=rank) == rank
    assert balancer.choose(loads, rank=rank, session_id="a") == rank
    assert balancer.choose(loads, session_id="a") == rank  # From now on it is the session's.


@pytest.mark.parametrize("rank", [-1, 2, 100])
def test_a_rank_that_is_none_is_refused_and_remembered_by_no_session(rank: int) -> None:
    balancer = LoadBalancer()
    with pytest.raises(RequestError, match="0 to 1") as caught:
        balancer.choose([RankLoad()] * 2, rank=rank, session_id="a")
    assert caught.value.param == "data_parallel_rank"
    assert balancer.num_sessions == 0


@given(LOADS)
def test_no_core_is_chosen_that_has_more_of_everything_than_another(loads: list[RankLoad]) -> None:
    chosen = loads[LoadBalancer().choose(loads)]
    for other in loads:
        assert not (
            other.waiting < chosen.waiting
            and other.running < chosen.running
            and other.in_flight < chosen.in_flight
            and other.kv_cache_usage <= chosen.kv_cache_usage
        )


@pytest.mark.parametrize(
    ("loads", "rank"),
    [
        ([RankLoad(running=1), RankLoad()], 1),
        ([RankLoad(in_flight=1), RankLoad()], 1),
        ([RankLoad(waiting=1), RankLoad(running=2)], 1),
        ([RankLoad(running=5, kv_cache_usage=0.9), RankLoad(running=6)], 1),
        ([RankLoad(kv_cache_usage=0.5), RankLoad()], 1),
    ],
)
def test_waiting_running_what_is_on_its_way_and_the_cache_all_count(loads: list[RankLoad], rank: int) -> None:
    assert LoadBalancer().choose(loads) == rank


@given(st.integers(1, 6), st.integers(0, 30))
def test_equals_take_turns(num_cores: int, num_requests: int) -> None:
    balancer = LoadBalancer()
    ranks = [balancer.choose([RankLoad()] * num_cores) for _ in range(num_requests)]
    assert ranks == [number % num_cores for number in range(num_requests)]


@given(st.lists(st.tuples(LOADS.filter(lambda loads: len(loads) >= 3), st.sampled_from("abcdefgh")), max_size=40))
def test_a_session_stays_where_it_is_while_it_is_remembered(uses: list[tuple[list[RankLoad], str]]) -> None:
    """However the load changes. Of more than fit, the one that was not used for longest is forgotten."""
    balancer = LoadBalancer(max_sessions=3)
    remembered: dict[str, int] = {}
    for loads, session in uses:
        rank = balancer.choose(loads[:3], session_id=session)
        assert remembered.pop(session, rank) == rank
        remembered[session] = rank
        if len(remembered) > 3:
            del remembered[next(iter(remembered))]
        assert balancer.num_sessions == len(remembered)
