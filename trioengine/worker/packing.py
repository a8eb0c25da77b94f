"""Packs tokens of several sequences into the arrays of one step."""

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from trioengine.worker.backend import StepBatch
from trioengine.worker.sequences import SequenceState


class TokenRange(Protocol):
    """Tokens of a sequence that are computed together; `end` is behind the last."""

    @property
    def state(self) -> SequenceState: ...

    @property
    def first(self) -> int: ...

    @property
    def end(self) -> int: ...


def pack_step(
    ranges: Sequence[TokenRange],
    logit_rows: Sequence[int],
    hidden_rows: Sequence[int] = (),
    *,
    block_size: int,
    num_blocks: Sequence[int],
    block_groups: Sequence[int],
    has_loras: bool = False,
) -> StepBatch:
    """The tokens of these sequences, one after another.

    Args:
        ranges: at least one, each of at least one token.
        logit_rows: the tokens whose successors are wanted, by their place in the step.
        hidden_rows: the tokens whose hidden states are wanted; others.
        block_size: tokens of a block.
        num_blocks: of each group of the sequences' block tables.
        block_groups: for each KV group of the model the group whose blocks it uses.
        has_loras: whether the sequences' adapters are computed.
    """
    firsts = np.array([each.first for each in ranges], np.int32)
    ends = np.array([each.end for each in ranges], np.int32)
    query_start = np.zeros(len(ranges) + 1, np.int32)
    (ends - firsts).cumsum(out=query_start[1:])
    owners = np.arange(len(ranges), dtype=np.int32).repeat(ends - firsts)
    positions = np.arange(query_start[-1], dtype=np.int32) + (firsts - query_start[:-1])[owners]
    token_ids = array("i")
    num_groups = len(num_blocks)
    max_blocks = max(len(each.state.block_ids) for each in ranges) // num_groups
    block_table = np.zeros((num_groups, len(ranges), max_blocks), np.int32)
    for i, each in enumerate(ranges):
        token_ids += each.state.token_ids[each.first : each.end]
        block_ids = each.state.block_ids.reshape(-1, num_groups).T
        block_table[:, i, : block_ids.shape[1]] = block_ids
    if list(block_groups) != list(range(num_groups)):
        block_table = block_table[list(block_groups)]
    blocks = block_table[:, owners, positions // block_size]
    # A wrong block id would overwrite another sequence's memory.
    assert blocks.min() >= 0
    assert (block_table.max(axis=(1, 2)) < np.array(num_blocks)[list(block_groups)]).all()
    lora_slots = None
    if has_loras and any(each.state.lora_slot for each in ranges):
        lora_slots = np.array([each.state.lora_slot for each in ranges], np.int32)[owners]
    return StepBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slots=np.ascontiguousarray(blocks * np.int32(block_size) + positions % np.int32(block_size)),
        query_start=query_start,
        seq_lens=ends,
        block_table=block_table,
        logit_rows=np.array(logit_rows, np.int32),
        lora_slots=lora_slots,
        hidden_rows=np.array(hidden_rows, np.int32),
    )
