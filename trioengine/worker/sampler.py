# pyright: basic
"""Samples rows of logits with torch: the rules and limits of `SamplingArrays`, as the native sampler keeps them.

What a row's rules are is decided elsewhere. A batch without rules costs nothing here but the draw.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trioengine_kernels.native.sampler import RaggedIds, SampledStatus, SampledTokens, SamplingArrays, TokenLogprobs
from trioengine_kernels.sampling import MIN_LOGPROB, SamplingBatch, logprobs, penalize, processed_logits, sample


def sample_rows(logits: Tensor, arrays: SamplingArrays) -> SampledTokens:
    """Draw a token for each row.

    Args:
        logits: [num_rows, vocab_size], float32. Not changed.
        arrays: the parameters of the rows.
    """
    batch = SamplingBatch(
        temperature=torch.from_numpy(arrays.temperature),
        top_k=torch.from_numpy(arrays.top_k).long(),
        top_p=torch.from_numpy(arrays.top_p),
        min_p=torch.from_numpy(arrays.min_p),
        seed=torch.from_numpy(arrays.seed.view(np.int64)),
        position=torch.from_numpy(arrays.position),
    )
    ruled = _apply_rules(logits, arrays)
    tokens = sample(ruled, batch)
    # Sampling a row with NaN gives the place of a NaN, so one look tells; also of one that rules would hide.
    own = ruled.gather(1, tokens.unsqueeze(1)).squeeze(1)
    is_nan = own.isnan()
    if ruled is not logits:
        is_nan |= logits.isnan().any(dim=1)
    status = torch.where(own == float("-inf"), SampledStatus.NOTHING_ALLOWED, SampledStatus.SAMPLED)
    if arrays.forced is not None:
        forced = torch.from_numpy(arrays.forced).long()
        tokens = torch.where(forced < 0, tokens, forced)
        status[forced >= 0] = SampledStatus.SAMPLED
    status[is_nan] = SampledStatus.IS_NAN
    return SampledTokens(
        tokens.int().numpy(), status.to(torch.uint8).numpy(), _logprobs(logits, ruled, batch, tokens, is_nan, arrays)
    )


def _apply_rules(logits: Tensor, arrays: SamplingArrays) -> Tensor:
    """The rows after their rules; the same tensor where no row has any."""
    rules = (arrays.changed, arrays.masks, arrays.logit_bias, arrays.penalties, arrays.forbidden, arrays.allowed)
    if all(rule is None for rule in rules):
        return logits
    ruled = logits.clone()
    for row, values in enumerate(ruled):
        if arrays.forced is not None and arrays.forced[row] >= 0:
            continue
        if arrays.changed is not None and (changed_row := arrays.changed.rows[row]) >= 0:
            values.copy_(torch.from_numpy(arrays.changed.logits[changed_row]))
        if arrays.masks is not None and (mask_row := arrays.masks.rows[row]) >= 0:
            bits = np.unpackbits(arrays.masks.bits[mask_row].view(np.uint8), count=len(values), bitorder="little")
            values.masked_fill_(torch.from_numpy(bits) == 0, float("-inf"))
        if arrays.logit_bias is not None:
            ids = _row_ids(arrays.logit_bias.ids, row)
            values[ids] += torch.from_numpy(_row_of(arrays.logit_bias.ids, row, arrays.logit_bias.values))
        if arrays.penalties is not None and len(seen := _row_ids(arrays.penalties.seen, row)):
            num_prompt_tokens = int(arrays.penalties.num_prompt_tokens[row])
            penalize(
                values,
                seen[:num_prompt_tokens],
                seen[num_prompt_tokens:],
                repetition_penalty=float(arrays.penalties.repetition[row]),
                presence_penalty=float(arrays.penalties.presence[row]),
                frequency_penalty=float(arrays.penalties.frequency[row]),
            )
        if arrays.forbidden is not None:
            values[_row_ids(arrays.forbidden, row)] = float("-inf")
        if arrays.allowed is not None and len(allowed := _row_ids(arrays.allowed, row)):
            is_allowed = torch.zeros(len(values), dtype=torch.bool)
            is_allowed[allowed] = True
            values.masked_fill_(~is_allowed, float("-inf"))
    return ruled


def _row_of(ids: RaggedIds, row: int, values: NDArray[np.generic]) -> NDArray[np.generic]:
    return values[ids.starts[row] : ids.starts[row + 1]]


def _row_ids(ids: RaggedIds, row: int) -> Tensor:
    return torch.from_numpy(_row_of(ids, row, ids.token_ids)).long()


def _logprobs(
    logits: Tensor, ruled: Tensor, batch: SamplingBatch, tokens: Tensor, is_nan: Tensor, arrays: SamplingArrays
) -> TokenLogprobs | None:
    if arrays.num_logprobs is None:
        return None
    if arrays.logprobs_are_processed:
        processed = processed_logits(ruled, batch)
        if arrays.forced is not None:
            processed = torch.where(torch.from_numpy(arrays.forced >= 0).unsqueeze(1), logits, processed)
        logits = processed
    num_top = torch.from_numpy(arrays.num_logprobs)
    most = max(0, int(num_top.max()))
    found = logprobs(logits, tokens, most)
    is_left_out = (num_top < 0) | is_nan
    is_top_left_out = (torch.arange(most) >= num_top.unsqueeze(1)) | is_nan.unsqueeze(1)
    # A row that forbids everything has no logarithms, and they are no numbers.
    chosen = found.chosen.nan_to_num(MIN_LOGPROB).masked_fill(is_left_out, MIN_LOGPROB)
    top = found.top.nan_to_num(MIN_LOGPROB).masked_fill(is_top_left_out, MIN_LOGPROB)
    return TokenLogprobs(
        chosen=chosen.numpy(),
        rank=found.rank.masked_fill(is_left_out, 0).int().numpy(),
        top=top.numpy(),
        top_token_ids=found.top_token_ids.masked_fill(is_top_left_out, -1).int().numpy(),
    )
