# pyright: basic
"""Computes steps of models that only transformers can build, with torch, in float32."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from trioengine_kernels.native.sampler import SampledTokens, SamplingArrays
from trioengine_kernels.paged_attention import plan_attention

from trioengine.config.resolve import ResolvedConfig
from trioengine.core.executor import KVCacheGroup
from trioengine.models.loader import NewTensors, ReportFraction
from trioengine.models.torch_ops import DecoderInput
from trioengine.worker.backend import StepBatch
from trioengine.worker.kv_cache import TorchKVCache
from trioengine.worker.model_memory import ModelMemory
from trioengine.worker.profile import Profile
from trioengine.worker.sampler import sample_rows
from trioengine.worker.torch_profile import TorchProfile
from trioengine.worker.transformers_checkpoint import TransformersCheckpoint
from trioengine.worker.transformers_model import TransformersModel, load_transformers_model


def load_transformers_backend(
    checkpoint: TransformersCheckpoint, config: ResolvedConfig, report: ReportFraction | None = None
) -> "TransformersBackend":
    """Read a model and make its cache. Sets the number of torch's threads, which the whole process shares.

    `report` is called once: transformers does not say how far it is.

    Raises:
        CheckpointError: as `load_transformers_model` says.
        MemoryError: weights or cache do not fit.
    """
    torch.set_num_threads(config.cpu_threads)

    def reload(tensors: NewTensors) -> TransformersModel:
        checkpoint.version.check()
        return load_transformers_model(checkpoint, tensors)

    backend = TransformersBackend(
        load_transformers_model(checkpoint),
        reload=reload,
        num_blocks=config.num_kv_blocks,
        block_size=config.block_size,
    )
    if report is not None:
        report(1.0)
    return backend


class TransformersBackend(ModelMemory[TransformersModel, TransformersModel, TorchKVCache]):
    """A model of transformers and its KV cache."""

    def __init__(
        self,
        model: TransformersModel,
        *,
        reload: Callable[[NewTensors], TransformersModel],
        num_blocks: Sequence[int],
        block_size: int,
    ) -> None:
        """`reload` is as `WeightsMemory` has it; `num_blocks` is for each of its KV groups."""
        self.vocab_size = model.config.vocab_size
        self.block_size = block_size
        self.kv_cache_groups = [
            KVCacheGroup(number, group.window) for number, group in zip(num_blocks, model.config.kv_groups, strict=True)
        ]
        self._config = model.config
        self._logits = torch.empty(0, self.vocab_size)
        super().__init__(model, reload)

    def _make_ready(self, model: TransformersModel) -> TransformersModel:
        return model

    def start_profile(self) -> Profile:
        """As `Profilable.start_profile`."""
        return TorchProfile()

    def _weights_changed(self) -> None:
        self._logits = torch.empty(0, self.vocab_size)

    def _make_caches(self) -> Sequence[TorchKVCache]:
        return [
            TorchKVCache(
                num_blocks=blocks.num_blocks,
                block_size=self.block_size,
                num_layers=len(group.layers),
                num_kv_heads=group.num_kv_heads,
                head_dim=group.head_dim,
            )
            for blocks, group in zip(self.kv_cache_groups, self._config.kv_groups, strict=True)
        ]

    @property
    def labels(self) -> None:
        """As `Backend.labels`."""
        return None

    def weight_arrays(self) -> Iterator[memoryview]:
        """As `ComputedModel.weight_arrays`."""
        tensors = iter(()) if self._ready is None else self._ready.tensors()
        return (tensor.detach().reshape(-1).numpy().data for tensor in tensors)

    def load_lora(self, slot: int, lora: object) -> None:
        """There are no adapters."""
        raise AssertionError("without adapters")

    @torch.inference_mode()
    def compute(self, batch: StepBatch) -> None:
        """As `Backend.compute`."""
        assert self._ready is not None, "asleep"
        step = DecoderInput(
            token_ids=torch.from_numpy(batch.token_ids).long(),
            positions=torch.from_numpy(batch.positions).long(),
            slots=list(torch.from_numpy(batch.slots).long()),
            attention=[
                plan_attention(
                    torch.from_numpy(block_table),
                    torch.from_numpy(batch.query_start),
                    torch.from_numpy(batch.seq_lens),
                    block_size=self.block_size,
                    window=group.window,
                )
                for block_table, group in zip(batch.block_table, self.kv_cache_groups, strict=True)
            ],
            logit_rows=torch.from_numpy(batch.logit_rows).long(),
        )
        self._logits = self._ready.forward(step, [cache.layers for cache in self._kv_caches])

    def copy_logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """As `Backend.copy_logits`."""
        return self._logits[list(rows)].numpy()

    def hidden_states(self) -> NDArray[np.float32]:
        """No vectors are made of these models."""
        raise AssertionError("without vectors")

    @torch.inference_mode()
    def sample(self, arrays: SamplingArrays) -> SampledTokens:
        """As `Backend.sample`."""
        return sample_rows(self._logits, arrays)
