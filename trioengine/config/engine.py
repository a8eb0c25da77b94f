"""`EngineConfig`: what a user may decide about an engine. None means that `config.resolve` derives the value."""

import enum

import attrs
from attrs.validators import optional

from trioengine.config.options import documented, integer, member_of, number, text, to_member_of


class Quantization(enum.StrEnum):
    """What weights become when a model is loaded."""

    INT8 = "int8"
    INT4 = "int4"


class SchedulingPolicy(enum.StrEnum):
    """Who comes first."""

    FCFS = "fcfs"
    """Who arrived first."""
    PRIORITY = "priority"
    """Who has the lowest priority value; among equals who arrived first."""


class SpeculationMethod(enum.StrEnum):
    """Where drafts come from."""

    NGRAM = "ngram"
    """What followed the last tokens when they stood in the sequence before (prompt lookup)."""
    DRAFT_MODEL = "draft_model"
    """A smaller model."""


@attrs.frozen(kw_only=True)
class SpeculationConfig:
    """How drafts are made. Names are vLLM's."""

    method: SpeculationMethod = attrs.field(
        converter=to_member_of(SpeculationMethod), validator=member_of(SpeculationMethod)
    )
    num_speculative_tokens: int = attrs.field(validator=integer(1, 64))
    """The most drafts of a sequence in one step."""
    model: str | None = attrs.field(default=None, validator=optional(text()))
    """The draft model, named as `EngineConfig.model`; only for `DRAFT_MODEL`. It has the same vocabulary."""
    prompt_lookup_min: int = attrs.field(default=2, validator=integer(1, 64))
    """The fewest last tokens that must be found again."""
    prompt_lookup_max: int = attrs.field(default=5, validator=integer(1, 64))
    """The most last tokens that are looked for."""


class LogprobsMode(enum.StrEnum):
    """What the log probabilities that requests ask for are of."""

    RAW_LOGPROBS = "raw_logprobs"
    """Of the model's distribution."""
    PROCESSED_LOGPROBS = "processed_logprobs"
    """Of the distribution that is sampled from: after every rule, temperature, top-k, top-p and min-p."""


@attrs.frozen(kw_only=True)
class EngineConfig:
    """The options of one engine, checked one by one.

    Raises:
        ConfigError: a value cannot work, whatever the model. `option` is its name.
    """

    model: str | None = attrs.field(
        default=None,
        validator=optional(text()),
        metadata=documented(
            "The model: a folder with safetensors, a .gguf file, the name of a bundled model, or a hub id."
            " Unset is the default model, fetched when it is missing."
        ),
    )
    served_model_name: str | None = attrs.field(
        default=None,
        validator=optional(text()),
        metadata=documented("The name that clients ask for. Unset is the model's own."),
    )
    quantization: Quantization | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(to_member_of(Quantization)),
        validator=optional(member_of(Quantization)),
        metadata=documented(
            "Quantize the weights of a folder with safetensors when they are loaded: less memory, faster, a little less"
            " exact. Unset keeps them as they are. A .gguf file has its own types."
        ),
    )
    max_model_len: int | None = attrs.field(
        default=None,
        validator=optional(integer(2)),
        metadata=documented("The most tokens of prompt and answer together. Unset is what the model was trained for."),
    )
    block_size: int = attrs.field(
        default=16,
        validator=integer(1, 1024),
        metadata=documented("Tokens in one block of the KV cache."),
    )
    kv_cache_memory_bytes: int | None = attrs.field(
        default=None,
        validator=optional(integer(1)),
        metadata=documented(
            "Memory for the KV cache. Unset is a quarter of the machine's memory, or less where all sequences at full"
            " length need less."
        ),
    )
    max_num_seqs: int = attrs.field(
        default=256,
        validator=integer(1, 65536),
        metadata=documented("The most sequences in one step. Never more than a step has tokens."),
    )
    max_num_batched_tokens: int | None = attrs.field(
        default=None,
        validator=optional(integer(1)),
        metadata=documented(
            "The most tokens, of prompts and answers together, in one step. Unset keeps a step near 300 ms, so that"
            " a cancelled request is felt soon."
        ),
    )
    cpu_threads: int | None = attrs.field(
        default=None,
        validator=optional(integer(1, 1024)),
        metadata=documented("Threads that compute. Unset is one for each processor this process may use."),
    )
    step_timeout_s: float = attrs.field(
        default=120.0,
        validator=number(0.1),
        metadata=documented("A step that takes longer than this many seconds counts as the death of the engine."),
    )
    startup_timeout_s: float = attrs.field(
        default=600.0,
        validator=number(0.1),
        metadata=documented("The most seconds the engine core may take to start and load, downloads not counted."),
    )
    core_stop_timeout_s: float = attrs.field(
        default=5.0,
        validator=number(0.0),
        metadata=documented("Seconds that a core which is asked to stop gets before it is terminated, then killed."),
    )
