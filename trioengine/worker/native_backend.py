# pyright: basic
"""Computes steps with the native CPU kernels: one call for all of a model, one for sampling."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.library import Library, ThreadPool
from trioengine_kernels.native.program import KVCache, Program, StepArrays
from trioengine_kernels.native.sampler import NativeSampler, SampledTokens, SamplingArrays

from trioengine.config import env
from trioengine.config.engine import Quantization
from trioengine.config.resolve import ResolvedConfig
from trioengine.models.loader import Checkpoint, ReportFraction
from trioengine.models.lora import LoRA
from trioengine.models.native_ops import NativeLoRAs, NativeModel, load_native_model, record
from trioengine.worker.backend import StepBatch, kv_cache_groups


def load_native_backend(
    checkpoint: Checkpoint,
    config: ResolvedConfig,
    library: Library,
    quantization: Quantization | None = None,
    report: ReportFraction | None = None,
    max_loras: int = 0,
) -> "NativeBackend":
    """Read a model, pack its weights, and make its cache and threads.

    Raises:
        CheckpointError: as `load_model` says.
        MemoryError: weights or cache do not fit.
    """
    pool, version = ThreadPool(library, config.cpu_threads), checkpoint.version
    cache_folder = env.cache_dir() / "packed"
    return NativeBackend(
        load_native_model(checkpoint, library, pool, quantization, report, config.max_model_len, cache_folder),
        library,
        pool,
        reload=lambda: load_native_model(
            version.open(), library, pool, quantization, max_length=config.max_model_len, cache_folder=cache_folder
        ),
        num_blocks=config.num_kv_blocks,
        block_size=config.block_size,
        max_tokens=config.max_num_batched_tokens,
        max_logit_rows=config.max_num_logit_rows,
        max_loras=max_loras,
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
        reload: Callable[[], NativeModel],
        num_blocks: Sequence[int],
        block_size: int,
        max_tokens: int,
        max_logit_rows: int,
        max_loras: int = 0,
    ) -> None:
        """`reload` reads the same model again; `num_blocks` is for each of its KV groups; `max_loras` is the number of
        slots for adapters."""
        self.vocab_size = model.config.vocab_size
        self.block_size = block_size
        self.kv_cache_groups = kv_cache_groups(model.config, num_blocks)
        self._config = model.config
        self._library = library
        self._pool = pool
        self._reload = reload
        self._record = functools.partial(record, library=library, max_tokens=max_tokens, max_logit_rows=max_logit_rows)
        self._max_loras = max_loras
        self._loras: dict[int, LoRA] = {}
        self._slots: NativeLoRAs | None = None
        self._program: Program | None = None
        self._make_program(model)
        self._sampler = NativeSampler(library, pool)
        self._logits: NDArray[np.float32] = np.empty((0, self.vocab_size), np.float32)
        self._kv_caches: Sequence[KVCache] = ()
        self.make_kv_cache()

    def drop_weights(self) -> None:
        """As `Memory.drop_weights`."""
        self._program = self._slots = None
        # It may be a view of the program's memory.
        self._logits = np.empty((0, self.vocab_size), np.float32)
        self._library.drop_arena()

    def load_weights(self) -> None:
        """As `Memory.load_weights`."""
        if self._program is None:
            self._make_program(self._reload())

    def drop_kv_cache(self) -> None:
        """As `Memory.drop_kv_cache`."""
        self._kv_caches = ()

    def make_kv_cache(self) -> None:
        """As `Memory.make_kv_cache`."""
        self._kv_caches = self._kv_caches or [
            KVCache(
                num_blocks=blocks.num_blocks,
                block_size=self.block_size,
                num_layers=len(group.layers),
                num_kv_heads=self._config.num_kv_heads,
                head_dim=self._config.head_dim,
            )
            for blocks, group in zip(self.kv_cache_groups, self._config.kv_groups, strict=True)
        ]

    def kv_block(self, group: int, block_id: int) -> NDArray[np.generic]:
        """As `Backend.kv_block`."""
        return self._kv_caches[group].block(block_id)

    def load_lora(self, slot: int, lora: LoRA) -> None:
        """As `Backend.load_lora`."""
        assert 1 <= slot <= self._max_loras
        self._loras[slot] = lora
        if self._slots is not None:
            self._slots.load(slot, lora)

    def compute(self, batch: StepBatch) -> None:
        """As `Backend.compute`."""
        assert self._program is not None, "asleep"
        step = StepArrays(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slots=batch.slots,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            logit_rows=batch.logit_rows,
            lora_slots=batch.lora_slots,
            hidden_rows=batch.hidden_rows,
        )
        self._logits = self._program.run(step, self._kv_caches, self._pool)

    def copy_logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """As `Backend.copy_logits`."""
        return self._logits[list(rows)]

    def hidden_states(self) -> NDArray[np.float32]:
        """As `Backend.hidden_states`."""
        assert self._program is not None, "asleep"
        # The last norm has it in its weights.
        return self._program.hidden_states() / np.float32(self._config.logit_multiplier)

    def sample(self, arrays: SamplingArrays) -> SampledTokens:
        """As `Backend.sample`."""
        return self._sampler.sample(self._logits, arrays)

    def _make_program(self, model: NativeModel) -> None:
        slots = NativeLoRAs(model, self._max_loras) if self._max_loras else None
        program = self._record(model, loras=slots)
        if slots is not None:
            for slot, lora in self._loras.items():
                slots.load(slot, lora)
        self._program, self._slots = program, slots
