"""What vLLM's scripts pass to `LLM`: prompts as strings and dictionaries, chat messages, adapters, engine arguments."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import attrs

from trioengine.config.engine import EngineConfig
from trioengine.errors import ConfigError, RequestError
from trioengine.types.params import SamplingParams
from trioengine.types.pooling import EncodePrompt, TextPairPrompt
from trioengine.types.request import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokensPrompt

logger = logging.getLogger(__name__)

PromptLike: TypeAlias = str | Sequence[int] | Mapping[str, object] | Prompt | TextPairPrompt
"""A text, token ids, {"prompt": text}, {"prompt_token_ids": token ids}, or one of the engine's own."""

_NO_EFFECT = frozenset(
    {
        "allowed_local_media_path",
        "allowed_media_domains",
        "compilation_config",
        "convert",
        "cpu_offload_gb",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "distributed_executor_backend",
        "download_dir",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "enable_sleep_mode",
        "fully_sharded_loras",
        "hf_token",
        "limit_mm_per_prompt",
        "load_format",
        "max_parallel_loading_workers",
        "max_seq_len_to_capture",
        "mm_processor_kwargs",
        "num_gpu_blocks_override",
        "pipeline_parallel_size",
        "profiler_config",
        "runner",
        "structured_outputs_config",
        "swap_space",
        "task",
        "tensor_parallel_size",
        "tokenizer_mode",
        "trust_remote_code",
    }
)
"""Options of vLLM about how it computes. Here they change nothing that a caller could see but speed."""

_WITHOUT = frozenset(
    {
        "code_revision",
        "hf_config_path",
        "hf_overrides",
        "logits_processors",
        "pooler_config",
        "skip_tokenizer_init",
        "tokenizer_revision",
    }
)
"""Options of vLLM that change its answers and that this engine does not have: only a value that asks for nothing."""

_CALLERS = frozenset({"chat_template", "generation_config", "override_generation_config"})


@attrs.frozen
class LoRARequest:
    """An adapter that a request is computed with. It is read from its folder when it is first named."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """Its number."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """Its folder, in PEFT's format."""
        return self.lora_path


@attrs.frozen
class CallerOptions:
    """What is decided on the caller's side, for every request that leaves it open."""

    chat_template: str | None = None
    """In place of the model's own."""
    generation_config: str = "auto"
    """"auto" takes what the model's authors recommend for sampling, "vllm" nothing of it."""
    override_generation_config: Mapping[str, object] = attrs.field(factory=dict[str, object])
    """Over what the authors recommend."""


class DefaultSamplingParams(SamplingParams):
    """Those of `LLM.get_default_sampling_params`, whose fields may be set, as scripts do. There are no others."""

    __slots__ = ()
    __setattr__ = object.__setattr__  # pyright: ignore[reportAssignmentType]
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def plain(self) -> SamplingParams:
        """The same, for good."""
        return SamplingParams(**{field.name: getattr(self, field.name) for field in attrs.fields(SamplingParams)})


class EngineArgs:
    """The options of an engine as vLLM names them.

    Raises:
        ConfigError: an option is not known, or cannot work. `option` is its name.
    """

    def __init__(self, model: str | None = None, **options: object) -> None:
        """With `EngineConfig`'s options and vLLM's."""
        tokenizer = options.pop("tokenizer", None)
        if tokenizer not in (None, model):
            raise ConfigError("The tokenizer is the model's own.", option="tokenizer")
        for name in _WITHOUT & options.keys():
            if options.pop(name):
                raise ConfigError(f"This engine has no option {name}.", option=name)
        idle = {name: options.pop(name) for name in sorted(_NO_EFFECT & options.keys())}
        idle = {name: value for name, value in idle.items() if value not in (None, False, "auto", 0, 1)}
        caller = {name: value for name in _CALLERS & options.keys() if (value := options.pop(name)) is not None}
        known = {field.name for field in attrs.fields(EngineConfig)}
        for name in options:
            if name not in known:
                raise ConfigError(f"There is no option {name!r}.", option=name)
        self.config = EngineConfig(model=model, **cast(dict[str, Any], options))
        """The engine's options."""
        self.caller = _caller_options(caller)
        """What is none of the engine's."""
        if idle:
            logger.warning(
                "Without effect here: %s", ", ".join(f"{name}={str(value)[:50]}" for name, value in idle.items())
            )


