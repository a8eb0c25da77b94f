# pyright: basic
"""The logits of a text by each backend, without scheduling: what comparisons of backends compare."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from trioengine_kernels.kernel_set import KernelSet, reference_kernels
from trioengine_kernels.native.library import ThreadPool
from trioengine_kernels.native.program import KVCache, StepArrays
from trioengine_kernels.paged_attention import plan_attention
from trioengine_kernels.paged_attention.batch import AttentionBatch
from trioengine_kernels.paged_attention.work import plan_work

from trioengine.models.config import ModelConfig
from trioengine.models.decoder import AttentionShape, Rotation
from trioengine.models.device_ops import DeviceInput, DeviceLoRAs, DeviceModel, DeviceOps
from trioengine.models.device_ops import LayerKVCache as DeviceLayerKVCache
from trioengine.models.native_ops import NativeModel, record
from trioengine.models.source import Floats
from trioengine.models.torch_ops import DecoderInput, LayerKVCache, TorchModel, TorchOps
from trioengine.testing.native import native_library

BLOCK_SIZE = 16


class HalfCacheOps(TorchOps):
    """Keys and values are rounded to halves, as the native cache holds them."""

    def rope_write_kv(
        self,
        qkv: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        rotation: Rotation[Tensor] | None,
        shape: AttentionShape,
    ) -> Tensor:
        """As `TorchOps.rope_write_kv`, rounded."""
        query = super().rope_write_kv(qkv, query_norm, key_norm, rotation, shape)
        cache = self._kv_cache[shape.kv_group][shape.kv_layer]
        cache.keys.copy_(cache.keys.half())
        cache.values.copy_(cache.values.half())
        return query


def torch_logits(model: TorchModel, token_ids: Sequence[int], ops: type[TorchOps] = TorchOps) -> Floats:
    """[num_tokens, vocab_size], computed at once."""
    config = model.config
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    places = torch.arange(len(token_ids))
    plans = [
        plan_attention(
            torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
            torch.tensor([0, len(token_ids)]),
            torch.tensor([len(token_ids)]),
            block_size=BLOCK_SIZE,
            window=group.window,
        )
        for group in config.kv_groups
    ]
    batch = DecoderInput(torch.tensor(token_ids), places, [places] * len(plans), plans, places)
    cache = [[LayerKVCache(torch.zeros(shape), torch.zeros(shape)) for _ in group.layers] for group in config.kv_groups]
    with torch.inference_mode():
        return model.decoder.forward(ops(batch, cache)).numpy()


def native_logits(model: NativeModel, token_ids: Sequence[int], counts: Sequence[int], num_threads: int = 2) -> Floats:
    """[num_tokens, vocab_size], computed in pieces of `counts` tokens."""
    config, library = model.config, native_library()
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    program = record(model, library, max_tokens=max(counts), max_logit_rows=max(counts))
    caches = [
        KVCache(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_layers=len(group.layers),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        for group in config.kv_groups
    ]
    pool = ThreadPool(library, num_threads)
    # Of each group other blocks.
    order = np.arange(num_blocks, dtype=np.int32)[::-1]
    block_tables = np.stack([np.roll(order, i) for i in range(len(caches))])
    logits, first = [], 0
    for count in counts:
        places = np.arange(first, first + count, dtype=np.int32)
        blocks = block_tables.take(places // BLOCK_SIZE, axis=1)
        step = StepArrays(
            token_ids=np.array(token_ids[first : first + count], np.int32),
            positions=places,
            slots=blocks * np.int32(BLOCK_SIZE) + places % np.int32(BLOCK_SIZE),
            query_start=np.array([0, count], np.int32),
            seq_lens=np.array([first + count], np.int32),
            block_table=block_tables[:, None].copy(),
            logit_rows=np.arange(count, dtype=np.int32),
        )
        logits.append(program.run(step, caches, pool).copy())
        first += count
    assert first == len(token_ids)
    return np.concatenate(logits)


def device_logits(
    model: DeviceModel,
    token_ids: Sequence[int],
    counts: Sequence[int],
    *,
    kernels: KernelSet | None = None,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    loras: DeviceLoRAs | None = None,
    lora_slot: int = 0,
    is_deterministic: bool = False,
) -> Floats:
    """[num_tokens, vocab_size] of a model on the CPU, computed in pieces of `counts` tokens.

    Args:
        model: whose floats are of the type `dtype`.
        token_ids: one sequence's.
        counts: of tokens.
        kernels: None is the reference's.
        dtype: of the activations.
        cache_dtype: of the KV cache; None is the same.
        loras: adapters.
        lora_slot: of the sequence.
        is_deterministic: as `DeviceOps` has it.
    """
    config, num_blocks = model.config, -(-len(token_ids) // BLOCK_SIZE)
    shape, numbers = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim), cache_dtype or dtype
    caches = [
        [DeviceLayerKVCache(_poisoned(shape, numbers), _poisoned(shape, numbers)) for _ in group.layers]
        for group in config.kv_groups
    ]
    # Of each group other blocks, in the second of two rows.
    order = torch.arange(num_blocks, dtype=torch.int32).flip(0)
    block_tables = [torch.stack([torch.full_like(order, -1), order.roll(i)]) for i in range(len(caches))]
    logits, first = [], 0
    for count in counts:
        places = torch.arange(first, first + count, dtype=torch.int32)
        batch = DeviceInput(
            token_ids=torch.tensor(token_ids[first : first + count], dtype=torch.int32),
            positions=places,
            slots=[table[1, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE for table in block_tables],
            attention=[
                _attention_batch(config, table, first, count, group.window, is_deterministic)
                for table, group in zip(block_tables, config.kv_groups, strict=True)
            ],
            logit_rows=torch.arange(count, dtype=torch.int32),
            hidden_rows=torch.empty(0, dtype=torch.int32),
            lora_slots=None if loras is None else torch.full((count,), lora_slot, dtype=torch.int32),
        )
        ops = DeviceOps(
            batch,
            caches,
            kernels or reference_kernels(),
            dtype=dtype,
            loras=loras,
            is_deterministic=is_deterministic,
        )
        with torch.inference_mode():
            logits.append(model.decoder.forward(ops).numpy())
        first += count
    assert first == len(token_ids)
    return np.concatenate(logits)


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def _attention_batch(
    config: ModelConfig, block_table: Tensor, first: int, count: int, window: int | None, is_deterministic: bool
) -> AttentionBatch:
    """Of the sequence in row 1, and a padded place."""
    query_start, seq_lens = np.array([0, count, count], np.int32), np.array([first + count, 0], np.int32)
    work = plan_work(
        query_start,
        seq_lens,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=window,
        is_deterministic=is_deterministic,
    )
    return AttentionBatch(
        block_table=block_table,
        rows=torch.tensor([1, 0], dtype=torch.int32),
        query_start=torch.from_numpy(query_start),
        seq_lens=torch.from_numpy(seq_lens),
        work=torch.from_numpy(work),
        num_work=torch.tensor([len(work)], dtype=torch.int32),
        block_size=BLOCK_SIZE,
        window=window,
        max_query_len=count,
        is_deterministic=is_deterministic,
    )
