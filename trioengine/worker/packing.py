"""Packs tokens of several sequences into the arrays of one step."""

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trioengine.worker.backend import LaunchBatch, PackedTokens, StepBatch
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
    tokens, owners = _pack_tokens(ranges, logit_rows, hidden_rows, has_loras=has_loras)
    num_groups = len(num_blocks)
    max_blocks = max(len(each.state.block_ids) for each in ranges) // num_groups
    block_table = np.zeros((num_groups, len(ranges), max_blocks), np.int32)
    for i, each in enumerate(ranges):
        block_ids = each.state.block_ids.reshape(-1, num_groups).T
        block_table[:, i, : block_ids.shape[1]] = block_ids
    if list(block_groups) != list(range(num_groups)):
        block_table = block_table[list(block_groups)]
    blocks = block_table[:, owners, tokens.positions // block_size]
    # A wrong block id would overwrite another sequence's memory.
    assert blocks.min() >= 0
    assert (block_table.max(axis=(1, 2)) < np.array(num_blocks)[list(block_groups)]).all()
    return StepBatch(
        token_ids=tokens.token_ids,
        positions=tokens.positions,
        slots=np.ascontiguousarray(blocks * np.int32(block_size) + tokens.positions % np.int32(block_size)),
        query_start=tokens.query_start,
        seq_lens=tokens.seq_lens,
        block_table=block_table,
        logit_rows=tokens.logit_rows,
        lora_slots=tokens.lora_slots,
        hidden_rows=tokens.hidden_rows,
    )


def pack_launch(
    ranges: Sequence[TokenRange],
    logit_rows: Sequence[int],
    hidden_rows: Sequence[int],
    logit_owners: Sequence[int],
    sampled_rows: Sequence[int],
    block_updates: Sequence[NDArray[np.int32]],
) -> LaunchBatch:
    """The tokens of these sequences, one after another, for a backend that remembers their blocks.

    Args:
        ranges: as `pack_step` has it.
        logit_rows: as `pack_step` has it.
        hidden_rows: as `pack_step` has it.
        logit_owners: as `LaunchBatch.logit_owners`.
        sampled_rows: as `LaunchBatch.sampled_rows`.
        block_updates: parts of `LaunchBatch.block_updates`.
    """
    tokens, _ = _pack_tokens(ranges, logit_rows, hidden_rows, has_loras=True)
    return LaunchBatch(
        token_ids=tokens.token_ids,
        positions=tokens.positions,
        query_start=tokens.query_start,
        seq_lens=tokens.seq_lens,
        logit_rows=tokens.logit_rows,
        lora_slots=tokens.lora_slots,
        hidden_rows=tokens.hidden_rows,
        rows=np.array([each.state.row for each in ranges], np.int32),
        block_updates=np.concatenate(block_updates) if block_updates else np.empty((0, 4), np.int32),
        logit_owners=np.array(logit_owners, np.int32),
        sampled_rows=np.array(sampled_rows, np.int32),
    )


def block_updates(row: int, first: int, block_ids: NDArray[np.int32], num_groups: int) -> NDArray[np.int32]:
    """What a sequence's new blocks are in `LaunchBatch.block_updates`.

    Args:
        row: the sequence's.
        first: so many blocks of each group it had before.
        block_ids: as `ScheduledSequence.new_block_ids`.
        num_groups: of the model.
    """
    numbers = np.arange(len(block_ids), dtype=np.int32)
    return np.stack((numbers % num_groups, np.full_like(numbers, row), first + numbers // num_groups, block_ids), 1)


def _pack_tokens(
    ranges: Sequence[TokenRange], logit_rows: Sequence[int], hidden_rows: Sequence[int], *, has_loras: bool
) -> tuple[PackedTokens, NDArray[np.int32]]:
    """What all kinds of steps have, and for each token the number of its range."""
    firsts = np.array([each.first for each in ranges], np.int32)
    ends = np.array([each.end for each in ranges], np.int32)
    query_start = np.zeros(len(ranges) + 1, np.int32)
    (ends - firsts).cumsum(out=query_start[1:])
    owners = np.arange(len(ranges), dtype=np.int32).repeat(ends - firsts)
    positions = np.arange(query_start[-1], dtype=np.int32) + (firsts - query_start[:-1])[owners]
    token_ids = array("i")
    for each in ranges:
        token_ids += each.state.token_ids[each.first : each.end]
    lora_slots = None
    if has_loras and any(each.state.lora_slot for each in ranges):
        lora_slots = np.array([each.state.lora_slot for each in ranges], np.int32)[owners]
    tokens = PackedTokens(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        query_start=query_start,
        seq_lens=ends,
        logit_rows=np.array(logit_rows, np.int32),
        lora_slots=lora_slots,
        hidden_rows=np.array(hidden_rows, np.int32),
    )
    return tokens, owners
