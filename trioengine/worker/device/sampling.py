# pyright: basic
"""The sampling of a step on a device: from `SamplingArrays` to tensors, and from logits to tokens.

What changes with every step is one block of 32-bit numbers, a part of what one copy brings to the device. Where a
number stands in it follows from its shape alone, so that a recorded graph finds it. Bits of masks and of prompts are
much larger and come in few steps: they travel by themselves.

What sequences with penalties have so far stays on the device (`PenaltyState`). A step's block says which tokens to add
to it before the step's own rules apply: those since the sequence's last step, of which the newest may be known to the
device only. Drafts are not among them until they are accepted.
"""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trioengine_kernels.kernel_set import KernelSet
from trioengine_kernels.native.sampler import LogitBias, RaggedIds, SampledStatus, SamplingArrays
from trioengine_kernels.sampling import SamplingBatch
from trioengine_kernels.sampling.device import (
    DeviceBias,
    DeviceIds,
    DeviceMasks,
    DevicePenalties,
    DeviceRules,
    PenaltyState,
    count_tokens,
)

_ALIGNMENT = 4
"""Words: parts begin at multiples of 16 bytes, which kernels read at once."""
_NONE = -1


@attrs.frozen(eq=False)
class StepSampling:
    """What a step's rows of logits are told, on the host."""

    arrays: SamplingArrays
    bits: NDArray[np.int32]
    """[num_masks + num_started, ceil(vocab_size / 32)]: masks, and behind them prompts, a bit for each token."""
    mask_rows: NDArray[np.int32]
    """[num_rows]: which of the masks; -1 is none."""
    bias: LogitBias
    """Ids rise in each row."""
    penalty_rows: NDArray[np.int32]
    """[num_rows]: which row of the `PenaltyState`; -1 is none."""
    drafts: RaggedIds
    """For each row with penalties, the drafts before its place. Ids rise in each row."""
    counted_rows: NDArray[np.int32]
    """[num_counted]: in which rows of the `PenaltyState` tokens of the output are new."""
    counted_ids: NDArray[np.int32]
    """[num_counted]: which; -1 is the last token that the device has sampled for the row."""
    started_rows: NDArray[np.int64]
    """[num_started]: rows of the `PenaltyState` that have to be started first."""

    @property
    def has_rules(self) -> bool:
        """Whether any row has a rule."""
        return bool((self.mask_rows >= 0).any() or (self.penalty_rows >= 0).any() or len(self.bias.ids.token_ids))

    @property
    def has_forced(self) -> bool:
        """Whether any row's token is known."""
        return self.arrays.forced is not None

    @property
    def num_masks(self) -> int:
        """The first so many of `bits`."""
        return len(self.bits) - len(self.started_rows)

    @property
    def shape(self) -> "SamplingShape":
        """The smallest that it fits into."""
        return SamplingShape(
            len(self.mask_rows), len(self.bias.ids.token_ids), len(self.drafts.token_ids), len(self.counted_rows)
        )


