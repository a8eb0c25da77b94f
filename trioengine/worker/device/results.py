# pyright: basic
"""What a step gives, as one row of 32-bit numbers that one copy brings to the host."""

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trioengine_kernels.native.sampler import SampledStatus, SampledTokens, TokenLogprobs
from trioengine_kernels.sampling import MIN_LOGPROB, Logprobs

from trioengine.worker.backend import StepNumbers


def pack_results(
    tokens: Tensor | None, status: Tensor | None, logprobs: Logprobs | None, hidden_states: Tensor | None
) -> Tensor:
    """Put the parts behind one another: what `ResultShape.unpack` takes apart.

    Args:
        tokens: [num_rows], int32.
        status: [num_rows], of any integer type.
        logprobs: of all rows.
        hidden_states: [num_hidden_rows, hidden_size], float32.
    """
    parts: list[Tensor] = []
    if tokens is not None and status is not None:
        parts += [tokens, status.int()]
    if logprobs is not None:
        ranks, top_ids = logprobs.rank.int(), logprobs.top_token_ids.int()
        parts += [logprobs.chosen.view(torch.int32), ranks, logprobs.top.flatten().view(torch.int32), top_ids.flatten()]
    if hidden_states is not None:
        parts.append(hidden_states.flatten().view(torch.int32))
    return torch.cat(parts)


@attrs.frozen(eq=False)
class ResultShape:
    """The parts that a step gives."""

    num_rows: int
    """That are sampled; 0 is none."""
    num_logprobs: NDArray[np.int32] | None
    """As `SamplingArrays.num_logprobs`; None where there are no log probabilities."""
    num_hidden_rows: int
    hidden_size: int

    @property
    def num_top(self) -> int:
        """Most likely tokens that each row has."""
        return 0 if self.num_logprobs is None else max(0, int(self.num_logprobs.max()))

    def unpack(self, results: NDArray[np.int32]) -> StepNumbers:
        """The parts of what `pack_results` made."""
        sampled, hidden_states, num_rows, start = None, None, self.num_rows, 2 * self.num_rows
        if num_rows:
            status = results[num_rows:start].astype(np.uint8)
            logprobs = None
            if self.num_logprobs is not None:
                num_top = num_rows * self.num_top
                end = start + 2 * num_rows + 2 * num_top
                logprobs = self._logprobs(results[start:end], status)
                start = end
            sampled = SampledTokens(results[:num_rows], status, logprobs)
        if self.num_hidden_rows:
            hidden_states = results[start:].view(np.float32).reshape(self.num_hidden_rows, self.hidden_size)
        return StepNumbers(sampled, hidden_states)

    def _logprobs(self, results: NDArray[np.int32], status: NDArray[np.uint8]) -> TokenLogprobs:
        assert self.num_logprobs is not None
        num_rows, num_top = self.num_rows, self.num_top
        chosen, rank = results[:num_rows].view(np.float32), results[num_rows : 2 * num_rows]
        top, top_token_ids = results[2 * num_rows :].reshape(2, num_rows, num_top)
        is_nan = status == SampledStatus.IS_NAN
        is_left_out = (self.num_logprobs < 0) | is_nan
        is_top_left_out = (np.arange(num_top) >= self.num_logprobs[:, None]) | is_nan[:, None]
        return TokenLogprobs(
            chosen=np.where(is_left_out, np.float32(MIN_LOGPROB), chosen),
            rank=np.where(is_left_out, 0, rank),
            top=np.where(is_top_left_out, np.float32(MIN_LOGPROB), top.view(np.float32)),
            top_token_ids=np.where(is_top_left_out, -1, top_token_ids),
        )
