# pyright: basic
# pyright: reportCallIssue=false, reportReturnType=false
"""Norms, rotation and the KV cache's writes between a product and its attention, in one launch.

Each program has some heads of one token: queries, keys or values. A norm over all heads needs all of them in one
program. A token's numbers do not depend on how many tokens there are.
"""

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.fp8 import encode_fp8
from trioengine_kernels.variants import Variant


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
    """As the reference's. `cos` and `sin` are contiguous, and so is each row of `qkv`."""
    num_tokens = qkv.shape[0]
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return query
    is_fp8 = key_cache.dtype is torch.float8_e4m3fn
    config = _Config(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=None if cos is None else 2 * cos.shape[1],
        is_query_norm_full=query_norm is not None and len(query_norm) > head_dim,
        is_key_norm_full=key_norm is not None and len(key_norm) > head_dim,
    )
    _rope_write_kv_kernel[(num_tokens, config.num_blocks)](
        qkv,
        query_norm,
        key_norm,
        cos,
        sin,
        query,
        key_cache.view(torch.uint8) if is_fp8 else key_cache,
        value_cache.view(torch.uint8) if is_fp8 else value_cache,
        slots,
        qkv.stride(0),
        norm_epsilon,
        float(key_scale) if is_fp8 else None,
        float(value_scale) if is_fp8 else None,
        **config.constants,
        num_warps=config.num_warps,
    )
    return query


def variants() -> list[Variant]:
    """Shapes of small and large models; norms of heads and of all; rotation of all, of a part and of nothing."""
    return [
        _variant("bf16", _Config(32, 8, 128, 128)),
        _variant("fp16", _Config(9, 3, 64, 64)),
        _variant("fp32", _Config(9, 3, 64, 64)),
        _variant("bf16", _Config(32, 8, 128, 128), has_norms=True),
        _variant("bf16", _Config(32, 8, 128, 128), has_norms=True, is_fp8=True),
        _variant("bf16", _Config(16, 16, 128, 128, True, True), has_norms=True),
        _variant("bf16", _Config(40, 8, 128, 128, True, True), has_norms=True),
        _variant("bf16", _Config(32, 32, 80, 32)),
        _variant("bf16", _Config(32, 32, 96, 96)),
        _variant("bf16", _Config(8, 4, 256, 256), has_norms=True),
        _variant("bf16", _Config(16, 4, 128, None), is_fp8=True),
    ]


