"""`EngineConfig`: what a user may decide about an engine. None means that `config.resolve` derives the value."""

import enum
from typing import Any

import attrs
from attrs.validators import optional

from trioengine.config.options import (
    documented,
    flag,
    integer,
    integers,
    member_of,
    number,
    section_of,
    text,
    to_integers,
    to_member_of,
    to_section,
)
from trioengine.errors import ConfigError


class Device(enum.StrEnum):
    """What computes."""

    AUTO = "auto"
    """A GPU where there is one that can be used, else the processors."""
    CPU = "cpu"
    CUDA = "cuda"


class DType(enum.StrEnum):
    """Numbers of 16 or 32 bits. Two have vLLM's other names, too."""

    AUTO = "auto"
    HALF = "half"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT = "float"
    FLOAT32 = "float32"

    @property
    def plain(self) -> "DType":
        """The same by its plain name."""
        return {DType.HALF: DType.FLOAT16, DType.FLOAT: DType.FLOAT32}.get(self, self)


class KVCacheDType(enum.StrEnum):
    """Numbers of the KV cache."""

    AUTO = "auto"
    """As the activations."""
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"
    FP8_E4M3 = "fp8_e4m3"
    """The same."""

    @property
    def is_fp8(self) -> bool:
        """Whether a number has 8 bits."""
        return self in (KVCacheDType.FP8, KVCacheDType.FP8_E4M3)


class AttentionBackend(enum.StrEnum):
    """Whose attention a GPU computes. Names are vLLM's."""

    TRITON_ATTN = "TRITON_ATTN"
    """Ours."""
    TORCH_SDPA = "TORCH_SDPA"
    FLASH_ATTN = "FLASH_ATTN"
    FLASHINFER = "FLASHINFER"


class Quantization(enum.StrEnum):
    """What weights become when a model is loaded."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    """On a GPU."""


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


def _is_needed_by_draft_model(speculation: "SpeculationConfig", _: object, model: str | None) -> None:
    if (model is None) is (speculation.method is SpeculationMethod.DRAFT_MODEL):
        problem = "is needed" if model is None else "is only"
        raise ConfigError(f'model {problem} for the method "draft_model".', option="model")


def _is_at_least_the_minimum(speculation: "SpeculationConfig", _: object, value: int) -> None:
    if value < speculation.prompt_lookup_min:
        raise ConfigError(
            f"prompt_lookup_max ({value}) is less than prompt_lookup_min ({speculation.prompt_lookup_min}).",
            option="prompt_lookup_max",
        )


@attrs.frozen(kw_only=True)
class SpeculationConfig:
    """How drafts are made. Names are vLLM's.

    Raises:
        ConfigError: a value cannot work. `option` is its name.
    """

    method: SpeculationMethod = attrs.field(
        converter=to_member_of(SpeculationMethod), validator=member_of(SpeculationMethod)
    )
    num_speculative_tokens: int = attrs.field(validator=integer(1, 64))
    """The most drafts of a sequence in one step."""
    model: str | None = attrs.field(default=None, validator=[optional(text()), _is_needed_by_draft_model])
    """The draft model, named as `EngineConfig.model`; only for `DRAFT_MODEL`. It has the same vocabulary."""
    prompt_lookup_min: int = attrs.field(default=2, validator=integer(1, 64))
    """The fewest last tokens that must be found again."""
    prompt_lookup_max: int = attrs.field(default=5, validator=[integer(1, 64), _is_at_least_the_minimum])
    """The most last tokens that are looked for."""


class LogprobsMode(enum.StrEnum):
    """What the log probabilities that requests ask for are of."""

    RAW_LOGPROBS = "raw_logprobs"
    """Of the model's distribution."""
    PROCESSED_LOGPROBS = "processed_logprobs"
    """Of the distribution that is sampled from: after every rule, temperature, top-k, top-p and min-p."""


class ReasoningParser(enum.StrEnum):
    """How a model marks its reasoning, which a grammar does not bind."""

    DEEPSEEK_R1 = "deepseek_r1"
    """`<think>` and `</think>`; a chat template may write the first."""
    QWEN3 = "qwen3"
    """The same, where reasoning may also be switched off."""


def _none_for_minus_1(value: int | None) -> int | None:
    """As vLLM has it."""
    return None if value == -1 else value


