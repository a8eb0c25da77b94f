# pyright: basic
"""Which implementation computes paged attention: ours, torch's, or a library's that is installed.

Names are vLLM's. A library is used when it is asked for; ours is the default, as the one that does everything, with
graphs and with the same result for a decode in any batch.
"""

from collections.abc import Callable, Container
from importlib import import_module
from types import ModuleType
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from trioengine_kernels.paged_attention.batch import AttentionBatch

_FLASHINFER_WORKSPACE_BYTES = 256 << 20


@attrs.frozen
class AttentionNeeds:
    """What a model and its cache ask of attention."""

    dtype: torch.dtype
    """Of the queries."""
    cache_dtype: torch.dtype
    head_dim: int
    block_size: int
    has_soft_cap: bool
    has_sinks: bool
    is_deterministic: bool
    capability: tuple[int, int]
    """The device's, as `torch.cuda.get_device_capability` says; (0, 0) for a processor."""


@attrs.frozen(eq=False)
class Attention:
    """An implementation."""

    name: str
    compute: Callable[..., Tensor]
    """As `paged_attention.device_reference.paged_attention`."""
    can_be_recorded: bool
    """In a graph: then its host reads nothing from the device."""


class AttentionUnavailableError(ValueError):
    """What was asked for is not installed, or does not do what the model needs."""


def choose_attention(name: str | None, needs: AttentionNeeds) -> Attention:
    """The implementation of a name: TRITON_ATTN, TORCH_SDPA, FLASH_ATTN or FLASHINFER; None is TRITON_ATTN.

    Raises:
        AttentionUnavailableError: it cannot be had here; the text says why, and what to do.
    """
    name = name or "TRITON_ATTN"
    choices = {
        "TRITON_ATTN": _triton,
        "TORCH_SDPA": _torch,
        "FLASH_ATTN": _flash_attention,
        "FLASHINFER": _flashinfer,
    }
    if name not in choices:
        raise AttentionUnavailableError(f"there is no attention backend {name!r}; choose one of {', '.join(choices)}")
    if needs.is_deterministic and name != "TRITON_ATTN":
        raise AttentionUnavailableError("the deterministic mode needs the attention backend TRITON_ATTN")
    return choices[name](needs)


def _triton(needs: AttentionNeeds) -> Attention:
    if needs.head_dim > 256:
        raise AttentionUnavailableError("TRITON_ATTN has heads of up to 256 dimensions; choose TORCH_SDPA")
    if needs.cache_dtype == torch.float8_e4m3fn and needs.capability < (8, 9):
        raise AttentionUnavailableError("an fp8 KV cache needs a GPU of compute capability 8.9; choose another dtype")
    module = _import("TRITON_ATTN", "trioengine_kernels.paged_attention.triton", "install triton")
    return Attention("TRITON_ATTN", module.paged_attention, can_be_recorded=True)


def _torch(needs: AttentionNeeds) -> Attention:
    from trioengine_kernels.paged_attention import torch_backend

    is_plain = not needs.has_soft_cap and not needs.has_sinks and needs.cache_dtype == needs.dtype
    reads_blocks = is_plain and torch_backend.reads_blocks(needs.dtype, needs.capability)
    return Attention("TORCH_SDPA", torch_backend.paged_attention, can_be_recorded=reads_blocks)


def _flash_attention(needs: AttentionNeeds) -> Attention:
    """FlashAttention 3 on Hopper, or 2, whose blocks have multiples of 256 tokens."""
    _check("FLASH_ATTN", needs, cache_dtypes=(needs.dtype,), head_dims=range(8, 257, 8))
    if needs.capability[0] == 9 and (module := _find("flash_attn_interface")):
        return Attention("FLASH_ATTN", _FlashAttention3(module), can_be_recorded=True)
    module = _import("FLASH_ATTN", "flash_attn", "install flash-attn")
    if needs.capability < (8, 0):
        raise AttentionUnavailableError("FLASH_ATTN needs a GPU of compute capability 8.0")
    if needs.block_size % 256:
        raise AttentionUnavailableError(
            f"flash-attn 2 reads blocks of multiples of 256 tokens, not {needs.block_size}: set the block size to 256"
        )
    return Attention("FLASH_ATTN", _FlashAttention2(module), can_be_recorded=True)


def _flashinfer(needs: AttentionNeeds) -> Attention:
    _check("FLASHINFER", needs, cache_dtypes=(needs.dtype, torch.float8_e4m3fn), head_dims=(64, 128, 256))
    module = _import("FLASHINFER", "flashinfer", "install flashinfer-python")
    return Attention("FLASHINFER", _FlashInfer(module), can_be_recorded=False)


