# pyright: basic
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
"""Products with matrices of floats on a GPU, in an order that depends on the matrix alone.

The columns are cut into runs (`Runs`), by the matrix's shape. Products of a run are summed from its first column to
its last, then the sums of all runs from the first to the last. A small batch gives each run to a program of its own, so
that all multiprocessors read the matrix, and a second pass adds; a large batch does all runs in one program. Both add
the same numbers in the same order, and the matrix is the left operand whatever the batch, so that tensor cores are told
to do the same: a row's numbers are bitwise the same in any batch.
"""

from collections.abc import Sequence

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.variants import Variant

ENOUGH_PROGRAMS = 256
"""About two for each multiprocessor of a large GPU. Fewer do not read memory as fast as it can be read."""
_MIN_RUN_COLUMNS = 512
_BLOCK_COLUMNS = 64
_SUM_BLOCK = 256
_SUM_WARPS = 4


@attrs.frozen
class Tile:
    """What a program computes of a product, for batches of up to so many tokens."""

    max_tokens: int
    num_rows: int
    """Of the matrix: 64 for each four warps, as the tensor cores of capability 90 want it."""
    num_tokens: int
    num_warps: int
    num_stages: int
    """Blocks of columns that are on their way at a time, and one."""


@attrs.frozen
class Runs:
    """How the columns of a matrix are cut."""

    num_blocks: int
    """Blocks of columns of the matrix. The last may be shorter."""
    blocks_per_run: int

    @classmethod
    def of(cls, num_rows: int, num_columns: int, block_columns: int, rows_per_program: int) -> "Runs":
        """As many runs as it takes to have `ENOUGH_PROGRAMS`, unless they become short."""
        num_blocks, num_runs = triton.cdiv(num_columns, block_columns), 1
        num_programs = triton.cdiv(num_rows, rows_per_program)
        while num_programs * num_runs < ENOUGH_PROGRAMS and num_columns >= 2 * num_runs * _MIN_RUN_COLUMNS:
            num_runs *= 2
        return cls(num_blocks, triton.cdiv(num_blocks, num_runs))

    @property
    def count(self) -> int:
        """How many there are; each has at least one block."""
        return triton.cdiv(self.num_blocks, self.blocks_per_run)


