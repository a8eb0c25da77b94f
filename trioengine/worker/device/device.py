# pyright: basic
"""The device that computes steps, as far as a backend must know it: `Device`, and CUDA's.

Work is begun and done later, in the order in which it was begun. The host waits in one place only, in `wait`, for what
a step gives it. This module does not know what is computed.
"""

from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from torch import Tensor


@attrs.frozen
class DeviceMemory:
    """How a device's memory is used."""

    free_bytes: int
    """That nobody has taken, this process or others."""
    total_bytes: int
    peak_bytes: int
    """The most that this process's tensors took at once since `Device.reset_peak`."""


class HostCopy(Protocol):
    """Numbers on their way to the host."""

    @property
    def is_done(self) -> bool:
        """Whether somebody has waited for it. All work that was begun before it is done then, too."""
        ...


class Graph(Protocol):
    """Recorded work. It keeps the memory that it works in while it exists."""

    def replay(self) -> None:
        """Do it again, with what is in its tensors then. Part of the work that is being begun."""
        ...


class Device(Protocol):
    """Does one piece of work after the other. Not thread-safe.

    A piece of work is a function that is called once: at once, or when the device has come to it. So it reads nothing
    that the host changes later, but for staging memory, which nobody may change before the work is done.
    """

    torch_device: torch.device
    num_synchronizations: int
    """How often the host has waited for the device."""
    num_copies_to_device: int

    def staging(self, num_words: int) -> Tensor:
        """[num_words], int32: memory of the host that the device can read by itself."""
        ...

    def copy_to_device(self, target: Tensor, staging: Tensor) -> None:
        """Copy what `staging` gave, or views of it. Part of the work that is being begun."""
        ...

    def run(self, work: Callable[[], object]) -> None:
        """Begin a piece of work."""
        ...

    def launch(self, work: Callable[[], Tensor]) -> HostCopy:
        """Begin a piece of work, and then a copy of the tensor that it returns, beside which later work goes on."""
        ...

    def wait(self, copy: HostCopy) -> Tensor:
        """What was copied, on the host. Waits for it."""
        ...

    def synchronize(self) -> None:
        """Wait for all that was begun."""
        ...

    def capture(self, work: Callable[[], object], beside: Graph | None = None) -> Graph:
        """Record work, which is also done once or more meanwhile. Waits.

        What it leaves for others is in tensors that were there before. All else is in the graph's own memory, which it
        shares with `beside`: they are never replayed at the same time.

        Raises:
            torch.OutOfMemoryError: there is no memory for it.
        """
        ...

    def memory(self) -> DeviceMemory:
        """How its memory is used now."""
        ...

    def reset_peak(self) -> None:
        """Forget the peak."""
        ...

    def return_memory(self) -> None:
        """Give memory back that tensors have had, for other processes."""
        ...


@attrs.define(eq=False)
class _CudaCopy:
    host: Tensor
    event: torch.cuda.Event
    source: Tensor | None
    """Its memory must not be another tensor's before it is copied."""
    is_done: bool = False


class CudaDevice:
    """A GPU. Work is done on the stream that is torch's current one, copies to the host on another. Which GPU is the
    current one is a thread's own: the threads that call need not have set it.

    Nothing waits but `wait`, `synchronize` and `capture`, unless work itself does: `torch.cuda.set_sync_debug_mode`
    finds that.
    """

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.num_synchronizations = 0
        self.num_copies_to_device = 0
        torch.cuda.set_device(self.torch_device)
        self._copies = torch.cuda.Stream(self.torch_device)

    def staging(self, num_words: int) -> Tensor:
        """As `Device.staging`: pinned."""
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=True)

    def copy_to_device(self, target: Tensor, staging: Tensor) -> None:
        """As `Device.copy_to_device`."""
        target.copy_(staging, non_blocking=True)
        self.num_copies_to_device += 1

    @torch.inference_mode()
    def run(self, work: Callable[[], object]) -> None:
        """As `Device.run`."""
        with torch.cuda.device(self.torch_device):
            work()

    @torch.inference_mode()
    def launch(self, work: Callable[[], Tensor]) -> _CudaCopy:
        """As `Device.launch`."""
        with torch.cuda.device(self.torch_device):
            source = work()
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copies):
                host.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._copies)
            return _CudaCopy(host, event, source)

    def wait(self, copy: HostCopy) -> Tensor:
        """As `Device.wait`."""
        assert isinstance(copy, _CudaCopy)
        if not copy.is_done:
            self.num_synchronizations += 1
            copy.event.synchronize()
            copy.is_done, copy.source = True, None
        return copy.host

    def synchronize(self) -> None:
        """As `Device.synchronize`."""
        self.num_synchronizations += 1
        torch.cuda.synchronize(self.torch_device)

    @torch.inference_mode()
    def capture(self, work: Callable[[], object], beside: Graph | None = None) -> torch.cuda.CUDAGraph:
        """As `Device.capture`."""
        assert beside is None or isinstance(beside, torch.cuda.CUDAGraph)
        with torch.cuda.device(self.torch_device):
            # Whatever is made at the first call (compiled kernels, libraries' handles) must not be made in the record.
            work()
            self.synchronize()
            graph = torch.cuda.CUDAGraph()
            pool = None if beside is None else beside.pool()
            # Other threads may prepare weights meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                work()
        return graph

    def memory(self) -> DeviceMemory:
        """As `Device.memory`."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(free_bytes, total_bytes, torch.cuda.max_memory_allocated(self.torch_device))

    def reset_peak(self) -> None:
        """As `Device.reset_peak`."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def return_memory(self) -> None:
        """As `Device.return_memory`."""
        torch.cuda.empty_cache()
