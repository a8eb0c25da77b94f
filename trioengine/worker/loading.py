"""Chooses what computes a model, and loads it for that: the native CPU kernels, or torch where those cannot.

Torch is imported only where it computes.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union, cast

import attrs
from trioengine_kernels.native.library import Library, NativeUnavailableError, load_library
from trioengine_kernels.native.program import KVCache

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.checkpoint.safetensors import open_safetensors
from trioengine.checkpoint.small_files import read_json_object
from trioengine.config import env
from trioengine.config.engine import EngineConfig, LogprobsMode, Quantization
from trioengine.config.resolve import HardwareFacts, KVGroupShape, ModelShape, ResolvedConfig
from trioengine.errors import CheckpointError, ConfigError, EngineStartError
from trioengine.models.config import ARCHITECTURES, ModelConfig
from trioengine.models.loader import Checkpoint, ReportFraction, open_checkpoint
from trioengine.models.lora import read_lora
from trioengine.models.source import TensorLayout, ggml_type_of
from trioengine.tokenizer.bad_words import BadWordsRules
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from trioengine.worker.backend import Backend
from trioengine.worker.draft import DraftModel, draft_block_group
from trioengine.worker.executor import LocalExecutor
from trioengine.worker.kv_offload import DiskOffloadStore, MemoryOffloadStore, OffloadStore
from trioengine.worker.logits_processors import LogitsProcessors
from trioengine.worker.pooling import decoder_pooling
from trioengine.worker.shared_operations import ModelInfo
from trioengine.worker.weight_transfer import ReplaceableWeights, WeightTransfer

if TYPE_CHECKING:
    from trioengine.worker.transformers_checkpoint import TransformersCheckpoint, TransformersConfig

logger = logging.getLogger(__name__)

AnyCheckpoint: TypeAlias = Union[Checkpoint, "TransformersCheckpoint"]
AnyConfig: TypeAlias = Union[ModelConfig, "TransformersConfig"]

TORCH_KV_VALUE_BYTES = 4
"""float32."""


@attrs.frozen
class Computer:
    """What computes a model on this machine."""

    library: Library | None
    """The native kernels; None is torch."""

    def shape(self, model: AnyConfig, draft_model: ModelConfig | None = None) -> ModelShape:
        """The sizes that `config.resolve` wants to know of a model, with its draft model's part of the KV cache.

        Raises:
            ConfigError: it cannot have a draft model, as `draft_block_group` says.
        """
        if isinstance(model, ModelConfig):
            token_bytes = [len(group.layers) * self._kv_bytes(model) for group in model.kv_groups]
        else:
            token_bytes = [group.num_token_values * TORCH_KV_VALUE_BYTES for group in model.kv_groups]
        windows = [group.window for group in model.kv_groups]
        kv_groups = list(map(KVGroupShape, token_bytes, windows))
        if draft_model is not None:
            number = draft_block_group([group.window for group in kv_groups])
            num_bytes = kv_groups[number].bytes_per_token + draft_model.num_layers * self._kv_bytes(draft_model)
            kv_groups[number] = attrs.evolve(kv_groups[number], bytes_per_token=num_bytes)
        return ModelShape(
            num_parameters=model.num_active_parameters,
            max_position_embeddings=model.max_position_embeddings,
            kv_groups=kv_groups,
            vocab_size=model.vocab_size,
        )

    def _kv_bytes(self, model: ModelConfig) -> int:
        """Of a token in one layer."""
        if self.library is None:
            return 2 * model.num_kv_heads * model.head_dim * TORCH_KV_VALUE_BYTES
        return KVCache.bytes_per_token(num_layers=1, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)

    def hardware_facts(self) -> HardwareFacts:
        """What this process may use, and how fast this computes with it."""
        return env.hardware_facts(env.FLOPS_PER_CPU_PER_S if self.library is None else env.NATIVE_FLOPS_PER_CPU_PER_S)


def open_model(location: ModelLocation) -> AnyCheckpoint:
    """The files of a model: for this engine's decoder where it knows the architecture, else for transformers' code.

    Raises:
        CheckpointError: the files are damaged, or the model is not one that this engine runs.
    """
    name = _unknown_architecture(location)
    if name is None:
        return open_checkpoint(location)
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        raise CheckpointError(
            f"{location.path}: this engine's own decoder does not know the architecture {name[:100]!r}. transformers"
            " may, and is not installed: pip install 'trioengine[transformers]'.",
            path=str(location.path),
        )
    from trioengine.worker.transformers_checkpoint import open_transformers_checkpoint

    checkpoint = open_transformers_checkpoint(location)
    logger.warning(
        "transformers' code computes %s, which this engine's own decoder does not know: with torch, and weights take"
        " float32's memory.",
        name,
    )
    return checkpoint


def _unknown_architecture(location: ModelLocation) -> str | None:
    """None where `open_checkpoint` knows it, or says what is wrong."""
    if location.kind is not ModelKind.FOLDER:
        return None
    names = read_json_object(location.path / "config.json").get("architectures")
    name = cast(list[object], names)[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name not in ARCHITECTURES else None


def transformers_computer(config: EngineConfig) -> Computer:
    """What computes a `TransformersCheckpoint`: torch.

    Raises:
        ConfigError: an option cannot be had with it.
    """
    for option, is_set in (("quantization", config.quantization is not None), ("enable_lora", config.enable_lora)):
        if is_set:
            raise ConfigError(f"transformers' code computes this model, without {option}.", option=option)
    return Computer(None)


def choose_computer(config: EngineConfig, location: ModelLocation) -> Computer:
    """The native kernels where they can be had; they are built at the first use on a machine, which takes seconds.

    Else torch: one line in the log says why, and what is lost.

    Raises:
        ConfigError: `quantization` is asked for and cannot be had.
        EngineStartError: torch is not installed either.
    """
    if config.quantization is not None and location.kind is ModelKind.GGUF:
        raise ConfigError(
            f"quantization is for folders with safetensors; {location.path.name} has types of its own.",
            option="quantization",
        )
    try:
        if env.are_cpu_kernels_off():
            raise NativeUnavailableError(f"{env.CPU_KERNELS_VARIABLE} is off.")
        if config.block_size % 16:
            raise NativeUnavailableError(f"They need a block_size that is a multiple of 16, not {config.block_size}.")
        return Computer(load_library(env.cache_dir() / "native"))
    except NativeUnavailableError as error:
        if config.quantization is not None:
            raise ConfigError(
                f"quantization needs the native CPU kernels, which cannot be used: {error}", option="quantization"
            ) from error
        if importlib.util.find_spec("torch") is None:
            raise EngineStartError(
                f"Nothing can compute on this machine. The native CPU kernels cannot be used: {error} And torch, which"
                " could take their place, is not installed: pip install 'trioengine[torch]'."
            ) from error
        logger.warning(
            "torch computes, not the native CPU kernels: %s This is several times slower, and weights take float32's"
            " memory.",
            error,
        )
        return Computer(None)


def open_draft_checkpoint(config: EngineConfig, location: ModelLocation, target: AnyConfig) -> Checkpoint:
    """The draft model's files.

    Raises:
        CheckpointError: they cannot be read.
        ConfigError: it does not go with its target, or with other options.
    """
    checkpoint = open_checkpoint(location)
    if checkpoint.config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"The draft model {location.served_name} has a vocabulary of {checkpoint.config.vocab_size} tokens, the"
            f" model one of {target.vocab_size}. They must be the same tokens.",
            option="speculative_config",
        )
    if config.kv_offload_bytes is not None:
        raise ConfigError(
            "kv_offload_bytes does not go with a draft model: blocks that are loaded again would lack its part.",
            option="kv_offload_bytes",
        )
    return checkpoint


def load_executor(
    checkpoint: AnyCheckpoint,
    config: ResolvedConfig,
    computer: Computer,
    *,
    quantization: Quantization | None = None,
    kv_offload_path: str | None = None,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    draft: Checkpoint | None = None,
    tokenizer: Callable[[], Tokenizer] | None = None,
    report: ReportFraction | None = None,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    profile_dir: str | None = None,
) -> LocalExecutor:
    """Load a model and make it ready to compute.

    Where torch computes, this sets the number of its threads, which the whole process shares.

    Args:
        checkpoint: the model.
        config: its sizes.
        computer: what computes.
        quantization: of the weights, as `EngineConfig.quantization`.
        kv_offload_path: as `EngineConfig.kv_offload_path`.
        logprobs_mode: as `EngineConfig.logprobs_mode`.
        draft: the draft model.
        tokenizer: loads the model's tokenizer, or has it; called when bad words need it. None loads it anew.
        report: called with the share of the weights that is loaded.
        max_loras: slots for adapters.
        max_lora_rank: as `EngineConfig.max_lora_rank`.
        profile_dir: as `EngineConfig.profile_dir`.

    Raises:
        CheckpointError: as `load_model` says.
        ConfigError: files cannot be written in `kv_offload_path`.
        EngineStartError: there is no memory for the weights or the KV cache.
    """
    try:
        backend = _load_backend(checkpoint, config, computer, quantization, report, max_loras)
        draft_model = None if draft is None else _load_draft_model(draft, backend, config, computer, quantization)
        offload_store = _offload_store(backend, config.num_offload_blocks, kv_offload_path)
    except MemoryError as error:
        raise EngineStartError(
            f"There is not enough memory for {checkpoint.location.path} and its KV cache."
        ) from error
    # The checkpoint, whose files are mapped, must not live as long as the executor.
    get_tokenizer = tokenizer or partial(load_tokenizer, checkpoint.location)
    return LocalExecutor(
        backend,
        draft_model=draft_model,
        offload_store=offload_store,
        logprobs_mode=logprobs_mode,
        logits_processors=LogitsProcessors.installed(),
        bad_words_rules=BadWordsRules(
            lambda skip_special_tokens: get_tokenizer().token_byte_table(skip_special_tokens),
            checkpoint.config.vocab_size,
        ),
        pooling=decoder_pooling(checkpoint.location, checkpoint.config) if isinstance(checkpoint, Checkpoint) else None,
        is_asynchronous=config.async_scheduling,
        read_lora=partial(read_lora, config=checkpoint.config, max_rank=max_lora_rank)
        if isinstance(checkpoint, Checkpoint)
        else None,
        weights=_weight_transfer(checkpoint, backend),
        profile_dir=profile_dir,
        model_info=_model_info(checkpoint, computer),
    )


def _weight_transfer(checkpoint: AnyCheckpoint, model: ReplaceableWeights) -> WeightTransfer:
    if isinstance(checkpoint, Checkpoint):
        head = f"{checkpoint.source.names.head}.weight"
        is_tied = checkpoint.config.has_tied_embeddings
        return WeightTransfer(checkpoint.source.layouts(), model, frozenset([head] if is_tied else []))
    tensors = open_safetensors(checkpoint.location.path)
    layouts = {name: TensorLayout(tensor.shape, ggml_type_of(tensor)) for name, tensor in tensors.items()}
    return WeightTransfer(layouts, model)


def _model_info(checkpoint: AnyCheckpoint, computer: Computer) -> ModelInfo:
    config = checkpoint.config
    is_ours = isinstance(config, ModelConfig)
    return ModelInfo(
        architecture=str(config.architecture),
        num_parameters=config.num_parameters if is_ours else config.num_active_parameters,
        num_layers=config.num_layers if is_ours else len(config.attention_calls),
        hidden_size=config.hidden_size if is_ours else None,
        vocab_size=config.vocab_size,
        backend="transformers" if not is_ours else "torch" if computer.library is None else "native",
    )


def _load_backend(
    checkpoint: AnyCheckpoint,
    config: ResolvedConfig,
    computer: Computer,
    quantization: Quantization | None,
    report: ReportFraction | None = None,
    max_loras: int = 0,
) -> Backend:
    if not isinstance(checkpoint, Checkpoint):
        from trioengine.worker.transformers_backend import load_transformers_backend

        return load_transformers_backend(checkpoint, config, report)
    if computer.library is None:
        from trioengine.worker.torch_backend import load_torch_backend

        return load_torch_backend(checkpoint, config, report)
    from trioengine.worker.native_backend import load_native_backend

    return load_native_backend(checkpoint, config, computer.library, quantization, report, max_loras)


def _load_draft_model(
    checkpoint: Checkpoint,
    target: Backend,
    config: ResolvedConfig,
    computer: Computer,
    quantization: Quantization | None,
) -> DraftModel:
    groups, model = target.kv_cache_groups, checkpoint.config
    num_blocks = groups[draft_block_group([group.window for group in groups])].num_blocks
    backend = _load_backend(
        checkpoint,
        attrs.evolve(config, num_kv_blocks=[num_blocks] * len(model.kv_groups), max_num_logit_rows=config.max_num_seqs),
        computer,
        # GGUF files have types of their own.
        quantization if checkpoint.location.kind is ModelKind.FOLDER else None,
    )
    return DraftModel(
        backend, groups, max_tokens=config.max_num_batched_tokens, max_model_len=model.max_position_embeddings
    )


def _offload_store(backend: Backend, num_slots: int, folder: str | None) -> OffloadStore | None:
    if not num_slots:
        return None
    slot_bytes = [backend.kv_block(group, 0).nbytes for group in range(len(backend.kv_cache_groups))]
    if folder is None:
        return MemoryOffloadStore(num_slots, slot_bytes)
    return DiskOffloadStore(num_slots, slot_bytes, Path(folder).expanduser())
