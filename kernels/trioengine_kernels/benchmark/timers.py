# pyright: basic
"""Times what runs on a card, by its own clock."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

MIN_CALLS = 50
"""Calls in one recorded graph: what starting the graph takes is shared by so many."""
NUM_REPLAYS = 15
MIN_REPLAYS = 3
MAX_REPLAYS_S = 0.3
"""Long calls are replayed less often, so that a suite takes minutes."""


class Timer(Protocol):
    """Times calls that do the same with other buffers."""

    def seconds(self, calls: Sequence[Callable[[], object]], *, is_recordable: bool) -> float:
        """What one call takes when they are done in turn, again and again.

        Args:
            calls: at least one.
            is_recordable: nothing in them waits for the device, so they may be recorded in a graph.
        """
        ...


class CudaTimer:
    """Times by CUDA events around replays of a graph, or around the calls themselves where there can be none.

    The median of several replays counts. A graph has no gaps in which the host gets the next kernel ready, which is how
    the engine runs them too.
    """

    def seconds(self, calls: Sequence[Callable[[], object]], *, is_recordable: bool) -> float:
        """As `Timer.seconds`."""
        num_rounds = -(-MIN_CALLS // len(calls)) if is_recordable else 1

        def run_all() -> None:
            for _ in range(num_rounds):
                for call in calls:
                    call()

        # Before anything is recorded: kernels are compiled and libraries get their memory at a first call.
        for call in calls:
            call()
        run = _recorded(run_all) if is_recordable else run_all
        run()
        (first_s,) = _timed_s(run, 1)
        num_replays = max(MIN_REPLAYS, min(NUM_REPLAYS, int(MAX_REPLAYS_S / max(first_s, 1e-9))))
        return statistics.median(_timed_s(run, num_replays)) / (num_rounds * len(calls))


class HostTimer:
    """Times by the host's clock, once: for a CPU, where a benchmark is tried out and its figures mean nothing."""

    def seconds(self, calls: Sequence[Callable[[], object]], *, is_recordable: bool) -> float:
        """As `Timer.seconds`."""
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)


def _recorded(run: Callable[[], None]) -> Callable[[], None]:
    # On another stream than the default one, which cannot be recorded; what a first call there needs is not part of it.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _timed_s(run: Callable[[], object], count: int) -> list[float]:
    """Of each of so many runs, one right behind the other."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in events]
