"""What a caller receives: `RequestOutput`."""

import enum
from collections.abc import Iterator, Mapping

import attrs


class FinishReason(enum.StrEnum):
    """Why an output ended, in OpenAI's words and vLLM's."""

    STOP = "stop"
    """The model's end token, a stop token or a stop string (`stop_reason` tells which)."""
    LENGTH = "length"
    """`max_tokens`, or the end of the context."""
    REPETITION = "repetition"
    """It repeated itself as often as `SamplingParams.repetition_detection` says."""
    ABORT = "abort"
    """The client, or a shutdown."""


@attrs.frozen
class Logprob:
    """One token's log probability at one place."""

    token_id: int
    logprob: float
    """Natural logarithm, finite: -9999.0 stands for probability 0."""
    rank: int
    """1 is the most likely token; equals share the best place. 0 is not known, as for `logprob_token_ids`."""
    token_bytes: bytes
    """The token's own bytes, which may be a part of a character."""

    @property
    def decoded_token(self) -> str:
        """The token's text; what is no whole character is U+FFFD."""
        return self.token_bytes.decode("utf-8", "replace")


@attrs.frozen
class PositionLogprobs(Mapping[int, Logprob]):
    """Log probabilities at one place of prompt or answer; as a mapping, by token id, the chosen one first."""

    chosen: Logprob
    """Of the token that stands there."""
    top: tuple[Logprob, ...]
    """The most likely tokens, as many as were asked for, the most likely first; or those of `logprob_token_ids`, in
    their order. The chosen one may be among them."""

    def __getitem__(self, token_id: int) -> Logprob:
        for each in (self.chosen, *self.top):
            if each.token_id == token_id:
                return each
        raise KeyError(token_id)

    def __iter__(self) -> Iterator[int]:
        return iter(dict.fromkeys(each.token_id for each in (self.chosen, *self.top)))

    def __len__(self) -> int:
        return len({each.token_id for each in (self.chosen, *self.top)})


@attrs.frozen
class CompletionOutput:
    """One choice of a request: its text and tokens, whole or new ones as `RequestOutputKind` says."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token's id or the stop string, or "repetition_detected"; None for the model's own end token and for
    other reasons."""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """One for each of `token_ids`; None where none were asked for."""

    @property
    def cumulative_logprob(self) -> float | None:
        """The log probability of all tokens here; None where none were asked for."""
        return None if self.logprobs is None else sum(each.chosen.logprob for each in self.logprobs)


@attrs.frozen
class RequestOutput:
    """One output of a stream. Immutable: keeping it, or reading late, is safe."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_generated_tokens: int
    """Tokens generated so far, over all choices, those of stops included: the usage's completion tokens."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    """One for each token of the prompt (fewer where it was aborted before they were computed), None for the first; in
    the first output, and in every one for CUMULATIVE. None where none were asked for."""
    weight_version: str | None = None
    """Of the weights that computed it; None before the first update."""
