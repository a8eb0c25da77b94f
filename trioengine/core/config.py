"""`CoreConfig`: the limits that scheduling keeps. The runtime derives them; nothing here knows why they are so."""

import attrs

from trioengine.errors import ConfigError


def _at_least_one(_: "CoreConfig", attribute: "attrs.Attribute[int]", value: int) -> None:
    if value < 1:
        raise ConfigError(f"{attribute.name} must be at least 1, not {value}.", option=attribute.name)


@attrs.frozen(kw_only=True)
class CoreConfig:
    """Limits of one engine core. Any combination of values of at least one works.

    Raises:
        ConfigError: naming a value below one.
    """

    max_num_seqs: int = attrs.field(validator=_at_least_one)
    """The most requests that run at once."""
    max_num_batched_tokens: int = attrs.field(validator=_at_least_one)
    """The most tokens that one step computes, prompts and answers together."""
    max_model_len: int = attrs.field(validator=_at_least_one)
    """The most tokens of prompt and answer together."""
    block_size: int = attrs.field(validator=_at_least_one)
    """Tokens in one KV cache block."""
    vocab_size: int = attrs.field(validator=_at_least_one)
    """Token ids are below this."""
