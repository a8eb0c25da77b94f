"""`sampling`: which implementation runs. There is one so far, the reference."""

from trioengine_kernels.sampling.reference import Logprobs, SamplingBatch, logprobs, penalize, sample

__all__ = ["Logprobs", "SamplingBatch", "logprobs", "penalize", "sample"]
