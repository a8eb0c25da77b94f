"""What a tokenizer is made of, as the readers of model files find it."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import attrs
import tokenizers

from trioengine.errors import CheckpointError


@attrs.frozen
class TokenizerFacts:
    """What a model's files say about its tokens beside the vocabulary."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """The model's own end of sequence first, then other tokens that end an answer."""
    pad_token_id: int | None = None
    unk_token_id: int | None = None
    chat_templates: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """Jinja source by name; "default" is the usual one."""


@attrs.frozen
class TokenizerParts:
    """A tokenizer as a model's files describe it."""

    backend: tokenizers.Tokenizer
    facts: TokenizerFacts


@contextmanager
def library_errors_as_checkpoint_errors(what: str, path: str | None = None) -> Generator[None]:
    """Turn what the tokenizers library raises for a damaged file into a `CheckpointError` that says `what` is wrong.

    The library raises `Exception` itself, and on some damage a `PanicException`, which is not even that; this is the
    border that turns both into the reply of whoever loads the model. Anything else passes.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {str(error)[:300]}.", path=path) from error