class SamplingPlanner:
    """Knows which tokens of which sequences are in the `PenaltyState`."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        """
        Args:
            num_rows: of the state, without the one that is nobody's.
            vocab_size: of the model.
        """
        self._vocab_size = vocab_size
        self._num_words = (vocab_size + 31) // 32
        self._num_counted = np.zeros(num_rows, np.int64)

    def forget(self, rows: Sequence[int] | NDArray[np.integer]) -> None:
        """Note that these rows of the state are other sequences' now, or of sequences that are computed again."""
        self._num_counted[rows] = 0

    def plan(self, arrays: SamplingArrays, rows: NDArray[np.integer]) -> StepSampling:
        """What the device has to be told for a step. The steps' order is the device's.

        Args:
            arrays: of the step's rows of logits. The rows of a sequence stand in the order of their places, and the
                tokens of its first row's `penalties.seen` are its own, those of later rows are drafts behind them. An
                id of -1 is the token that the device has sampled last for the sequence, which only the newest may be.
            rows: [num_rows]: whose each row of logits is, as rows of the state.
        """
        num_rows = len(arrays.temperature)
        forced = np.full(num_rows, _NONE, np.int32) if arrays.forced is None else arrays.forced
        mask_rows, bits = self._masks(arrays, forced)
        news = _News(np.full(num_rows, _NONE, np.int32))
        if arrays.penalties is not None:
            self._count(arrays, rows, forced, news)
        return StepSampling(
            arrays=arrays,
            bits=np.concatenate((*bits, *news.prompts)) if bits or news.prompts else self._no_bits,
            mask_rows=mask_rows,
            bias=_rising_bias(arrays.logit_bias, forced),
            penalty_rows=news.penalty_rows,
            drafts=_ragged(num_rows, news.drafts),
            counted_rows=np.array(news.counted_rows, np.int32),
            counted_ids=np.concatenate((*news.counted_ids, np.empty(0, np.int32))),
            started_rows=np.array(news.started_rows, np.int64),
        )

    @property
    def _no_bits(self) -> NDArray[np.int32]:
        return np.empty((0, self._num_words), np.int32)

    def _masks(
        self, arrays: SamplingArrays, forced: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], list[NDArray[np.int32]]]:
        """The rows' masks, which forbid what their other rules forbid, too."""
        mask_rows = np.full(len(forced), _NONE, np.int32)
        bits: list[NDArray[np.int32]] = []
        num_masks = 0
        if arrays.masks is not None:
            mask_rows = np.where(forced < 0, arrays.masks.rows, _NONE).astype(np.int32)
            bits.append(arrays.masks.bits[:, : self._num_words])
            num_masks = len(bits[0])
        for row in _rows_with_ids(arrays.forbidden, arrays.allowed):
            if forced[row] >= 0:
                continue
            mask = np.full((1, self._num_words), -1, np.int32)
            if mask_rows[row] >= 0:
                mask = bits[0][mask_rows[row] :][:1].copy()
            if len(allowed := _ids_of(arrays.allowed, row)):
                mask &= self._packed(allowed)
            if len(forbidden := _ids_of(arrays.forbidden, row)):
                mask &= ~self._packed(forbidden)
            mask_rows[row] = num_masks
            num_masks += 1
            bits.append(mask)
        return mask_rows, bits

    def _count(
        self, arrays: SamplingArrays, rows: NDArray[np.integer], forced: NDArray[np.int32], news: "_News"
    ) -> None:
        penalties = arrays.penalties
        assert penalties is not None
        num_own: dict[int, int] = {}
        for index in _rows_with_ids(penalties.seen):
            if forced[index] >= 0:
                continue
            row, seen = int(rows[index]), _ids_of(penalties.seen, index)
            news.penalty_rows[index] = row
            if row in num_own:
                news.drafts[index] = np.sort(seen[num_own[row] :])
                continue
            num_own[row] = len(seen)
            num_counted = int(self._num_counted[row])
            if num_counted == 0:
                num_counted = int(penalties.num_prompt_tokens[index])
                news.started_rows.append(row)
                news.prompts.append(self._packed(seen[:num_counted]))
            new = seen[num_counted:]
            assert len(new) >= len(seen) - num_counted >= 0, "A sequence has lost tokens, and nobody said so."
            assert (new[:-1] >= 0).all(), "Only the newest token may be known to the device alone."
            news.counted_rows.extend([row] * len(new))
            news.counted_ids.append(new)
            self._num_counted[row] = len(seen)

    def _packed(self, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """[1, num_words]: a bit for each of these tokens."""
        flags = np.zeros((1, self._num_words * 32), np.uint8)
        flags[0, token_ids] = 1
        return np.packbits(flags, axis=1, bitorder="little").view(np.int32)


@attrs.frozen(eq=False)
class _News:
    """Fields of `StepSampling`, while they are collected."""

    penalty_rows: NDArray[np.int32]
    drafts: dict[int, NDArray[np.int32]] = attrs.field(factory=dict)
    counted_rows: list[int] = attrs.field(factory=list)
    counted_ids: list[NDArray[np.int32]] = attrs.field(factory=list)
    started_rows: list[int] = attrs.field(factory=list)
    prompts: list[NDArray[np.int32]] = attrs.field(factory=list)


@attrs.frozen
class SamplingShape:
    """For how many of everything there is room in a block."""

    num_rows: int
    num_bias_ids: int = 0
    num_draft_ids: int = 0
    num_counted: int = 0

    def has_room_for(self, other: "SamplingShape") -> bool:
        """Whether what has the other shape fits into this one."""
        return all(mine >= theirs for mine, theirs in zip(attrs.astuple(self), attrs.astuple(other), strict=True))


@attrs.frozen
class SamplingLayout:
    """Where the parts of a block are."""

    shape: SamplingShape
    parts: Mapping[str, slice]
    num_words: int


def sampling_layout(shape: SamplingShape) -> SamplingLayout:
    """The layout of blocks of a shape. Blocks must begin at multiples of 16 bytes."""
    num_rows = shape.num_rows
    sizes = dict.fromkeys((*_FLOATS, *_INTEGERS), num_rows) | dict.fromkeys(_LONGS, 2 * num_rows)
    sizes |= {"bias_starts": num_rows + 1, "bias_ids": shape.num_bias_ids, "bias_values": shape.num_bias_ids}
    sizes |= {"draft_starts": num_rows + 1, "draft_ids": shape.num_draft_ids}
    sizes |= {"counted_rows": shape.num_counted, "counted_ids": shape.num_counted}
    parts: dict[str, slice] = {}
    start = 0
    for name, size in sizes.items():
        parts[name] = slice(start, start + size)
        start += size + -size % _ALIGNMENT
    return SamplingLayout(shape, parts, start)


_FLOATS: Mapping[str, float] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
}
"""Parts with a float32 for each row, and what padded rows have."""
_INTEGERS: Mapping[str, int] = {"top_k": 0, "forced": _NONE, "mask_rows": _NONE, "penalty_rows": _NONE}
_LONGS: Mapping[str, int] = {"seed": 0, "position": 0}


