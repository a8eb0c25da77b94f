# pyright: basic
"""Computes steps with the native CPU kernels: one call for all of a model, one for sampling."""

from collections.abc import Sequence

from trioengine_kernels.native.library import Library, ThreadPool
from trioengine_kernels.native.program import KVCache, StepArrays
from trioengine_kernels.native.sampler import NativeSampler, SampledStatus

from trioengine.config.engine import Quantization
from trioengine.config.resolve import ResolvedConfig
from trioengine.models.loader import Checkpoint, ReportFraction
from trioengine.models.native_ops import NativeModel, load_native_model, record
from trioengine.worker.backend import StepBatch
from trioengine.worker.native_sampling import sampling_arrays
from trioengine.worker.sequences import SequenceState


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
        max_sequences=config.max_num_seqs,
    )


class NativeBackend:
    """A model of tiles, its program and its KV cache.

    A step has at most `max_tokens` tokens, and wants the logits of at most `max_sequences`.
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
        max_sequences: int,
    ) -> None:
        config = model.config
        self.vocab_size = config.vocab_size
        self._pool = pool
        self._program = record(model, library, max_tokens=max_tokens, max_logit_rows=max_sequences)
        self._sampler = NativeSampler(library, pool)
        self._kv_cache = KVCache(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )

    def compute(self, batch: StepBatch, sampled: Sequence[SequenceState]) -> Sequence[int | None]:
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
        logits = self._program.run(step, self._kv_cache, self._pool)
        if not sampled:
            return []
        result = self._sampler.sample(logits, sampling_arrays(sampled))
        return [
            token_id if status == SampledStatus.SAMPLED else None
            for token_id, status in zip(result.token_ids.tolist(), result.status.tolist(), strict=True)
        ]