def _caller_options(values: dict[str, Any]) -> CallerOptions:
    checks = {"chat_template": str, "generation_config": str, "override_generation_config": Mapping}
    for name, value in values.items():
        if not isinstance(value, checks[name]):
            raise ConfigError(f"{name} cannot be {str(value)[:50]!r}.", option=name)
    if values.get("generation_config", "auto") not in ("auto", "vllm"):
        raise ConfigError('generation_config must be "auto" or "vllm".', option="generation_config")
    return CallerOptions(**values)


def several(prompts: object) -> list[Any]:
    """Prompts as a list: one alone is a string, a dictionary, a prompt of the engine's, or a list of token ids."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, str):
        return [prompts]
    values = cast(Sequence[object], prompts)
    return [prompts] if values and isinstance(values[0], int) else list(values)


def to_prompt(value: object, path: str = "prompts") -> EncodePrompt:
    """A prompt of the engine's.

    Raises:
        RequestError: it is none that a model of this engine could read.
    """
    if isinstance(value, (TextPrompt, TokensPrompt, ChatPrompt, TextPairPrompt)):
        return value
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, Mapping):
        return _of_mapping(cast("Mapping[str, object]", value), path)
    if isinstance(value, Sequence):
        return TokensPrompt(cast("Sequence[int]", value))
    raise RequestError(f"{path} must be a text, token ids or a dictionary, not {type(value).__name__}.", param=path)


def cache_salt_of(value: object) -> str | None:
    """What a dictionary says of it."""
    salt = cast("Mapping[str, object]", value).get("cache_salt") if isinstance(value, Mapping) else None
    return cast("str | None", salt)


def to_messages(conversation: Sequence[Mapping[str, object]], content_format: str) -> Sequence[ChatMessage]:
    """Messages as a chat template reads them: parts of texts are joined, unless the format is "openai".

    Raises:
        RequestError: they are no messages, or a part is no text.
    """
    if isinstance(conversation, str) or not isinstance(conversation, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(f"messages must be a list, not {type(conversation).__name__}.", param="messages")
    if content_format not in ("auto", "string", "openai"):
        raise RequestError(
            'chat_template_content_format must be "auto", "string" or "openai".', param="chat_template_content_format"
        )
    if content_format == "openai":
        return conversation
    return [_with_text(position, message) for position, message in enumerate(conversation)]


def _with_text(position: int, message: Mapping[str, object]) -> ChatMessage:
    if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(f"messages[{position}] must be a mapping.", param=f"messages[{position}]")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    path = f"messages[{position}].content"
    if not isinstance(content, Sequence):
        raise RequestError(f"{path} must be a string or a list of parts.", param=path)
    texts: list[str] = []
    for number, part in enumerate(cast("Sequence[object]", content)):
        text = cast("Mapping[str, object]", part).get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise RequestError(
                f"{path}[{number}] is no text, and this engine's models read nothing else.", param=f"{path}[{number}]"
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _of_mapping(value: Mapping[str, object], path: str) -> EncodePrompt:
    if value.get("multi_modal_data"):
        raise RequestError("The models of this engine read texts only.", param=f"{path}.multi_modal_data")
    token_ids, text = value.get("prompt_token_ids"), value.get("prompt")
    if token_ids is not None:
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
            raise RequestError("prompt_token_ids must be a list of token ids.", param=f"{path}.prompt_token_ids")
        return TokensPrompt(cast("Sequence[int]", token_ids), text if isinstance(text, str) else None)
    if not isinstance(text, str):
        raise RequestError(f'{path} needs "prompt" or "prompt_token_ids".', param=path)
    return TextPrompt(text)
