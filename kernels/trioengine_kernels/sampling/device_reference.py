# pyright: basic
"""Sampling as the operations of a device compute it: what Triton's have to equal, token by token."""

import torch
from torch import Tensor

from trioengine_kernels.native.sampler import SampledStatus
from trioengine_kernels.sampling import reference
from trioengine_kernels.sampling.device import DeviceIds, DeviceRules
from trioengine_kernels.sampling.reference import MIN_LOGPROB, Logprobs, SamplingBatch


def apply_rules(logits: Tensor, rules: DeviceRules, *, out: Tensor | None = None) -> Tensor:
    """Logits after their rules. NaN stays NaN, also where a mask forbids the token.

    Args:
        logits: [num_rows, vocab_size], float32, tokens consecutive.
        rules: of these rows.
        out: where to put them, like `logits` and possibly `logits` itself; None is a new tensor.
    """
    ruled = _masked(logits, rules)
    ruled = ruled + _dense(rules.bias.ids, rules.bias.values, ruled)
    ruled = _penalized(ruled, rules)
    return ruled if out is None else out.copy_(ruled)


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Draw one token for each row: the tokens of `reference.sample`.

    Args:
        logits: [num_rows, vocab_size], float32, tokens consecutive. Not changed. Minus infinity forbids a token.
        batch: the parameters of the rows.

    Returns:
        Token ids, [num_rows], int32, all of the vocabulary, and each row's `SampledStatus`, [num_rows], uint8.
    """
    tokens = reference.sample(logits, batch)
    own = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    status = torch.where(own == float("-inf"), SampledStatus.NOTHING_ALLOWED, SampledStatus.SAMPLED)
    # A row that has NaN gives the place of the first.
    status = torch.where(own.isnan(), SampledStatus.IS_NAN, status)
    return tokens.int(), status.to(torch.uint8)


def processed_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """As `reference.processed_logits`."""
    return reference.processed_logits(logits, batch)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """As `reference.logprobs`, but ranks and ids are int32, and what is no number is `MIN_LOGPROB`.

    Args:
        logits: [num_rows, vocab_size], float32, tokens consecutive.
        token_ids: [num_rows], int32: the chosen tokens.
        num_top: how many of the most likely; 0 to vocab_size.
    """
    found = reference.logprobs(logits, token_ids.long(), num_top)
    return Logprobs(
        chosen=found.chosen.nan_to_num(MIN_LOGPROB),
        rank=found.rank.int(),
        top=found.top.nan_to_num(MIN_LOGPROB),
        top_token_ids=found.top_token_ids.int(),
    )


def _masked(logits: Tensor, rules: DeviceRules) -> Tensor:
    if rules.masks is None:
        return logits
    is_allowed = _unpacked(rules.masks.bits, rules.masks.rows, logits.shape[1])
    is_bound = (rules.masks.rows >= 0).unsqueeze(1)
    return logits.masked_fill(is_bound & ~is_allowed & ~logits.isnan(), float("-inf"))


def _penalized(logits: Tensor, rules: DeviceRules) -> Tensor:
    penalties = rules.penalties
    vocab_size = logits.shape[1]
    counts = penalties.state.output_counts.index_select(0, penalties.rows.clamp(min=0).long())
    counts = counts + _dense(penalties.drafts, torch.ones_like(penalties.drafts.token_ids), counts)
    is_seen = _unpacked(penalties.state.prompt_bits, penalties.rows, vocab_size) | (counts > 0)
    repetition, presence, frequency = (
        column.unsqueeze(1) for column in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    penalized = torch.where(is_seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    penalized = torch.where(counts > 0, penalized - (presence + frequency * counts.float()), penalized)
    return torch.where((penalties.rows >= 0).unsqueeze(1), penalized, logits)


def _unpacked(bits: Tensor, rows: Tensor, vocab_size: int) -> Tensor:
    """[num_rows, vocab_size], bool: the bits of these rows; of those below 0 any."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    words = bits.index_select(0, rows.clamp(min=0).long())
    return (words.unsqueeze(-1) >> places & 1).flatten(1)[:, :vocab_size] != 0


def _dense(ids: DeviceIds, values: Tensor, like: Tensor) -> Tensor:
    """[num_rows, vocab_size]: the sums of the values of each row's ids, 0 where there is none."""
    num_rows, vocab_size = like.shape
    dense = torch.zeros(num_rows + 1, vocab_size, dtype=like.dtype, device=like.device)
    numbers = torch.arange(len(values), dtype=torch.int32, device=like.device)
    # Ids behind those of the last row come into a row of their own, which is dropped.
    rows = torch.searchsorted(ids.starts[1:].contiguous(), numbers, right=True)
    token_ids = ids.token_ids.clamp(0, vocab_size - 1).long()
    dense.view(-1).scatter_add_(0, rows * vocab_size + token_ids, values.to(like.dtype))
    return dense[:num_rows]
