"""What a tokenizer is made of, as the readers of model files find it."""

from collections.abc import Mapping

import attrs
import tokenizers


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
