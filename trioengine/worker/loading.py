"""Chooses what computes a model, and loads it for that: a GPU, the native CPU kernels, or torch where those cannot.

Torch is imported only where it computes, or may.
"""

import importlib.util
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union, cast

import attrs
from trioengine_kernels.native.library import Isa, Library, NativeUnavailableError, load_library
from trioengine_kernels.native.program import KVCache

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.checkpoint.safetensors import open_safetensors
from trioengine.checkpoint.small_files import read_json_object
from trioengine.config import env
from trioengine.config.engine import Device, DType, EngineConfig, KVCacheDType, LogprobsMode, Quantization
from trioengine.config.resolve import GPUMemoryUse, HardwareFacts, KVGroupShape, ModelShape, ResolvedConfig
from trioengine.errors import CheckpointError, ConfigError, EngineStartError
from trioengine.models.config import ARCHITECTURES, ModelConfig
from trioengine.models.encoder_loader import EncoderCheckpoint
from trioengine.models.loader import Checkpoint, ReportFraction, open_checkpoint
from trioengine.models.lora import read_lora
from trioengine.models.source import TensorLayout, ggml_type_of
from trioengine.tokenizer.bad_words import BadWordsRules
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from trioengine.worker.backend import Backend
from trioengine.worker.device.find import NoGPUError, find_gpu
from trioengine.worker.draft import DraftModel, draft_block_group, draft_config
from trioengine.worker.executor import LocalExecutor
from trioengine.worker.kv_offload import DiskOffloadStore, MemoryOffloadStore, OffloadStore
from trioengine.worker.logits_processors import LogitsProcessors
from trioengine.worker.pooling import decoder_pooling
from trioengine.worker.shared_operations import ModelInfo
from trioengine.worker.weight_transfer import ReplaceableWeights, WeightTransfer

if TYPE_CHECKING:
    from trioengine.worker.device.loading import DeviceComputer
    from trioengine.worker.transformers_checkpoint import TransformersCheckpoint, TransformersConfig

logger = logging.getLogger(__name__)

AnyCheckpoint: TypeAlias = Union[Checkpoint, "TransformersCheckpoint"]
AnyConfig: TypeAlias = Union[ModelConfig, "TransformersConfig"]

TORCH_KV_VALUE_BYTES = 4
"""float32."""
NATIVE_FLOPS_PER_CPU_PER_S = {
    Isa.PORTABLE: 5e9,
    Isa.AVX2: 90e9,
    Isa.AVX_VNNI: 120e9,
    Isa.VNNI: 200e9,
    Isa.DOTPROD: 90e9,
}
"""As `env.FLOPS_PER_CPU_PER_S`, of a whole prefill with the native kernels' quantized products. Measured, but for
AVX_VNNI and DOTPROD."""


@attrs.frozen
class Computer:
    """What computes a model on this machine."""

    library: Library | None
    """The native kernels; None is torch."""
    device: "DeviceComputer | None" = None
    """Computes in place of both."""

    @property
    def name(self) -> str:
        """Of what computes."""
        return "cuda" if self.device is not None else "torch" if self.library is None else "native"

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
        if self.device is not None:
            return self.device.kv_bytes(model)
        if self.library is None:
            return 2 * model.num_kv_heads * model.head_dim * TORCH_KV_VALUE_BYTES
        return KVCache.bytes_per_token(num_layers=1, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)

    def hardware_facts(self) -> HardwareFacts:
        """What this process may use, and how fast this computes with it."""
        rate = env.FLOPS_PER_CPU_PER_S if self.library is None else NATIVE_FLOPS_PER_CPU_PER_S[self.library.isa]
        facts = env.hardware_facts(rate)
        return facts if self.device is None else attrs.evolve(facts, gpu=self.device.facts)


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


def choose_computer(
    config: EngineConfig, checkpoint: AnyCheckpoint | EncoderCheckpoint, gpu_index: int = 0
) -> Computer:
    """A GPU where there is one and this engine's decoder is computed; else the native kernels where they can be had.

    They are built at the first use on a machine, which takes seconds. Else torch: one line in the log says why, and
    what is lost.

    Args:
        config: what the user asked for.
        checkpoint: the model.
        gpu_index: which of the machine's GPUs.

    Raises:
        ConfigError: an option cannot be kept by what computes.
        EngineStartError: torch is not installed either.
    """
    if config.quantization is not None and checkpoint.location.kind is ModelKind.GGUF:
        raise ConfigError(
            f"quantization is for folders with safetensors; {checkpoint.location.path.name} has types of its own.",
            option="quantization",
        )
    device = _find_device(config, checkpoint, gpu_index)
    if device is not None:
        return Computer(None, device)
    _check_cpu_options(config)
    if isinstance(checkpoint, (Checkpoint, EncoderCheckpoint)):
        computer = _native_or_torch(config)
    else:
        computer = _transformers_computer(config)
    if config.deterministic and computer.library is None:
        raise ConfigError(
            "deterministic needs a GPU or the native CPU kernels, and torch computes this model.",
            option="deterministic",
        )
    return computer


def _transformers_computer(config: EngineConfig) -> Computer:
    for option, is_set in (("quantization", config.quantization is not None), ("enable_lora", config.enable_lora)):
        if is_set:
            raise ConfigError(f"transformers' code computes this model, without {option}.", option=option)
    return Computer(None)


