# pyright: basic
"""Loads models for a device: chooses number types and kernels, measures what steps need, and makes the KV cache of what
is left."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import attrs
import torch
from trioengine_kernels.kernel_set import KernelSet, triton_kernels
from trioengine_kernels.paged_attention.libraries import AttentionNeeds, AttentionUnavailableError, choose_attention

from trioengine.checkpoint.gguf import GGMLType
from trioengine.checkpoint.locate import ModelKind
from trioengine.config.engine import AttentionBackend, DType, EngineConfig, KVCacheDType, Quantization
from trioengine.config.resolve import GPUFacts, GPUMemoryUse, ResolvedConfig
from trioengine.errors import ConfigError, EngineStartError
from trioengine.models.config import ModelConfig
from trioengine.models.device_ops import DeviceModel, load_device_model
from trioengine.models.device_weights import DeviceWeightMaker
from trioengine.models.loader import Checkpoint, NewTensors, ReportFraction
from trioengine.worker.device.backend import DeviceBackend, DeviceOptions
from trioengine.worker.device.device import CudaDevice, Device
from trioengine.worker.device.memory_profile import MemoryProfile
from trioengine.worker.draft import draft_config

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = (2, 12, 40, 200)
"""Of steps that are computed before the first request: as different kernels as there are, so that most are compiled."""
FP8_CACHE_CAPABILITY = 89
"""Of GPUs that convert these numbers."""

_DTYPES: Mapping[DType, torch.dtype] = {
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT32: torch.float32,
}
_CACHE_DTYPES: Mapping[KVCacheDType, torch.dtype] = {
    KVCacheDType.FLOAT16: torch.float16,
    KVCacheDType.BFLOAT16: torch.bfloat16,
    KVCacheDType.FP8: torch.float8_e4m3fn,
    KVCacheDType.FP8_E4M3: torch.float8_e4m3fn,
}


@attrs.frozen(eq=False)
class DeviceKernels:
    """What computes on a device."""

    kernels: KernelSet
    can_be_recorded: bool = True
    """In graphs."""


@attrs.frozen(eq=False, kw_only=True)
class DeviceComputer:
    """A device, and how models are computed on it."""

    device: Device
    facts: GPUFacts
    dtype: torch.dtype
    """Of activations, and of weights that are not quantized."""
    cache_dtype: torch.dtype
    """The same, or float8_e4m3fn."""
    choose_kernels: Callable[[AttentionNeeds], DeviceKernels]
    """Raises: ConfigError."""
    is_deterministic: bool = False

    def kv_bytes(self, model: ModelConfig) -> int:
        """Of a token in one layer."""
        return 2 * model.num_kv_heads * model.head_dim * self.cache_dtype.itemsize

    def kernels_for(self, model: ModelConfig, block_size: int) -> DeviceKernels:
        """What computes a model.

        Raises:
            ConfigError: the attention that was asked for does not do what it needs.
        """
        return self.choose_kernels(
            AttentionNeeds(
                dtype=self.dtype,
                cache_dtype=self.cache_dtype,
                head_dim=model.head_dim,
                block_size=block_size,
                has_soft_cap=model.attention_soft_cap is not None,
                has_sinks=False,
                is_deterministic=self.is_deterministic,
                capability=divmod(self.facts.capability, 10),
            )
        )


def open_gpu(config: EngineConfig, checkpoint: Checkpoint, facts: GPUFacts, index: int) -> DeviceComputer:
    """A GPU, for the number types and kernels that were asked for.

    Args:
        config: what the user asked for.
        checkpoint: the model, whose type of numbers may count.
        facts: the GPU's.
        index: which it is of the machine's.

    Raises:
        ConfigError: an option cannot be kept.
    """
    dtype = _dtype(config, checkpoint)
    computer = DeviceComputer(
        device=CudaDevice(index),
        facts=facts,
        dtype=dtype,
        cache_dtype=_cache_dtype(config, dtype, facts),
        choose_kernels=partial(_triton_kernels, config.attention_backend),
        is_deterministic=config.deterministic,
    )
    computer.kernels_for(checkpoint.config, config.block_size)  # Before weights are read.
    logger.info("%s computes, in %s.", facts.name, _name(dtype))
    return computer


def _dtype(config: EngineConfig, checkpoint: Checkpoint) -> torch.dtype:
    if config.dtype is not DType.AUTO:
        return _DTYPES[config.dtype.plain]
    if checkpoint.location.kind is ModelKind.GGUF:
        return torch.bfloat16
    embedding = checkpoint.source.layouts().get(f"{checkpoint.source.names.embedding}.weight")
    # Whoever wants float32, which takes twice the memory and several times as long, says so.
    is_half = embedding is not None and embedding.kind is GGMLType.F16
    return torch.float16 if is_half else torch.bfloat16


def _cache_dtype(config: EngineConfig, dtype: torch.dtype, facts: GPUFacts) -> torch.dtype:
    option, wanted = "kv_cache_dtype", _CACHE_DTYPES.get(config.kv_cache_dtype, dtype)
    if config.kv_cache_dtype.is_fp8 and facts.capability < FP8_CACHE_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype} needs a GPU of compute capability 8.9 or newer; {facts.name} has"
            f" {facts.capability // 10}.{facts.capability % 10}.",
            option=option,
        )
    if not config.kv_cache_dtype.is_fp8 and wanted is not dtype:
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype}, but activations are {_name(dtype)} (dtype). The cache has"
            " their type, or fp8.",
            option=option,
        )
    return wanted


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _triton_kernels(attention: AttentionBackend | None, needs: AttentionNeeds) -> DeviceKernels:
    try:
        chosen = choose_attention(None if attention is None else attention.value, needs)
    except AttentionUnavailableError as error:
        raise ConfigError(f"attention_backend: {error}.", option="attention_backend") from error
    return DeviceKernels(triton_kernels(chosen.compute), chosen.can_be_recorded)


@attrs.frozen(eq=False)
class DeviceBackends:
    """A model that is ready to compute, and the model that drafts for it."""

    backend: DeviceBackend
    draft: DeviceBackend | None
    config: ResolvedConfig
    """With the size of the KV cache."""


@attrs.frozen(kw_only=True)
class DeviceRequest:
    """What is asked of `load_device_backends`, besides models and sizes."""

    quantization: Quantization | None = None
    """Of the weights, as `EngineConfig.quantization`."""
    max_loras: int = 0
    """Slots for adapters."""
    max_lora_rank: int = 0


def load_device_backends(
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    config: ResolvedConfig,
    computer: DeviceComputer,
    request: DeviceRequest,
    *,
    with_memory: Callable[[GPUMemoryUse], ResolvedConfig],
    report: Callable[[str, float], None] = lambda _stage, _fraction: None,
) -> DeviceBackends:
    """Load a model onto a device, measure what steps need, and make a KV cache of what is left.

    Args:
        checkpoint: the model.
        draft: the model that drafts for it.
        config: the sizes of steps; that of the KV cache does not count yet.
        computer: the device.
        request: what else is wanted.
        with_memory: the same sizes, and the KV cache's, from what was measured.
        report: called with a stage and a fraction.

    Raises:
        CheckpointError: as `loader.load_model` says.
        ConfigError: what is left is too little, as `config.resolve` says; or as `DeviceComputer.kernels_for`.
        EngineStartError: the device's memory is too small.
    """
    profile = MemoryProfile(computer.device)
    with _advice(computer, "its weights. Quantize them (quantization), or take a smaller model"):
        loaded = _Loaded.of(checkpoint, config, computer, request, partial(report, "loading the weights"))
        drafting = None
        if draft is not None:
            # GGUF files have types of their own, and adapters are the model's.
            quantization = request.quantization if draft.location.kind is ModelKind.FOLDER else None
            drafting = _Loaded.of(draft, config, computer, DeviceRequest(quantization=quantization), lambda _: None)
        profile.weights_are_there()
    report("compiling kernels and measuring memory", 0.0)
    with _advice(computer, "the largest step. Lower max_num_batched_tokens or max_num_seqs"):
        use = _measure(profile, loaded, config)
    config = with_memory(use)
    report("recording graphs" if loaded.graph_sizes(config) else "making the KV cache", 0.0)
    with _advice(computer, "its KV cache and graphs. Lower gpu_memory_utilization, or record fewer graphs"):
        backend = loaded.backend(config)
        draft_backend = None
        if drafting is not None:
            draft_backend = drafting.backend(draft_config(config, backend.kv_cache_groups, drafting.model.config))
    return DeviceBackends(backend, draft_backend, config)


@attrs.frozen(eq=False)
class _Loaded:
    """A model on a device, with which backends can be made."""

    model: DeviceModel
    computer: DeviceComputer
    kernels: DeviceKernels
    request: DeviceRequest
    reload: Callable[[NewTensors], DeviceModel]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        config: ResolvedConfig,
        computer: DeviceComputer,
        request: DeviceRequest,
        report: ReportFraction,
    ) -> "_Loaded":
        """Load a model."""
        kernels = computer.kernels_for(checkpoint.config, config.block_size)
        if config.cudagraph_capture_sizes and not kernels.can_be_recorded:
            logger.warning("No graphs are recorded: the attention that was asked for cannot be part of one.")
        maker = DeviceWeightMaker(computer.device.torch_device, computer.dtype, request.quantization)
        version, max_length = checkpoint.version, config.max_model_len

        def reload(tensors: NewTensors) -> DeviceModel:
            return load_device_model(version.open().with_tensors(tensors), maker, max_length=max_length)

        return cls(load_device_model(checkpoint, maker, report, max_length), computer, kernels, request, reload)

    def graph_sizes(self, config: ResolvedConfig) -> Sequence[int]:
        """Of the graphs that are recorded."""
        return config.cudagraph_capture_sizes if self.kernels.can_be_recorded else ()

    def backend(self, config: ResolvedConfig) -> DeviceBackend:
        """A backend of these sizes."""
        return DeviceBackend(
            self.model,
            self.computer.device,
            self.kernels.kernels,
            DeviceOptions(
                block_size=config.block_size,
                num_blocks=config.num_kv_blocks,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                dtype=self.computer.dtype,
                kv_dtype=self.computer.cache_dtype,
                max_loras=self.request.max_loras,
                max_lora_rank=self.request.max_lora_rank,
                is_deterministic=self.computer.is_deterministic,
                graph_sizes=self.graph_sizes(config),
            ),
            reload=self.reload,
        )


def _measure(profile: MemoryProfile, loaded: _Loaded, config: ResolvedConfig) -> GPUMemoryUse:
    """By a backend with hardly any cache, and with the largest graph, whose memory the others share. Kernels are
    compiled first, which takes longer than all else."""
    model = loaded.model.config
    num_blocks = (1,) * len(model.kv_groups)
    graph_sizes = config.cudagraph_capture_sizes[-1:]
    backend = loaded.backend(attrs.evolve(config, num_kv_blocks=num_blocks, cudagraph_capture_sizes=graph_sizes))
    max_tokens, max_rows = config.max_num_batched_tokens, config.max_num_logit_rows
    for num_tokens in WARM_UP_TOKENS:
        if num_tokens < max_tokens:
            backend.compute_largest_step(num_tokens, max_rows)
    use = profile.measure(partial(backend.compute_largest_step, max_tokens, max_rows))
    backend.drop_kv_cache()
    # What penalties remember, once there are some: a number and a bit for each token of the vocabulary.
    later_bytes = (config.max_num_seqs + 1) * model.vocab_size * 33 // 8
    return attrs.evolve(use, step_bytes=use.step_bytes + later_bytes)


@contextlib.contextmanager
def _advice(computer: DeviceComputer, what: str) -> Iterator[None]:
    """Memory that is missing becomes an error that says for what, and what helps."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EngineStartError(f"The memory of {computer.facts.name} is too small for {what}.") from error
