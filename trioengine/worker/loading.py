"""Loads a model for the backend that computes it."""

from trioengine.checkpoint.locate import ModelLocation
from trioengine.config.resolve import ModelShape, ResolvedConfig
from trioengine.errors import EngineStartError
from trioengine.models.config import ModelConfig
from trioengine.models.loader import ReportFraction
from trioengine.worker.executor import LocalExecutor

TORCH_KV_VALUE_BYTES = 4
"""float32."""


def model_shape(config: ModelConfig) -> ModelShape:
    """The sizes that `config.resolve` wants to know of a model."""
    return ModelShape(
        num_parameters=config.num_parameters,
        max_position_embeddings=config.max_position_embeddings,
        kv_bytes_per_token=config.num_kv_values_per_token * TORCH_KV_VALUE_BYTES,
        vocab_size=config.vocab_size,
    )


def load_executor(
    location: ModelLocation, config: ResolvedConfig, report: ReportFraction | None = None
) -> LocalExecutor:
    """Load a model and make it ready to compute. Sets the number of torch's threads, which the whole process shares.

    Args:
        location: where the model is.
        config: `num_kv_blocks`, `block_size` and `cpu_threads` are used.
        report: called with the share of the weights that is loaded.

    Raises:
        CheckpointError: as `load_model` says.
        EngineStartError: there is no memory for the weights or the KV cache.
    """
    from trioengine.worker.torch_backend import load_torch_backend

    try:
        backend = load_torch_backend(location, config, report)
    except MemoryError as error:
        raise EngineStartError(f"There is not enough memory for {location.path} and its KV cache.") from error
    return LocalExecutor(backend, num_blocks=config.num_kv_blocks, block_size=config.block_size)
