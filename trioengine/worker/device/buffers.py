# pyright: basic
"""What a step is told, as one block of 32-bit numbers that one copy brings to the device; and what stays there.

Where a number stands in the block follows from the step's shape alone, so that steps of one shape find theirs at the
same place, as graphs need it. What is not used is padding: tokens of nobody, in a row and in blocks that are nobody's.
"""

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trioengine_kernels.paged_attention.work import WORK_FIELDS, max_work, plan_work
from trioengine_kernels.sampling.device import empty_state

from trioengine.core.executor import KVCacheGroup
from trioengine.models.config import ModelConfig
from trioengine.worker.backend import LaunchBatch
from trioengine.worker.device.device import Device, HostCopy
from trioengine.worker.device.sampling import (
    SamplingLayout,
    SamplingShape,
    StepSampling,
    sampling_layout,
    write_sampling,
)

ArrayT = TypeVar("ArrayT", NDArray[np.int32], Tensor)

ALIGNMENT = 4
"""Words: parts begin at multiples of 16 bytes, which kernels read at once. For others Triton would compile anew."""
NUM_STAGING_BLOCKS = 3
"""Two steps may be in flight while a third is written."""


@attrs.frozen(eq=False)
class StepFacts:
    """What all steps of a backend have in common."""

    model: ModelConfig
    groups: Sequence[KVCacheGroup]
    block_size: int
    max_model_len: int
    max_num_seqs: int
    has_loras: bool
    is_deterministic: bool

    @property
    def max_blocks(self) -> int:
        """Of a sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def no_row(self) -> int:
        """The row of `DeviceState` that is nobody's."""
        return self.max_num_seqs

    def plan_work(self, query_start: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """For each KV group, as `paged_attention.work` has it."""
        return [
            plan_work(query_start, seq_lens, window=group.window, is_deterministic=self.is_deterministic, **self._heads)
            for group in self.groups
        ]

    def decode_shape(self, num_seqs: int) -> "StepShape":
        """Of a step of so many sequences, each with one token, from which one is sampled. Each may get a new block."""
        num_work = max_work(
            max_num_seqs=num_seqs,
            max_num_tokens=num_seqs,
            max_seq_len=self.max_model_len,
            max_query_len=1,
            is_deterministic=self.is_deterministic,
            **self._heads,
        )
        num_groups = len(self.groups)
        return StepShape(
            num_tokens=num_seqs,
            num_seqs=num_seqs,
            num_logit_rows=num_seqs,
            num_hidden_rows=0,
            num_updates=num_groups * num_seqs,
            num_work=(num_work,) * num_groups,
            sampling=SamplingShape(num_seqs),
        )

    @property
    def _heads(self) -> dict[str, int]:
        model = self.model
        return {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}


@attrs.frozen
class StepShape:
    """For how many of everything there is room in a step's block."""

    num_tokens: int
    num_seqs: int
    num_logit_rows: int
    num_hidden_rows: int
    num_updates: int
    """Of block tables."""
    num_work: tuple[int, ...]
    """For each KV group, rows of `paged_attention.work.plan_work`."""
    sampling: SamplingShape

    @classmethod
    def of(cls, batch: LaunchBatch, work: Sequence[NDArray[np.int32]], sampling: StepSampling | None) -> "StepShape":
        """The smallest that a step fits into."""
        return cls(
            num_tokens=len(batch.token_ids),
            num_seqs=len(batch.rows),
            # One at least: not all kernels take tensors without rows.
            num_logit_rows=max(1, len(batch.logit_rows)),
            num_hidden_rows=len(batch.hidden_rows),
            num_updates=len(batch.block_updates),
            num_work=tuple(map(len, work)),
            sampling=SamplingShape(0) if sampling is None else sampling.shape,
        )


@attrs.frozen(eq=False)
class StepInputs(Generic[ArrayT]):
    """A step's block, cut into its parts: numpy arrays of the host's memory, or tensors. int32 unless said."""

    token_ids: ArrayT
    """[num_tokens]: -1 is the last token that was sampled for its row."""
    token_rows: ArrayT
    """[num_tokens]: the row of the token's sequence in `DeviceState`."""
    positions: ArrayT
    """[num_tokens]."""
    lora_slots: ArrayT
    """[num_tokens]; empty where there are no adapters."""
    query_start: ArrayT
    """[num_seqs + 1]."""
    seq_lens: ArrayT
    """[num_seqs]."""
    rows: ArrayT
    """[num_seqs]: the row of each sequence in `DeviceState`."""
    logit_rows: ArrayT
    """[num_logit_rows]."""
    sampled_rows: ArrayT
    """[num_logit_rows], int64: where in `DeviceState.last_tokens` the sampled token goes."""
    hidden_rows: ArrayT
    """[num_hidden_rows]."""
    update_places: ArrayT
    """[num_updates], int64: in `DeviceState.block_table`, flat."""
    update_ids: ArrayT
    """[num_updates]: what stands there from now on."""
    sampling: ArrayT
    """As `sampling_layout` has it."""
    num_work: ArrayT
    """[num_groups, ALIGNMENT]: the first in each row."""
    work: Sequence[ArrayT]
    """For each KV group, [num_work, WORK_FIELDS]."""


class StepLayout:
    """Where the parts of a block are for steps of one shape."""

    def __init__(self, shape: StepShape, facts: StepFacts) -> None:
        self.shape = shape
        self.sampling: SamplingLayout = sampling_layout(shape.sampling)
        self._facts = facts
        self._parts: list[tuple[str, int, tuple[int, ...], bool]] = []
        self.num_words = 0
        num_tokens, num_rows = shape.num_tokens, shape.num_logit_rows
        self._add("token_ids", num_tokens)
        self._add("token_rows", num_tokens)
        self._add("positions", num_tokens)
        self._add("lora_slots", num_tokens if facts.has_loras else 0)
        self._add("query_start", shape.num_seqs + 1)
        self._add("seq_lens", shape.num_seqs)
        self._add("rows", shape.num_seqs)
        self._add("logit_rows", num_rows)
        self._add("sampled_rows", num_rows, is_long=True)
        self._add("hidden_rows", shape.num_hidden_rows)
        self._add("update_places", shape.num_updates, is_long=True)
        self._add("update_ids", shape.num_updates)
        self._add("sampling", self.sampling.num_words)
        self._add("num_work", len(shape.num_work), ALIGNMENT)
        # The last, as most of it is empty in most steps.
        for number in shape.num_work:
            self._add("work", number, WORK_FIELDS)

    def _add(self, name: str, *shape: int, is_long: bool = False) -> None:
        self._parts.append((name, self.num_words, shape, is_long))
        num_words = math.prod(shape) * (2 if is_long else 1)
        self.num_words += num_words + -num_words % ALIGNMENT

    def arrays(self, staging: Tensor) -> StepInputs[NDArray[np.int32]]:
        """The parts of a block in the host's memory."""
        block = staging.numpy()
        return self._cut(block, np.int64)

    def tensors(self, block: Tensor) -> StepInputs[Tensor]:
        """The parts of a block."""
        return self._cut(block, torch.int64)

    def _cut(self, block: Any, long: Any) -> StepInputs[Any]:
        parts: dict[str, Any] = {"work": []}
        for name, start, shape, is_long in self._parts:
            part = block[start : start + math.prod(shape) * (2 if is_long else 1)]
            part = part.view(long) if is_long else part.reshape(shape)
            if name == "work":
                parts[name].append(part)
            else:
                parts[name] = part
        return StepInputs(**parts)

    def fill(
        self,
        staging: Tensor,
        batch: LaunchBatch,
        work: Sequence[NDArray[np.int32]],
        sampling: StepSampling | None,
    ) -> int:
        """Write a step into a block, with padding in each part; how many words of the block are in use.

        Args:
            staging: the block.
            batch: which fits into this shape.
            work: for each KV group, as `StepFacts.plan_work` has it.
            sampling: of the step's rows of logits; only as far as this shape has room, which is always for what stands
                in columns. None samples nothing.
        """
        inputs, facts = self.arrays(staging), self._facts
        num_tokens, no_row = len(batch.token_ids), facts.no_row
        _pad(inputs.token_ids, batch.token_ids, 0)
        _pad(inputs.token_rows, batch.rows.repeat(np.diff(batch.query_start)), no_row)
        _pad(inputs.positions, batch.positions, 0)
        if facts.has_loras:
            _pad(inputs.lora_slots, () if batch.lora_slots is None else batch.lora_slots, 0)
        _pad(inputs.query_start, batch.query_start, num_tokens)
        _pad(inputs.seq_lens, batch.seq_lens, 0)
        _pad(inputs.rows, batch.rows, no_row)
        _pad(inputs.logit_rows, batch.logit_rows, 0)
        _pad(inputs.sampled_rows, np.where(batch.sampled_rows < 0, no_row, batch.sampled_rows), no_row)
        _pad(inputs.hidden_rows, batch.hidden_rows, 0)
        group, row, place, block_id = batch.block_updates.T
        num_blocks = np.array([each.num_blocks for each in facts.groups], np.int32)
        # A wrong block id would overwrite another sequence's memory.
        assert (block_id < num_blocks[group]).all()
        assert (place < facts.max_blocks).all()
        places = (group.astype(np.int64) * (no_row + 1) + row) * facts.max_blocks + place
        # What no token sees any more is in no block. Reading it all the same must do no harm.
        _pad(inputs.update_ids, np.where(block_id < 0, num_blocks[group], block_id), num_blocks[0])
        _pad(inputs.update_places, places, no_row * facts.max_blocks)
        if sampling is not None:
            write_sampling(sampling, self.sampling, inputs.sampling)
        num_words = self.num_words
        for number, (items, part) in enumerate(zip(work, inputs.work, strict=True)):
            inputs.num_work[number, 0] = len(items)
            part[: len(items)] = items
        if work:
            num_words -= (len(inputs.work[-1]) - len(work[-1])) * WORK_FIELDS
        return num_words


def _pad(part: NDArray[Any], values: Sequence[int] | NDArray[Any], padding: int | np.integer[Any]) -> None:
    part[: len(values)] = values
    part[len(values) :] = padding


class DeviceState:
    """What is remembered of sequences on the device: a row for each, and one that is nobody's, the last."""

    def __init__(self, facts: StepFacts, device: torch.device) -> None:
        num_rows = facts.max_num_seqs + 1
        # Where nothing else is known the blocks are nobody's.
        num_blocks = torch.tensor([group.num_blocks for group in facts.groups], dtype=torch.int32, device=device)
        self.block_table = num_blocks[:, None, None].repeat(1, num_rows, facts.max_blocks)
        """[num_groups, num_rows, max_blocks]. The block behind a group's last one is nobody's."""
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        """[num_rows]: the token that was sampled last."""
        # Of no sequence, until one has penalties: counts of the whole vocabulary take memory.
        self._no_penalties = empty_state(0, facts.model.vocab_size, device)
        self.penalties = self._no_penalties

    def update(self, inputs: StepInputs[Tensor]) -> None:
        """Take in a step's new blocks."""
        self.block_table.view(-1).index_copy_(0, inputs.update_places, inputs.update_ids)

    def keep_tokens(self, rows: Tensor, tokens: Tensor) -> None:
        """Take in what a step has sampled: [num_tokens], int64 and int32."""
        self.last_tokens.index_copy_(0, rows, tokens)

    def begin_penalties(self) -> None:
        """Make room for what penalties need, if there is none."""
        if self.penalties is self._no_penalties:
            penalties, vocab_size = self._no_penalties, self._no_penalties.output_counts.shape[1]
            self.penalties = empty_state(len(self.last_tokens) - 1, vocab_size, penalties.output_counts.device)

    def drop_penalties(self) -> None:
        """Give that back. No sequence is known."""
        self.penalties = self._no_penalties


@attrs.define(eq=False)
class _Block:
    memory: Tensor
    read_by: HostCopy | None = None
    """The step that it was written for."""


class StagingRing:
    """Blocks of the host's memory, of which one after the other is written and read by the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocks = [_Block(device.staging(0)) for _ in range(NUM_STAGING_BLOCKS)]
        self._next = 0

    def take(self, num_words: int) -> Tensor:
        """A block of at least so many words that the device does not read any more. Waits where there is none; not
        while fewer steps are in flight than there are blocks."""
        block = self._blocks[self._next]
        if block.read_by is not None and not block.read_by.is_done:
            self._device.wait(block.read_by)
        if len(block.memory) < num_words:
            block.memory = self._device.staging(1 << (num_words - 1).bit_length())
        return block.memory

    def launched(self, step: HostCopy) -> None:
        """Note that this step reads the block that was taken."""
        self._blocks[self._next].read_by = step
        self._next = (self._next + 1) % len(self._blocks)
