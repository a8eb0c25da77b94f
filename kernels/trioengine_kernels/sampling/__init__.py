"""`sampling`: which implementation runs. There is one so far, the reference."""

from trioengine_kernels.sampling.reference import (
    MIN_LOGPROB,
    Logprobs,
    SamplingBatch,
    logprobs,
    penalize,
    processed_logits,
    sample,
)

__all__ = ["MIN_LOGPROB", "Logprobs", "SamplingBatch", "logprobs", "penalize", "processed_logits", "sample"]
