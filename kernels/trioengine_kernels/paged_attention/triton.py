# pyright: basic
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Paged attention on a GPU: prefill chunks and decodes of many sequences in one launch, and one that merges splits.

Online softmax over tiles of keys (FlashAttention-2, Dao 2023), whose queries are those of all heads that share a KV
head; few queries over many keys are split (Flash-Decoding). The programs walk a list of work items that the host made
(`paged_attention.work`), so a recorded graph's launch never changes.

Scores are in units of the logarithm to base 2, and what is subtracted from them is a whole number, their maximum
rounded up. So rescaling multiplies by powers of two, which rounds nothing: it does not matter when the maximum of a
row was found, and in the deterministic mode a row's sums are the same bits whatever stands beside it in a tile, and
whether its parts were added by one program or by the merge.
"""

from functools import cache, lru_cache

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.paged_attention.batch import AttentionBatch
from trioengine_kernels.paged_attention.work import WORK_FIELDS, max_partials, split_keys, tile_rows
from trioengine_kernels.variants import Variant

_LOG2_E = 1.4426950408889634
_NUM_INTERPRETED_PROGRAMS = 3
"""Without a GPU, so that some of them have several items."""


@attrs.frozen
class _Config:
    """How the tiles of a size are computed."""

    rows: int
    """Of one program; a tile that has more is several programs' work."""
    keys: int
    """Of one step of the inner loop. Divides the length of a split."""
    num_warps: int
    programs_per_processor: int
    """As many as have room on a multiprocessor of capability 9 or 10, in registers and shared memory."""
    num_stages: int = 5
    """The ids of blocks are loaded two steps ahead of keys and values, and these two steps ahead of their use."""


def _config(rows: int, head_dim: int, element_size: int, cache_element_size: int) -> _Config:
    """The table: for tiles of so many rows, and sizes of a query's and a cached number in bytes."""
    is_large = head_dim > 128
    if element_size == 4:
        # Tensor cores do not multiply these to full precision, and without them a program has registers for few rows.
        return _Config(rows=16, keys=16 if is_large else 32, num_warps=4, programs_per_processor=2)
    if rows <= 16:
        is_fp8 = cache_element_size == 1
        return _Config(
            rows=rows, keys=32 if is_large else 64, num_warps=4, programs_per_processor=2 if is_large or is_fp8 else 3
        )
    return _Config(rows=rows, keys=32 if is_large else 64, num_warps=8, programs_per_processor=1)


