"""What a caller receives: `RequestOutput`."""

import enum

import attrs


class FinishReason(enum.StrEnum):
    """Why an output ended, in OpenAI's words."""

    STOP = "stop"
    """The model's end token, a stop token or a stop string (`stop_reason` tells which)."""
    LENGTH = "length"
    """`max_tokens`, or the end of the context."""
    ABORT = "abort"
    """The client, or a shutdown."""


@attrs.frozen
class CompletionOutput:
    """One choice of a request: its text and tokens, whole or new ones as `RequestOutputKind` says."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token's id or the stop string; None for the model's own end token and for other reasons."""


@attrs.frozen
class RequestOutput:
    """One output of a stream. Immutable: keeping it, or reading late, is safe."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_generated_tokens: int
    """Tokens generated so far, over all choices, those of stops included: the usage's completion tokens."""
