# pyright: basic
"""`LocalExecutor`: the `core.executor.Executor` that computes in this process, on the CPU."""

from collections import deque

import torch

from trioengine.checkpoint.locate import ModelLocation
from trioengine.config.resolve import ModelShape, ResolvedConfig
from trioengine.core.executor import StepPlan, StepResult
from trioengine.errors import EngineStartError
from trioengine.models.config import ModelConfig
from trioengine.models.loader import LoadedModel, ReportFraction, load_model
from trioengine.worker.kv_cache import kv_bytes_per_token
from trioengine.worker.model_runner import ModelRunner


def model_shape(config: ModelConfig) -> ModelShape:
    """The sizes that `config.resolve` wants to know of a model."""
    return ModelShape(
        num_parameters=config.num_parameters,
        max_position_embeddings=config.max_position_embeddings,
        kv_bytes_per_token=kv_bytes_per_token(config),
        vocab_size=config.vocab_size,
    )


def load_executor(
    location: ModelLocation, config: ResolvedConfig, report: ReportFraction | None = None
) -> "LocalExecutor":
    """Load a model and make it ready to compute. Sets the number of torch's threads, which the whole process shares.

    Args:
        location: where the model is.
        config: `num_kv_blocks`, `block_size` and `cpu_threads` are used.
        report: called with the share of the weights that is loaded.

    Raises:
        CheckpointError: as `load_model` says.
        EngineStartError: there is no memory for the weights or the KV cache.
    """
    torch.set_num_threads(config.cpu_threads)
    try:
        model = load_model(location, report)
        return LocalExecutor(model, num_blocks=config.num_kv_blocks, block_size=config.block_size)
    except MemoryError as error:
        raise EngineStartError(f"There is not enough memory for {location.path} and its KV cache.") from error


class LocalExecutor:
    """Computes each step when it is submitted, in the caller's thread."""

    def __init__(self, model: LoadedModel, *, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._runner: ModelRunner | None = ModelRunner(model, num_blocks=num_blocks, block_size=block_size)
        self._results: deque[StepResult] = deque()

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self._num_blocks

    def submit(self, plan: StepPlan) -> None:
        """Compute a step."""
        assert self._runner is not None, "closed"
        self._results.append(self._runner.run(plan))

    def result(self) -> StepResult:
        """What the oldest step not yet fetched sampled."""
        return self._results.popleft()

    def close(self) -> None:
        """Give weights and KV cache back. Idempotent."""
        self._runner = None
        self._results.clear()
