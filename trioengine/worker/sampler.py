# pyright: basic
"""Applies each sequence's rules to its row of logits, then draws the tokens of all rows in one call.

Order: logit bias, penalties, tokens forbidden by `min_tokens`; then the order of `trioengine_kernels.sampling`. A
sequence without rules costs nothing here.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from trioengine_kernels.sampling import SamplingBatch, penalize, sample

from trioengine.types.params import SamplingParams
from trioengine.worker.sequences import SequenceState


def sample_tokens(sequences: Sequence[SequenceState], logits: Tensor) -> Tensor:
    """Draw the next token of each sequence.

    Args:
        sequences: one per row.
        logits: [num_rows, vocab_size], float32. Overwritten.

    Returns:
        Token ids, [num_rows], int64.
    """
    for row, sequence in zip(logits, sequences, strict=True):
        _apply_rules(sequence, row)
    return sample(logits, _batch(sequences))


def _apply_rules(sequence: SequenceState, logits: Tensor) -> None:
    params = sequence.sampling
    if params.logit_bias:
        logits[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        token_ids = torch.tensor(sequence.token_ids)
        penalize(
            logits,
            token_ids[: sequence.num_prompt_tokens],
            token_ids[sequence.num_prompt_tokens :],
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        )
    if sequence.end_token_ids and sequence.num_output_tokens < params.min_tokens:
        logits[list(sequence.end_token_ids)] = float("-inf")


def _batch(sequences: Sequence[SequenceState]) -> SamplingBatch:
    def floats(value: Callable[[SamplingParams], float]) -> Tensor:
        return torch.tensor([value(sequence.sampling) for sequence in sequences], dtype=torch.float32)

    return SamplingBatch(
        temperature=floats(lambda params: 0.0 if params.is_greedy else params.temperature),
        top_k=torch.tensor([sequence.sampling.top_k for sequence in sequences]),
        top_p=floats(lambda params: params.top_p),
        min_p=floats(lambda params: params.min_p),
        seed=torch.tensor([sequence.seed for sequence in sequences]),
        # The place of the token in its sequence: the same when the sequence is computed again after a preemption.
        position=torch.tensor([len(sequence.token_ids) for sequence in sequences]),
    )
