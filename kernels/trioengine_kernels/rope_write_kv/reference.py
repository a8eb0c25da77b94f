# pyright: basic
"""All that is between the product of a layer's input and its attention: norms, rotation, and the KV cache."""

import torch
from torch import Tensor

from trioengine_kernels.rms_norm.reference import rms_norm
from trioengine_kernels.rope.reference import rope
from trioengine_kernels.write_kv.reference import write_kv

FP8_MAX = 448.0
"""The largest number that float8_e4m3fn has. What is larger becomes it."""


def rope_write_kv(
    qkv: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm_epsilon: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values to their slots. All is computed in float32.

    The caches change in place; slots that no token has stay as they are.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: each token's queries, keys and values.
        query_norm: the weights of an RMS norm over each head, [head_dim], or over all, [num_heads * head_dim].
        key_norm: the same for keys.
        cos: [num_tokens, rotary_dim / 2], float32, as `rope`'s. None rotates nothing.
        sin: like `cos`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, like `qkv` or float8_e4m3fn.
        value_cache: like `key_cache`.
        slots: [num_tokens], int32: `block_id * block_size + offset`. What is in a slot that several have is undefined.
        num_heads: of the queries.
        num_kv_heads: of keys and values.
        head_dim: numbers of a head.
        norm_epsilon: of both norms.
        key_scale: a float8 cache has keys divided by it.
        value_scale: the same for values.

    Returns:
        The queries, [num_tokens, num_heads, head_dim].
    """
    query_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    query, key, value = qkv.float().split([query_width, kv_width, kv_width], dim=1)

    def normed_and_rotated(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = rms_norm(x.unflatten(1, (-1, len(norm))), norm, norm_epsilon).flatten(1)
        heads = x.unflatten(1, (-1, head_dim))
        return heads if cos is None or sin is None else rope(heads, cos, sin)

    key = normed_and_rotated(key, key_norm)
    value = value.unflatten(1, (-1, head_dim))
    if key_cache.dtype is torch.float8_e4m3fn:
        # As bytes: torch does not copy all kinds of numbers by index.
        key, value = _to_fp8(key / key_scale).view(torch.uint8), _to_fp8(value / value_scale).view(torch.uint8)
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    write_kv(key.to(key_cache.dtype), value.to(value_cache.dtype), key_cache, value_cache, slots.long())
    return normed_and_rotated(query, query_norm).to(qkv.dtype)


def _to_fp8(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
