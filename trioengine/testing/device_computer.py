# pyright: basic
"""A `Computer` that takes the way of a GPU on the CPU: `FakeDevice`, with the reference's kernels."""

import torch
from trioengine_kernels.kernel_set import KernelSet, reference_kernels

from trioengine.config.resolve import GPUFacts
from trioengine.testing.fake_device import FakeDevice
from trioengine.worker.device.device import Device
from trioengine.worker.device.loading import DeviceComputer, DeviceKernels
from trioengine.worker.loading import Computer


def device_computer(
    device: Device | None = None,
    *,
    kernels: KernelSet | None = None,
    total_bytes: int = 2**26,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    is_deterministic: bool = False,
) -> Computer:
    """What computes on a device.

    Args:
        device: None is a new `FakeDevice`.
        kernels: None is the reference's.
        total_bytes: what the device is said to have.
        dtype: of activations.
        cache_dtype: of the KV cache; None is the same.
        is_deterministic: as `DeviceComputer` has it.
    """
    made = DeviceKernels(kernels or reference_kernels())
    return Computer(
        None,
        DeviceComputer(
            device=device or FakeDevice(),
            facts=GPUFacts("Fake", 90, total_bytes, total_bytes),
            dtype=dtype,
            cache_dtype=cache_dtype or dtype,
            choose_kernels=lambda needs: made,
            is_deterministic=is_deterministic,
        ),
    )
