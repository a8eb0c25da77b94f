# pyright: basic
"""The memory of torch's paged KV cache.

It does not know which block belongs to whom.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from trioengine.models.torch_ops import LayerKVCache


class TorchKVCache:
    """Keys and values of a KV group's layers, float32, zeros at first.

    Raises:
        MemoryError: so much address space is not to be had.
    """

    def __init__(self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        # Unlike torch.zeros, numpy's asks the system for zeroed pages: blocks that are never used take no memory.
        self.data = np.zeros((num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), np.float32)
        self.layers = [LayerKVCache(torch.from_numpy(keys), torch.from_numpy(values)) for keys, values in self.data]

    def block(self, block_id: int) -> NDArray[np.float32]:
        """A view of a block in all layers: [num_layers, 2, block_size, num_kv_heads, head_dim]."""
        return self.data[:, :, block_id]
