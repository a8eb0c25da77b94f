# pyright: basic
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""Low-rank adapters of a product, in two kernels: `x @ aᵀ`, few numbers of each token, and those `@ bᵀ`, added to `y`.

A program has 16 tokens and goes through the adapters that these have, in the order of their slots, each time for its
tokens only. So tokens may stand in any order, nothing is sorted, and where no token has an adapter a program ends after
it has read 16 numbers. An adapter is read once for each tile of tokens that has it: 128 times, from the cache, for a
prompt of 2,048 tokens. Tokens of one adapter should lie side by side, which those of one sequence do.

Each sum has an order that depends on the shapes of `a` only: what a token gets does not depend on the others.
"""

from collections.abc import Mapping

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.variants import Variant

_NONE: tl.constexpr = tl.constexpr(2**31 - 1)
"""Above every slot."""
_TOKENS = 16
_OUTPUTS = 64
_COLUMNS = 128
_COLUMNS_FLOAT32 = 32
_MIN_SPLIT_COLUMNS = 512
_MAX_PROGRAMS_PER_TILE = 8
"""Of tokens. One token must keep more than one multiprocessor busy, and partial sums cost memory."""


@attrs.frozen
class _Config:
    """What both kernels are launched with. It depends on the shapes of the adapters only."""

    ranks: int
    """Of a tile."""
    num_rank_tiles: int
    num_splits: int
    """Into which columns are cut."""
    split_columns: int
    columns: int
    """Of a tile."""

    @classmethod
    def of(cls, rank: int, num_columns: int, dtype: torch.dtype) -> "_Config":
        ranks = min(max(triton.next_power_of_2(rank), 16), 64)
        num_rank_tiles = triton.cdiv(rank, ranks)
        columns = _COLUMNS_FLOAT32 if dtype == torch.float32 else _COLUMNS
        most = max(_MAX_PROGRAMS_PER_TILE // num_rank_tiles, 1)
        split_columns = max(triton.cdiv(num_columns, most), _MIN_SPLIT_COLUMNS)
        split_columns = triton.cdiv(split_columns, columns) * columns
        return cls(ranks, num_rank_tiles, triton.cdiv(num_columns, split_columns), split_columns, columns)


def lora(y: Tensor, x: Tensor, slots: Tensor, first_row: int, a: Tensor, b: Tensor) -> Tensor:
    """As `device_reference.lora`."""
    num_tokens, num_columns = x.shape
    rank, num_outputs = a.shape[1], b.shape[1]
    config = _Config.of(rank, num_columns, x.dtype)
    shrunk = torch.empty(config.num_splits, num_tokens, rank, dtype=torch.float32, device=x.device)
    token_tiles = triton.cdiv(num_tokens, _TOKENS)
    if token_tiles == 0:
        return y
    _shrink[token_tiles, config.num_rank_tiles, config.num_splits](
        shrunk,
        x,
        slots,
        a,
        num_tokens,
        num_columns,
        rank,
        x.stride(0),
        config.split_columns,
        TOKENS=_TOKENS,
        RANKS=config.ranks,
        COLUMNS=config.columns,
    )
    _expand[token_tiles, triton.cdiv(num_outputs, _OUTPUTS)](
        y,
        shrunk,
        slots,
        b,
        num_tokens,
        num_outputs,
        rank,
        first_row,
        y.stride(0),
        NUM_SPLITS=config.num_splits,
        TOKENS=_TOKENS,
        RANKS=config.ranks,
        OUTPUTS=_OUTPUTS,
        IS_FLOAT32=x.dtype == torch.float32,
    )
    return y


@triton.jit
def _slots_of(slots, tokens, num_tokens):
    return tl.load(slots + tokens, mask=tokens < num_tokens, other=0).to(tl.int32)


@triton.jit
def _next_slot(slots, slot):
    """The lowest above this one."""
    return tl.min(tl.where(slots > slot, slots, _NONE), axis=0)


# Steps have any number of tokens, and their slots are a part of a buffer: neither is compiled for.
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _shrink(
    shrunk,
    x,
    slots,
    a,
    num_tokens,
    num_columns,
    rank,
    x_stride,
    split_columns,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`shrunk[split, token]` is `a @ x` over the columns of the split, for tokens that have an adapter."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    ranks = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    split = tl.program_id(2)
    token_slots = _slots_of(slots, tokens, num_tokens)
    first_column = split * split_columns
    last_column = tl.minimum(first_column + split_columns, num_columns)
    x_rows = x + tokens.to(tl.int64) * x_stride
    shrunk_rows = shrunk + (split.to(tl.int64) * num_tokens + tokens) * rank
    slot = _next_slot(token_slots, 0)
    while slot < _NONE:
        is_here = token_slots == slot
        a_rows = a + (slot.to(tl.int64) * rank + ranks) * num_columns
        sums = tl.zeros([TOKENS, RANKS], tl.float32)
        for start in range(first_column, last_column, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            is_column = columns < last_column
            x_tile = tl.load(x_rows[:, None] + columns[None, :], mask=is_here[:, None] & is_column[None, :], other=0.0)
            a_tile = tl.load(
                a_rows[None, :] + columns[:, None], mask=(ranks < rank)[None, :] & is_column[:, None], other=0.0
            )
            sums = tl.dot(x_tile, a_tile, sums, input_precision="ieee")
        tl.store(shrunk_rows[:, None] + ranks[None, :], sums, mask=is_here[:, None] & (ranks < rank)[None, :])
        slot = _next_slot(token_slots, slot)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _expand(
    y,
    shrunk,
    slots,
    b,
    num_tokens,
    num_outputs,
    rank,
    first_row,
    y_stride,
    NUM_SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
):
    """Adds `b` times the sum of the splits to `y`, for tokens that have an adapter."""
    # Nineteen bits of a float32 hold every number of b and more of the sums than its type would.
    precision: tl.constexpr = "ieee" if IS_FLOAT32 else "tf32"
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    token_slots = _slots_of(slots, tokens, num_tokens)
    is_output = outputs < num_outputs
    y_places = y + (tokens.to(tl.int64) * y_stride + first_row)[:, None] + outputs[None, :]
    slot = _next_slot(token_slots, 0)
    while slot < _NONE:
        is_here = token_slots == slot
        b_rows = b + (slot.to(tl.int64) * num_outputs + outputs) * rank
        sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
        for start in range(0, rank, RANKS):
            ranks = start + tl.arange(0, RANKS)
            is_rank = ranks < rank
            total = tl.zeros([TOKENS, RANKS], tl.float32)
            for split in tl.static_range(NUM_SPLITS):
                places = (split * num_tokens + tokens).to(tl.int64) * rank
                total += tl.load(
                    shrunk + places[:, None] + ranks[None, :], mask=is_here[:, None] & is_rank[None, :], other=0.0
                )
            b_tile = tl.load(b_rows[None, :] + ranks[:, None], mask=is_output[None, :] & is_rank[:, None], other=0.0)
            sums = tl.dot(total, b_tile.to(tl.float32), sums, input_precision=precision)
        mask = is_here[:, None] & is_output[None, :]
        old = tl.load(y_places, mask=mask, other=0.0)
        tl.store(y_places, (old + sums).to(old.dtype), mask=mask)
        slot = _next_slot(token_slots, slot)


def variants() -> list[Variant]:
    """Ranks of one tile and of several, for 4,096 columns."""
    types: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    cases = [(torch.bfloat16, 8), (torch.bfloat16, 64), (torch.bfloat16, 512), (torch.float16, 16), (torch.float32, 16)]
    made: list[Variant] = []
    for dtype, rank in cases:
        config = _Config.of(rank, 4096, dtype)
        number = f"*{types[dtype]}"
        sizes = {"num_tokens": "i32", "rank": "i32:16" if rank % 16 == 0 else "i32"}
        constants = {"TOKENS": _TOKENS, "RANKS": config.ranks}
        shrink = {"shrunk": "*fp32", "x": number, "slots": "*i32", "a": number, **sizes}
        shrink |= {"num_columns": "i32:16", "x_stride": "i32:16", "split_columns": "i32:16"}
        expand = {"y": number, "shrunk": "*fp32", "slots": "*i32", "b": number, **sizes}
        expand |= {"num_outputs": "i32:16", "first_row": "i32:16", "y_stride": "i32:16"}
        name = f"[{types[dtype]}, rank={rank}]"
        made.append(Variant(f"lora_shrink{name}", _shrink, shrink, {**constants, "COLUMNS": config.columns}))
        constants |= {"NUM_SPLITS": config.num_splits, "OUTPUTS": _OUTPUTS, "IS_FLOAT32": dtype == torch.float32}
        made.append(Variant(f"lora_expand{name}", _expand, expand, constants))
    return made
