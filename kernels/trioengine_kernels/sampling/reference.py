# pyright: basic
"""Choosing one token per row of logits, with random numbers that depend on nothing but seed, position and token id.

Sampling is the Gumbel-max trick: the token with the largest `logit / temperature + noise` is a sample of the softmax,
where the noise of each token is drawn from the Gumbel distribution. The noise is a hash of (seed, position, token id),
so a request draws the same tokens alone, in any batch, and when its steps are computed a second time.

Other implementations draw exactly these tokens: what decides is either one float32 operation, or an integer, or
computed in float64 and rounded to float32, so that two libraries' logarithms, which differ in the last place, agree.
"""

import attrs
import torch
from torch import Tensor

MIN_LOGPROB = -9999.0
"""Stands for the logarithm of probability 0, which JSON cannot carry."""
_MIN_TEMPERATURE = 1e-6
_NUM_CANDIDATES = 1024
"""Largest logits that top-k and top-p look at first; where these do not settle a row, its whole vocabulary does."""
_WEIGHT_ONE = 2.0**44
"""The weight of the most probable token, for top-p."""
_MASK32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


@attrs.frozen(eq=False)
class SamplingBatch:
    """Sampling parameters, one entry for each row of logits, on the same device."""

    temperature: Tensor
    """float32. 0 takes the largest logit and draws no random number."""
    top_k: Tensor
    """int64 or int32. Only the k largest logits; below 1 is off. Logits equal to the k-th stay too."""
    top_p: Tensor
    """float32. Only the largest logits until their probabilities, after `top_k` and `min_p`, sum to this; 1 is off.
    Logits equal to the last one stay too."""
    min_p: Tensor
    """float32. Only tokens at least this fraction as probable as the most probable one; 0 is off."""
    seed: Tensor
    """int64, the bits of an unsigned 64-bit number."""
    position: Tensor
    """int64: the place in its sequence that the drawn token takes."""


@attrs.frozen(eq=False)
class Logprobs:
    """Natural logarithms of probabilities, none below `MIN_LOGPROB`."""

    chosen: Tensor
    """[num_rows], float32: of the chosen token."""
    rank: Tensor
    """[num_rows], int64: the chosen token's place by probability, from 1; equals share the best place."""
    top: Tensor
    """[num_rows, num_top], float32: the largest ones, whether or not the chosen token is among them."""
    top_token_ids: Tensor
    """[num_rows, num_top], int64; equals by token id."""


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one token for each row.

    The order is temperature, `min_p`, `top_k`, `top_p`. Rows that use none of them cost what greedy rows cost.

    Args:
        logits: [num_rows, vocab_size], float32. Not changed. Minus infinity forbids a token.
        batch: the parameters of the rows.

    Returns:
        Token ids, [num_rows], int64. A row that has NaN, else plus infinity, gives the id of the first; one that
        forbids every token gives 0.
    """
    tokens = logits.argmax(dim=-1)
    rows = _drawn_rows(logits, tokens, batch)
    if len(rows) == 0:
        return tokens
    scaled = _scaled(logits, tokens, batch, rows)
    top_k = batch.top_k.index_select(0, rows).tolist()
    top_p = batch.top_p.index_select(0, rows).tolist()
    seed, position = batch.seed.index_select(0, rows), batch.position.index_select(0, rows)
    all_ids = torch.arange(logits.shape[1], device=logits.device)
    # Row by row: a row is then computed in the same shapes in any batch, and the memory does not grow with the batch.
    drawn: list[Tensor] = []
    for i, row in enumerate(scaled):
        ids = all_ids
        if top_k[i] > 0 or top_p[i] < 1:
            row, ids = _cut(row, top_k[i], top_p[i])
        drawn.append(ids[(row + _gumbel_noise(seed[i], position[i], ids)).argmax()])
    tokens[rows] = torch.stack(drawn)
    return tokens


def processed_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """What `sample` draws from: logits over temperature, minus infinity for tokens that the limits leave out.

    Rows that draw no random number are as they were: their logits have an order and no distribution of their own.

    Args:
        logits: [num_rows, vocab_size], float32. Not changed.
        batch: the parameters of the rows.
    """
    tokens = logits.argmax(dim=-1)
    rows = _drawn_rows(logits, tokens, batch)
    processed = logits.clone()
    for row, scaled in zip(rows.tolist(), _scaled(logits, tokens, batch, rows), strict=True):
        top_k, top_p = int(batch.top_k[row]), float(batch.top_p[row])
        if top_k > 0 or top_p < 1:
            candidates = scaled.sort(descending=True).values
            scaled.masked_fill_(scaled < _threshold(scaled, candidates, top_k, top_p), float("-inf"))
        processed[row] = scaled
    return processed


def penalize(
    logits: Tensor,
    prompt_token_ids: Tensor,
    output_token_ids: Tensor,
    *,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
) -> None:
    """Make tokens that were there already less likely, in place.

    The repetition penalty (Keskar et al., 2019) divides positive logits of tokens of prompt and output and multiplies
    negative ones. From the logits of tokens of the output, the frequency penalty is then subtracted once for each time
    they occur, and the presence penalty once.

    Args:
        logits: [vocab_size], one row.
        prompt_token_ids: [num_prompt_tokens], int64.
        output_token_ids: [num_output_tokens], int64.
        repetition_penalty: above 0; 1 is off.
        presence_penalty: 0 is off.
        frequency_penalty: 0 is off.
    """
    if repetition_penalty != 1:
        seen = torch.cat((prompt_token_ids, output_token_ids)).unique()
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / repetition_penalty, old * repetition_penalty)
    if presence_penalty or frequency_penalty:
        generated, counts = output_token_ids.unique(return_counts=True)
        logits[generated] -= presence_penalty + frequency_penalty * counts.to(logits.dtype)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """The log probabilities of the chosen tokens and of the most likely ones.

    Args:
        logits: [num_rows, vocab_size], float32.
        token_ids: [num_rows], int64: the chosen tokens.
        num_top: how many of the most likely; 0 to vocab_size.
    """
    all_logprobs = torch.log_softmax(logits, dim=-1)
    chosen = all_logprobs.gather(1, token_ids.unsqueeze(1))
    # Stable: topk promises no order of equals, and may choose others of them in another batch.
    top_token_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    return Logprobs(
        chosen=chosen.squeeze(1).clamp(min=MIN_LOGPROB),
        rank=(logits > logits.gather(1, token_ids.unsqueeze(1))).sum(dim=-1) + 1,
        top=all_logprobs.gather(1, top_token_ids).clamp(min=MIN_LOGPROB),
        top_token_ids=top_token_ids,
    )


def _drawn_rows(logits: Tensor, largest: Tensor, batch: SamplingBatch) -> Tensor:
    """The rows that draw random numbers; `largest` is where each row's largest logit is."""
    is_finite = logits.gather(1, largest.unsqueeze(1)).squeeze(1).isfinite()
    return ((batch.temperature > 0) & is_finite).nonzero().flatten()


