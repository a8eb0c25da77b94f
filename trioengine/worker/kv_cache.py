# pyright: basic
"""The memory of torch's paged KV cache.

It does not know which block belongs to whom.
"""

import numpy as np
import torch

from trioengine.models.config import ModelConfig
from trioengine.models.torch_ops import LayerKVCache


def allocate_kv_cache(config: ModelConfig, num_blocks: int, block_size: int) -> list[LayerKVCache]:
    """Make an empty cache, one entry per layer, all zeros.

    Raises:
        MemoryError: so much address space is not to be had.
    """
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)

    def zeros() -> torch.Tensor:
        # Unlike torch.zeros, numpy's asks the system for zeroed pages: blocks that are never used take no memory.
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))

    return [LayerKVCache(zeros(), zeros()) for _ in range(config.num_layers)]