def _check(
    name: str, needs: AttentionNeeds, *, cache_dtypes: Container[torch.dtype], head_dims: Container[int]
) -> None:
    """What both libraries lack."""
    lacks = [
        (needs.has_sinks, "has no attention sinks"),
        (needs.dtype not in (torch.float16, torch.bfloat16), f"does not compute in {needs.dtype}"),
        (needs.cache_dtype not in cache_dtypes, f"reads no KV cache of {needs.cache_dtype} with {needs.dtype}"),
        (needs.head_dim not in head_dims, f"has no heads of {needs.head_dim} dimensions"),
    ]
    for is_lacking, reason in lacks:
        if is_lacking:
            raise AttentionUnavailableError(f"{name} {reason}; choose TRITON_ATTN")


def _find(module: str) -> ModuleType | None:
    try:
        return import_module(module)
    except ImportError:
        return None


def _import(name: str, module: str, advice: str) -> ModuleType:
    found = _find(module)
    if found is None:
        raise AttentionUnavailableError(f"{name} is not here: {advice}, or choose another attention backend")
    return found


@attrs.frozen(eq=False)
class _FlashAttention3:
    """`flash_attn_with_kvcache` of the module `flash_attn_interface`."""

    module: ModuleType

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Tensor:
        assert sinks is None, "not what was chosen for"
        assert key_scale == value_scale == 1, "not what was chosen for"
        return self.module.flash_attn_with_kvcache(
            query,
            key_cache,
            value_cache,
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table.index_select(0, batch.rows),
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=batch.max_query_len,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(batch),
            softcap=soft_cap or 0.0,
        )


@attrs.frozen(eq=False)
class _FlashAttention2:
    """`flash_attn_varlen_func` of the module `flash_attn`."""

    module: ModuleType

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Tensor:
        assert sinks is None, "not what was chosen for"
        assert key_scale == value_scale == 1, "not what was chosen for"
        return self.module.flash_attn_varlen_func(
            query,
            key_cache,
            value_cache,
            cu_seqlens_q=batch.query_start,
            cu_seqlens_k=F.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.block_table.shape[1] * batch.block_size,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(batch),
            softcap=soft_cap or 0.0,
            block_table=batch.block_table.index_select(0, batch.rows),
        )


@attrs.frozen(eq=False)
class _FlashInfer:
    """`BatchPrefillWithPagedKVCacheWrapper` of the module `flashinfer`, which plans on the host.

    Whether the batch holds what it held at the last call cannot be told, so every layer is planned: it is for
    comparison rather than for speed.
    """

    module: ModuleType
    _wrappers: dict[torch.device, Any] = attrs.field(factory=dict, init=False)

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Tensor:
        assert sinks is None, "not what was chosen for"
        if query.device not in self._wrappers:
            workspace = torch.empty(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            self._wrappers[query.device] = self.module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper = self._wrappers[query.device]
        has_queries = batch.query_start.diff() > 0
        seq_lens = batch.seq_lens[has_queries]
        num_blocks = (seq_lens + batch.block_size - 1) // batch.block_size
        block_table = batch.block_table[batch.rows[has_queries]]
        is_used = torch.arange(block_table.shape[1], device=query.device) < num_blocks.unsqueeze(1)
        query_start = torch.cat([batch.query_start[:1], batch.query_start[1:][has_queries]])
        wrapper.plan(
            query_start,
            F.pad(num_blocks.cumsum(0, dtype=torch.int32), (1, 0)),
            # Blocks that no window reaches any more may have no id.
            block_table[is_used].clamp(min=0),
            seq_lens - (num_blocks - 1) * batch.block_size,
            query.shape[1],
            key_cache.shape[2],
            query.shape[2],
            batch.block_size,
            causal=True,
            sm_scale=scale,
            window_left=_window_size(batch)[0],
            logits_soft_cap=soft_cap,
            q_data_type=query.dtype,
            kv_data_type=key_cache.dtype,
        )
        num_queries = int(query_start[-1])
        output = torch.empty_like(query)
        output[:num_queries] = wrapper.run(
            query[:num_queries], (key_cache, value_cache), k_scale=key_scale, v_scale=value_scale
        )
        return output


def _window_size(batch: AttentionBatch) -> tuple[int, int]:
    """Keys before and behind its own that a query sees; -1 is all of them."""
    return (-1, -1) if batch.window is None else (batch.window - 1, 0)