def write_sampling(step: StepSampling, layout: SamplingLayout, into: NDArray[np.int32]) -> None:
    """Write a step into a block. Padded rows are greedy and have no rules; padded tokens are counted for nobody.

    Args:
        step: which fits into the layout's shape.
        layout: the block's.
        into: [layout.num_words].
    """
    assert layout.shape.has_room_for(step.shape)
    arrays = step.arrays
    parts = {name: into[part] for name, part in layout.parts.items()}
    temperature = arrays.temperature
    if arrays.forced is not None:
        # Nothing is drawn, and log probabilities of what is drawn from are those of the logits.
        temperature = np.where(arrays.forced < 0, temperature, np.float32(0))
    penalties = arrays.penalties
    columns = {
        "temperature": temperature,
        "top_k": arrays.top_k,
        "top_p": arrays.top_p,
        "min_p": arrays.min_p,
        "seed": arrays.seed.view(np.int64),
        "position": arrays.position,
        "forced": () if arrays.forced is None else arrays.forced,
        "mask_rows": step.mask_rows,
        "penalty_rows": step.penalty_rows,
        "repetition": () if penalties is None else penalties.repetition,
        "presence": () if penalties is None else penalties.presence,
        "frequency": () if penalties is None else penalties.frequency,
    }
    for table, dtype in ((_FLOATS, np.float32), (_INTEGERS, np.int32), (_LONGS, np.int64)):
        for name, padding in table.items():
            _fill(parts[name].view(dtype), columns[name], padding)
    for name, ids in (("bias", step.bias.ids), ("draft", step.drafts)):
        _fill(parts[f"{name}_starts"], ids.starts, ids.starts[-1])
        _fill(parts[f"{name}_ids"], ids.token_ids, 0)
    _fill(parts["bias_values"].view(np.float32), step.bias.values, 0)
    _fill(parts["counted_rows"], step.counted_rows, _NONE)
    _fill(parts["counted_ids"], step.counted_ids, 0)


@attrs.frozen(eq=False)
class DeviceSampling:
    """What a step's rows of logits are told, on the device: views of a block."""

    batch: SamplingBatch
    rules: DeviceRules
    forced: Tensor
    """[num_rows], int32: as in `SamplingArrays`."""
    counted_rows: Tensor
    """[num_counted], int32: as in `StepSampling`; -1 is nobody."""
    counted_ids: Tensor
    """[num_counted], int32: as in `StepSampling`."""


def read_sampling(
    block: Tensor, layout: SamplingLayout, state: PenaltyState, mask_bits: Tensor | None = None
) -> DeviceSampling:
    """The parts of a block.

    Args:
        block: [layout.num_words], int32.
        layout: the block's.
        state: the penalties'.
        mask_bits: [num_masks, ceil(vocab_size / 32)], int32; None where no row has a mask.
    """
    ints = {name: block[part] for name, part in layout.parts.items()}
    floats = {name: ints[name].view(torch.float32) for name in _FLOATS}
    return DeviceSampling(
        batch=SamplingBatch(
            temperature=floats["temperature"],
            top_k=ints["top_k"],
            top_p=floats["top_p"],
            min_p=floats["min_p"],
            seed=ints["seed"].view(torch.int64),
            position=ints["position"].view(torch.int64),
        ),
        rules=DeviceRules(
            bias=DeviceBias(DeviceIds(ints["bias_starts"], ints["bias_ids"]), ints["bias_values"].view(torch.float32)),
            penalties=DevicePenalties(
                state=state,
                rows=ints["penalty_rows"],
                repetition=floats["repetition"],
                presence=floats["presence"],
                frequency=floats["frequency"],
                drafts=DeviceIds(ints["draft_starts"], ints["draft_ids"]),
            ),
            masks=None if mask_bits is None else DeviceMasks(ints["mask_rows"], mask_bits),
        ),
        forced=ints["forced"],
        counted_rows=ints["counted_rows"],
        counted_ids=ints["counted_ids"],
    )