def _find_device(
    config: EngineConfig, checkpoint: AnyCheckpoint | EncoderCheckpoint, gpu_index: int
) -> "DeviceComputer | None":
    """The GPU that computes a model; None where the processors do."""
    if config.device is Device.CPU:
        return None
    try:
        if isinstance(checkpoint, EncoderCheckpoint):
            raise NoGPUError("Models that only give vectors are computed by the processors.")
        if not isinstance(checkpoint, Checkpoint):
            raise NoGPUError("What transformers' code computes is computed by the processors.")
        facts = find_gpu(gpu_index)
    except NoGPUError as error:
        if config.device is Device.CUDA:
            raise ConfigError(f"device cuda cannot be had. {error}", option="device") from error
        if env.may_have_gpu():
            logger.warning("The processors compute, not a GPU. %s", error)
        return None
    from trioengine.worker.device.loading import open_gpu

    return open_gpu(config, checkpoint, facts, gpu_index)


def _check_cpu_options(config: EngineConfig) -> None:
    """Refuse what only a GPU could keep. What asks for nothing, and what is always so on a CPU, is fine."""
    refused = {
        "dtype": config.dtype.plain not in (DType.AUTO, DType.FLOAT32),
        "kv_cache_dtype": config.kv_cache_dtype is not KVCacheDType.AUTO,
        "quantization": config.quantization is Quantization.FP8,
        "attention_backend": config.attention_backend is not None,
        "cudagraph_capture_sizes": bool(config.cudagraph_capture_sizes),
    }
    for option, is_refused in refused.items():
        if is_refused:
            value = getattr(config, option)
            raise ConfigError(
                f"{option} {value} needs a GPU, and the processors compute this model. Leave it out, or find out with"
                " device cuda why no GPU does.",
                option=option,
            )


def _native_or_torch(config: EngineConfig) -> Computer:
    try:
        if env.are_cpu_kernels_off():
            raise NativeUnavailableError(f"{env.CPU_KERNELS_VARIABLE} is off.")
        if config.block_size % 16:
            raise NativeUnavailableError(f"They need a block_size that is a multiple of 16, not {config.block_size}.")
        return Computer(_load_library())
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


def _load_library() -> Library:
    folder = env.cache_dir() / "native"
    try:
        return load_library(folder)
    except NativeUnavailableError as error:
        if not isinstance(error.__cause__, OSError) or os.access(folder, os.W_OK):
            raise
        raise NativeUnavailableError(f"{error} Set {env.CACHE_VARIABLE} to a folder that can be written.") from error


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
    report: Callable[[str, float], None] = lambda _stage, _fraction: None,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    profile_dir: str | None = None,
    with_gpu_memory: Callable[[GPUMemoryUse], ResolvedConfig] | None = None,
) -> LocalExecutor:
    """Load a model and make it ready to compute.

    Where torch computes on the CPU, this sets the number of its threads, which the whole process shares.

    Args:
        checkpoint: the model.
        config: its sizes.
        computer: what computes.
        quantization: of the weights, as `EngineConfig.quantization`.
        kv_offload_path: as `EngineConfig.kv_offload_path`.
        logprobs_mode: as `EngineConfig.logprobs_mode`.
        draft: the draft model.
        tokenizer: loads the model's tokenizer, or has it; called when bad words need it. None loads it anew.
        report: called with a stage of loading, and the share of it that is done.
        max_loras: slots for adapters.
        max_lora_rank: as `EngineConfig.max_lora_rank`.
        profile_dir: as `EngineConfig.profile_dir`.
        with_gpu_memory: where a device computes, the sizes once it is known what steps need; `config` is what they
            were before. None leaves the KV cache as `config` has it.

    Raises:
        CheckpointError: as `load_model` says.
        ConfigError: files cannot be written in `kv_offload_path`; or as `load_device_backends` says.
        EngineStartError: there is no memory for the weights or the KV cache.
    """
    try:
        if computer.device is not None:
            assert isinstance(checkpoint, Checkpoint)
            from trioengine.worker.device.loading import DeviceRequest, load_device_backends

            loaded = load_device_backends(
                checkpoint,
                draft,
                config,
                computer.device,
                DeviceRequest(quantization=quantization, max_loras=max_loras, max_lora_rank=max_lora_rank),
                with_memory=with_gpu_memory or (lambda _: config),
                report=report,
            )
            config, backend, draft_backend = loaded.config, loaded.backend, loaded.draft
        else:
            report_weights = partial(report, "loading the weights")
            backend = _load_backend(checkpoint, config, computer, quantization, report_weights, max_loras)
            draft_backend = None
            if draft is not None:
                draft_backend = _load_draft_backend(draft, backend, config, computer, quantization)
        draft_model = None
        if draft is not None and draft_backend is not None:
            draft_model = DraftModel(
                draft_backend,
                backend.kv_cache_groups,
                max_tokens=config.max_num_batched_tokens,
                max_model_len=draft.config.max_position_embeddings,
            )
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
        backend=computer.name if is_ours else "transformers",
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


def _load_draft_backend(
    checkpoint: Checkpoint,
    target: Backend,
    config: ResolvedConfig,
    computer: Computer,
    quantization: Quantization | None,
) -> Backend:
    return _load_backend(
        checkpoint,
        draft_config(config, target.kv_cache_groups, checkpoint.config),
        computer,
        # GGUF files have types of their own.
        quantization if checkpoint.location.kind is ModelKind.FOLDER else None,
    )


def _offload_store(backend: Backend, num_slots: int, folder: str | None) -> OffloadStore | None:
    if not num_slots:
        return None
    slot_bytes = [backend.kv_block(group, 0).nbytes for group in range(len(backend.kv_cache_groups))]
    if folder is None:
        return MemoryOffloadStore(num_slots, slot_bytes)
    return DiskOffloadStore(num_slots, slot_bytes, Path(folder).expanduser())
