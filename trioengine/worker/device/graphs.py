# pyright: basic
"""Recorded steps: which sizes there are, and the graph that a step of so many sequences takes.

Of a decode, all is recorded: what the step is told is unpacked, the model computed, tokens are chosen by temperature,
top-k, top-p, min-p and seed, which every row has as numbers of its own, and kept for the next step. What few requests
ask for is not: masks, biases, penalties, forbidden and allowed tokens, and log probabilities come behind the graph, on
the logits that it leaves, and the tokens that they lead to take the place of the graph's. So there is one graph for
each size, and steps without such requests, which are most, pay for none of it but the graph's copy of the logits.
"""

import bisect
from collections.abc import Callable, Sequence

from trioengine.worker.device.device import Device, Graph


class DecodeGraphs:
    """The graphs of decodes, which share their memory. None is recorded at first."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        """Args:
        device: what records and replays.
        sizes: numbers of sequences.
        """
        self._device = device
        self._sizes = sorted({*sizes})
        self._graphs: dict[int, Graph] = {}

    def size_for(self, num_seqs: int) -> int | None:
        """The smallest size that has room for so many; None where there is none, or nothing is recorded."""
        if not self._graphs:
            return None
        place = bisect.bisect_left(self._sizes, num_seqs)
        return self._sizes[place] if place < len(self._sizes) else None

    def graph(self, size: int) -> Graph:
        """The graph of a size, which is recorded."""
        return self._graphs[size]

    def record(self, work: Callable[[int], Callable[[], object]]) -> None:
        """Record all, or none where this raises. The largest first, so that the others fit into its memory. Waits.

        Args:
            work: what is recorded for a size.

        Raises:
            torch.OutOfMemoryError: there is no memory for it.
        """
        graphs: dict[int, Graph] = {}
        for size in reversed(self._sizes):
            beside = next(iter(graphs.values()), None)
            graphs[size] = self._device.capture(work(size), beside)
        self._graphs = graphs

    def drop(self) -> None:
        """Forget all, and give their memory back."""
        self._graphs.clear()
