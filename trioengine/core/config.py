"""`CoreConfig`: the limits that scheduling keeps. The runtime derives them; nothing here knows why they are so."""

import attrs

from trioengine.config.engine import SchedulingPolicy, SpeculationConfig
from trioengine.errors import ConfigError


def _at_least_one(_: object, attribute: "attrs.Attribute[int]", value: int) -> None:
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
    max_num_logit_rows: int = attrs.field(default=2**31 - 1, validator=_at_least_one)
    """The most rows of logits that one step wants. At least `max_num_seqs`; drafts and prompt log probabilities take
    what is left."""
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    enable_prefix_caching: bool = False
    """Whether blocks stay findable by their content."""
    max_num_partial_prefills: int = attrs.field(default=1, validator=_at_least_one)
    """The most prompts that are in the middle of their computation at once."""
    max_long_partial_prefills: int = attrs.field(default=1, validator=_at_least_one)
    """How many of them may be long."""
    long_prefill_token_threshold: int = 0
    """Prompts with more tokens are long, and take at most so many in a step; 0 is none."""
    splits_prompts: bool = True
    """Whether several steps may compute a prompt, one part after another. Not where each token sees those behind it."""
    async_scheduling: bool = False
    """Whether a step is scheduled while the one before it is computed."""
    speculation: SpeculationConfig | None = None
    max_loras: int = 0
    """The most adapters that running requests have at once; 0 is no adapters."""
    max_cpu_loras: int = 0
    """The most adapters in memory."""
    enable_kv_cache_events: bool = False
    """Whether what happens to cached blocks is recorded for `GetKVCacheEvents`."""
