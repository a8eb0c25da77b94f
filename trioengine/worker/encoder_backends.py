# pyright: basic
"""Loads an encoder for the native CPU kernels, or for torch where those cannot be had."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.library import Library, ThreadPool
from trioengine_kernels.native.program import Program, StepArrays

from trioengine.config.engine import Quantization
from trioengine.config.resolve import ResolvedConfig
from trioengine.errors import EngineStartError
from trioengine.models.encoder_config import EncoderConfig
from trioengine.models.encoder_loader import ClassificationHead, EncoderCheckpoint, load_encoder
from trioengine.models.encoder_native import NativeEncoder, record_encoder
from trioengine.models.loader import ReportFraction
from trioengine.models.native_ops import NativeWeights
from trioengine.worker.encoder_executor import EncoderBackend, EncoderBatch, EncoderExecutor


def load_encoder_executor(
    checkpoint: EncoderCheckpoint,
    config: ResolvedConfig,
    library: Library | None,
    *,
    quantization: Quantization | None = None,
    report: ReportFraction | None = None,
) -> EncoderExecutor:
    """Load an encoder and make it ready to compute.

    Args:
        checkpoint: the model.
        config: all but what is about generation is used.
        library: the native kernels; None is torch, the number of whose threads this sets.
        quantization: of the weights, as `EngineConfig.quantization`.
        report: called with the share of the weights that is loaded.

    Raises:
        CheckpointError: as `load_encoder` says.
        EngineStartError: there is no memory for the weights.
    """
    try:
        if library is None:
            from trioengine.worker.torch_encoder_backend import load_torch_encoder_backend

            backend: EncoderBackend = load_torch_encoder_backend(checkpoint, config.cpu_threads, report)
        else:
            backend = _load_native(checkpoint, config, library, quantization, report)
    except MemoryError as error:
        raise EngineStartError(f"There is not enough memory for {checkpoint.location.path}.") from error
    (num_blocks,) = config.num_kv_blocks
    return EncoderExecutor(backend, num_blocks=num_blocks, max_length=config.max_model_len)


def _load_native(
    checkpoint: EncoderCheckpoint,
    config: ResolvedConfig,
    library: Library,
    quantization: Quantization | None,
    report: ReportFraction | None,
) -> "NativeEncoderBackend":
    pool = ThreadPool(library, config.cpu_threads)

    def load(opened: EncoderCheckpoint, report: ReportFraction | None = None) -> NativeEncoder:
        return load_encoder(opened, NativeWeights(library, pool, quantization), report)

    model = load(checkpoint, report)
    version = checkpoint.version
    return NativeEncoderBackend(
        model, library, pool, reload=lambda: load(version.open()), max_tokens=config.max_num_batched_tokens
    )


class NativeEncoderBackend:
    """An encoder of tiles and its program."""

    def __init__(
        self,
        model: NativeEncoder,
        library: Library,
        pool: ThreadPool,
        *,
        reload: Callable[[], NativeEncoder],
        max_tokens: int,
    ) -> None:
        """`reload` reads the same model again. A step has at most `max_tokens` tokens."""
        self.config: EncoderConfig = model.config
        self.head: ClassificationHead | None = model.head
        self._library = library
        self._pool = pool
        self._reload = reload
        self._max_tokens = max_tokens
        self._program: Program | None = record_encoder(model, library, max_tokens=max_tokens)

    def drop_weights(self) -> None:
        """As `EncoderBackend.drop_weights`."""
        self._program = None
        self._library.drop_arena()

    def load_weights(self) -> None:
        """As `EncoderBackend.load_weights`."""
        if self._program is None:
            self._program = record_encoder(self._reload(), self._library, max_tokens=self._max_tokens)

    def compute(self, batch: EncoderBatch) -> NDArray[np.float32]:
        """As `EncoderBackend.compute`."""
        assert self._program is not None, "asleep"
        num_tokens, num_seqs = len(batch.token_ids), len(batch.query_start) - 1
        step = StepArrays(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slots=np.empty((0, num_tokens), np.int32),
            query_start=batch.query_start,
            seq_lens=np.diff(batch.query_start),
            block_table=np.empty((0, num_seqs, 0), np.int32),
            logit_rows=batch.rows,
        )
        return self._program.run(step, (), self._pool)
