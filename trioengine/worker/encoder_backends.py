# pyright: basic
"""Loads an encoder for the native CPU kernels, or for torch where those cannot be had."""

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.library import Library, ThreadPool
from trioengine_kernels.native.program import Program, StepArrays

from trioengine.config.engine import Quantization
from trioengine.config.resolve import ResolvedConfig
from trioengine.errors import EngineStartError
from trioengine.models.encoder_config import EncoderConfig
from trioengine.models.encoder_loader import EncoderCheckpoint, load_encoder
from trioengine.models.encoder_native import NativeEncoder, record_encoder
from trioengine.models.head import ClassificationHead
from trioengine.models.loader import NewTensors, ReportFraction
from trioengine.models.native_ops import NativeWeights
from trioengine.worker.encoder_executor import EncoderBackend, EncoderBatch, EncoderExecutor
from trioengine.worker.model_memory import WeightsMemory
from trioengine.worker.native_backend import ProgramProfile
from trioengine.worker.profile import Profile, TimedProfile
from trioengine.worker.shared_operations import ModelInfo
from trioengine.worker.weight_transfer import WeightTransfer

CACHED_TOKENS = 256
"""For each thread: what lies between the operations of so many stays in a processor's own cache (measured: a tenth
faster than 1024)."""


def load_encoder_executor(
    checkpoint: EncoderCheckpoint,
    config: ResolvedConfig,
    library: Library | None,
    *,
    quantization: Quantization | None = None,
    report: ReportFraction | None = None,
    profile_dir: str | None = None,
) -> EncoderExecutor:
    """Load an encoder and make it ready to compute.

    Args:
        checkpoint: the model.
        config: all but what is about generation is used.
        library: the native kernels; None is torch, the number of whose threads this sets.
        quantization: of the weights, as `EngineConfig.quantization`.
        report: called with the share of the weights that is loaded.
        profile_dir: as `EngineConfig.profile_dir`.

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
    model = checkpoint.config
    return EncoderExecutor(
        backend,
        num_blocks=num_blocks,
        max_length=config.max_model_len,
        weights=WeightTransfer(checkpoint.layouts(), backend),
        profile_dir=profile_dir,
        model_info=ModelInfo(
            architecture=str(model.family),
            num_parameters=model.num_parameters,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            backend="torch" if library is None else "native",
        ),
    )


def _load_native(
    checkpoint: EncoderCheckpoint,
    config: ResolvedConfig,
    library: Library,
    quantization: Quantization | None,
    report: ReportFraction | None,
) -> "NativeEncoderBackend":
    pool = ThreadPool(library, config.cpu_threads)

    version = checkpoint.version

    def reload(tensors: NewTensors) -> NativeEncoder:
        # One of its own: steps may be computed meanwhile.
        weights = NativeWeights(library, ThreadPool(library, config.cpu_threads), quantization)
        return load_encoder(version.open().with_tensors(tensors), weights)

    model = load_encoder(checkpoint, NativeWeights(library, pool, quantization), report)
    max_tokens = min(config.max_num_batched_tokens, CACHED_TOKENS * config.cpu_threads + config.max_model_len)
    return NativeEncoderBackend(model, library, pool, reload=reload, max_tokens=max_tokens)


@attrs.frozen(eq=False)
class _Recorded:
    program: Program
    head: ClassificationHead | None


class NativeEncoderBackend(WeightsMemory[NativeEncoder, _Recorded]):
    """An encoder of tiles and its program."""

    def __init__(
        self,
        model: NativeEncoder,
        library: Library,
        pool: ThreadPool,
        *,
        reload: Callable[[NewTensors], NativeEncoder],
        max_tokens: int,
    ) -> None:
        """`reload` is as `WeightsMemory` has it. `max_tokens` are computed at once: those of any text, or
        `CACHED_TOKENS` for each thread and any text, which are enough for steps of any size."""
        self.config: EncoderConfig = model.config
        self.head: ClassificationHead | None = None
        self._library = library
        self._pool = pool
        self._max_tokens = max_tokens
        self._profiled = ProgramProfile()
        super().__init__(model, reload)

    def _make_ready(self, model: NativeEncoder) -> _Recorded:
        return _Recorded(record_encoder(model, self._library, max_tokens=self._max_tokens), model.head)

    def start_profile(self) -> Profile:
        """As `Profilable.start_profile`."""
        self._profiled.profile = TimedProfile()
        return self._profiled.profile

    def end_profile(self) -> None:
        """As `Profilable.end_profile`."""
        self._profiled.profile = None

    def _weights_changed(self) -> None:
        if self._ready is None:
            self._library.drop_arena()
        else:
            self.head = self._ready.head

    def weight_arrays(self) -> Iterator[memoryview]:
        """As `ComputedModel.weight_arrays`."""
        return iter(()) if self._ready is None else self._ready.program.weight_arrays()

    def compute(self, batch: EncoderBatch) -> NDArray[np.float32]:
        """As `EncoderBackend.compute`."""
        parts = cut_batch(batch, CACHED_TOKENS * self._pool.num_threads)
        if len(parts) == 1:
            return self._compute_part(batch)
        hidden = np.empty((len(batch.rows), self.config.hidden_size), np.float32)
        first = 0
        for part in parts:
            hidden[first : first + len(part.rows)] = self._compute_part(part)
            first += len(part.rows)
        return hidden

    def _compute_part(self, batch: EncoderBatch) -> NDArray[np.float32]:
        assert self._ready is not None, "asleep"
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
        return self._profiled.run(self._ready.program, step, (), self._pool)


def cut_batch(batch: EncoderBatch, num_tokens: int) -> Sequence[EncoderBatch]:
    """Parts of whole sequences and about equal sizes, in their order, each below `num_tokens` plus its last sequence.

    Rows must be in the order of their tokens.
    """
    starts, total = batch.query_start, len(batch.token_ids)
    num_parts = -(-total // num_tokens)
    ends = np.searchsorted(starts, total * np.arange(1, num_parts + 1) / num_parts)
    parts: list[EncoderBatch] = []
    first = 0
    for end in np.unique(ends).tolist():
        start, stop = starts[first], starts[end]
        rows = slice(*np.searchsorted(batch.rows, (start, stop)))
        parts.append(
            EncoderBatch(
                token_ids=batch.token_ids[start:stop],
                positions=batch.positions[start:stop],
                query_start=starts[first : end + 1] - start,
                rows=batch.rows[rows] - start,
            )
        )
        first = end
    return parts
