# pyright: basic
"""The memory of a device's paged KV cache. It does not know which block belongs to whom."""

import numpy as np
import torch
from numpy.typing import NDArray

from trioengine.models.device_ops import LayerKVCache
from trioengine.worker.device.device import Device


class DeviceKVCache:
    """Keys and values of a KV group's layers, zeros at first. The block behind the last one is nobody's: whatever
    belongs to no sequence is written there."""

    def __init__(
        self,
        device: Device,
        *,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        """Raises:
        torch.OutOfMemoryError: it does not fit.
        """
        self._device = device
        # As bytes, which can be filled and copied whatever the type is.
        head_bytes = head_dim * torch.empty(0, dtype=dtype).element_size()
        shape = (num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_bytes)
        self.data = torch.zeros(shape, dtype=torch.uint8, device=device.torch_device)
        self.layers = [LayerKVCache(keys, values) for keys, values in self.data.view(dtype)]

    def block(self, block_id: int) -> NDArray[np.uint8]:
        """A copy of what a block holds in all layers. Waits for the device."""
        return self._device.wait(self._device.launch(lambda: self.data[:, :, block_id].contiguous())).numpy()

    def write(self, block_id: int, data: NDArray[np.uint8] | None) -> None:
        """Fill a block, behind the work that was begun. None is zeros."""
        block = self.data[:, :, block_id]
        if data is None:
            self._device.run(block.zero_)
            return
        # A copy: what is done later must not read what may have changed. From other memory the host would wait for it.
        staging = self._device.staging(-(-data.nbytes // 4)).view(torch.uint8)[: data.nbytes]
        staging.numpy()[:] = data.reshape(-1)
        self._device.run(lambda: self._device.copy_to_device(block, staging.view(block.shape)))