def paged_attention(
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
    """As `paged_attention.device_reference.paged_attention`; that the head's dimension is up to 256 is all it asks.

    Slots of the cache that belong to no key of a sequence never influence the result, whatever they hold. In the
    deterministic mode a query's result depends on its own sequence only, to the bit, however its prompt is cut into
    chunks; otherwise a decode's does among decodes.
    """
    return attend(
        query,
        key_cache,
        value_cache,
        batch,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        keys_per_split=split_keys(batch.is_deterministic),
    )


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    key_scale: float,
    value_scale: float,
    keys_per_split: int,
) -> Tensor:
    """`paged_attention` where splits are a multiple of `keys_per_split`; the work has to be planned for the same."""
    _, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    assert query.is_contiguous(), "queries have to be contiguous"
    assert key_cache.stride() == value_cache.stride(), "keys and values have to lie alike"
    assert key_cache.stride()[2:] == (head_dim, 1), "the heads of a cached token have to lie side by side"
    assert batch.block_table.stride(1) == 1, "the blocks of a sequence have to lie side by side"
    shape = _Shape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=batch.block_size,
        block_stride=key_cache.stride(0),
        token_stride=key_cache.stride(1),
        window=batch.window,
        max_query_len=batch.max_query_len,
        is_deterministic=batch.is_deterministic,
        element_size=query.element_size(),
        cache_element_size=key_cache.element_size(),
        keys_per_split=keys_per_split,
    )
    (config, constants), work_rows = _launch_of(shape), batch.work.shape[0]
    output = torch.empty_like(query)
    # Whether there can be splits is known from the shapes: it may not depend on what the tensors hold.
    has_splits = batch.block_table.shape[1] * batch.block_size > keys_per_split
    partials = partial_sums = None
    if has_splits:
        group = num_heads // num_kv_heads
        rows = max_partials(work_rows, rows=shape.tile_rows, group=group, max_query_len=batch.max_query_len)
        partials = torch.empty((rows, num_heads, head_dim), dtype=torch.float32, device=query.device)
        partial_sums = torch.empty((rows, num_heads, 2), dtype=torch.float32, device=query.device)
    num_tasks = work_rows * num_kv_heads * (shape.tile_rows // config.rows)
    score_scale = scale * key_scale * (_LOG2_E if soft_cap is None else 1 / soft_cap)
    _attend_kernel[(_num_programs(query.device, config.programs_per_processor, num_tasks),)](
        query,
        key_cache,
        value_cache,
        output,
        partials,
        partial_sums,
        batch.block_table,
        batch.rows,
        batch.work,
        batch.num_work,
        batch.block_table.stride(0),
        sinks,
        score_scale,
        None if soft_cap is None else soft_cap * _LOG2_E,
        value_scale,
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if has_splits:
        _merge_kernel[(_num_programs(query.device, _MERGE_PROGRAMS_PER_PROCESSOR, work_rows * num_heads),)](
            partials,
            partial_sums,
            output,
            batch.work,
            batch.num_work,
            sinks,
            value_scale,
            **_merge_constants(num_heads, head_dim),
            num_warps=_MERGE_NUM_WARPS,
        )
    return output


_MERGE_NUM_WARPS = 1
_MERGE_PROGRAMS_PER_PROCESSOR = 16


@attrs.frozen
class _Shape:
    """All that decides which machine code runs, beside number types and what is left out."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_stride: int
    token_stride: int
    window: int | None
    max_query_len: int
    is_deterministic: bool
    element_size: int
    cache_element_size: int
    keys_per_split: int

    @property
    def tile_rows(self) -> int:
        return tile_rows(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_query_len=self.max_query_len,
            is_deterministic=self.is_deterministic,
        )

    @property
    def config(self) -> _Config:
        return _config(self.tile_rows, self.head_dim, self.element_size, self.cache_element_size)

    @property
    def first_phase(self) -> int:
        """Decodes are bound by memory, masks or not, and one loop instead of two keeps their loads coming.

        In the deterministic mode all scores are masked, needed or not: that is arithmetic that the compiler fuses or
        does not, and the same key may need a mask in one chunk of a prompt and none in another.
        """
        if self.is_deterministic or self.config.rows < 64:
            return 2
        return 1 if self.window is None else 0

    def attend_constants(self) -> dict[str, object]:
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.num_heads // self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "DIMS": triton.next_power_of_2(self.head_dim),
            "BLOCK_SIZE": self.block_size,
            "BLOCK_STRIDE": self.block_stride,
            "TOKEN_STRIDE": self.token_stride,
            "WINDOW": self.window,
            "TILE_ROWS": self.tile_rows,
            "ROWS": self.config.rows,
            "FIRST_PHASE": self.first_phase,
            "KEYS": min(self.config.keys, self.keys_per_split),
            "KEYS_PER_SPLIT": self.keys_per_split,
            "IS_DETERMINISTIC": self.is_deterministic,
            "FIELDS": WORK_FIELDS,
        }


@lru_cache(maxsize=1024)
def _launch_of(shape: _Shape) -> tuple[_Config, dict[str, object]]:
    """The configuration and the constants of a shape: working them out takes as long as a launch."""
    return shape.config, shape.attend_constants()


@cache
def _merge_constants(num_heads: int, head_dim: int) -> dict[str, object]:
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "DIMS": triton.next_power_of_2(head_dim),
        "FIELDS": WORK_FIELDS,
    }


def _num_programs(device: torch.device, per_processor: int, num_tasks: int) -> int:
    """As many as run at the same time, which does not depend on what the work is, or fewer where there are not so many
    tasks."""
    if device.type != "cuda":
        return _NUM_INTERPRETED_PROGRAMS
    num_processors, share = _processors(device)
    return min(num_tasks, num_processors * max(1, int(per_processor * share)))


@cache
def _processors(device: torch.device) -> tuple[int, float]:
    """Multiprocessors, and the shared memory of one as a part of what those of capability 9 and 10 have."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, min(1.0, properties.shared_memory_per_multiprocessor / (228 << 10))


_LISTS = ["block_table", "rows", "work", "num_work"]
"""Parts of buffers, wherever they begin: another machine code for each alignment would gain nothing."""


# Block tables become wider as sequences grow: that must not compile anew.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_LISTS)
def _attend_kernel(
    query,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    value_cache,
    output,  # like query
    partials,  # [max_partials, num_heads, HEAD_DIM] float32, or None where nothing is split
    partial_sums,  # [max_partials, num_heads, 2] float32: what was subtracted from scores, sum of weights
    block_table,
    rows,
    work,
    num_work,
    table_stride,
    sinks,  # [num_heads], or None
    score_scale,  # to base 2; with a soft cap, what a score is multiplied with inside the tanh
    soft_cap,  # to base 2, or None
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST_PHASE: tl.constexpr,  # 0: mask, none, mask; 1: none, mask; 2: mask only
    KEYS: tl.constexpr,
    KEYS_PER_SPLIT: tl.constexpr,
    IS_DETERMINISTIC: tl.constexpr,
    FIELDS: tl.constexpr,
):
    dims = tl.arange(0, DIMS)
    tasks_per_item: tl.constexpr = NUM_KV_HEADS * (TILE_ROWS // ROWS)
    num_tasks = tl.load(num_work) * tasks_per_item
    for task in tl.range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        item = work + task // tasks_per_item * FIELDS
        kv_head = task % NUM_KV_HEADS
        first_row = task % tasks_per_item // NUM_KV_HEADS * ROWS
        row = first_row + tl.arange(0, ROWS)
        sequence = tl.load(item)
        first_query = tl.load(item + 1).to(tl.int64)
        num_queries = tl.load(item + 2)
        position = tl.load(item + 3)
        first_key = tl.load(item + 4)
        end_key = tl.load(item + 5)
        if TILE_ROWS != ROWS:
            end_key = tl.where(first_row < num_queries * GROUP, end_key, 0)
        partial = tl.load(item + 6).to(tl.int64)
        block_ids = block_table + tl.load(rows + sequence).to(tl.int64) * table_stride
        keys_of_head = key_cache + kv_head * HEAD_DIM
        values_of_head = value_cache + kv_head * HEAD_DIM

        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        row_starts = token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM
        is_row = token < num_queries
        is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        # Pointers of rows first: offsets of all elements would be kept in registers until results are stored.
        query_rows = query + first_query * (NUM_KV_HEADS * GROUP * HEAD_DIM) + row_starts
        q = tl.load(query_rows[:, None] + dims[None, :], mask=is_element, other=0.0)
        positions = position + token

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, DIMS], tl.float32)
        begin = first_key // KEYS * KEYS
        if IS_DETERMINISTIC:
            for part in tl.range(first_key // KEYS_PER_SPLIT * KEYS_PER_SPLIT, end_key, KEYS_PER_SPLIT):
                part_top, part_total, part_result = _add_keys(
                    tl.full([ROWS], float("-inf"), tl.float32),
                    tl.zeros([ROWS], tl.float32),
                    tl.zeros([ROWS, DIMS], tl.float32),
                    q,
                    positions,
                    keys_of_head,
                    values_of_head,
                    block_ids,
                    first_key,
                    end_key,
                    tl.maximum(part, begin),
                    tl.minimum(part + KEYS_PER_SPLIT, end_key),
                    score_scale,
                    soft_cap,
                    HEAD_DIM,
                    DIMS,
                    BLOCK_SIZE,
                    BLOCK_STRIDE,
                    TOKEN_STRIDE,
                    WINDOW,
                    KEYS,
                    IS_MASKED=True,
                )
                top, total, result = _add_part(top, total, result, part_top, part_total, part_result)
        else:
            # Of the keys that some of many queries see, those in the middle are seen by all: these need no mask.
            middle_begin = begin
            if FIRST_PHASE == 0:
                middle_begin = tl.cdiv(tl.maximum(first_key, position + num_queries - WINDOW), KEYS) * KEYS
                middle_begin = tl.minimum(middle_begin, tl.cdiv(end_key, KEYS) * KEYS)
            middle_end = middle_begin
            if FIRST_PHASE <= 1:
                middle_end = tl.maximum(tl.minimum(end_key, position + 1) // KEYS * KEYS, middle_begin)
            for phase in tl.static_range(FIRST_PHASE, 3):
                top, total, result = _add_keys(
                    top,
                    total,
                    result,
                    q,
                    positions,
                    keys_of_head,
                    values_of_head,
                    block_ids,
                    first_key,
                    end_key,
                    begin if phase == 0 else (middle_begin if phase == 1 else middle_end),
                    middle_begin if phase == 0 else (middle_end if phase == 1 else end_key),
                    score_scale,
                    soft_cap,
                    HEAD_DIM,
                    DIMS,
                    BLOCK_SIZE,
                    BLOCK_STRIDE,
                    TOKEN_STRIDE,
                    WINDOW,
                    KEYS,
                    IS_MASKED=phase != 1,
                )
        if partials is not None:  # noqa: SIM102 (this is known to the compiler, and the other is not)
            if partial >= 0:
                partial_rows = partials + partial * (NUM_KV_HEADS * GROUP * HEAD_DIM) + row_starts
                tl.store(partial_rows[:, None] + dims[None, :], result, mask=is_element)
                sums = partial_sums + (partial + token) * (NUM_KV_HEADS * GROUP * 2) + head * 2
                tl.store(sums, top, mask=is_row)
                tl.store(sums + 1, total, mask=is_row)
        result = _finish(top, total, result, sinks, head, value_scale).to(output.dtype.element_ty)
        output_rows = output + first_query * (NUM_KV_HEADS * GROUP * HEAD_DIM) + row_starts
        tl.store(output_rows[:, None] + dims[None, :], result, mask=is_element & (partial < 0))


@triton.jit
def _add_keys(
    top,  # [ROWS]: what was subtracted from scores so far, a whole number, or -inf where no key was seen
    total,  # [ROWS]: sum of weights
    result,  # [ROWS, DIMS]: sum of weighted values
    q,
    positions,
    keys_of_head,
    values_of_head,
    block_ids,
    first_key,  # outside of these two nothing is read
    end_key,
    begin,  # a multiple of KEYS
    end,
    score_scale,
    soft_cap,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Attend from each row to the keys from `begin` to `end` that it sees."""
    dims = tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    for start in tl.range(begin, end, KEYS):
        places = start + tl.arange(0, KEYS)
        if IS_MASKED:
            is_key = (places >= first_key) & (places < end_key)
            blocks = tl.load(block_ids + places // BLOCK_SIZE, mask=is_key, other=0)
        else:
            blocks = tl.load(block_ids + places // BLOCK_SIZE)
        offsets = blocks.to(tl.int64) * BLOCK_STRIDE + places % BLOCK_SIZE * TOKEN_STRIDE
        key_pointers = keys_of_head + offsets[None, :] + dims[:, None]
        value_pointers = values_of_head + offsets[:, None] + dims[None, :]
        # What is not read is zero: a weight of zero times whatever an old owner left (infinity, NaN) would be NaN.
        if IS_MASKED and HEAD_DIM != DIMS:
            k = tl.load(key_pointers, mask=is_key[None, :] & is_dim[:, None], other=0.0)
            v = tl.load(value_pointers, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        elif IS_MASKED:
            k = tl.load(key_pointers, mask=is_key[None, :], other=0.0)
            v = tl.load(value_pointers, mask=is_key[:, None], other=0.0)
        elif HEAD_DIM != DIMS:
            k = tl.load(key_pointers, mask=is_dim[:, None], other=0.0)
            v = tl.load(value_pointers, mask=is_dim[None, :], other=0.0)
        else:
            k = tl.load(key_pointers)
            v = tl.load(value_pointers)

        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * score_scale
        if soft_cap is not None:
            # tanh(x) = (1 - exp(-2 |x|)) / (1 + exp(-2 |x|)) with the sign of x.
            small = tl.exp2(tl.abs(scores) * -2.8853900817779268)
            scores = tl.where(scores < 0, -soft_cap, soft_cap) * ((1 - small) / (1 + small))
        if IS_MASKED:
            is_seen = is_key[None, :] & (places[None, :] <= positions[:, None])
            if WINDOW is not None:
                is_seen &= places[None, :] > positions[:, None] - WINDOW
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.ceil(tl.max(scores, 1)))
        subtracted = new_top
        if IS_MASKED:
            subtracted = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - subtracted[:, None])
        rescale = tl.exp2(top - subtracted)
        total = total * rescale + tl.sum(weights, 1)
        result = result * rescale[:, None]
        result = tl.dot(weights.to(q.dtype), v.to(q.dtype), result, input_precision="ieee")
        top = new_top
    return top, total, result


@triton.jit
def _add_part(top, total, result, part_top, part_total, part_result):
    """The sums of two sets of keys from the sums of each. Their factors are powers of two, or zero."""
    new_top = tl.maximum(top, part_top)
    subtracted = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2(top - subtracted)
    part_rescale = tl.exp2(part_top - subtracted)
    total = total * rescale + part_total * part_rescale
    result = result * rescale[:, None] + part_result * part_rescale[:, None]
    return new_top, total, result


@triton.jit
def _finish(top, total, result, sinks, heads, value_scale):
    """The weighted mean of the values."""
    if sinks is not None:
        sink = tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634
        subtracted = tl.maximum(top, tl.ceil(sink))
        rescale = tl.exp2(top - subtracted)
        total = total * rescale + tl.exp2(sink - subtracted)
        result = result * rescale[:, None]
    # Rows without a query, or without keys in this split, may have seen nothing: theirs is not stored.
    return result / tl.where(total == 0, 1.0, total)[:, None] * value_scale


@triton.jit(do_not_specialize_on_alignment=_LISTS)
def _merge_kernel(
    partials,
    partial_sums,
    output,
    work,
    num_work,
    sinks,
    value_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Add up the splits of each query, in their order. What is to be merged stands before all other items."""
    dims = tl.arange(0, DIMS)[None, :]
    is_dim = dims < HEAD_DIM
    end = tl.load(num_work) * NUM_HEADS
    task = tl.program_id(0)
    num_splits = _num_splits(work, task, end, NUM_HEADS, FIELDS)
    while num_splits > 1:
        item = work + task // NUM_HEADS * FIELDS
        head = task % NUM_HEADS + tl.arange(0, 1)
        first_query = tl.load(item + 1).to(tl.int64)
        num_queries = tl.load(item + 2)
        partial = tl.load(item + 6).to(tl.int64)
        for query in tl.range(num_queries):
            top = tl.full([1], float("-inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            result = tl.zeros([1, DIMS], tl.float32)
            for split in tl.range(0, num_splits, num_stages=4):
                place = (partial + split * num_queries + query) * NUM_HEADS + head
                part_top = tl.load(partial_sums + place * 2)
                part_total = tl.load(partial_sums + place * 2 + 1)
                part_result = tl.load(partials + place[:, None] * HEAD_DIM + dims, mask=is_dim, other=0.0)
                top, total, result = _add_part(top, total, result, part_top, part_total, part_result)
            result = _finish(top, total, result, sinks, head, value_scale)
            place = (first_query + query) * NUM_HEADS + head
            tl.store(output + place[:, None] * HEAD_DIM + dims, result.to(output.dtype.element_ty), mask=is_dim)
        task += tl.num_programs(0)
        num_splits = _num_splits(work, task, end, NUM_HEADS, FIELDS)


@triton.jit
def _num_splits(work, task, end, NUM_HEADS: tl.constexpr, FIELDS: tl.constexpr):
    """Of the task's item; 0 behind the last item."""
    return tl.load(work + task // NUM_HEADS * FIELDS + 7, mask=task < end, other=0)


def variants() -> list[Variant]:
    """Every row of the table, and every way through the kernels: a window, a soft cap, sinks, fp8, splits, fp32."""
    return [
        _attend_variant("bf16", max_query_len=1),
        _attend_variant("bf16", max_query_len=16),
        _attend_variant("bf16", max_query_len=8192),
        _attend_variant("bf16", max_query_len=8192, is_deterministic=True),
        _attend_variant("fp16", max_query_len=8192, head_dim=96, window=4096, has_sinks=True),
        _attend_variant("bf16", max_query_len=1, head_dim=256, window=4096, has_soft_cap=True),
        _attend_variant("bf16", max_query_len=8192, head_dim=256, window=4096, has_soft_cap=True),
        _attend_variant("bf16", max_query_len=8192, head_dim=256, is_deterministic=True),
        _attend_variant("bf16", "fp8e4nv", max_query_len=1),
        _attend_variant("bf16", "fp8e4nv", max_query_len=8192),
        _attend_variant("fp32", max_query_len=8192),
        _attend_variant("fp32", max_query_len=8192, head_dim=256, is_deterministic=True),
        _merge_variant("bf16"),
    ]


def _attend_variant(
    kind: str,
    cache_kind: str | None = None,
    *,
    max_query_len: int,
    head_dim: int = 128,
    window: int | None = None,
    has_soft_cap: bool = False,
    has_sinks: bool = False,
    is_deterministic: bool = False,
) -> Variant:
    num_heads, num_kv_heads, block_size = 32, 8, 16
    shape = _Shape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        block_stride=block_size * num_kv_heads * head_dim,
        token_stride=num_kv_heads * head_dim,
        window=window,
        max_query_len=max_query_len,
        is_deterministic=is_deterministic,
        element_size=4 if kind == "fp32" else 2,
        cache_element_size=1 if cache_kind == "fp8e4nv" else 4 if kind == "fp32" else 2,
        keys_per_split=split_keys(is_deterministic),
    )
    cache_kind = cache_kind or kind
    options = [f"head_dim={head_dim}", f"rows={shape.config.rows}"]
    options += [f"window={window}"] * (window is not None) + ["soft_cap"] * has_soft_cap + ["sinks"] * has_sinks
    options += ["deterministic"] * is_deterministic
    given: dict[str, str] = {
        "query": f"*{kind}",
        "key_cache": f"*{cache_kind}",
        "value_cache": f"*{cache_kind}",
        "output": f"*{kind}",
        "partials": "*fp32",
        "partial_sums": "*fp32",
        **dict.fromkeys(_LISTS, "*i32"),
        "table_stride": "i32",
        "score_scale": "fp32",
        "value_scale": "fp32",
    }
    absent: dict[str, object] = {}
    for name, kind_of_it, is_given in (("sinks", "*fp32", has_sinks), ("soft_cap", "fp32", has_soft_cap)):
        if is_given:
            given[name] = kind_of_it
        else:
            absent[name] = None
    return Variant(
        name=f"paged_attention[{kind}, cache={cache_kind}, {', '.join(options)}]",
        kernel=_attend_kernel,
        signature=given,
        constants={**absent, **shape.attend_constants()},
        num_warps=shape.config.num_warps,
        num_stages=shape.config.num_stages,
        min_capability=89 if cache_kind == "fp8e4nv" else 80,
    )


def _merge_variant(kind: str) -> Variant:
    return Variant(
        name=f"paged_attention merge[{kind}]",
        kernel=_merge_kernel,
        signature={
            "partials": "*fp32",
            "partial_sums": "*fp32",
            "output": f"*{kind}",
            "work": "*i32",
            "num_work": "*i32",
            "sinks": "*fp32",
            "value_scale": "fp32",
        },
        constants=_merge_constants(num_heads=32, head_dim=128),
        num_warps=_MERGE_NUM_WARPS,
    )
