# pyright: basic
"""Measures what an engine takes of a device's memory beside its KV cache, by steps as large as they may be."""

from collections.abc import Callable

from trioengine.config.resolve import GPUMemoryUse
from trioengine.worker.device.device import Device


class MemoryProfile:
    """The memory of a device from now on, before anything is on it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free_before = device.memory().free_bytes
        self._weights_bytes = 0

    def weights_are_there(self) -> None:
        """Note that what was taken since the beginning are the weights."""
        self._device.synchronize()
        self._weights_bytes = self._taken_bytes()

    def measure(self, step: Callable[[], None]) -> GPUMemoryUse:
        """What is there now, and what this step takes when it is computed."""
        device = self._device
        device.reset_peak()
        resting_bytes = device.memory().peak_bytes
        step()
        device.synchronize()
        peak_bytes = device.memory().peak_bytes - resting_bytes
        # Graphs, workspaces of libraries, compiled kernels and memory that is lost between tensors are in the first.
        return GPUMemoryUse(self._weights_bytes, max(0, self._taken_bytes() - self._weights_bytes) + peak_bytes)

    def _taken_bytes(self) -> int:
        """Also of what torch has not taken. Another process that ends meanwhile makes it too small, but not below 0."""
        self._device.return_memory()
        return max(0, self._free_before - self._device.memory().free_bytes)
