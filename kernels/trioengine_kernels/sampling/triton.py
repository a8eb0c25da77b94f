# pyright: basic
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""Sampling on a GPU: the tokens of the reference, exactly, for any mix of rows, and nothing that the host waits for.

A row's tokens are split over several programs, by the numbers of rows and tokens only. Everything that goes from one
program to another is a maximum, a first place or an integer, so neither the split nor the order in which programs run
changes a result. Six launches, of which three end at once where a row has neither top-k nor top-p:

1. `_find_largest`: the largest logit of each part and its place.
2. `_weigh_bins`: how many logits, and what weight, fall into each of 2,048 bins below the largest.
3. `_collect`: from these, the bins in which the two thresholds lie; their logits are written side by side.
4. `_find_thresholds`: bisection over the bit patterns of floats, 16 parts at a time, among those few logits only.
5. `_draw`: the largest of `logit / temperature + noise` of each part, of logits that reach the threshold.
6. `_choose`: the best part.

Why the tokens are those of the reference:

- A logit over temperature is one subtraction and one division, as IEEE defines them (`div_rn`; Triton's `/` is not),
  and every threshold is such a value itself. Bins are a rising function of it, so equals share a bin.
- Weights are integers, so that their sums have no rounding and no order.
- Noise and the logarithm of `min_p` are computed in double and then rounded. `log1p(-v)` is computed as `log(1 - v)`:
  v has 33 bits behind the point, so `1 - v` is exact, and both are the same number before they are rounded.
- `native/src/variants/sampling.c` says how seldom two libraries' last places of double exp or log could matter.

Kernels are compiled without fused multiply-add, which rounds once where the reference rounds twice.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine_kernels.sampling import device_reference
from trioengine_kernels.sampling.device import DeviceRules
from trioengine_kernels.sampling.reference import MIN_LOGPROB, Logprobs, SamplingBatch
from trioengine_kernels.variants import Variant

_TILE = 1024
"""Logits that a program looks at at once."""
_RULES_TILE = 2048
_MIN_PART = 4096
"""Logits that are worth a program."""
_MAX_PARTS = 64
"""Of a row."""
_MAX_PROGRAMS = 1024
"""More of them than a GPU runs at once make nothing faster."""
_BINS = 2048
_LIST_SIZE = 8192
"""Logits of a row that are written side by side; where there are more, the row itself is looked through."""
_WAYS = 16
"""Into which bisection cuts what is left at once: a look at the logits costs more than the comparisons."""
_WAYS_TILE = 512
_SELECTION_SIZE = 8
"""Numbers that `_collect` tells `_find_thresholds`."""
_TOP_PART = 4096
"""Logits whose log probabilities one program sums. Never another number, so that sums have one order."""
_MAX_TOP = 64
"""The most likely tokens that are found without sorting."""
_NUM_WARPS = 4

_NONE: tl.constexpr = tl.constexpr(2**31 - 1)
"""Above every token id."""
_BINS_PER_UNIT: tl.constexpr = tl.constexpr(32.0)
_LOWEST: tl.constexpr = tl.constexpr(MIN_LOGPROB)


def apply_rules(logits: Tensor, rules: DeviceRules, *, out: Tensor | None = None) -> Tensor:
    """As `device_reference.apply_rules`, in one pass."""
    num_rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    penalties, masks = rules.penalties, rules.masks
    if num_rows:
        _launch(
            _apply_rules,
            (num_rows, triton.cdiv(vocab_size, _RULES_TILE)),
            {
                "logits": logits,
                "out": out,
                "mask_rows": None if masks is None else masks.rows,
                "mask_bits": None if masks is None else masks.bits,
                "bias_starts": rules.bias.ids.starts,
                "bias_ids": rules.bias.ids.token_ids,
                "bias_values": rules.bias.values,
                "penalty_rows": penalties.rows,
                "repetition": penalties.repetition,
                "presence": penalties.presence,
                "frequency": penalties.frequency,
                "prompt_bits": penalties.state.prompt_bits,
                "output_counts": penalties.state.output_counts,
                "draft_starts": penalties.drafts.starts,
                "draft_ids": penalties.drafts.token_ids,
                "row_stride": logits.stride(0),
                "out_stride": out.stride(0),
                "mask_stride": 0 if masks is None else masks.bits.stride(0),
                "vocab_size": vocab_size,
                "is_in_place": int(out.data_ptr() == logits.data_ptr()),
            },
        )
    return out


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """As `device_reference.sample`."""
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    status = torch.empty(len(logits), dtype=torch.uint8, device=logits.device)
    if len(logits):
        arguments, grid = _limit(logits, batch)
        arguments |= {"tokens": tokens, "status": status}
        _launch(_draw, grid, arguments)
        _launch(_choose, grid[:1], arguments)
    return tokens, status


def processed_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """As `device_reference.processed_logits`."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        arguments, grid = _limit(logits, batch)
        _launch(_write_processed, grid, arguments | {"out": out, "out_stride": out.stride(0)})
    return out


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """As `device_reference.logprobs`. More than 64 of the most likely are found by sorting the vocabulary.

    A row's numbers do not depend on the other rows.
    """
    num_rows, vocab_size = logits.shape
    if num_top > _MAX_TOP:
        return device_reference.logprobs(logits, token_ids, num_top)
    num_parts = triton.cdiv(vocab_size, _TOP_PART)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    found = Logprobs(
        chosen=empty(num_rows, dtype=torch.float32),
        rank=empty(num_rows, dtype=torch.int32),
        top=empty(num_rows, num_top, dtype=torch.float32),
        top_token_ids=empty(num_rows, num_top, dtype=torch.int32),
    )
    if num_rows:
        arguments = {
            "logits": logits,
            "token_ids": token_ids,
            "maxima": empty(num_rows, num_parts, dtype=torch.float32),
            "sums": empty(num_rows, num_parts, dtype=torch.float32),
            "larger": empty(num_rows, num_parts, dtype=torch.int32),
            "keys": empty(num_rows, num_parts, max(num_top, 1), dtype=torch.int64),
            "chosen": found.chosen,
            "rank": found.rank,
            "top": found.top,
            "top_token_ids": found.top_token_ids,
            "row_stride": logits.stride(0),
            "vocab_size": vocab_size,
            "num_parts": num_parts,
            "num_top": num_top,
        }
        _launch(_find_top, (num_rows, num_parts), arguments)
        _launch(_merge_top, (num_rows,), arguments | _merge_constants(num_parts, num_top))
    return found


def variants() -> list[Variant]:
    """All kernels. The merge of the most likely tokens is the only one that comes in sizes."""
    without_masks = {"mask_rows": None, "mask_bits": None}
    cases = [
        ("apply_rules", _apply_rules, {}),
        ("apply_rules[masks=None]", _apply_rules, without_masks),
        *((kernel.fn.__name__.strip("_"), kernel, {}) for kernel in (_find_largest, _weigh_bins, _collect)),
        *((kernel.fn.__name__.strip("_"), kernel, {}) for kernel in (_find_thresholds, _draw, _choose)),
        *((kernel.fn.__name__.strip("_"), kernel, {}) for kernel in (_write_processed, _find_top)),
        *(
            (f"merge_top[parts={num_parts}, top={num_top}]", _merge_top, _merge_constants(num_parts, num_top))
            for num_parts, num_top in ((32, 0), (32, 20), (64, _MAX_TOP))
        ),
    ]
    return [
        Variant(
            name=name,
            kernel=kernel,
            signature=_SIGNATURE,
            constants=_constants(kernel) | constants,
            num_warps=_num_warps(kernel),
            is_fused=False,
        )
        for name, kernel, constants in cases
    ]


def _limit(logits: Tensor, batch: SamplingBatch) -> tuple[dict[str, object], tuple[int, int]]:
    """Find the thresholds of rows that have some. Arguments and grid of kernels that go on from there."""
    num_rows, vocab_size = logits.shape
    num_parts = min(_MAX_PARTS, triton.cdiv(vocab_size, _MIN_PART), max(1, _MAX_PROGRAMS // num_rows))
    num_tiles = triton.cdiv(triton.cdiv(vocab_size, num_parts), _TILE)
    num_parts = triton.cdiv(vocab_size, num_tiles * _TILE)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    arguments: dict[str, object] = {
        "logits": logits,
        "temperature": batch.temperature,
        "top_k": batch.top_k,
        "top_p": batch.top_p,
        "min_p": batch.min_p,
        "seed": batch.seed,
        "position": batch.position,
        "maxima": empty(num_rows, num_parts, dtype=torch.float32),
        "places": empty(num_rows, num_parts, dtype=torch.int32),
        "counts": empty(num_rows, _BINS, dtype=torch.int32),
        "weights": empty(num_rows, _BINS, dtype=torch.int64),
        "selection": empty(num_rows, _SELECTION_SIZE, dtype=torch.int64),
        "list_sizes": empty(num_rows, dtype=torch.int32),
        "lists": empty(num_rows, _LIST_SIZE, dtype=torch.float32),
        "thresholds": empty(num_rows, dtype=torch.float32),
        "scores": empty(num_rows, num_parts, dtype=torch.float32),
        "drawn": empty(num_rows, num_parts, dtype=torch.int32),
        "row_stride": logits.stride(0),
        "vocab_size": vocab_size,
        "num_tiles": num_tiles,
        "num_parts": num_parts,
    }
    grid = num_rows, num_parts
    for kernel in (_find_largest, _weigh_bins, _collect):
        _launch(kernel, grid, arguments)
    _launch(_find_thresholds, grid[:1], arguments)
    return arguments, grid


def _launch(kernel: triton.JITFunction, grid: tuple[int, ...], arguments: Mapping[str, object]) -> None:
    """Run a kernel with those of the arguments that it takes."""
    given = {name: arguments[name] for name in kernel.arg_names if name in arguments}
    kernel[grid](**(_constants(kernel) | given), num_warps=_num_warps(kernel), enable_fp_fusion=False)


def _constants(kernel: triton.JITFunction) -> dict[str, object]:
    sizes = {
        "TILE": {_apply_rules: _RULES_TILE, _find_top: _TOP_PART}.get(kernel, _TILE),
        "BINS": _BINS,
        "LIST_SIZE": _LIST_SIZE,
        "SELECTION_SIZE": _SELECTION_SIZE,
        "MAX_PARTS": _MAX_PARTS,
        "WAYS": _WAYS,
        "WAYS_TILE": _WAYS_TILE,
    }
    return {name: size for name, size in sizes.items() if name in kernel.arg_names}


def _merge_constants(num_parts: int, num_top: int) -> dict[str, object]:
    return {
        "PARTS": triton.next_power_of_2(num_parts),
        "CANDIDATES": triton.next_power_of_2(num_parts * max(num_top, 1)),
    }


def _num_warps(kernel: triton.JITFunction) -> int:
    return {_choose: 1, _find_thresholds: 8, _find_top: 8, _merge_top: 8}.get(kernel, _NUM_WARPS)


_SIGNATURE: Mapping[str, str] = {
    "logits": "*fp32",
    "out": "*fp32",
    "mask_rows": "*i32",
    "mask_bits": "*i32",
    "bias_starts": "*i32",
    "bias_ids": "*i32",
    "bias_values": "*fp32",
    "penalty_rows": "*i32",
    "repetition": "*fp32",
    "presence": "*fp32",
    "frequency": "*fp32",
    "prompt_bits": "*i32",
    "output_counts": "*i32",
    "draft_starts": "*i32",
    "draft_ids": "*i32",
    "row_stride": "i32:16",
    "out_stride": "i32:16",
    "mask_stride": "i32",
    "is_in_place": "i32",
    "temperature": "*fp32",
    "top_k": "*i32",
    "top_p": "*fp32",
    "min_p": "*fp32",
    "seed": "*i64",
    "position": "*i64",
    "maxima": "*fp32",
    "places": "*i32",
    "counts": "*i32",
    "weights": "*i64",
    "selection": "*i64",
    "list_sizes": "*i32",
    "lists": "*fp32",
    "thresholds": "*fp32",
    "scores": "*fp32",
    "drawn": "*i32",
    "tokens": "*i32",
    "status": "*u8",
    "token_ids": "*i32",
    "sums": "*fp32",
    "larger": "*i32",
    "keys": "*i64",
    "chosen": "*fp32",
    "rank": "*i32",
    "top": "*fp32",
    "top_token_ids": "*i32",
    "vocab_size": "i32:16",
    "num_tiles": "i32",
    "num_parts": "i32",
    "num_top": "i32",
}
"""Of every argument of the kernels below: one name is one thing."""


# ---- rules ----


@triton.jit(do_not_specialize=["mask_stride", "is_in_place"])
def _apply_rules(
    logits,
    out,
    mask_rows,
    mask_bits,
    bias_starts,
    bias_ids,
    bias_values,
    penalty_rows,
    repetition,
    presence,
    frequency,
    prompt_bits,
    output_counts,
    draft_starts,
    draft_ids,
    row_stride,
    out_stride,
    mask_stride,
    vocab_size,
    is_in_place,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    tokens = first + tl.arange(0, TILE)
    is_token = tokens < vocab_size
    bias_start = tl.load(bias_starts + row)
    bias_end = tl.load(bias_starts + row + 1)
    penalty_row = tl.load(penalty_rows + row).to(tl.int64)
    is_same = (is_in_place != 0) & (bias_start == bias_end) & (penalty_row < 0)
    if mask_bits is not None:
        mask_row = tl.load(mask_rows + row)
        is_same = is_same & (mask_row < 0)
    if is_same:
        return
    x = tl.load(logits + row * row_stride + tokens, mask=is_token, other=0.0)
    if mask_bits is not None:  # noqa: SIM102
        if mask_row >= 0:
            words = tl.load(mask_bits + mask_row.to(tl.int64) * mask_stride + tokens // 32, mask=is_token, other=0)
            is_allowed = (words >> (tokens % 32)) & 1
            # What is no number stays what it is: the row is wrong, whatever it may choose.
            x = tl.where((is_allowed != 0) | (x != x), x, float("-inf"))
    if bias_start < bias_end:
        bias_start, bias_end = _ids_of_tile(bias_ids, bias_start, bias_end, first, first + TILE)
        for i in range(bias_start, bias_end):
            x = tl.where(tokens == tl.load(bias_ids + i), x + tl.load(bias_values + i), x)
    if penalty_row >= 0:
        words = tl.load(prompt_bits + penalty_row * tl.cdiv(vocab_size, 32) + tokens // 32, mask=is_token, other=0)
        counts = tl.load(output_counts + penalty_row * vocab_size + tokens, mask=is_token, other=0)
        draft_start = tl.load(draft_starts + row)
        draft_end = tl.load(draft_starts + row + 1)
        draft_start, draft_end = _ids_of_tile(draft_ids, draft_start, draft_end, first, first + TILE)
        for i in range(draft_start, draft_end):
            counts += (tokens == tl.load(draft_ids + i)).to(tl.int32)
        is_seen = ((words >> (tokens % 32)) & 1) + counts > 0
        factor = tl.load(repetition + row)
        x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
        penalty = tl.load(presence + row) + tl.load(frequency + row) * counts.to(tl.float32)
        x = tl.where(counts > 0, x - penalty, x)
    tl.store(out + row * out_stride + tokens, x, mask=is_token)


@triton.jit
def _ids_of_tile(ids, start, end, first, last):
    """Which of the rising `ids[start:end]` are at least `first` and below `last`: their start and end."""
    num_before = 0
    num_until = 0
    for place in range(start, end, 128):
        places = place + tl.arange(0, 128)
        each = tl.load(ids + places, mask=places < end, other=_NONE)
        num_before += tl.sum((each < first).to(tl.int32))
        num_until += tl.sum((each < last).to(tl.int32))
    return start + num_before, start + num_until


# ---- a row's values ----


@triton.jit
def _first_largest(values, places):
    """The largest value, NaN where there is one, and the first place of it. Places of equals need no order."""
    is_nan = values != values
    nan_place = tl.min(tl.where(is_nan, places, _NONE))
    numbers = tl.where(is_nan, float("-inf"), values)
    largest = tl.max(numbers)
    place = tl.min(tl.where(numbers == largest, places, _NONE))
    has_nan = nan_place < _NONE
    return tl.where(has_nan, float("nan"), largest), tl.where(has_nan, nan_place, place)


@triton.jit
def _largest_of_row(maxima, places, row, num_parts, MAX_PARTS: tl.constexpr):
    parts = tl.arange(0, MAX_PARTS)
    is_part = parts < num_parts
    values = tl.load(maxima + row * num_parts + parts, mask=is_part, other=float("-inf"))
    return _first_largest(values, tl.load(places + row * num_parts + parts, mask=is_part, other=_NONE))


@triton.jit
def _is_drawn(largest, temperature, row):
    """Whether a row draws a random number. Its largest logit tells whether it has a distribution."""
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    return is_finite & (tl.load(temperature + row) > 0)


@triton.jit
def _has_top_k(top_k, row, vocab_size):
    k = tl.load(top_k + row)
    return (k > 0) & (k < vocab_size)


@triton.jit
def _divisor(temperature, row):
    return tl.maximum(tl.load(temperature + row), 1e-6)


@triton.jit
def _distances(x, largest, divisor):
    """How far logits over temperature lie below the largest: never below 0, and +0 where they are equal to it."""
    return tl.abs(tl.div_rn(x - largest, divisor))


@triton.jit
def _reach(min_p, row):
    """The largest distance that `min_p` leaves."""
    share = tl.load(min_p + row)
    # Negated as double or as float: rounding is the same on both sides of 0.
    reach = -tl.log(tl.where(share > 0, share, 1.0).to(tl.float64)).to(tl.float32)
    return tl.where(share > 0, reach, float("inf"))


@triton.jit
def _bins_of(distances, divisor, BINS: tl.constexpr):
    """A bin for each distance, rising. Equal distances share one; the last takes all that is far away."""
    # Over temperature again, so that bins are as fine as logits lie, at any temperature. Bounded, as 0 times infinity
    # is no number.
    scale = tl.minimum(divisor * _BINS_PER_UNIT, 1e30)
    return tl.minimum(distances * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def _weights_of(distances):
    """`rint(exp(-distance) * 2**44)`, int64."""
    share = tl.exp(-distances.to(tl.float64)) * 17592186044416.0
    # 1.5 * 2**52: numbers of this size have no places behind the point, so the sum is rounded to an integer.
    return ((share + 6755399441055744.0) - 6755399441055744.0).to(tl.int64)


# ---- limits ----


@triton.jit(do_not_specialize=["num_tiles", "num_parts"])
def _find_largest(
    logits,
    temperature,
    top_k,
    top_p,
    maxima,
    places,
    counts,
    weights,
    list_sizes,
    row_stride,
    vocab_size,
    num_tiles,
    num_parts,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Also clears what the next kernels count in."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * num_tiles * TILE
    best = tl.full((TILE,), float("-inf"), tl.float32)
    place = first + tl.arange(0, TILE)
    for start in range(first, tl.minimum(first + num_tiles * TILE, vocab_size), TILE):
        tokens = start + tl.arange(0, TILE)
        x = tl.load(logits + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
        is_better = (x > best) | ((x != x) & (best == best))
        best = tl.where(is_better, x, best)
        place = tl.where(is_better, tokens, place)
    largest, at = _first_largest(best, place)
    tl.store(maxima + row * num_parts + part, largest)
    tl.store(places + row * num_parts + part, at)
    if _has_top_k(top_k, row, vocab_size) | (tl.load(top_p + row) < 1):
        for start in range(part * TILE, BINS, num_parts * TILE):
            bins = start + tl.arange(0, TILE)
            tl.store(counts + row * BINS + bins, tl.zeros((TILE,), tl.int32), mask=bins < BINS)
            tl.store(weights + row * BINS + bins, tl.zeros((TILE,), tl.int64), mask=bins < BINS)
        if part == 0:
            tl.store(list_sizes + row, 0)


@triton.jit(do_not_specialize=["num_tiles", "num_parts"])
def _weigh_bins(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    places,
    counts,
    weights,
    row_stride,
    vocab_size,
    num_tiles,
    num_parts,
    MAX_PARTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * num_tiles * TILE
    has_top_k = _has_top_k(top_k, row, vocab_size)
    has_top_p = tl.load(top_p + row) < 1
    if (has_top_k | has_top_p) == 0:
        return
    largest, _ = _largest_of_row(maxima, places, row, num_parts, MAX_PARTS)
    if _is_drawn(largest, temperature, row) == 0:
        return
    divisor = _divisor(temperature, row)
    reach = _reach(min_p, row)
    for start in range(first, tl.minimum(first + num_tiles * TILE, vocab_size), TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < vocab_size
        x = tl.load(logits + row * row_stride + tokens, mask=is_token, other=float("-inf"))
        distances = _distances(x, largest, divisor)
        bins = _bins_of(distances, divisor, BINS)
        if has_top_k:
            # What is in no other bin is in the last one, which may have nearly all and would be crowded.
            is_counted = is_token & (bins < BINS - 1)
            tl.atomic_add(counts + row * BINS + bins, 1, mask=is_counted, sem="relaxed")
        if has_top_p:
            weight = _weights_of(distances)
            is_weighed = is_token & (distances <= reach) & (weight > 0)
            tl.atomic_add(weights + row * BINS + bins, weight, mask=is_weighed, sem="relaxed")


@triton.jit(do_not_specialize=["num_tiles", "num_parts"])
def _collect(
    logits,
    temperature,
    top_k,
    top_p,
    maxima,
    places,
    counts,
    weights,
    selection,
    list_sizes,
    lists,
    row_stride,
    vocab_size,
    num_tiles,
    num_parts,
    MAX_PARTS: tl.constexpr,
    BINS: tl.constexpr,
    LIST_SIZE: tl.constexpr,
    SELECTION_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * num_tiles * TILE
    has_top_k = _has_top_k(top_k, row, vocab_size)
    share = tl.load(top_p + row)
    has_top_p = share < 1
    if (has_top_k | has_top_p) == 0:
        return
    largest, _ = _largest_of_row(maxima, places, row, num_parts, MAX_PARTS)
    if _is_drawn(largest, temperature, row) == 0:
        return
    bins = tl.arange(0, BINS)
    # The bin of the k-th largest logit; behind the last bin where all logits stay.
    k_bin = BINS
    num_above = 0
    if has_top_k:
        in_bin = tl.load(counts + row * BINS + bins)
        k = tl.load(top_k + row).to(tl.int32)
        k_bin = tl.minimum(tl.sum((tl.cumsum(in_bin) < k).to(tl.int32)), BINS - 1)
        num_above = tl.sum(tl.where(bins < k_bin, in_bin, 0))
    # The bins in which the last logit of top-p may be: the total depends on how many of the k-th logit's bin stay.
    p_first = BINS
    p_last = -1
    weight_above_k = tl.full((), 0, tl.int64)
    weight_above_p = tl.full((), 0, tl.int64)
    if has_top_p:
        of_bin = tl.load(weights + row * BINS + bins)
        weight_above_k = tl.sum(tl.where(bins < k_bin, of_bin, 0))
        until_k = tl.sum(tl.where(bins <= k_bin, of_bin, 0))
        until_bin = tl.cumsum(of_bin).to(tl.float64)
        p_first = tl.sum((until_bin < _share_of(weight_above_k, share)).to(tl.int32))
        p_last = tl.sum((until_bin < _share_of(until_k, share)).to(tl.int32))
        weight_above_p = tl.sum(tl.where(bins < p_first, of_bin, 0))
    if part == 0:
        numbers = selection + row * SELECTION_SIZE
        tl.store(numbers, k_bin)
        tl.store(numbers + 1, num_above)
        tl.store(numbers + 2, p_first)
        tl.store(numbers + 3, p_last)
        tl.store(numbers + 4, weight_above_k)
        tl.store(numbers + 5, weight_above_p)
    divisor = _divisor(temperature, row)
    for start in range(first, tl.minimum(first + num_tiles * TILE, vocab_size), TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < vocab_size
        x = tl.load(logits + row * row_stride + tokens, mask=is_token, other=float("-inf"))
        each = _bins_of(_distances(x, largest, divisor), divisor, BINS)
        is_kept = (is_token & ((each == k_bin) | ((each >= p_first) & (each <= p_last)))).to(tl.int32)
        num_kept = tl.sum(is_kept)
        if num_kept > 0:
            # In any order: what becomes of them is counted and summed.
            place = tl.atomic_add(list_sizes + row, num_kept, sem="relaxed") + tl.cumsum(is_kept) - 1
            tl.store(lists + row * LIST_SIZE + place, x, mask=(is_kept > 0) & (place < LIST_SIZE))


@triton.jit
def _share_of(total, share):
    return total.to(tl.float64) * share.to(tl.float64)


@triton.jit(do_not_specialize=["num_parts"])
def _find_thresholds(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    places,
    selection,
    list_sizes,
    lists,
    thresholds,
    row_stride,
    vocab_size,
    num_parts,
    MAX_PARTS: tl.constexpr,
    BINS: tl.constexpr,
    LIST_SIZE: tl.constexpr,
    SELECTION_SIZE: tl.constexpr,
    WAYS: tl.constexpr,
    WAYS_TILE: tl.constexpr,
):
    """A threshold is a distance: logits that are no farther below the largest stay."""
    row = tl.program_id(0).to(tl.int64)
    has_top_k = _has_top_k(top_k, row, vocab_size)
    share = tl.load(top_p + row)
    has_top_p = share < 1
    if (has_top_k | has_top_p) == 0:
        return
    largest, _ = _largest_of_row(maxima, places, row, num_parts, MAX_PARTS)
    if _is_drawn(largest, temperature, row) == 0:
        return
    divisor = _divisor(temperature, row)
    reach = _reach(min_p, row)
    numbers = selection + row * SELECTION_SIZE
    k_bin = tl.load(numbers).to(tl.int32)
    source = lists + row * LIST_SIZE
    size = tl.load(list_sizes + row)
    if size > LIST_SIZE:
        source = logits + row * row_stride
        size = vocab_size
    # Bit patterns of distances, as integers, are in the order of the distances. This one is infinity's.
    key = 0x7F800000
    if has_top_k:
        k = tl.load(top_k + row).to(tl.float64)
        num_above = tl.load(numbers + 1)
        key = _smallest_key(
            source, size, largest, divisor, reach, k_bin, k_bin, key, num_above, k, False, BINS, WAYS, WAYS_TILE
        )
    if has_top_p:
        total = tl.load(numbers + 4)
        if has_top_k:
            keys = tl.full((1,), 0, tl.int32) + key
            total += tl.sum(
                _measure(source, size, largest, divisor, reach, k_bin, k_bin, keys, True, BINS, 1, WAYS_TILE)
            )
        p_first = tl.load(numbers + 2).to(tl.int32)
        p_last = tl.load(numbers + 3).to(tl.int32)
        above = tl.load(numbers + 5)
        target = _share_of(total, share)
        key = _smallest_key(
            source, size, largest, divisor, reach, p_first, p_last, key, above, target, True, BINS, WAYS, WAYS_TILE
        )
    tl.store(thresholds + row, tl.minimum(key.to(tl.float32, bitcast=True), reach))


@triton.jit
def _smallest_key(
    source,
    size,
    largest,
    divisor,
    reach,
    first_bin,
    last_bin,
    last_key,
    above,
    target,
    IS_WEIGHTED: tl.constexpr,
    BINS: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The smallest distance up to which logits of these bins weigh, with what is `above`, at least `target`."""
    lanes_low = tl.full((TILE,), 0x7F800000, tl.int32)
    lanes_high = tl.full((TILE,), 0, tl.int32)
    for start in range(0, size, TILE):
        places = start + tl.arange(0, TILE)
        x = tl.load(source + places, mask=places < size, other=float("-inf"))
        distances = _distances(x, largest, divisor)
        bins = _bins_of(distances, divisor, BINS)
        is_inside = (places < size) & (bins >= first_bin) & (bins <= last_bin)
        keys = distances.to(tl.int32, bitcast=True)
        lanes_low = tl.minimum(lanes_low, tl.where(is_inside, keys, 0x7F800000))
        lanes_high = tl.maximum(lanes_high, tl.where(is_inside, keys, 0))
    low = tl.min(lanes_low)
    high = tl.minimum(tl.max(lanes_high), last_key)
    # The answer is in [low, high], and it is a logit's: only there does the weight change.
    while low < high:
        step = (high - low) // WAYS + 1
        ends = low + step * (tl.arange(0, WAYS) + 1) - 1
        reached = above + _measure(
            source, size, largest, divisor, reach, first_bin, last_bin, ends, IS_WEIGHTED, BINS, WAYS, TILE
        )
        low += step * tl.sum((reached.to(tl.float64) < target).to(tl.int32))
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def _measure(
    source,
    size,
    largest,
    divisor,
    reach,
    first_bin,
    last_bin,
    last_keys,
    IS_WEIGHTED: tl.constexpr,
    BINS: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """What logits of these bins that are no farther than each of these distances weigh, or how many they are: int64."""
    totals = tl.zeros((WAYS, TILE), tl.int64)
    for start in range(0, size, TILE):
        places = start + tl.arange(0, TILE)
        x = tl.load(source + places, mask=places < size, other=float("-inf"))
        distances = _distances(x, largest, divisor)
        bins = _bins_of(distances, divisor, BINS)
        is_inside = (places < size) & (bins >= first_bin) & (bins <= last_bin)
        if IS_WEIGHTED:
            weight = tl.where(is_inside & (distances <= reach), _weights_of(distances), 0)
        else:
            weight = is_inside.to(tl.int64)
        keys = distances.to(tl.int32, bitcast=True)
        totals += tl.where(keys[None, :] <= last_keys[:, None], weight[None, :], 0)
    return tl.sum(totals, axis=1)


@triton.jit
def _threshold(top_k, top_p, min_p, thresholds, row, vocab_size):
    """The largest distance that stays."""
    threshold = _reach(min_p, row)
    if _has_top_k(top_k, row, vocab_size) | (tl.load(top_p + row) < 1):
        threshold = tl.load(thresholds + row)
    return threshold


@triton.jit(do_not_specialize=["num_tiles", "num_parts"])
def _write_processed(
    logits,
    out,
    temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    places,
    thresholds,
    row_stride,
    out_stride,
    vocab_size,
    num_tiles,
    num_parts,
    MAX_PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * num_tiles * TILE
    largest, _ = _largest_of_row(maxima, places, row, num_parts, MAX_PARTS)
    is_drawn = _is_drawn(largest, temperature, row)
    divisor = _divisor(temperature, row)
    threshold = float("inf")
    if is_drawn:
        threshold = _threshold(top_k, top_p, min_p, thresholds, row, vocab_size)
    for start in range(first, tl.minimum(first + num_tiles * TILE, vocab_size), TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < vocab_size
        x = tl.load(logits + row * row_stride + tokens, mask=is_token, other=float("-inf"))
        if is_drawn:
            distances = _distances(x, largest, divisor)
            x = tl.where(distances <= threshold, -distances, float("-inf"))
        tl.store(out + row * out_stride + tokens, x, mask=is_token)


# ---- draws ----


@triton.jit
def _mix32(x):
    """As the reference's, in unsigned arithmetic, which wraps."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise_key(seed, position, row):
    golden = tl.full((), 0x9E3779B9, tl.uint32)
    bits = tl.load(seed + row).to(tl.uint64)
    first = _mix32(bits.to(tl.uint32) ^ _mix32(tl.load(position + row).to(tl.uint32) + golden))
    return first, _mix32((bits >> 32).to(tl.uint32) ^ _mix32(first + golden))


@triton.jit
def _noise(hashes):
    """Gumbel noise of hashes, float32."""
    v = (hashes.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(1.0 - v)).to(tl.float32)


@triton.jit
def _noise_bounds(hashes):
    """At least the noise of hashes, and cheap: `-log(1 - v)` is at least v."""
    # One of 1,000 is far more than what float32, and the fast logarithm, round away.
    return 22.180709777918249 + 1e-3 - tl.log(hashes.to(tl.float32) + 0.5)


@triton.jit(do_not_specialize=["num_tiles", "num_parts"])
def _draw(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    maxima,
    places,
    thresholds,
    scores,
    drawn,
    row_stride,
    vocab_size,
    num_tiles,
    num_parts,
    MAX_PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * num_tiles * TILE
    largest, largest_place = _largest_of_row(maxima, places, row, num_parts, MAX_PARTS)
    if _is_drawn(largest, temperature, row) == 0:
        return
    divisor = _divisor(temperature, row)
    threshold = _threshold(top_k, top_p, min_p, thresholds, row, vocab_size)
    first_key, second_key = _noise_key(seed, position, row)
    # Every part begins with the largest logit's score, so that nearly all tiles are passed over at the first look.
    token = largest_place
    best = _noise(_mix32(_mix32(token.to(tl.uint32) ^ first_key) + second_key))
    for start in range(first, tl.minimum(first + num_tiles * TILE, vocab_size), TILE):
        tokens = start + tl.arange(0, TILE)
        x = tl.load(logits + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
        distances = _distances(x, largest, divisor)
        values = tl.where(distances <= threshold, -distances, float("-inf"))
        hashes = _mix32(_mix32(tokens.to(tl.uint32) ^ first_key) + second_key)
        # A sum that is rounded rises with its terms, so no score is above its bound.
        if tl.max(values + _noise_bounds(hashes)) >= best:
            score, place = _first_largest(values + _noise(hashes), tokens)
            is_better = (score > best) | ((score == best) & (place < token))
            best = tl.where(is_better, score, best)
            token = tl.where(is_better, place, token)
    tl.store(scores + row * num_parts + part, best)
    tl.store(drawn + row * num_parts + part, token)


@triton.jit(do_not_specialize=["num_parts"])
def _choose(temperature, maxima, places, scores, drawn, tokens, status, num_parts, MAX_PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest, token = _largest_of_row(maxima, places, row, num_parts, MAX_PARTS)
    if _is_drawn(largest, temperature, row):
        _, token = _largest_of_row(scores, drawn, row, num_parts, MAX_PARTS)
    tl.store(tokens + row, token)
    # The values of `SampledStatus`.
    tl.store(status + row, tl.where(largest != largest, 1, tl.where(largest == float("-inf"), 2, 0)).to(tl.uint8))


# ---- log probabilities ----


@triton.jit(do_not_specialize=["num_top"])
def _find_top(logits, token_ids, maxima, sums, larger, keys, row_stride, vocab_size, num_top, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    tokens = part * TILE + tl.arange(0, TILE)
    is_token = tokens < vocab_size
    x = tl.load(logits + row * row_stride + tokens, mask=is_token, other=float("-inf"))
    own = tl.load(logits + row * row_stride + tl.load(token_ids + row))
    largest = tl.max(x)
    # A part that forbids everything weighs nothing, and minus infinity less itself is no number.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(maxima + row * num_parts + part, largest)
    tl.store(sums + row * num_parts + part, tl.sum(tl.exp(x - shift)))
    tl.store(larger + row * num_parts + part, tl.sum((x > own).to(tl.int32)))
    # One integer for logit and id, in their order, so that no two are equal. -0 is equal to +0.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = tl.where(is_token, order * 4294967296 + (0x7FFFFFFF - tokens), -9223372036854775808)
    for i in range(num_top):
        best = tl.max(key)
        tl.store(keys + (row * num_parts + part) * num_top + i, best)
        key = tl.where(key == best, -9223372036854775808, key)


@triton.jit(do_not_specialize=["num_parts", "num_top"])
def _merge_top(
    logits,
    token_ids,
    maxima,
    sums,
    larger,
    keys,
    chosen,
    rank,
    top,
    top_token_ids,
    row_stride,
    num_top,
    num_parts,
    PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    values = tl.load(maxima + row * num_parts + parts, mask=is_part, other=float("-inf"))
    largest = tl.max(values)
    total = tl.sum(tl.load(sums + row * num_parts + parts, mask=is_part, other=0.0) * tl.exp(values - largest))
    log_total = tl.log(total)
    own = tl.load(logits + row * row_stride + tl.load(token_ids + row))
    tl.store(chosen + row, _logprob(own, largest, log_total))
    num_larger = tl.sum(tl.load(larger + row * num_parts + parts, mask=is_part, other=0))
    tl.store(rank + row, 1 + num_larger)
    candidates = tl.arange(0, CANDIDATES)
    is_candidate = candidates < num_parts * num_top
    key = tl.load(keys + row * num_parts * num_top + candidates, mask=is_candidate, other=-9223372036854775808)
    for i in range(num_top):
        best = tl.max(key)
        order = (best >> 32).to(tl.int32)
        bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
        tl.store(top + row * num_top + i, _logprob(bits.to(tl.float32, bitcast=True), largest, log_total))
        tl.store(top_token_ids + row * num_top + i, 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32))
        key = tl.where(key == best, -9223372036854775808, key)


@triton.jit
def _logprob(x, largest, log_total):
    value = x - largest - log_total
    # What is no number is not larger either.
    return tl.where(value > _LOWEST, value, _LOWEST)
