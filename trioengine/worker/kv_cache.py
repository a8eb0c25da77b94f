# pyright: basic
"""The memory of the paged KV cache: how much a token takes, and the tensors themselves.

It does not know which block belongs to whom.
"""

import numpy as np
import torch

from trioengine.models.config import ModelConfig
from trioengine.models.decoder import LayerKVCache

VALUE_BYTES = 4
"""float32."""


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Bytes that the cache holds for one token, over all layers."""
    return config.num_kv_values_per_token * VALUE_BYTES


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
