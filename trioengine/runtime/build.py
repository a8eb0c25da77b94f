"""Builds the real engine core: the model's facts, the resolved numbers, the executor, the core.

The one module outside `worker` that imports it, and with it what computes: only core processes come here, and who asks
whether a model runs.
"""

import functools
import logging
from typing import TYPE_CHECKING

from trioengine.checkpoint.locate import ModelLocation
from trioengine.config import env
from trioengine.config.engine import EngineConfig
from trioengine.config.resolve import GPUMemoryUse, ModelShape, ResolvedConfig, resolve, resolve_encoder
from trioengine.core.background import Background
from trioengine.core.config import CoreConfig
from trioengine.core.engine_core import EngineCore
from trioengine.core.structured_output import StructuredOutputs
from trioengine.models.encoder_loader import EncoderCheckpoint, open_encoder
from trioengine.runtime.core_process import BuiltCore, ReportProgress
from trioengine.runtime.launch import CoreLaunch
from trioengine.tokenizer.tokenizer import load_tokenizer
from trioengine.transport.zmq_blocking import Waker
from trioengine.types.messages import ModelFacts, Ready

if TYPE_CHECKING:
    from trioengine.worker.loading import Computer

logger = logging.getLogger(__name__)


def check_model(location: ModelLocation) -> None:
    """Return when this is a model that can be run. Its weights are not read.

    Raises:
        CheckpointError: as `build_engine_core` would.
    """
    if open_encoder(location) is None:
        from trioengine.worker.loading import open_model

        open_model(location)


def build_launched_core(launch: CoreLaunch, progress: ReportProgress) -> BuiltCore:
    """The core that a core process runs."""
    # A core that is alone on its machine, or is started by itself, has the first GPU that it sees.
    gpu_index = launch.rank if launch.config.data_parallel_rank is None else 0
    return build_engine_core(
        launch.config, launch.model, progress, draft_location=launch.draft_model, gpu_index=gpu_index
    )


def build_engine_core(
    config: EngineConfig,
    location: ModelLocation,
    progress: ReportProgress = lambda _stage, _fraction: None,
    *,
    draft_location: ModelLocation | None = None,
    gpu_index: int = 0,
    computer: "Computer | None" = None,
) -> BuiltCore:
    """Load a model, and a core around it.

    Args:
        config: how to run it.
        location: of the model.
        progress: called with a stage and a fraction.
        draft_location: of `config.draft_model`.
        gpu_index: which of this machine's GPUs is the core's, where one computes.
        computer: what computes a model that generates text; None chooses.

    Raises:
        CheckpointError, ConfigError: the model or an option cannot work.
        EngineStartError: there is not enough memory.
    """
    encoder = open_encoder(location)
    if encoder is not None:
        return _build_encoder_core(config, encoder, progress)
    env.let_compute_threads_sleep()
    progress("preparing the kernels", 0.0)
    from trioengine.worker.loading import (
        choose_computer,
        load_executor,
        open_draft_checkpoint,
        open_model,
    )

    checkpoint = open_model(location)
    model = checkpoint.config
    computer = computer or choose_computer(config, checkpoint, gpu_index)
    draft = None if draft_location is None else open_draft_checkpoint(config, draft_location, model)
    shape = computer.shape(model, None if draft is None else draft.config)
    hardware = computer.hardware_facts()
    resolved = resolve(config, shape, hardware)

    def with_gpu_memory(use: GPUMemoryUse) -> ResolvedConfig:
        nonlocal resolved
        resolved = resolve(config, shape, hardware, use)
        return resolved

    # When something needs it first. At worst two threads load it at once, and one of the two is kept.
    tokenizer = functools.cache(lambda: load_tokenizer(location))
    executor = load_executor(
        checkpoint,
        resolved,
        computer,
        quantization=config.quantization,
        kv_offload_path=config.kv_offload_path,
        logprobs_mode=config.logprobs_mode,
        draft=draft,
        tokenizer=tokenizer,
        report=progress,
        max_loras=config.max_loras if config.enable_lora else 0,
        max_lora_rank=config.max_lora_rank,
        profile_dir=config.profile_dir,
        with_gpu_memory=with_gpu_memory,
    )
    for reason in resolved.reasons.items():
        logger.debug("%s = %s", *reason)
    waker = Waker()
    structured_outputs = StructuredOutputs(
        tokenizer,
        vocab_size=model.vocab_size,
        reasoning_parser=config.reasoning_parser,
        wake=waker.wake,
    )
    background = Background(waker.wake)
    core = EngineCore(
        _core_config(config, resolved, model.vocab_size), executor, structured_outputs, background=background
    )
    facts = ModelFacts(
        resolved.max_model_len,
        model.vocab_size,
        model.eos_token_ids,
        config.max_logprobs,
        can_generate=executor.pooling is None or not executor.pooling.labels,
        pooling=executor.pooling,
    )
    ready = Ready(
        facts,
        max(resolved.num_kv_blocks),
        resolved.block_size,
        dict(resolved.reasons),
        needs_lockstep=core.needs_lockstep,
    )

    def close() -> None:
        structured_outputs.close()
        background.close()
        executor.close()
        waker.close()

    return BuiltCore(core, ready, close, waker)


def _build_encoder_core(config: EngineConfig, checkpoint: EncoderCheckpoint, progress: ReportProgress) -> BuiltCore:
    """As `build_engine_core`, for a model that gives vectors only."""
    env.let_compute_threads_sleep()
    progress("preparing the kernels", 0.0)
    from trioengine.worker.encoder_backends import load_encoder_executor
    from trioengine.worker.loading import choose_computer

    model = checkpoint.config
    computer = choose_computer(config, checkpoint)
    shape = ModelShape(model.num_parameters, model.max_length, (), model.vocab_size)
    resolved = resolve_encoder(config, shape, computer.hardware_facts())
    for reason in resolved.reasons.items():
        logger.debug("%s = %s", *reason)
    executor = load_encoder_executor(
        checkpoint,
        resolved,
        computer.library,
        quantization=config.quantization,
        report=lambda fraction: progress("loading the weights", fraction),
        profile_dir=config.profile_dir,
    )
    core_config = CoreConfig(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_num_logit_rows=resolved.max_num_logit_rows,
        max_model_len=resolved.max_model_len,
        block_size=resolved.block_size,
        vocab_size=model.vocab_size,
        scheduling_policy=config.scheduling_policy,
        splits_prompts=False,
        async_scheduling=resolved.async_scheduling,
    )
    waker = Waker()
    background = Background(waker.wake)
    facts = ModelFacts(
        resolved.max_model_len, model.vocab_size, (), config.max_logprobs, can_generate=False, pooling=model.pooling
    )
    ready = Ready(facts, max(resolved.num_kv_blocks), resolved.block_size, dict(resolved.reasons))

    def close() -> None:
        background.close()
        executor.close()
        waker.close()

    return BuiltCore(EngineCore(core_config, executor, background=background), ready, close, waker)


def _core_config(config: EngineConfig, resolved: ResolvedConfig, vocab_size: int) -> CoreConfig:
    return CoreConfig(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_num_logit_rows=resolved.max_num_logit_rows,
        max_model_len=resolved.max_model_len,
        block_size=resolved.block_size,
        vocab_size=vocab_size,
        scheduling_policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        async_scheduling=resolved.async_scheduling,
        speculation=config.speculative_config,
        enable_kv_cache_events=config.enable_kv_cache_events,
        max_loras=config.max_loras if config.enable_lora else 0,
        max_cpu_loras=config.max_cpu_loras or config.max_loras,
    )