def _scaled(logits: Tensor, largest: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    """These rows over their temperatures, minus infinity for tokens that `min_p` leaves out."""
    # Relative to the largest: no temperature can make infinity out of a finite logit, except the one that forbids.
    scaled = logits.index_select(0, rows)
    scaled -= scaled.gather(1, largest.index_select(0, rows).unsqueeze(1))
    scaled /= batch.temperature.index_select(0, rows).clamp(min=_MIN_TEMPERATURE).unsqueeze(1)
    min_p = batch.min_p.index_select(0, rows)
    if bool((min_p > 0).any()):
        scaled.masked_fill_(scaled < min_p.double().log().float().unsqueeze(1), float("-inf"))
    return scaled


def _cut(row: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The candidates that top-k and top-p leave of a row, minus infinity in place of others, and their token ids.

    Args:
        row: [vocab_size]: logits over temperature, the largest is 0.
        top_k: as in `SamplingBatch`.
        top_p: as in `SamplingBatch`.
    """
    for num_candidates in (_NUM_CANDIDATES, len(row)):
        values, ids = row.topk(min(num_candidates, len(row)))
        threshold = _threshold(row, values, top_k, top_p)
        # Where the last candidate is below the threshold, all tokens that are not candidates are.
        if len(values) == len(row) or bool(values[-1] < threshold):
            break
    # By token id, so that the first of equals wins here too.
    ids, order = ids.sort()
    values = values[order]
    return values.masked_fill(values < threshold, float("-inf")), ids


def _threshold(row: Tensor, candidates: Tensor, top_k: int, top_p: float) -> Tensor:
    """The smallest logit that stays; minus infinity where the candidates, sorted, are too few to tell."""
    threshold = row.new_tensor(float("-inf"))
    weights = _weights(candidates)
    if 0 < top_k < len(row):
        # There may be more equals of the k-th than candidates.
        if top_k > len(candidates) or (len(candidates) < len(row) and candidates[-1] == candidates[top_k - 1]):
            return threshold
        threshold = candidates[top_k - 1]
        weights = weights.masked_fill(candidates < threshold, 0)
    if top_p < 1:
        total = (weights if 0 < top_k < len(row) else _weights(row)).sum().double()
        place = int(torch.searchsorted(weights.cumsum(0).double(), total * top_p))
        if place < len(candidates):
            threshold = torch.maximum(threshold, candidates[place])
    return threshold


def _weights(row: Tensor) -> Tensor:
    """Probabilities relative to that of a logit of 0, as integers: their sums are exact, in any order, up to 2**19."""
    return (row.double().exp() * _WEIGHT_ONE).round().long()


def _gumbel_noise(seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise for tokens, float32: `-log(-log(u))` with `u` uniform in (0, 1), hashed from the three arguments."""
    bits = _hash32(seed, position, token_ids)
    # -log(u) is -log1p(-v) with v = 1 - u, also uniform. Neither end is reached.
    v = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v)).float()


def _hash32(seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """32 well-mixed bits for each token id, as int64. Integer arithmetic only, the same on every machine."""
    key0 = _mix32((seed & _MASK32) ^ _mix32((position + _GOLDEN) & _MASK32))
    key1 = _mix32((seed >> 32 & _MASK32) ^ _mix32((key0 + _GOLDEN) & _MASK32))
    return _mix32((_mix32(token_ids ^ key0) + key1) & _MASK32)


def _mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers that changes half of the bits when one changes ("lowbias32", C. Wellons, 2018)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    # May exceed 63 bits and wrap; the low 32 bits, which are kept, are right all the same.
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)
