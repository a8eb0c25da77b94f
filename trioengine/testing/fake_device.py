# pyright: basic
"""A device on the CPU that is always late: `FakeDevice`.

Work waits in a queue until somebody waits for it, so that whoever reads a result without waiting gets none, and whoever
changes staging memory too early computes with the wrong numbers. Copies to the host are later still: they take what is
there when somebody waits for them, so that later work which changes it too early is found, too. A graph is a function
that is called again; a replay that reads or writes other memory than was there when it was recorded is an error, as a
real graph would not follow. Only staging memory can be copied to it, and nothing while a graph is recorded. Nor may
work read numbers on the host, for which a real device would be waited for.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trioengine.testing.host_reads import NothingIsRead
from trioengine.worker.device.device import DeviceMemory, Graph, HostCopy


@attrs.define(eq=False)
class FakeCopy:
    """A copy that somebody has to wait for."""

    source: Tensor | None = None
    """Once it is computed."""
    host: Tensor | None = None
    is_done: bool = False


class FakeDevice:
    """Does work when it is waited for, or when `advance` lets it."""

    def __init__(self, memory: DeviceMemory | None = None) -> None:
        """`memory` is what `memory` returns."""
        self.torch_device = torch.device("cpu")
        self.num_synchronizations = 0
        self.num_copies_to_device = 0
        self.replayed: list[FakeGraph] = []
        self._memory = memory or DeviceMemory(free_bytes=2**30, total_bytes=2**30, peak_bytes=0)
        self._queue: deque[Callable[[], object]] = deque()
        self._is_recording = False
        # Kept, so that no other memory comes to lie where one is.
        self._staging: dict[int, Tensor] = {}

    @property
    def num_replays(self) -> int:
        """Graphs that were replayed."""
        return len(self.replayed)

    @property
    def num_queued(self) -> int:
        """Pieces of work that are not done."""
        return len(self._queue)

    def advance(self, num_pieces: int = 1) -> None:
        """Do so many pieces of work, at most all."""
        for _ in range(min(num_pieces, len(self._queue))):
            self._next()

    def staging(self, num_words: int) -> Tensor:
        """As `Device.staging`."""
        assert not self._is_recording, "Memory of the host cannot be made while a graph is recorded."
        staging = torch.zeros(num_words, dtype=torch.int32)
        self._staging[staging.untyped_storage().data_ptr()] = staging
        return staging

    def copy_to_device(self, target: Tensor, staging: Tensor) -> None:
        """As `Device.copy_to_device`.

        Raises:
            AssertionError: a real device's host would wait for it, or a graph would read memory that others have then.
        """
        assert not self._is_recording, "Nothing of the host's can be copied while a graph is recorded."
        assert staging.untyped_storage().data_ptr() in self._staging, "The host would wait: this is no staging memory."
        target.copy_(staging)
        self.num_copies_to_device += 1

    def run(self, work: Callable[[], object]) -> None:
        """As `Device.run`."""
        self._queue.append(work)

    def launch(self, work: Callable[[], Tensor]) -> FakeCopy:
        """As `Device.launch`."""
        copy = FakeCopy()

        def compute() -> None:
            copy.source = work()

        self._queue.append(compute)
        return copy

    def wait(self, copy: HostCopy) -> Tensor:
        """As `Device.wait`. Later work goes on waiting."""
        assert isinstance(copy, FakeCopy)
        if not copy.is_done:
            self.num_synchronizations += 1
            while copy.source is None:
                self._next()
            copy.host, copy.is_done = copy.source.clone(), True
        assert copy.host is not None
        return copy.host

    def synchronize(self) -> None:
        """As `Device.synchronize`."""
        self.num_synchronizations += 1
        self.advance(len(self._queue))

    def capture(self, work: Callable[[], object], beside: Graph | None = None) -> "FakeGraph":
        """As `Device.capture`."""
        self.synchronize()
        self._is_recording = True
        try:
            with torch.inference_mode(), _TouchedMemory() as touched:
                work()
        finally:
            self._is_recording = False
        return FakeGraph(self, work, touched.others)

    def memory(self) -> DeviceMemory:
        """As `Device.memory`."""
        return self._memory

    def reset_peak(self) -> None:
        """As `Device.reset_peak`."""

    def return_memory(self) -> None:
        """As `Device.return_memory`."""

    @torch.inference_mode()
    def _next(self) -> None:
        with NothingIsRead():
            self._queue.popleft()()


class FakeGraph:
    """Work that can be done again."""

    def __init__(
        self, device: FakeDevice, work: Callable[[], object], touched: dict[int, torch.UntypedStorage]
    ) -> None:
        self._device = device
        self._work = work
        # Kept, so that nothing else can come to lie where they are.
        self._touched = touched

    def replay(self) -> None:
        """As `Graph.replay`.

        Raises:
            AssertionError: it uses memory that it did not use when it was recorded.
        """
        self._device.replayed.append(self)
        with _TouchedMemory() as touched:
            self._work()
        strange = touched.others.keys() - self._touched.keys()
        assert not strange, f"A graph was replayed with {len(strange)} tensors that are not where they were."


class _TouchedMemory(TorchDispatchMode):
    """Notes which memory operations use that none of them has made."""

    def __init__(self) -> None:
        super().__init__()
        self.others: dict[int, torch.UntypedStorage] = {}
        # Kept, so that their addresses are not used twice.
        self._own: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # What it is given are numbers of the host, for a new tensor.
        is_new = func is torch.ops.aten.lift_fresh.default
        for storage in () if is_new else _storages((args, kwargs)):
            if storage.data_ptr() not in self._own:
                self.others.setdefault(storage.data_ptr(), storage)
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if storage.data_ptr() not in self.others:
                self._own[storage.data_ptr()] = storage
        return result


def _storages(values: object) -> Iterator[torch.UntypedStorage]:
    """The memory of the tensors among these."""
    for each in tree_leaves(values):
        if isinstance(each, Tensor) and each.untyped_storage().nbytes():
            yield each.untyped_storage()
