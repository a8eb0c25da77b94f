# pyright: basic
# pyright: reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Products with quantized matrices on a GPU, in an order that depends on the matrix alone.

A tile of codes becomes numbers of the activations' type in registers, which tensor cores multiply by; no numbers of
the matrix are written to memory. Activations are not quantized: 8 bits of them would cost 2 % of the result. How runs
of columns are summed is told in `linear.triton`; here, too, a row's numbers are bitwise the same in any batch.

Of INT4, half of each byte is a column of the first half of its group, the other half one of the second: there are two
products for each tile, with the activations of those columns. A scale of FP8 multiplies sums of products.

Conversions are slow on a GPU, so codes are written into the fractions of floats by their bits (`_number`), two from
each pair of bytes: that is how tensor cores take a thread's numbers. What the floats are too large by is in the
minimum, with an error of at most 2^-16 of the scale.
"""

from collections.abc import Sequence

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.linear.triton import (
    Runs,
    Tile,
    add_runs,
    float32_tile,
    product_grid,
    run_sums,
    store_tile,
    tile_for,
    tile_of_program,
)
from trioengine_kernels.quantized_linear.weight import GROUP_SIZE, QuantizedWeight, WeightKind
from trioengine_kernels.variants import Variant

_BLOCK_COLUMNS = 128
_TILES: Sequence[Tile] = (
    Tile(max_tokens=16, num_rows=64, num_tokens=16, num_warps=4, num_stages=6),
    Tile(max_tokens=64, num_rows=64, num_tokens=64, num_warps=4, num_stages=4),
    Tile(max_tokens=1 << 31, num_rows=128, num_tokens=128, num_warps=8, num_stages=3),
)


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """As the reference's, bitwise the same for a row in any batch. `x` is contiguous, FP8 codes are numbers."""
    num_tokens, num_rows = len(x), weight.num_rows
    block_columns = block_columns_of(weight)
    tile = tile_for(num_tokens, _TILES, x.dtype)
    runs = Runs.of(num_rows, weight.num_columns, block_columns, _TILES[0].num_rows)
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    sums = run_sums(out, tile, runs)
    if weight.kind is WeightKind.INT8_AFFINE or (sums is None and runs.count > 1):
        tile = _with_fewer_tokens(tile)
    if num_tokens:
        _quantized_linear_kernel[product_grid(out, tile, runs, sums)](
            x,
            weight.codes.view(torch.uint16),
            weight.scales,
            weight.minimums,
            bias if sums is None else None,
            out if sums is None else sums,
            num_tokens,
            num_rows,
            weight.num_columns // GROUP_SIZE,
            weight.scales.shape[1],
            runs.num_blocks,
            runs.blocks_per_run,
            **_constants(
                weight.kind,
                weight.num_columns,
                block_columns,
                blocks_per_scale(weight),
                tile,
                1 if sums is not None else runs.count,
            ),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if sums is not None:
            add_runs(sums, bias, out)
    return out


def variants() -> list[Variant]:
    """Each tile with some kinds of matrices, those that take most of it; edges; other activations and scales."""
    small, medium, large = _TILES
    fewer_tokens = _with_fewer_tokens(large)
    cases = [
        ("bf16", WeightKind.INT4, small, 1, 4096, 0),
        ("bf16", WeightKind.INT4, small, 1, 576, 0),
        ("bf16", WeightKind.INT4, medium, 1, 4096, 0),
        ("bf16", WeightKind.INT4, large, 1, 4096, 0),
        ("bf16", WeightKind.INT4, fewer_tokens, 4, 4096, 0),
        ("fp16", WeightKind.INT4, large, 1, 4096, 0),
        ("bf16", WeightKind.INT8, small, 1, 4096, 0),
        ("bf16", WeightKind.INT8, large, 1, 4096, 0),
        ("bf16", WeightKind.INT8_AFFINE, medium, 1, 4096, 0),
        ("bf16", WeightKind.INT8_AFFINE, fewer_tokens, 1, 4096, 0),
        ("bf16", WeightKind.INT8_AFFINE, fewer_tokens, 4, 4096, 0),
        ("bf16", WeightKind.FP8, small, 1, 4096, 0),
        ("bf16", WeightKind.FP8, large, 1, 4096, 0),
        ("bf16", WeightKind.FP8, fewer_tokens, 4, 4096, 1),
        ("bf16", WeightKind.FP8, large, 1, 4096, 1),
        ("fp32", WeightKind.INT8_AFFINE, float32_tile(medium), 4, 4096, 0),
    ]
    return [_variant(*case) for case in cases]


def _variant(
    dtype: str, kind: WeightKind, tile: Tile, num_runs: int, num_columns: int, blocks_per_scale: int
) -> Variant:
    has_minimums = kind in (WeightKind.INT4, WeightKind.INT8_AFFINE)
    constants = _constants(kind, num_columns, _BLOCK_COLUMNS, blocks_per_scale, tile, num_runs)
    return Variant(
        name=f"quantized_linear[{dtype}, {kind.value}, tile={tile.num_rows}x{tile.num_tokens}, runs={num_runs}, "
        f"columns={num_columns}, blocks_per_scale={blocks_per_scale}]",
        kernel=_quantized_linear_kernel,
        signature={
            "x": f"*{dtype}",
            "codes": "*u16",
            "scales": "*fp32" if kind is WeightKind.FP8 else "*fp16",
            "minimums": "*fp16",
            "bias": "*fp32",
            "out": f"*{dtype}",
            "num_tokens": "i32",
            "num_rows": "i32:16",
            "groups_per_row": "i32",
            "scales_per_row": "i32",
            "num_blocks": "i32",
            "blocks_per_run": "i32",
        },
        constants=constants if has_minimums else constants | {"minimums": None},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def block_columns_of(weight: QuantizedWeight) -> int:
    """Columns that are multiplied at a time. Of FP8 they have one scale."""
    if weight.kind is not WeightKind.FP8 or weight.scales.shape[1] == 1:
        return _BLOCK_COLUMNS
    return next(size for size in (_BLOCK_COLUMNS, 64, GROUP_SIZE) if weight.group_size % size == 0)


def blocks_per_scale(weight: QuantizedWeight) -> int:
    """Of FP8, blocks of columns that have one scale; 0 is all of a row. Of others it means nothing."""
    has_one = weight.kind is not WeightKind.FP8 or weight.scales.shape[1] == 1
    return 0 if has_one else weight.group_size // block_columns_of(weight)


def _with_fewer_tokens(tile: Tile) -> Tile:
    """For programs that sum runs, and add the sums: registers hold both. And for bytes with minimums, of which GPUs of
    capability 8.6, 8.9 and 12.0 have no shared memory for more."""
    return attrs.evolve(tile, num_tokens=min(tile.num_tokens, 64))


def _constants(
    kind: WeightKind, num_columns: int, block_columns: int, blocks_per_scale: int, tile: Tile, num_runs: int
) -> dict[str, object]:
    return {
        "KIND": kind.value,
        "BLOCKS_PER_SCALE": blocks_per_scale,
        "NUM_RUNS": num_runs,
        "IS_EVEN": num_columns % block_columns == 0,
        "BLOCK_ROWS": tile.num_rows,
        "BLOCK_TOKENS": tile.num_tokens,
        "BLOCK_COLUMNS": block_columns,
    }


@triton.jit(do_not_specialize=["num_tokens", "groups_per_row", "scales_per_row", "num_blocks", "blocks_per_run"])
def _quantized_linear_kernel(
    x,
    codes,
    scales,
    minimums,
    bias,
    out,
    num_tokens,
    num_rows,
    groups_per_row,
    scales_per_row,
    num_blocks,
    blocks_per_run,
    KIND: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr,
    NUM_RUNS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The second axis of the grid are runs, where a program does one of several."""
    rows, tokens = tile_of_program(num_rows, num_tokens, BLOCK_ROWS, BLOCK_TOKENS)
    if IS_EVEN:
        # The compiler is told that rows of scales begin where wide loads can.
        groups_per_row = groups_per_row // (BLOCK_COLUMNS // 32) * (BLOCK_COLUMNS // 32)
    # Behind the last row or token something is computed, and not stored.
    tokens_read = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    rows_read = tl.minimum(rows, num_rows - 1).to(tl.int64)
    x += tokens_read[None, :] * (groups_per_row * 32)
    codes += rows_read[:, None] * (groups_per_row * (8 if KIND == "int4" else 16))
    if KIND == "fp8":
        scales += rows_read * scales_per_row
    else:
        scales += rows_read[:, None] * groups_per_row
        if minimums is not None:
            minimums += rows_read[:, None] * groups_per_row
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    if NUM_RUNS == 1:
        first = tl.program_id(1) * blocks_per_run
        end = tl.minimum(first + blocks_per_run, num_blocks)
        total = add_run(
            total,
            x,
            codes,
            scales,
            minimums,
            first,
            end,
            groups_per_row,
            BLOCKS_PER_SCALE,
            KIND,
            IS_EVEN,
            BLOCK_COLUMNS,
        )
    else:
        for run in range(NUM_RUNS):
            first = run * blocks_per_run
            end = tl.minimum(first + blocks_per_run, num_blocks)
            run_sum = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
            total += add_run(
                run_sum,
                x,
                codes,
                scales,
                minimums,
                first,
                end,
                groups_per_row,
                BLOCKS_PER_SCALE,
                KIND,
                IS_EVEN,
                BLOCK_COLUMNS,
            )
    store_tile(total, bias, out, rows, tokens, num_rows, num_tokens)


@triton.jit
def add_run(
    total,
    x,
    codes,
    scales,
    minimums,
    first,
    end,
    groups_per_row,
    BLOCKS_PER_SCALE: tl.constexpr,
    KIND: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The products of blocks `first` to `end - 1`, added to [BLOCK_ROWS, BLOCK_TOKENS].

    Pointers are to rows: `x` [1, BLOCK_TOKENS], `codes` (of pairs of bytes, uint16), `scales` and `minimums`
    [BLOCK_ROWS, 1], but `scales` of FP8 [BLOCK_ROWS].
    """
    GROUPS: tl.constexpr = BLOCK_COLUMNS // 32
    GROUP_PAIRS: tl.constexpr = 8 if KIND == "int4" else 16
    pairs = tl.arange(0, GROUPS * GROUP_PAIRS)
    # Of INT4 those that low halves of bytes are for.
    columns = tl.arange(0, 2 * GROUPS * GROUP_PAIRS)
    columns = columns // (2 * GROUP_PAIRS) * 32 + columns % (2 * GROUP_PAIRS)
    groups = tl.arange(0, GROUPS)
    products = total
    if KIND == "fp8" and BLOCKS_PER_SCALE == 0:
        products = tl.zeros_like(total)
    for block in range(first, end):
        x_places = x + (block * BLOCK_COLUMNS + columns)[:, None]
        is_column = (block * BLOCK_COLUMNS + columns < groups_per_row * 32)[:, None]
        is_pair = (block * (GROUPS * GROUP_PAIRS) + pairs < groups_per_row * GROUP_PAIRS)[None, :]
        pair = _load(codes + (block * (GROUPS * GROUP_PAIRS) + pairs)[None, :], is_pair, IS_EVEN).to(tl.int32)
        x_tile = _load(x_places, is_column, IS_EVEN)
        if KIND == "fp8":
            values = _joined(_float8(pair << 24), _float8(pair << 16), x_tile.dtype)
            if BLOCKS_PER_SCALE == 0:
                products = tl.dot(values, x_tile, products, input_precision="ieee")
            else:
                scale = tl.load(scales + block // BLOCKS_PER_SCALE)
                products += tl.dot(values, x_tile, input_precision="ieee") * scale[:, None]
        else:
            group_places = (block * GROUPS + groups)[None, :]
            is_group = block * GROUPS + groups[None, :] < groups_per_row
            scale = _load(scales + group_places, is_group, IS_EVEN).to(tl.float32)
            minimum = tl.zeros_like(scale)
            if minimums is not None:
                minimum = _load(minimums + group_places, is_group, IS_EVEN).to(tl.float32)
            even, odd = pair << 15, pair << 7
            if KIND == "int4":
                low = _numbers(even & 0x78000, odd & 0x78000, 0x43800000, 256.0, scale, minimum, x_tile.dtype)
                products = tl.dot(low, x_tile, products, input_precision="ieee")
                x_tile = _load(x_places + 16, is_column, IS_EVEN)
                high = _numbers(even & 0x780000, odd & 0x780000, 0x41800000, 16.0, scale, minimum, x_tile.dtype)
                products = tl.dot(high, x_tile, products, input_precision="ieee")
            else:
                # Whole numbers with a sign, to which 128 is added by their highest bit.
                values = _numbers(even & 0x7F8000, odd & 0x7F8000, 0x43C00000, 384.0, scale, minimum, x_tile.dtype)
                products = tl.dot(values, x_tile, products, input_precision="ieee")
    if KIND == "fp8" and BLOCKS_PER_SCALE == 0:
        products = total + products * tl.load(scales)[:, None]
    return products


@triton.jit
def _load(places, is_there, IS_EVEN: tl.constexpr):
    if IS_EVEN:
        return tl.load(places)
    else:
        return tl.load(places, mask=is_there, other=0)


@triton.jit
def _numbers(even, odd, BITS: tl.constexpr, OFFSET: tl.constexpr, scale, minimum, dtype: tl.constexpr):
    """What codes stand for, [rows, columns].

    `even` and `odd` [rows, columns / 2] have each a code in the upper bits of a float's fraction. `BITS` are those of a
    float next to which that counts ones, and `OFFSET` its size with what the codes are too large by. `scale` and
    `minimum` are [rows, groups].
    """
    WIDTH: tl.constexpr = even.shape[1] // scale.shape[1]
    # The compiler must not know the bits: a constant with two constants takes two instructions, and this takes one.
    bits = _for_each_pair(tl.where(scale == scale, BITS, 0x7FC00000), WIDTH)
    minimum = _for_each_pair(minimum - scale * OFFSET, WIDTH)
    scale = _for_each_pair(scale, WIDTH)
    return _joined(_number(even, bits) * scale + minimum, _number(odd, bits) * scale + minimum, dtype)


@triton.jit
def _number(code, bits):
    return (code ^ bits).to(tl.float32, bitcast=True)


@triton.jit
def _for_each_pair(values, WIDTH: tl.constexpr):
    """[rows, groups] to [rows, groups * WIDTH]."""
    ROWS: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], (ROWS, GROUPS, WIDTH)), (ROWS, GROUPS * WIDTH))


@triton.jit
def _float8(bits):
    """What the highest eight bits of each number stand for, float32; NaN is none.

    The fraction and the exponent, four bits of float32's eight, go to their place, the sign stays. The exponent then
    counts from -127 in place of -7.
    """
    return ((bits >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 to the power of 120.


@triton.jit
def _joined(even, odd, dtype: tl.constexpr):
    """[rows, 2 * columns]: columns of both in turn."""
    return tl.reshape(tl.join(even.to(dtype), odd.to(dtype)), (even.shape[0], 2 * even.shape[1]))
