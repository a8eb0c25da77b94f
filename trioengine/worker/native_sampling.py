"""The sampling rules of sequences as the arrays of the native sampler.

Order: logit bias, penalties, tokens forbidden by `min_tokens`; then the order of `trioengine_kernels.sampling`. What no
sequence of a step uses is left out.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from trioengine_kernels.native.sampler import LogitBias, Penalties, RaggedIds, SamplingArrays

from trioengine.types.params import SamplingParams
from trioengine.worker.sequences import SequenceState


def sampling_arrays(sequences: Sequence[SequenceState]) -> SamplingArrays:
    """One entry for each sequence."""
    params = [sequence.sampling for sequence in sequences]
    return SamplingArrays(
        temperature=np.array([0.0 if each.is_greedy else each.temperature for each in params], np.float32),
        top_k=np.array([each.top_k for each in params], np.int32),
        top_p=np.array([each.top_p for each in params], np.float32),
        min_p=np.array([each.min_p for each in params], np.float32),
        seed=np.array([sequence.seed for sequence in sequences], np.int64).view(np.uint64),
        # The place of the token in its sequence: the same when the sequence is computed again after a preemption.
        position=np.array([len(sequence.token_ids) for sequence in sequences], np.int64),
        logit_bias=_logit_bias(params),
        penalties=_penalties(sequences),
        forbidden=_ragged(_forbidden(sequence) for sequence in sequences),
    )


def _logit_bias(params: Sequence[SamplingParams]) -> LogitBias | None:
    ids = _ragged(tuple(each.logit_bias or ()) for each in params)
    if ids is None:
        return None
    values = [value for each in params for value in (each.logit_bias or {}).values()]
    return LogitBias(ids, np.array(values, np.float32))


def _penalties(sequences: Sequence[SequenceState]) -> Penalties | None:
    punished = [
        sequence
        if sequence.sampling.repetition_penalty != 1
        or sequence.sampling.presence_penalty
        or sequence.sampling.frequency_penalty
        else None
        for sequence in sequences
    ]
    seen = _ragged(() if sequence is None else sequence.token_ids for sequence in punished)
    if seen is None:
        return None

    def floats(value: Callable[[SamplingParams], float]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.array([value(sequence.sampling) for sequence in sequences], np.float32)

    return Penalties(
        seen=seen,
        num_prompt_tokens=np.array([0 if each is None else each.num_prompt_tokens for each in punished], np.int64),
        repetition=floats(lambda params: params.repetition_penalty),
        presence=floats(lambda params: params.presence_penalty),
        frequency=floats(lambda params: params.frequency_penalty),
    )


def _forbidden(sequence: SequenceState) -> Sequence[int]:
    is_too_short = sequence.num_output_tokens < sequence.sampling.min_tokens
    return sequence.end_token_ids if is_too_short else ()


def _ragged(rows: Iterable[Sequence[int]]) -> RaggedIds | None:
    """None where no row has any."""
    token_ids: list[int] = []
    starts = [0]
    for row in rows:
        token_ids += row
        starts.append(len(token_ids))
    return RaggedIds(np.array(starts, np.int64), np.array(token_ids, np.int32)) if token_ids else None
