# pyright: basic
"""What a device is told about the rules of rows of logits, and what it remembers of sequences for their penalties.

Everything is a tensor, so that a recorded graph reads it again. Rules apply in the order mask, bias, penalties. Tokens
that are forbidden or not allowed are masked too, although the native sampler forbids them last: minus infinity stays
minus infinity whatever is added to it and whatever it is multiplied by.
"""

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class DeviceMasks:
    """Which tokens rows may choose."""

    rows: Tensor
    """[num_rows], int32: which of `bits`; below 0 is none, so all tokens."""
    bits: Tensor
    """[num_masks, at least ceil(vocab_size / 32)], int32: token t may be chosen where bit `t % 32` of word `t // 32` is
    set."""


@attrs.frozen(eq=False)
class DeviceIds:
    """Token ids for each row, int32: those of row r are `token_ids[starts[r] : starts[r + 1]]`, rising in each row."""

    starts: Tensor
    """[num_rows + 1], int32. Ids from `starts[-1]` on belong to no row."""
    token_ids: Tensor


@attrs.frozen(eq=False)
class DeviceBias:
    """What is added to logits."""

    ids: DeviceIds
    """No id twice in a row."""
    values: Tensor
    """[num_ids], float32: finite."""


@attrs.frozen(eq=False)
class PenaltyState:
    """The tokens that sequences have, a row for each sequence that has penalties. The last row is nobody's: what
    belongs to no sequence may be written there."""

    prompt_bits: Tensor
    """[num_state_rows + 1, ceil(vocab_size / 32)], int32: a bit for each token of the prompt, as in masks."""
    output_counts: Tensor
    """[num_state_rows + 1, vocab_size], int32: how often each token is in the output."""


@attrs.frozen(eq=False)
class DevicePenalties:
    """Makes tokens that were there already less likely; `reference.penalize` has the formulas."""

    state: PenaltyState
    rows: Tensor
    """[num_rows], int32: which of the state; below 0 is none, so no penalty."""
    repetition: Tensor
    """[num_rows], float32, and so on; 1 is off."""
    presence: Tensor
    """0 is off."""
    frequency: Tensor
    """0 is off."""
    drafts: DeviceIds
    """More tokens of the output, which the state does not count: the drafts before a row's place. May be there several
    times."""


@attrs.frozen(eq=False)
class DeviceRules:
    """The rules of rows of logits, all tensors on their device."""

    bias: DeviceBias
    penalties: DevicePenalties
    masks: DeviceMasks | None = None


def empty_state(num_rows: int, vocab_size: int, device: torch.device | str) -> PenaltyState:
    """The state of sequences without tokens.

    Args:
        num_rows: how many sequences may have penalties; one more row is for nobody.
        vocab_size: tokens.
        device: where it lives.
    """
    return PenaltyState(
        torch.zeros(num_rows + 1, (vocab_size + 31) // 32, dtype=torch.int32, device=device),
        torch.zeros(num_rows + 1, vocab_size, dtype=torch.int32, device=device),
    )


def set_prompt(prompt_bits: Tensor, row: int, token_ids: Tensor) -> None:
    """Write the row of a sequence's prompt.

    Args:
        prompt_bits: as in `PenaltyState`.
        row: which.
        token_ids: [num_tokens], int64, of the prompt.
    """
    is_there = torch.zeros(prompt_bits.shape[1] * 32, dtype=torch.int32, device=prompt_bits.device)
    is_there[token_ids] = 1
    places = torch.arange(32, dtype=torch.int32, device=prompt_bits.device)
    # Each bit is added once, so the sum is their union, in the 32nd bit too.
    prompt_bits[row] = (is_there.view(-1, 32) << places).sum(1, dtype=torch.int32)


def set_output(output_counts: Tensor, row: int, token_ids: Tensor) -> None:
    """Write the row of a sequence's output.

    Args:
        output_counts: as in `PenaltyState`.
        row: which.
        token_ids: [num_tokens], int64, of the output.
    """
    counts = output_counts[row].zero_()
    counts.scatter_add_(0, token_ids, torch.ones_like(token_ids, dtype=torch.int32))


def count_tokens(output_counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Count sampled tokens. Starts nothing that the host waits for, and may be recorded in a graph.

    Args:
        output_counts: as in `PenaltyState`.
        rows: [num_tokens], int32: whose; below 0 is nobody's. May be there several times.
        tokens: [num_tokens], int32.
    """
    num_rows, vocab_size = output_counts.shape
    rows = torch.where(rows < 0, num_rows - 1, rows).long()
    # Integers: the order in which they are added does not matter.
    output_counts.view(-1).scatter_add_(0, rows * vocab_size + tokens, torch.ones_like(tokens))


def change_rows(logits: Tensor, rows: Tensor, changed: Tensor) -> Tensor:
    """Logits with other ones in place of some rows', but for rows with NaN, which stay what they are: wrong.

    Args:
        logits: [num_rows, vocab_size], float32. Not changed.
        rows: [num_changed], int64: no row twice.
        changed: [num_changed, vocab_size], float32: what takes their places.
    """
    own = logits.index_select(0, rows)
    return logits.index_copy(0, rows, torch.where(own.isnan().any(dim=1, keepdim=True), own, changed))
