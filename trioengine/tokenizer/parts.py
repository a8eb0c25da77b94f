"""What a tokenizer is made of, as the readers of model files find it."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import attrs
import tokenizers
from tokenizers import processors

from trioengine.errors import CheckpointError


@attrs.frozen
class TokenizerFacts:
    """What a model's files say about its tokens beside the vocabulary."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """The model's own end of sequence first, then other tokens that end an answer."""
    pad_token_id: int | None = None
    unk_token_id: int | None = None
    special_tokens: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """What chat templates know tokens by, as "bos_token". Empty where the files have no names, only ids."""
    chat_templates: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """Jinja source by name; "default" is the usual one."""


@attrs.frozen
class TokenizerParts:
    """A tokenizer as a model's files describe it."""

    backend: tokenizers.Tokenizer
    facts: TokenizerFacts


def set_affixes(backend: tokenizers.Tokenizer, first: int | None, last: int | None) -> None:
    """Let the tokenizer put these tokens around every text, and behind the second of a pair once more."""
    tokens = {name: token_id for name, token_id in (("FIRST", first), ("LAST", last)) if token_id is not None}
    start, end = [name for name in tokens if name == "FIRST"], [name for name in tokens if name == "LAST"]
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=[*start, "$A", *end],
        pair=[*start, "$A", *end, "$B:1", *(f"{name}:1" for name in end)],
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [backend.id_to_token(token_id) or ""]}
            for name, token_id in tokens.items()
        ],
    )


@contextmanager
def library_errors_as_checkpoint_errors(what: str, path: str | None = None) -> Generator[None]:
    """Turn what the tokenizers library raises for a damaged file into a `CheckpointError` that says `what` is wrong.

    The library raises `Exception` itself, and on some damage a `PanicException`, which is not even that; this is the
    border that turns both into the reply of whoever loads the model. Anything else passes.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {str(error)[:300]}.", path=path) from error
