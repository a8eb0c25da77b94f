# pyright: basic
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
"""The mixture of experts of a layer in five kernels, of which the host learns nothing.

1. Route: of each token, the experts with the largest logits and their shares.
2. Align: of each expert, the list of its pairs (a pair is a token and one of its experts: `token * num_per_token + n`),
   in their order, and their number. A program scans all pairs for one expert, so no atomic operation decides an order.
3. Product with gates and values, and the activation. A program has some pairs of one expert. Which, it finds from the
   numbers of pairs; the grid has as many programs as the least fortunate choice needs, and the rest end at once.
4. Product of that.
5. Sum: of each token, its pairs' results times their shares, in order.

Weights are read where they are, by their addresses; products are those of `linear` and of `quantized_linear`, without
runs. As there, what a token gets does not depend on the others.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.experts.weights import ExpertMatrices, ExpertWeights
from trioengine_kernels.linear.triton import Tile, add_run, float32_tile, tile_for
from trioengine_kernels.quantized_linear.triton import add_run as add_quantized_run
from trioengine_kernels.quantized_linear.triton import block_columns_of, blocks_per_scale
from trioengine_kernels.quantized_linear.weight import GROUP_SIZE, QuantizedWeight, WeightKind
from trioengine_kernels.variants import Variant

_SCANNED_PAIRS = 4096
_SCANNING_WARPS = 8
_SUMMED_COLUMNS = 1024
_BLOCK_COLUMNS = 64
"""Of matrices that are not quantized."""
_TILES: Sequence[Tile] = (
    Tile(max_tokens=12, num_rows=64, num_tokens=16, num_warps=4, num_stages=6),
    Tile(max_tokens=160, num_rows=64, num_tokens=64, num_warps=4, num_stages=4),
    Tile(max_tokens=1 << 31, num_rows=128, num_tokens=128, num_warps=8, num_stages=3),
)
"""By pairs of an expert, on average. Some have more; their second tiles read the weights again, from the cache."""


def experts(
    x: Tensor,
    router_logits: Tensor,
    weights: ExpertWeights,
    *,
    num_per_token: int,
    is_normalized: bool,
    activation: str,
) -> Tensor:
    """As `device_reference.experts`."""
    num_tokens, hidden_size = x.shape
    num_experts, size = weights.num_experts, weights.down.num_columns
    num_pairs = num_tokens * num_per_token
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    chosen = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    shares = torch.empty(num_pairs, dtype=torch.float32, device=x.device)
    # No expert has a token twice.
    lists = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    gated = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
    results = torch.empty(num_pairs, hidden_size, dtype=x.dtype, device=x.device)

    _route[num_tokens,](
        chosen,
        shares,
        router_logits,
        num_experts,
        router_logits.stride(0),
        NUM_PER_TOKEN=num_per_token,
        IS_NORMALIZED=is_normalized,
        EXPERTS=triton.next_power_of_2(num_experts),
        PLACES=triton.next_power_of_2(num_per_token),
        num_warps=1,
    )
    _align[num_experts,](lists, counts, chosen, num_pairs, num_tokens, PAIRS=_SCANNED_PAIRS, num_warps=_SCANNING_WARPS)
    pairs_per_expert = triton.cdiv(num_pairs, num_experts)
    tile = _tile_for(pairs_per_expert, weights.gate_up, x.dtype)
    _multiply(gated, x, lists, counts, weights.gate_up, tile, num_per_token, activation)
    tile = _tile_for(pairs_per_expert, weights.down, x.dtype)
    _multiply(results, gated, lists, counts, weights.down, tile, 1, None)
    _sum[num_tokens, triton.cdiv(hidden_size, _SUMMED_COLUMNS)](
        out, results, shares, hidden_size, NUM_PER_TOKEN=num_per_token, COLUMNS=_SUMMED_COLUMNS
    )
    return out


def _tile_for(num_pairs: int, weight: ExpertMatrices, dtype: torch.dtype) -> Tile:
    """GPUs of capability 8.6, 8.9 and 12.0 have shared memory for no more."""
    first = weight.matrices[0]
    if dtype is torch.float32:
        # Nor have registers room for more numbers of 32 bits, nor are there tensor cores for them.
        return float32_tile(_TILES[0])
    is_affine = isinstance(first, QuantizedWeight) and first.kind is WeightKind.INT8_AFFINE
    return tile_for(num_pairs, _TILES[:2] if is_affine else _TILES, dtype)


def _multiply(
    out: Tensor,
    x: Tensor,
    lists: Tensor,
    counts: Tensor,
    weight: ExpertMatrices,
    tile: Tile,
    pairs_per_row: int,
    activation: str | None,
) -> None:
    """For each pair p of each expert, row p of `out`: that expert's matrix times row `p // pairs_per_row` of `x`."""
    num_pairs, num_experts = len(out), len(counts)
    # Each expert that has any pairs, and no other, may have a tile that is not full.
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (tile.num_tokens - 1)) // tile.num_tokens
    _product[num_tiles, triton.cdiv(weight.num_rows, tile.num_rows)](
        out,
        x,
        lists,
        counts,
        weight.codes,
        weight.scales,
        weight.minimums,
        num_experts,
        lists.shape[1],
        x.stride(0),
        **_constants(weight, tile, pairs_per_row, activation, num_experts),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _constants(
    weight: ExpertMatrices, tile: Tile, pairs_per_row: int, activation: str | None, num_experts: int
) -> dict[str, object]:
    first = weight.matrices[0]
    if isinstance(first, QuantizedWeight):
        block_columns = block_columns_of(first)
        types = {
            "KIND": first.kind.value,
            # Two bytes at a time, as `quantized_linear` reads them.
            "CODES": tl.uint16,
            "SCALES": tl.float32 if first.kind is WeightKind.FP8 else tl.float16,
            "NUM_SCALES": first.scales.shape[1],
            "BLOCKS_PER_SCALE": blocks_per_scale(first),
        }
    else:
        block_columns = _BLOCK_COLUMNS
        types = {"KIND": "dense", "CODES": _NUMBER_TYPES[first.dtype], "SCALES": None}
        types |= {"NUM_SCALES": 0, "BLOCKS_PER_SCALE": 0}
    return types | {
        "NUM_OUTPUTS": weight.num_rows,
        "NUM_COLUMNS": weight.num_columns,
        "PAIRS_PER_ROW": pairs_per_row,
        "ACTIVATION": activation,
        "EXPERTS": triton.next_power_of_2(num_experts),
        "BLOCK_OUTPUTS": tile.num_rows,
        "BLOCK_PAIRS": tile.num_tokens,
        "BLOCK_COLUMNS": block_columns,
    }


_NUMBER_TYPES: Mapping[torch.dtype, tl.dtype] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@triton.jit
def _route(
    chosen,
    shares,
    router_logits,
    num_experts,
    logits_stride,
    NUM_PER_TOKEN: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, EXPERTS)
    is_expert = numbers < num_experts
    logits = tl.load(router_logits + token * logits_stride + numbers, mask=is_expert, other=float("-inf"))
    logits = logits.to(tl.float32)
    # A row that has NaN goes through some experts, too: there must be no pair without one.
    order = tl.where(logits == logits, logits, float("-inf"))
    weights = tl.exp(logits - tl.max(order, axis=0))
    total = tl.sum(weights, axis=0)
    places = tl.arange(0, PLACES)
    experts = tl.zeros([PLACES], tl.int32)
    expert_shares = tl.zeros([PLACES], tl.float32)
    is_left = is_expert
    for n in tl.static_range(NUM_PER_TOKEN):
        largest = tl.max(tl.where(is_left, order, float("-inf")), axis=0)
        expert = tl.min(tl.where(is_left & (order == largest), numbers, EXPERTS), axis=0)
        is_left = is_left & (numbers != expert)
        share = tl.sum(tl.where(numbers == expert, weights, 0.0), axis=0) / total
        experts = tl.where(places == n, expert, experts)
        expert_shares = tl.where(places == n, share, expert_shares)
    if IS_NORMALIZED:
        expert_shares /= tl.sum(expert_shares, axis=0)
    is_place = places < NUM_PER_TOKEN
    tl.store(chosen + token * NUM_PER_TOKEN + places, experts, mask=is_place)
    tl.store(shares + token * NUM_PER_TOKEN + places, expert_shares, mask=is_place)


# Steps have any number of tokens: it is not compiled for.
@triton.jit(do_not_specialize=["num_pairs", "num_tokens"])
def _align(lists, counts, chosen, num_pairs, num_tokens, PAIRS: tl.constexpr):
    expert = tl.program_id(0)
    places = lists + expert.to(tl.int64) * num_tokens
    count = 0
    for start in range(0, num_pairs, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        is_here = tl.load(chosen + pairs, mask=pairs < num_pairs, other=-1) == expert
        ones = is_here.to(tl.int32)
        tl.store(places + count + tl.cumsum(ones, 0) - 1, pairs, mask=is_here)
        count += tl.sum(ones, axis=0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    out,
    x,
    lists,
    counts,
    codes,
    scales,
    minimums,
    num_experts,
    num_tokens,
    x_stride,
    KIND: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    tile = tl.program_id(0)
    numbers = tl.arange(0, EXPERTS)
    expert_counts = tl.load(counts + numbers, mask=numbers < num_experts, other=0)
    expert_tiles = (expert_counts + BLOCK_PAIRS - 1) // BLOCK_PAIRS
    if tile >= tl.sum(expert_tiles, axis=0):
        return
    expert = tl.sum((tl.cumsum(expert_tiles, 0) <= tile).to(tl.int32), axis=0)
    first_tile = tl.sum(tl.where(numbers < expert, expert_tiles, 0), axis=0)
    count = tl.sum(tl.where(numbers == expert, expert_counts, 0), axis=0)

    places = (tile - first_tile) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    is_pair = places < count
    # Behind the last pair or output something is computed, and not stored.
    pairs = tl.load(lists + expert.to(tl.int64) * num_tokens + places, mask=is_pair, other=0)
    x += (pairs // PAIRS_PER_ROW).to(tl.int64)[None, :] * x_stride
    if ACTIVATION is None:
        num_results: tl.constexpr = NUM_OUTPUTS
        results = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        outputs = tl.minimum(results, NUM_OUTPUTS - 1)
    else:
        # Eight gates, then the eight values beside them, and so on: a thread then has both of what it combines.
        num_results: tl.constexpr = NUM_OUTPUTS // 2
        results = tl.program_id(1) * (BLOCK_OUTPUTS // 2) + tl.arange(0, BLOCK_OUTPUTS // 2)
        outputs = tl.arange(0, BLOCK_OUTPUTS)
        is_value = outputs % 16 // 8
        outputs = tl.program_id(1) * (BLOCK_OUTPUTS // 2) + outputs // 16 * 8 + outputs % 8
        outputs = tl.minimum(outputs, num_results - 1) + is_value * num_results
    outputs = outputs.to(tl.int64)

    codes = tl.multiple_of(tl.load(codes + expert).to(tl.pointer_type(CODES)), 16)
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_PAIRS), tl.float32)
    num_blocks: tl.constexpr = (NUM_COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    is_even: tl.constexpr = NUM_COLUMNS % BLOCK_COLUMNS == 0
    if KIND == "dense":
        columns = tl.arange(0, BLOCK_COLUMNS)
        codes += outputs[:, None] * NUM_COLUMNS + columns[None, :]
        total = add_run(total, x + columns[:, None], codes, columns, 0, num_blocks, NUM_COLUMNS, is_even)
    else:
        codes += outputs[:, None] * (NUM_COLUMNS // 4 if KIND == "int4" else NUM_COLUMNS // 2)
        scales = tl.multiple_of(tl.load(scales + expert).to(tl.pointer_type(SCALES)), 16)
        scales += outputs * NUM_SCALES if KIND == "fp8" else outputs[:, None] * NUM_SCALES
        if minimums is not None:
            minimums = tl.multiple_of(tl.load(minimums + expert).to(tl.pointer_type(SCALES)), 16)
            minimums += outputs[:, None] * NUM_SCALES
        total = add_quantized_run(
            total,
            x,
            codes,
            scales,
            minimums,
            0,
            num_blocks,
            NUM_COLUMNS // 32,
            BLOCKS_PER_SCALE,
            KIND,
            is_even,
            BLOCK_COLUMNS,
        )

    if ACTIVATION is not None:
        # [16 outputs, gate or value, 8 of them, pairs].
        total = tl.reshape(total, (BLOCK_OUTPUTS // 16, 2, 8, BLOCK_PAIRS))
        gate, value = tl.split(tl.permute(total, (0, 2, 3, 1)))
        if ACTIVATION == "silu":
            total = gate * tl.sigmoid(gate) * value
        else:
            # (1 + tanh(u)) / 2 is the sigmoid of 2 * u; the number is 2 * sqrt(2 / pi).
            total = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * value
        total = tl.reshape(total, (BLOCK_OUTPUTS // 2, BLOCK_PAIRS))
    tl.store(
        out + pairs.to(tl.int64)[None, :] * num_results + results[:, None],
        total.to(out.dtype.element_ty),
        mask=(results < num_results)[:, None] & is_pair[None, :],
    )


@triton.jit
def _sum(out, results, shares, hidden_size, NUM_PER_TOKEN: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < hidden_size
    total = tl.zeros([COLUMNS], tl.float32)
    for n in tl.static_range(NUM_PER_TOKEN):
        pair = token * NUM_PER_TOKEN + n
        total += tl.load(shares + pair) * tl.load(results + pair * hidden_size + columns, mask=is_column, other=0.0)
    tl.store(out + token * hidden_size + columns, total.to(out.dtype.element_ty), mask=is_column)


def variants() -> list[Variant]:
    """Every kernel, tile and kind of weights, in the shapes of Qwen3-30B-A3B."""
    num_experts, num_per_token, hidden_size, size = 128, 8, 2048, 768
    route = {"NUM_PER_TOKEN": num_per_token, "IS_NORMALIZED": True, "EXPERTS": num_experts, "PLACES": num_per_token}
    route_signature = {"chosen": "*i32", "shares": "*fp32", "router_logits": "*bf16", "num_experts": "i32:16"}
    route_signature |= {"logits_stride": "i32:16"}
    align_signature = {"lists": "*i32", "counts": "*i32", "chosen": "*i32", "num_pairs": "i32", "num_tokens": "i32"}
    sum_signature = {"out": "*bf16", "results": "*bf16", "shares": "*fp32", "hidden_size": "i32:16"}
    sum_constants = {"NUM_PER_TOKEN": num_per_token, "COLUMNS": _SUMMED_COLUMNS}
    made = [
        Variant("experts_route[bf16]", _route, route_signature, route, num_warps=1),
        Variant("experts_align", _align, align_signature, {"PAIRS": _SCANNED_PAIRS}, num_warps=_SCANNING_WARPS),
        Variant("experts_sum[bf16]", _sum, sum_signature, sum_constants),
    ]
    small, medium, large = _TILES
    cases: list[tuple[torch.dtype, WeightKind | None, Tile, str | None]] = [
        (torch.bfloat16, None, large, "silu"),
        (torch.bfloat16, None, medium, "silu"),
        (torch.bfloat16, None, small, "silu"),
        (torch.float16, None, small, None),
        (torch.float32, None, float32_tile(small), "gelu_tanh"),
        (torch.bfloat16, WeightKind.INT4, large, "silu"),
        (torch.bfloat16, WeightKind.INT4, medium, "silu"),
        (torch.bfloat16, WeightKind.INT4, small, "silu"),
        (torch.bfloat16, WeightKind.INT8_AFFINE, medium, None),
        (torch.float16, WeightKind.INT8, small, None),
        (torch.bfloat16, WeightKind.INT8, large, None),
        (torch.bfloat16, WeightKind.FP8, large, "silu"),
        (torch.bfloat16, WeightKind.FP8, small, "silu"),
    ]
    for dtype, kind, tile, activation in cases:
        num_rows, num_columns = (hidden_size, size) if activation is None else (2 * size, hidden_size)
        weight = _without_memory(kind, dtype, num_experts, num_rows, num_columns)
        number = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
        signature = {"out": number, "x": number, "lists": "*i32", "counts": "*i32", "codes": "*i64"}
        signature |= {"scales": "*i64", "minimums": "*i64"}
        signature |= {"num_experts": "i32:16", "num_tokens": "i32", "x_stride": "i32:16"}
        constants = _constants(weight, tile, num_per_token if activation else 1, activation, num_experts)
        constants |= {} if weight.scales is not None else {"scales": None}
        constants |= {} if weight.minimums is not None else {"minimums": None}
        name = f"experts_product[{number[1:]}, {constants['KIND']}, {activation}, pairs={tile.num_tokens}]"
        made.append(Variant(name, _product, signature, constants, num_warps=tile.num_warps, num_stages=tile.num_stages))
    return made


def _without_memory(
    kind: WeightKind | None, dtype: torch.dtype, num_experts: int, num_rows: int, num_columns: int
) -> ExpertMatrices:
    """What a launch would be told of such matrices."""
    addresses = torch.empty(num_experts, dtype=torch.int64, device="meta")
    if kind is None:
        matrix = torch.empty(num_rows, num_columns, dtype=dtype, device="meta")
        return ExpertMatrices([matrix], addresses, None, None, num_rows, num_columns)
    group_size = 128 if kind is WeightKind.FP8 else GROUP_SIZE
    plane = torch.empty(num_rows, num_columns // group_size, device="meta")
    minimums = plane if kind in (WeightKind.INT4, WeightKind.INT8_AFFINE) else None
    planes = QuantizedWeight(kind, plane, plane, minimums, num_rows, num_columns, group_size)
    return ExpertMatrices(
        [planes], addresses, addresses, None if minimums is None else addresses, num_rows, num_columns
    )