def _needs_offload_bytes(config: "EngineConfig", field: "attrs.Attribute[Any]", path: str | None) -> None:
    if path is not None and config.kv_offload_bytes is None:
        raise ConfigError(f"{field.name} needs kv_offload_bytes, the most that is kept there.", option=field.name)


def _is_at_least_max_loras(config: "EngineConfig", _: object, value: int | None) -> None:
    if value is not None and value < config.max_loras:
        raise ConfigError(
            f"max_cpu_loras ({value}) is less than max_loras ({config.max_loras}).", option="max_cpu_loras"
        )


def _is_rank_of_several(config: "EngineConfig", _: object, rank: int | None) -> None:
    # Where the number is left out, whoever balances knows it.
    if rank is not None and 1 < config.data_parallel_size <= rank:
        raise ConfigError(
            f"data_parallel_rank ({rank}) counts from 0, so it is less than data_parallel_size"
            f" ({config.data_parallel_size}).",
            option="data_parallel_rank",
        )


def _is_at_most_data_parallel_size(config: "EngineConfig", _: object, value: int | None) -> None:
    if value is None:
        return
    if value > config.data_parallel_size:
        raise ConfigError(
            f"data_parallel_size_local ({value}) is more than data_parallel_size ({config.data_parallel_size}).",
            option="data_parallel_size_local",
        )
    if config.data_parallel_rank is not None:
        raise ConfigError(
            "data_parallel_size_local and data_parallel_rank exclude each other.", option="data_parallel_size_local"
        )