_TILES: Sequence[Tile] = (
    Tile(max_tokens=16, num_rows=64, num_tokens=16, num_warps=4, num_stages=6),
    Tile(max_tokens=64, num_rows=64, num_tokens=64, num_warps=4, num_stages=4),
    Tile(max_tokens=1 << 31, num_rows=128, num_tokens=128, num_warps=8, num_stages=3),
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the reference's, bitwise the same for a row in any batch. `x` and `weight` are contiguous."""
    num_tokens, num_columns = x.shape
    num_rows = len(weight)
    tile = tile_for(num_tokens, _TILES, x.dtype)
    runs = Runs.of(num_rows, num_columns, _BLOCK_COLUMNS, _TILES[0].num_rows)
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    sums = run_sums(out, tile, runs)
    if num_tokens:
        _linear_kernel[product_grid(out, tile, runs, sums)](
            x,
            weight,
            bias if sums is None else None,
            out if sums is None else sums,
            num_tokens,
            num_rows,
            num_columns,
            runs.num_blocks,
            runs.blocks_per_run,
            **_constants(num_columns, tile, 1 if sums is not None else runs.count),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if sums is not None:
            add_runs(sums, bias, out)
    return out


def tile_for(num_tokens: int, tiles: Sequence[Tile], dtype: torch.dtype) -> Tile:
    """Of `tiles`, which are sorted by their batches."""
    if dtype is torch.float32:
        # Without tensor cores, and twice as large: there is no room for more, least of all in the shared memory of GPUs
        # of capability 8.6, 8.9 and 12.0.
        tiles = [float32_tile(tile) for tile in tiles[:-1]]
    return next((tile for tile in tiles if num_tokens <= tile.max_tokens), tiles[-1])


def float32_tile(tile: Tile) -> Tile:
    """The same for numbers of 32 bits."""
    return attrs.evolve(tile, num_stages=2)


def run_sums(out: Tensor, tile: Tile, runs: Runs) -> Tensor | None:
    """Room for the sums of each run, [num_runs, num_tokens, num_rows], where each is a program's; else None."""
    num_tokens, num_rows = out.shape
    num_programs = triton.cdiv(num_rows, tile.num_rows) * triton.cdiv(num_tokens, tile.num_tokens)
    if runs.count == 1 or num_programs >= ENOUGH_PROGRAMS:
        return None
    return torch.empty((runs.count, num_tokens, num_rows), dtype=torch.float32, device=out.device)


def product_grid(out: Tensor, tile: Tile, runs: Runs, sums: Tensor | None) -> tuple[int, int]:
    """The programs of a product."""
    num_tokens, num_rows = out.shape
    num_programs = triton.cdiv(num_rows, tile.num_rows) * triton.cdiv(num_tokens, tile.num_tokens)
    return num_programs, 1 if sums is None else runs.count


def add_runs(sums: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The sums of all runs, one after the other, and the bias."""
    num_runs, num_tokens, num_rows = sums.shape
    grid = (triton.cdiv(num_rows, _SUM_BLOCK), num_tokens)
    _add_runs_kernel[grid](
        sums, bias, out, num_rows, num_tokens * num_rows, num_runs, BLOCK=_SUM_BLOCK, num_warps=_SUM_WARPS
    )


def variants() -> list[Variant]:
    """Each tile, with runs in programs of their own and in one; edges; the pass that adds runs."""
    signature = {
        "num_tokens": "i32",
        "num_rows": "i32:16",
        "num_columns": "i32:16",
        "num_blocks": "i32",
        "blocks_per_run": "i32",
    }
    small, medium, large = _TILES
    cases = [
        ("bf16", small, 1, 4096),
        ("bf16", small, 1, 4080),
        ("bf16", medium, 1, 4096),
        ("bf16", large, 1, 4096),
        ("bf16", large, 4, 4096),
        ("fp16", large, 4, 4096),
        ("fp32", float32_tile(small), 1, 4096),
        ("fp32", float32_tile(medium), 4, 4096),
    ]
    products = [
        Variant(
            name=f"linear[{dtype}, tokens={tile.num_tokens}, runs={num_runs}, columns={num_columns}]",
            kernel=_linear_kernel,
            signature={"x": f"*{dtype}", "weight": f"*{dtype}", "bias": "*fp32", "out": f"*{dtype}"} | signature,
            constants=_constants(num_columns, tile, num_runs),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        for dtype, tile, num_runs, num_columns in cases
    ]
    to_sums = attrs.evolve(
        products[0],
        name="linear[bf16, tokens=16, to sums]",
        signature={**products[0].signature, "out": "*fp32"},
        constants={**products[0].constants, "bias": None},
    )
    sums = Variant(
        name="linear[bf16, adding runs]",
        kernel=_add_runs_kernel,
        signature={
            "sums": "*fp32",
            "bias": "*fp32",
            "out": "*bf16",
            "num_rows": "i32:16",
            "run_size": "i32:16",
            "num_runs": "i32",
        },
        constants={"BLOCK": _SUM_BLOCK},
        num_warps=_SUM_WARPS,
    )
    return [*products, to_sums, sums]


def _constants(num_columns: int, tile: Tile, num_runs: int) -> dict[str, object]:
    return {
        "NUM_RUNS": num_runs,
        "IS_EVEN": num_columns % _BLOCK_COLUMNS == 0,
        "BLOCK_ROWS": tile.num_rows,
        "BLOCK_TOKENS": tile.num_tokens,
        "BLOCK_COLUMNS": _BLOCK_COLUMNS,
    }


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "blocks_per_run"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    num_tokens,
    num_rows,
    num_columns,
    num_blocks,
    blocks_per_run,
    NUM_RUNS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The second axis of the grid are runs, where a program does one of several."""
    rows, tokens = tile_of_program(num_rows, num_tokens, BLOCK_ROWS, BLOCK_TOKENS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    # Behind the last row or token something is computed, and not stored.
    x += tl.minimum(tokens, num_tokens - 1).to(tl.int64)[None, :] * num_columns + columns[:, None]
    weight += tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * num_columns + columns[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    if NUM_RUNS == 1:
        first = tl.program_id(1) * blocks_per_run
        end = tl.minimum(first + blocks_per_run, num_blocks)
        total = add_run(total, x, weight, columns, first, end, num_columns, IS_EVEN)
    else:
        for run in range(NUM_RUNS):
            first = run * blocks_per_run
            end = tl.minimum(first + blocks_per_run, num_blocks)
            run_sum = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
            total += add_run(run_sum, x, weight, columns, first, end, num_columns, IS_EVEN)
    store_tile(total, bias, out, rows, tokens, num_rows, num_tokens)


@triton.jit
def add_run(total, x, weight, columns, first, end, num_columns, IS_EVEN: tl.constexpr):
    """The products of blocks `first` to `end - 1` of columns, added to [rows, tokens]. Pointers are to the first."""
    for block in range(first, end):
        start = block * columns.shape[0]
        if IS_EVEN:
            x_tile, weight_tile = tl.load(x + start), tl.load(weight + start)
        else:
            is_column = start + columns < num_columns
            x_tile = tl.load(x + start, mask=is_column[:, None], other=0.0)
            weight_tile = tl.load(weight + start, mask=is_column[None, :], other=0.0)
        total = tl.dot(weight_tile, x_tile, total, input_precision="ieee")
    return total


@triton.jit
def tile_of_program(num_rows, num_tokens, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """The rows of the matrix and the tokens that a program computes. Programs that run at the same time share both."""
    num_row_blocks, num_token_blocks = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_tokens, BLOCK_TOKENS)
    per_band = num_row_blocks * 8
    first = tl.program_id(0) // per_band * 8
    band = tl.minimum(num_token_blocks - first, 8)
    place = tl.program_id(0) % per_band
    rows = place // band * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens = (first + place % band) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    return rows, tokens


@triton.jit
def store_tile(total, bias, out, rows, tokens, num_rows, num_tokens):
    """[BLOCK_ROWS, BLOCK_TOKENS] and the bias to the result; without one to the sums of the program's run."""
    if bias is not None:
        total += tl.load(bias + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
    places = (tl.program_id(1) * num_tokens + tokens).to(tl.int64)[None, :] * num_rows + rows[:, None]
    is_inside = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_runs"])
def _add_runs_kernel(sums, bias, out, num_rows, run_size, num_runs, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    places = tl.program_id(1) * num_rows + rows
    total = tl.zeros((BLOCK,), tl.float32)
    for run in range(num_runs):
        total += tl.load(sums + run * run_size + places, mask=is_row, other=0.0)
    if bias is not None:
        total += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_row)
