"""`Step`: what one step computes, from the moment it is planned until its result is in; `StepOutcome`: what it did."""

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.core.executor import NewSequence, ScheduledSequence, TokenLogprobs
from trioengine.core.request import Request


@attrs.define(eq=False)
class Step:
    """One step. While it is planned, it counts what is left of the step's limits."""

    number: int
    num_tokens_left: int
    """Of `max_num_batched_tokens`."""
    num_extra_rows: int
    """Rows of logits beside the one that each request may need."""
    requests: list[Request] = attrs.field(factory=list[Request])
    scheduled: list[ScheduledSequence] = attrs.field(factory=list[ScheduledSequence])
    """The entry of each of `requests`. The next step's planning changes them."""
    new: list[NewSequence] = attrs.field(factory=list[NewSequence])
    incomplete: set[int] = attrs.field(factory=set[int])
    """Indices of those whose known tokens the step does not reach the end of, so that nothing is sampled for them."""
    proposed: set[int] = attrs.field(factory=set[int])
    """Indices of those whose drafts are guesses. A grammar's are certain."""
    started: list[Request] = attrs.field(factory=list[Request])
    """Those that it is the first step of."""
    num_long_prefills: int = 0
    """How many of the incomplete ones have long prompts."""
    is_plain: bool = True
    """Whether its result is one token for each request, and every request still wants it."""


@attrs.define(eq=False)
class StepOutcome:
    """What one step did for requests."""

    requests: list[Request]
    """Those that got tokens, one entry for each token."""
    tokens: list[int]
    """One for each of `requests`."""
    finished: list[Request] = attrs.field(factory=list[Request])
    """Those that ended; their last token is part of `tokens`."""
    started: Sequence[Request] = ()
    """Those that began with this step."""
    logprobs: list[tuple[Request, Sequence[TokenLogprobs]]] = attrs.field(
        factory=list[tuple[Request, Sequence[TokenLogprobs]]]
    )
    """An entry for each of the request's tokens."""
    prompt_logprobs: list[tuple[Request, Sequence[TokenLogprobs]]] = attrs.field(
        factory=list[tuple[Request, Sequence[TokenLogprobs]]]
    )
    """The next part of the request's prompt."""
    pooled: list[tuple[Request, NDArray[np.float32]]] = attrs.field(factory=list[tuple[Request, NDArray[np.float32]]])
    """The vectors of requests that end with this step."""