def _is_needed_by_remote_cores(config: "EngineConfig", field: "attrs.Attribute[Any]", value: str | None) -> None:
    if (value is None) is config.has_remote_cores:
        problem = "is needed where" if value is None else "is only for engines of which"
        raise ConfigError(
            f"{field.name} {problem} some cores run on other machines (data_parallel_size_local).", option=field.name
        )


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
    revision: str | None = attrs.field(
        default=None,
        validator=optional(text()),
        metadata=documented("The branch, tag or commit of a hub id. Unset is its main branch."),
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
            " exact. Unset keeps them as they are. A .gguf file has its own types. fp8 needs a GPU."
        ),
    )
    seed: int | None = attrs.field(
        default=None,
        validator=optional(integer(-(2**63))),
        metadata=documented(
            "Requests without a seed draw theirs from this one: the same requests in the same order get the same"
            " answers. Unset draws anew."
        ),
    )
    device: Device = attrs.field(
        default=Device.AUTO,
        converter=to_member_of(Device),
        validator=member_of(Device),
        metadata=documented("What computes. auto is a GPU where there is one that can be used, else the processors."),
    )
    dtype: DType = attrs.field(
        default=DType.AUTO,
        converter=to_member_of(DType),
        validator=member_of(DType),
        metadata=documented(
            "The number type of activations, and of weights that are not quantized. auto is the checkpoint's where that"
            " has 16 bits, else bfloat16. On a CPU, which chooses by itself, only auto and float32."
        ),
    )
    attention_backend: AttentionBackend | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(to_member_of(AttentionBackend)),
        validator=optional(member_of(AttentionBackend)),
        metadata=documented(
            "On a GPU, whose attention is computed: this engine's own, torch's, or that of a library that is installed."
            " Unset is the engine's own."
        ),
    )
    deterministic: bool = attrs.field(
        default=False,
        validator=flag(),
        metadata=documented(
            "A request's tokens do not depend on what else is computed with it. On a GPU this is slower; the native CPU"
            " kernels are always so."
        ),
    )
    enforce_eager: bool = attrs.field(
        default=False,
        validator=flag(),
        metadata=documented("On a GPU, record no graphs: the engine starts sooner, and small steps take longer."),
    )
    cudagraph_capture_sizes: tuple[int, ...] = attrs.field(
        default=(),
        converter=to_integers(),
        validator=integers(1, 65536),
        metadata=documented(
            "On a GPU, the numbers of sequences that graphs of decode steps are recorded for. Unset is 1, 2, 4 and"
            " multiples of 8 up to max_num_seqs, at most 256."
        ),
    )
    max_model_len: int | None = attrs.field(
        default=None,
        converter=_none_for_minus_1,
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
            " length need less; on a GPU, what gpu_memory_utilization leaves."
        ),
    )
    gpu_memory_utilization: float = attrs.field(
        default=0.9,
        validator=number(0.01, 1.0),
        metadata=documented("The share of a GPU's memory that the engine may take, from 0.01 to 1."),
    )
    kv_cache_dtype: KVCacheDType = attrs.field(
        default=KVCacheDType.AUTO,
        converter=to_member_of(KVCacheDType),
        validator=member_of(KVCacheDType),
        metadata=documented(
            "The number type of the KV cache. auto is that of the activations; fp8, which is fp8_e4m3, keeps twice as"
            " many tokens, a little less exact, on a GPU of compute capability 8.9 or newer. On a CPU, which chooses by"
            " itself, only auto."
        ),
    )
    max_num_seqs: int = attrs.field(
        default=256,
        validator=integer(1, 65536),
        metadata=documented("The most sequences in one step. Never more than a step has tokens."),
    )
    max_num_batched_tokens: int | None = attrs.field(
        default=None,
        validator=optional(integer(1, 1 << 24)),
        metadata=documented(
            "The most tokens, of prompts and answers together, in one step. Unset keeps a step near 300 ms, so that"
            " a cancelled request is felt soon; on a GPU it is 8192, or 2048 where that has less than 40 GiB."
        ),
    )
    scheduling_policy: SchedulingPolicy = attrs.field(
        default=SchedulingPolicy.FCFS,
        converter=to_member_of(SchedulingPolicy),
        validator=member_of(SchedulingPolicy),
        metadata=documented(
            "Who comes first: who arrived first, or who has the lowest priority value. Priority also takes the place of"
            " less important requests that run already."
        ),
    )
    max_num_partial_prefills: int = attrs.field(
        default=1,
        validator=integer(1),
        metadata=documented("The most prompts that are in the middle of their computation at once."),
    )
    max_long_partial_prefills: int = attrs.field(
        default=1,
        validator=integer(1),
        metadata=documented("How many of these may be longer than long_prefill_token_threshold."),
    )
    long_prefill_token_threshold: int = attrs.field(
        default=0,
        validator=integer(0),
        metadata=documented("Prompts with more tokens are long, and take at most so many in a step. 0 is no limit."),
    )
    async_scheduling: bool | None = attrs.field(
        default=None,
        validator=optional(flag()),
        metadata=documented("Schedule a step while the one before it is computed. Unset is where that helps."),
    )
    enable_prefix_caching: bool = attrs.field(
        default=True,
        validator=flag(),
        metadata=documented("Keep what was computed for a prompt, for later prompts that begin with the same tokens."),
    )
    enable_kv_cache_events: bool = attrs.field(
        default=False,
        validator=flag(),
        metadata=documented("Record which blocks are cached and evicted, for whoever asks the core for these events."),
    )
    kv_offload_bytes: int | None = attrs.field(
        default=None,
        validator=optional(integer(1)),
        metadata=documented(
            "Keep cached prefixes that the KV cache has no room for, up to so many bytes. Unset is off."
        ),
    )
    kv_offload_path: str | None = attrs.field(
        default=None,
        validator=[optional(text()), _needs_offload_bytes],
        metadata=documented("The folder in which they are kept. Unset is this machine's memory."),
    )
    speculative_config: SpeculationConfig | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(to_section(SpeculationConfig)),
        validator=optional(section_of(SpeculationConfig)),
        metadata=documented(
            'Guess several tokens and check them in one step, for example {"method": "ngram",'
            ' "num_speculative_tokens": 4}. The other method is "draft_model", which needs "model". Unset is off.'
        ),
    )
    enable_lora: bool = attrs.field(
        default=False,
        validator=flag(),
        metadata=documented("Take LoRA adapters, which requests may name."),
    )
    max_loras: int = attrs.field(
        default=1,
        validator=integer(1, 1024),
        metadata=documented("The most adapters that a step computes with; requests of others wait."),
    )
    max_lora_rank: int = attrs.field(
        default=16,
        validator=integer(1, 512),
        metadata=documented("The largest rank that an adapter may have."),
    )
    max_cpu_loras: int | None = attrs.field(
        default=None,
        validator=[optional(integer(1)), _is_at_least_max_loras],
        metadata=documented("The most adapters in memory. Unset is max_loras."),
    )
    max_logprobs: int = attrs.field(
        default=20,
        validator=integer(-1),
        metadata=documented("The most log probabilities for each token that a request may ask for. -1 is no limit."),
    )
    logprobs_mode: LogprobsMode = attrs.field(
        default=LogprobsMode.RAW_LOGPROBS,
        converter=to_member_of(LogprobsMode),
        validator=member_of(LogprobsMode),
        metadata=documented(
            "What log probabilities are of: the model's own distribution, or the one that is sampled from, after every"
            " rule and the temperature."
        ),
    )
    reasoning_parser: ReasoningParser | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(to_member_of(ReasoningParser)),
        validator=optional(member_of(ReasoningParser)),
        metadata=documented(
            "How the model marks its reasoning. Structured outputs bind after it. Unset is no reasoning."
        ),
    )
    cpu_threads: int | None = attrs.field(
        default=None,
        validator=optional(integer(1, 1024)),
        metadata=documented("Threads that compute. Unset is one for each processor this process may use."),
    )
    data_parallel_size: int = attrs.field(
        default=1,
        validator=integer(1, 256),
        metadata=documented("Engine cores, each with the whole model; requests are balanced between them."),
    )
    data_parallel_rank: int | None = attrs.field(
        default=None,
        validator=[optional(integer(0, 255)), _is_rank_of_several],
        metadata=documented(
            "Start this one of the cores only, where something outside balances between engines. Unset starts all."
        ),
    )
    data_parallel_size_local: int | None = attrs.field(
        default=None,
        validator=[optional(integer(0, 256)), _is_at_most_data_parallel_size],
        metadata=documented(
            "How many of the cores run on this machine, from rank 0 on. The others are started with `trioengine core`"
            " on theirs. Unset is all."
        ),
    )
    data_parallel_listen: str | None = attrs.field(
        default=None,
        validator=[optional(text()), _is_needed_by_remote_cores],
        metadata=documented("Where cores on other machines connect to: tcp://HOST:PORT of this machine."),
    )
    data_parallel_key_file: str | None = attrs.field(
        default=None,
        validator=[optional(text()), _is_needed_by_remote_cores],
        metadata=documented(
            "The file with the keys that they need, made where it is missing. Copy it to their machines, and keep it"
            " secret."
        ),
    )
    max_num_queued_reqs: int | None = attrs.field(
        default=1024,
        validator=optional(integer(1)),
        metadata=documented("The most requests that wait for their first token. Further ones are refused with 503."),
    )
    max_num_queued_tokens: int | None = attrs.field(
        default=None,
        validator=optional(integer(1)),
        metadata=documented("The most tokens of prompts that wait for their first token. Unset is no limit."),
    )
    output_proc_chunk_size: int = attrs.field(
        default=128,
        validator=integer(1),
        metadata=documented("Outputs that are handled between two moments at which other tasks may run."),
    )
    disable_log_stats: bool = attrs.field(
        default=False, validator=flag(), metadata=documented("Count nothing and log no statistics.")
    )
    log_stats_interval_s: float = attrs.field(
        default=10.0, validator=number(0.1), metadata=documented("Seconds between two lines of statistics in the log.")
    )
    enable_log_requests: bool = attrs.field(
        default=False, validator=flag(), metadata=documented("Log each request when it comes and when it ends.")
    )
    otlp_traces_endpoint: str | None = attrs.field(
        default=None,
        validator=optional(text()),
        metadata=documented("Where spans of requests are sent (OTLP over HTTP). Unset records none."),
    )
    profile_dir: str | None = attrs.field(
        default=None,
        validator=optional(text()),
        metadata=documented("The folder that profiles are written to. Unset is the folder for temporary files."),
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

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of the cores that run on this machine."""
        if self.data_parallel_rank is not None:
            return (self.data_parallel_rank,)
        num_local = self.data_parallel_size_local
        return tuple(range(self.data_parallel_size if num_local is None else num_local))

    @property
    def remote_ranks(self) -> tuple[int, ...]:
        """The ranks of the cores that run on other machines."""
        if self.data_parallel_rank is not None or self.data_parallel_size_local is None:
            return ()
        return tuple(range(self.data_parallel_size_local, self.data_parallel_size))

    @property
    def has_remote_cores(self) -> bool:
        """Whether some cores run on other machines."""
        return bool(self.remote_ranks)

    @property
    def draft_model(self) -> str | None:
        """The model that drafts, named as `model`; None where none does."""
        return None if self.speculative_config is None else self.speculative_config.model
