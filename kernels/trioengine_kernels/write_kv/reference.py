# pyright: basic
"""Storing new keys and values in the paged KV cache."""

from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write each token's key and value to its slot. The caches change in place, all other slots stay as they are.

    Args:
        key: [num_tokens, num_kv_heads, head_dim].
        value: like `key`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        value_cache: like `key_cache`.
        slots: [num_tokens], int64: `block_id * block_size + offset`, each at most once.
    """
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slots, value)
