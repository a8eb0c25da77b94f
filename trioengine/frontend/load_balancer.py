"""`LoadBalancer`: which core computes a request. Pure: it sees numbers and remembers sessions, and knows no message."""

from collections import OrderedDict
from collections.abc import Sequence

import attrs

from trioengine.errors import RequestError

MAX_SESSIONS = 65_536
"""Those that were not used for longest are forgotten: their next request goes where the load is least."""
WAITING_WEIGHT = 4
"""A request that waits says more of a core's load than one that runs: there was no room for it."""


@attrs.frozen
class RankLoad:
    """What a core has to do, as far as a front end knows."""

    waiting: int = 0
    running: int = 0
    in_flight: int = 0
    """Sent by this front end since the core told the other numbers."""
    kv_cache_usage: float = 0.0
    """0 to 1."""

    @property
    def score(self) -> float:
        """Less is better. A core whose cache is full takes twice as long, as requests lose their blocks."""
        return (WAITING_WEIGHT * self.waiting + self.running + self.in_flight) * (1 + self.kv_cache_usage)


class LoadBalancer:
    """An explicit rank comes first, then the rank of the session, then the least load; equals take turns."""

    def __init__(self, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._rank_of_session: OrderedDict[str, int] = OrderedDict()
        self._last_rank = -1

    @property
    def num_sessions(self) -> int:
        """Sessions whose rank is known."""
        return len(self._rank_of_session)

    def choose(
        self,
        loads: Sequence[RankLoad],
        *,
        rank: int | None = None,
        session_id: str | None = None,
        first_rank: int = 0,
    ) -> int:
        """Which of the cores, counted from 0, is to compute a request.

        Args:
            loads: of each core, in the order of their ranks.
            rank: the one that the request names.
            session_id: later requests of the session go to the same core.
            first_rank: of the cores.

        Raises:
            RequestError: there is no such rank.
        """
        if rank is not None:
            check_rank(rank, len(loads), first_rank)
            rank -= first_rank
        elif session_id is not None and session_id in self._rank_of_session:
            rank = self._rank_of_session[session_id]
        else:
            rank = self._least_loaded(loads)
        if session_id is not None:
            self._rank_of_session[session_id] = rank
            self._rank_of_session.move_to_end(session_id)
            if len(self._rank_of_session) > self._max_sessions:
                self._rank_of_session.popitem(last=False)
        return rank

    def _least_loaded(self, loads: Sequence[RankLoad]) -> int:
        def key(rank: int) -> tuple[float, float, int]:
            load = loads[rank]
            return load.score, load.kv_cache_usage, (rank - self._last_rank - 1) % len(loads)

        self._last_rank = min(range(len(loads)), key=key)
        return self._last_rank


def check_rank(rank: int, num_cores: int, first_rank: int = 0) -> None:
    """Return when there is a core of this rank, among so many from the first.

    Raises:
        RequestError: there is none.
    """
    last_rank = first_rank + num_cores - 1
    if not first_rank <= rank <= last_rank:
        allowed = f"{first_rank} to {last_rank}" if num_cores > 1 else f"{first_rank}"
        raise RequestError(
            f"data_parallel_rank must be {allowed}, as the engine has {num_cores} core(s), not {rank}.",
            param="data_parallel_rank",
        )