def start_rows(state: PenaltyState, rows: Tensor, prompt_bits: Tensor) -> None:
    """Begin to remember sequences, before their first step's tokens are counted.

    Args:
        state: the penalties'.
        rows: [num_started], int64: of the state, no row twice.
        prompt_bits: [num_started, ceil(vocab_size / 32)], int32: their prompts.
    """
    state.prompt_bits.index_copy_(0, rows, prompt_bits)
    state.output_counts.index_fill_(0, rows, 0)


@attrs.frozen(eq=False)
class SampledLogits:
    """What rows of logits gave."""

    tokens: Tensor
    """[num_rows], int32, all of the vocabulary."""
    status: Tensor
    """[num_rows], uint8: values of `SampledStatus`."""
    ruled: Tensor
    """[num_rows, vocab_size], float32: the logits after their rules."""


def sample_logits(
    kernels: KernelSet,
    logits: Tensor,
    sampling: DeviceSampling,
    last_tokens: Tensor,
    *,
    has_rules: bool,
    has_forced: bool,
    is_kept: bool,
) -> SampledLogits:
    """Choose a token for each row. Starts nothing that the host waits for, and may be recorded in a graph.

    Args:
        kernels: the device's.
        logits: [num_rows, vocab_size], float32, tokens consecutive.
        sampling: the rows'.
        last_tokens: [num_state_rows + 1], int32: the token that was sampled last for each row of the state.
        has_rules: whether any row may have rules.
        has_forced: whether any row's token may be known.
        is_kept: whether `logits` must stay as they are, as somebody wants their log probabilities.
    """
    if has_rules:
        state, rows, token_ids = sampling.rules.penalties.state, sampling.counted_rows, sampling.counted_ids
        if len(rows):
            newest = last_tokens[torch.where(rows < 0, len(last_tokens) - 1, rows).long()]
            count_tokens(state.output_counts, rows, torch.where(token_ids < 0, newest, token_ids))
        logits = kernels.apply_rules(logits, sampling.rules, out=None if is_kept else logits)
    tokens, status = kernels.sample(logits, sampling.batch)
    if has_forced:
        is_forced = sampling.forced >= 0
        tokens = torch.where(is_forced, sampling.forced, tokens)
        is_nan = status == SampledStatus.IS_NAN
        status = torch.where(is_forced & ~is_nan, SampledStatus.SAMPLED, status).to(torch.uint8)
    return SampledLogits(tokens, status, logits)


def _fill(part: NDArray[np.generic], values: Sequence[int] | NDArray[np.generic], padding: float) -> None:
    part[: len(values)] = values
    part[len(values) :] = padding


def _rows_with_ids(*tables: RaggedIds | None) -> list[int]:
    """Rows for which any of the tables has ids."""
    has_ids = [np.diff(table.starts) > 0 for table in tables if table is not None]
    return np.flatnonzero(np.logical_or.reduce(has_ids)).tolist() if has_ids else []


def _ids_of(table: RaggedIds | None, row: int) -> NDArray[np.int32]:
    if table is None:
        return np.empty(0, np.int32)
    return table.token_ids[table.starts[row] : table.starts[row + 1]]


def _ragged(num_rows: int, ids: Mapping[int, NDArray[np.int32]]) -> RaggedIds:
    """Ids by row, in the order of the rows."""
    counts = np.zeros(num_rows + 1, np.int64)
    for row, row_ids in ids.items():
        counts[row + 1] = len(row_ids)
    return RaggedIds(counts.cumsum(), np.concatenate((*ids.values(), np.empty(0, np.int32))))


def _rising_bias(bias: LogitBias | None, forced: NDArray[np.int32]) -> LogitBias:
    """The bias of rows whose tokens are not known, ids rising in each row."""
    num_rows = len(forced)
    if bias is None:
        return LogitBias(_ragged(num_rows, {}), np.empty(0, np.float32))
    rows = np.arange(num_rows).repeat(np.diff(bias.ids.starts))
    order = np.lexsort((bias.ids.token_ids, rows))
    order = order[forced[rows[order]] < 0]
    starts = np.zeros(num_rows + 1, np.int64)
    np.bincount(rows[order], minlength=num_rows).cumsum(out=starts[1:])
    return LogitBias(RaggedIds(starts, bias.ids.token_ids[order]), bias.values[order])
