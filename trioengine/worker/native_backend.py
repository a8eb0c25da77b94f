# pyright: basic
"""Computes steps with the native CPU kernels: one call for all of a model, one for sampling."""

import functools
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.library import Library, ThreadPool
from trioengine_kernels.native.program import KVCache, Program, StepArrays
from trioengine_kernels.native.sampler import NativeSampler, SampledTokens, SamplingArrays

from trioengine.config import env
from trioengine.config.engine import Quantization
from trioengine.config.resolve import ResolvedConfig
from trioengine.models.loader import Checkpoint, NewTensors, ReportFraction
from trioengine.models.lora import LoRA
from trioengine.models.native_ops import NativeLoRAs, NativeModel, load_native_model, record
from trioengine.worker.backend import StepBatch, kv_cache_groups
from trioengine.worker.model_memory import ModelMemory
from trioengine.worker.pooling import Labels, labels_of
from trioengine.worker.profile import Profile, TimedProfile


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

    def reload(tensors: NewTensors) -> NativeModel:
        return load_native_model(
            version.open().with_tensors(tensors),
            library,
            # One of its own: steps may be computed meanwhile.
            ThreadPool(library, config.cpu_threads),
            quantization,
            max_length=config.max_model_len,
            cache_folder=None if tensors else cache_folder,
        )

    return NativeBackend(
        load_native_model(checkpoint, library, pool, quantization, report, config.max_model_len, cache_folder),
        library,
        pool,
        reload=reload,
        num_blocks=config.num_kv_blocks,
        block_size=config.block_size,
        max_tokens=config.max_num_batched_tokens,
        max_logit_rows=config.max_num_logit_rows,
        max_loras=max_loras,
    )


@attrs.frozen(eq=False)
class _Recorded:
    """A program, and its model's slots for adapters."""

    program: Program
    slots: NativeLoRAs | None
    labels: Labels | None


class ProgramProfile:
    """Runs programs, and tells a profile how long each operation takes, once there is one."""

    def __init__(self) -> None:
        self.profile: TimedProfile | None = None

    def run(
        self, program: Program, step: StepArrays, caches: Sequence[KVCache], pool: ThreadPool
    ) -> NDArray[np.float32]:
        """As `Program.run`."""
        if self.profile is None:
            return program.run(step, caches, pool)
        times_ns = np.empty(len(program.op_names) + 1, np.int64)
        result = program.run(step, caches, pool, times_ns)
        times = times_ns.tolist()
        for name, start, end in zip(program.op_names, times, times[1:], strict=False):
            self.profile.add(name, start, end)
        return result


class NativeBackend(ModelMemory[NativeModel, _Recorded, KVCache]):
    """A model of tiles, its program and its KV cache.

    A step has at most `max_tokens` tokens, and wants at most `max_logit_rows` rows of logits.
    """

    def __init__(
        self,
        model: NativeModel,
        library: Library,
        pool: ThreadPool,
        *,
        reload: Callable[[NewTensors], NativeModel],
        num_blocks: Sequence[int],
        block_size: int,
        max_tokens: int,
        max_logit_rows: int,
        max_loras: int = 0,
    ) -> None:
        """`reload` is as `WeightsMemory` has it; `num_blocks` is for each of its KV groups; `max_loras` is the number
        of slots for adapters."""
        self.vocab_size = model.config.vocab_size
        self.block_size = block_size
        self.kv_cache_groups = kv_cache_groups(model.config, num_blocks)
        self._config = model.config
        self._library = library
        self._pool = pool
        self._record = functools.partial(record, library=library, max_tokens=max_tokens, max_logit_rows=max_logit_rows)
        self._max_loras = max_loras
        self._loras: dict[int, LoRA] = {}
        self._sampler = NativeSampler(library, pool)
        self._logits: NDArray[np.float32] = np.empty((0, self.vocab_size), np.float32)
        self._profiled = ProgramProfile()
        super().__init__(model, reload)

    def _make_ready(self, model: NativeModel) -> _Recorded:
        slots = NativeLoRAs(model, self._max_loras) if self._max_loras else None
        return _Recorded(self._record(model, loras=slots), slots, labels_of(model))

    def start_profile(self) -> Profile:
        """As `Profilable.start_profile`."""
        self._profiled.profile = TimedProfile()
        return self._profiled.profile

    def end_profile(self) -> None:
        """As `Profilable.end_profile`."""
        self._profiled.profile = None

    def _weights_changed(self) -> None:
        # It may be a view of the old program's memory.
        self._logits = np.empty((0, self.vocab_size), np.float32)
        if self._ready is None:
            self._library.drop_arena()
        elif self._ready.slots is not None:
            for slot, lora in self._loras.items():
                self._ready.slots.load(slot, lora)

    def _make_caches(self) -> Sequence[KVCache]:
        return [
            KVCache(
                num_blocks=blocks.num_blocks,
                block_size=self.block_size,
                num_layers=len(group.layers),
                num_kv_heads=self._config.num_kv_heads,
                head_dim=self._config.head_dim,
            )
            for blocks, group in zip(self.kv_cache_groups, self._config.kv_groups, strict=True)
        ]

    @property
    def labels(self) -> Labels | None:
        """As `Backend.labels`."""
        return None if self._ready is None else self._ready.labels

    def weight_arrays(self) -> Iterator[memoryview]:
        """As `ComputedModel.weight_arrays`."""
        return iter(()) if self._ready is None else self._ready.program.weight_arrays()

    def load_lora(self, slot: int, lora: LoRA) -> None:
        """As `Backend.load_lora`."""
        assert 1 <= slot <= self._max_loras
        self._loras[slot] = lora
        if self._ready is not None and self._ready.slots is not None:
            self._ready.slots.load(slot, lora)

    def compute(self, batch: StepBatch) -> None:
        """As `Backend.compute`."""
        assert self._ready is not None, "asleep"
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
        self._logits = self._profiled.run(self._ready.program, step, self._kv_caches, self._pool)

    def copy_logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """As `Backend.copy_logits`."""
        return self._logits[list(rows)]

    def hidden_states(self) -> NDArray[np.float32]:
        """As `Backend.hidden_states`."""
        assert self._ready is not None, "asleep"
        # The last norm has it in its weights.
        return self._ready.program.hidden_states() / np.float32(self._config.logit_multiplier)

    def sample(self, arrays: SamplingArrays) -> SampledTokens:
        """As `Backend.sample`."""
        return self._sampler.sample(self._logits, arrays)