@attrs.frozen
class _Config:
    """What a launch's programs look like."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int | None
    is_query_norm_full: bool = False
    """Over all heads together."""
    is_key_norm_full: bool = False

    @property
    def block_heads(self) -> int:
        """Heads of a program, a power of two."""
        all_heads = triton.next_power_of_2(max(self.num_heads, self.num_kv_heads))
        if self.is_query_norm_full or self.is_key_norm_full:
            return all_heads
        return max(1, min(8, 1024 // triton.next_power_of_2(self.head_dim), all_heads))

    @property
    def num_blocks(self) -> int:
        """Programs of a token."""
        return triton.cdiv(self.num_heads, self.block_heads) + 2 * triton.cdiv(self.num_kv_heads, self.block_heads)

    @property
    def num_warps(self) -> int:
        """About eight elements for each thread."""
        return max(1, min(16, self.block_heads * triton.next_power_of_2(self.head_dim) // 256))

    @property
    def constants(self) -> dict[str, object]:
        """A head is two halves, whose elements are rotated in pairs, and the rest behind them."""
        half = (self.head_dim if self.rotary_dim is None else self.rotary_dim) // 2
        rest = self.head_dim - 2 * half
        return {
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "HALF": half,
            "REST": rest,
            "IS_QUERY_NORM_FULL": self.is_query_norm_full,
            "IS_KEY_NORM_FULL": self.is_key_norm_full,
            "BLOCK_HEADS": self.block_heads,
            "BLOCK_HALF": triton.next_power_of_2(half),
            "BLOCK_REST": triton.next_power_of_2(max(1, rest)),
        }


def _variant(dtype: str, config: _Config, *, has_norms: bool = False, is_fp8: bool = False) -> Variant:
    given: dict[str, str | None] = {
        "qkv": f"*{dtype}",
        "query_norm": "*fp32" if has_norms else None,
        "key_norm": "*fp32" if has_norms else None,
        "cos": None if config.rotary_dim is None else "*fp32",
        "sin": None if config.rotary_dim is None else "*fp32",
        "query": f"*{dtype}",
        "key_cache": "*u8" if is_fp8 else f"*{dtype}",
        "value_cache": "*u8" if is_fp8 else f"*{dtype}",
        "slots": "*i32",
        "qkv_stride": "i32:16",
        "epsilon": "fp32",
        "key_scale": "fp32" if is_fp8 else None,
        "value_scale": "fp32" if is_fp8 else None,
    }
    norm = ("full" if config.is_query_norm_full else "head") if has_norms else "none"
    heads = f"{config.num_heads}/{config.num_kv_heads}x{config.head_dim}"
    return Variant(
        name=f"rope_write_kv[{dtype}{', fp8 cache' * is_fp8}, {heads}, norm={norm}, rotary_dim={config.rotary_dim}]",
        kernel=_rope_write_kv_kernel,
        signature={name: kind for name, kind in given.items() if kind is not None},
        constants={name: None for name, kind in given.items() if kind is None} | config.constants,
        num_warps=config.num_warps,
    )


@triton.jit
def _rope_write_kv_kernel(
    qkv,
    query_norm,
    key_norm,
    cos,
    sin,
    query,
    key_cache,
    value_cache,
    slots,
    qkv_stride,
    epsilon,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    IS_QUERY_NORM_FULL: tl.constexpr,
    IS_KEY_NORM_FULL: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    QUERY_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if cos is not None:
        cos += token * HALF
        sin += token * HALF
    queries = qkv + token * qkv_stride
    keys = queries + NUM_HEADS * HEAD_DIM
    values = keys + NUM_KV_HEADS * HEAD_DIM
    if block < QUERY_BLOCKS:
        _move(
            queries,
            query + token * NUM_HEADS * HEAD_DIM,
            block * BLOCK_HEADS,
            query_norm,
            cos,
            sin,
            epsilon,
            None,
            NUM_HEADS,
            HEAD_DIM,
            HALF,
            REST,
            IS_QUERY_NORM_FULL,
            BLOCK_HEADS,
            BLOCK_HALF,
            BLOCK_REST,
        )
    else:
        slot = tl.load(slots + token).to(tl.int64) * NUM_KV_HEADS * HEAD_DIM
        if block < QUERY_BLOCKS + KV_BLOCKS:
            _move(
                keys,
                key_cache + slot,
                (block - QUERY_BLOCKS) * BLOCK_HEADS,
                key_norm,
                cos,
                sin,
                epsilon,
                key_scale,
                NUM_KV_HEADS,
                HEAD_DIM,
                HALF,
                REST,
                IS_KEY_NORM_FULL,
                BLOCK_HEADS,
                BLOCK_HALF,
                BLOCK_REST,
            )
        else:
            _move(
                values,
                value_cache + slot,
                (block - QUERY_BLOCKS - KV_BLOCKS) * BLOCK_HEADS,
                None,
                None,
                None,
                epsilon,
                value_scale,
                NUM_KV_HEADS,
                HEAD_DIM,
                HALF,
                REST,
                False,
                BLOCK_HEADS,
                BLOCK_HALF,
                BLOCK_REST,
            )


@triton.jit
def _move(
    source,
    target,
    first_head,
    norm,
    cos,
    sin,
    epsilon,
    scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    IS_NORM_FULL: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    # One token's heads from `first_head` on, of `NUM_HEADS` at `source`, to the same places at `target`.
    heads = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    is_head = heads < NUM_HEADS
    halves = tl.arange(0, BLOCK_HALF)[None, :]
    is_half = is_head & (halves < HALF)
    places = heads * HEAD_DIM + halves
    first = tl.load(source + places, mask=is_half, other=0.0).to(tl.float32)
    second = tl.load(source + places + HALF, mask=is_half, other=0.0).to(tl.float32)
    if REST > 0:
        rests = tl.arange(0, BLOCK_REST)[None, :]
        is_rest = is_head & (rests < REST)
        rest_places = heads * HEAD_DIM + 2 * HALF + rests
        rest = tl.load(source + rest_places, mask=is_rest, other=0.0).to(tl.float32)

    if norm is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        if IS_NORM_FULL:
            factor = tl.rsqrt(tl.sum(squares, axis=0) / (NUM_HEADS * HEAD_DIM) + epsilon)
            weights = norm + heads * HEAD_DIM
        else:
            factor = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
            weights = norm + heads * 0  # The same for all heads.
        first *= factor * tl.load(weights + halves, mask=is_half, other=0.0)
        second *= factor * tl.load(weights + HALF + halves, mask=is_half, other=0.0)
        if REST > 0:
            rest *= factor * tl.load(weights + 2 * HALF + rests, mask=is_rest, other=0.0)

    if cos is not None:
        cosines = tl.load(cos + halves, mask=halves < HALF, other=0.0)
        sines = tl.load(sin + halves, mask=halves < HALF, other=0.0)
        rotated = first * cosines - second * sines
        second = second * cosines + first * sines
        first = rotated

    _store(target + places, first, scale, is_half)
    _store(target + places + HALF, second, scale, is_half)
    if REST > 0:
        _store(target + rest_places, rest, scale, is_rest)


@triton.jit
def _store(places, values, scale, mask):
    # With a scale, places are of float8 numbers.
    if scale is not None:
        tl.store(places, encode_fp8(values / scale), mask=mask)
    else:
        tl.store(places, values.to(places.dtype.element_ty), mask=mask)
