# pyright: basic
"""Computes steps with the native CPU kernels: one call for all of a model, one for sampling."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.library import Library, ThreadPool
from trioengine_kernels.native.program import KVCache, StepArrays
from trioengine_kernels.native.sampler import NativeSampler, SampledTokens, SamplingArrays

from trioengine.config.engine import Quantization
from trioengine.config.resolve import ResolvedConfig
from trioengine.models.loader import Checkpoint, ReportFraction
from trioengine.models.native_ops import NativeModel, load_native_model, record
from trioengine.worker.backend import StepBatch


def load_native_backend(
    checkpoint: Checkpoint,
    config: ResolvedConfig,
    library: Library,
    quantization: Quantization | None = None,
    report: ReportFraction | None = None,
) -> "NativeBackend":
    """Read a model, pack its weights, and make its cache and threads.

    Raises:
        CheckpointError: as `load_model` says.
        MemoryError: weights or cache do not fit.
    """
    pool = ThreadPool(library, config.cpu_threads)
    model = load_native_model(checkpoint, library, pool, quantization, report)
    return NativeBackend(
        model,
        library,
        pool,
        num_blocks=config.num_kv_blocks,
        block_size=config.block_size,
        max_tokens=config.max_num_batched_tokens,
        max_logit_rows=config.max_num_logit_rows,
    )


class NativeBackend:
    """A model of tiles, its program and its KV cache.

    A step has at most `max_tokens` tokens, and wants at most `max_logit_rows` rows of logits.
    """

    def __init__(
        self,
        model: NativeModel,
        library: Library,
        pool: ThreadPool,
        *,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_logit_rows: int,
    ) -> None:
        config = model.config
        self.vocab_size = config.vocab_size
        self._pool = pool
        self._program = record(model, library, max_tokens=max_tokens, max_logit_rows=max_logit_rows)
        self._sampler = NativeSampler(library, pool)
        self._logits: NDArray[np.float32] = np.empty((0, config.vocab_size), np.float32)
        self._kv_cache = KVCache(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )

    def compute(self, batch: StepBatch) -> None:
        """As `Backend.compute`."""
        step = StepArrays(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slots=batch.slots,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            logit_rows=batch.logit_rows,
        )
        self._logits = self._program.run(step, self._kv_cache, self._pool)

    def copy_logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """As `Backend.copy_logits`."""
        return self._logits[list(rows)]

    def sample(self, arrays: SamplingArrays) -> SampledTokens:
        """As `Backend.sample`."""
        return self._sampler.sample(self._logits, arrays)
