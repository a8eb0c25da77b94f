# pyright: basic
"""Computes steps with torch, in float32."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from trioengine_kernels.native.sampler import SampledTokens, SamplingArrays
from trioengine_kernels.paged_attention import plan_attention

from trioengine.config.resolve import ResolvedConfig
from trioengine.models.loader import Checkpoint, ReportFraction
from trioengine.models.torch_ops import DecoderInput, TorchModel, TorchOps, load_torch_model
from trioengine.worker.backend import StepBatch
from trioengine.worker.kv_cache import allocate_kv_cache
from trioengine.worker.sampler import sample_rows


def load_torch_backend(
    checkpoint: Checkpoint, config: ResolvedConfig, report: ReportFraction | None = None
) -> "TorchBackend":
    """Read a model and make its cache. Sets the number of torch's threads, which the whole process shares.

    Raises:
        CheckpointError: as `load_model` says.
        MemoryError: weights or cache do not fit.
    """
    torch.set_num_threads(config.cpu_threads)
    model = load_torch_model(checkpoint, report)
    return TorchBackend(model, num_blocks=config.num_kv_blocks, block_size=config.block_size)


class TorchBackend:
    """A model of tensors and its KV cache."""

    def __init__(self, model: TorchModel, *, num_blocks: int, block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        self.vocab_size = model.config.vocab_size
        self._logits = torch.empty(0, self.vocab_size)
        self._kv_cache = allocate_kv_cache(model.config, num_blocks, block_size)

    @torch.inference_mode()
    def compute(self, batch: StepBatch) -> None:
        """As `Backend.compute`."""
        self._logits = self._model.decoder.forward(TorchOps(self._input(batch), self._kv_cache))

    def copy_logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """As `Backend.copy_logits`."""
        return self._logits[list(rows)].numpy()

    @torch.inference_mode()
    def sample(self, arrays: SamplingArrays) -> SampledTokens:
        """As `Backend.sample`."""
        return sample_rows(self._logits, arrays)

    def _input(self, batch: StepBatch) -> DecoderInput:
        return DecoderInput(
            token_ids=torch.from_numpy(batch.token_ids).long(),
            positions=torch.from_numpy(batch.positions).long(),
            slots=torch.from_numpy(batch.slots).long(),
            attention=plan_attention(
                torch.from_numpy(batch.block_table),
                torch.from_numpy(batch.query_start),
                torch.from_numpy(batch.seq_lens),
                block_size=self._block_size,
                window=self._model.config.sliding_window,
            ),
            logit_rows=torch.from_numpy(batch.logit_rows).long(),
        )
