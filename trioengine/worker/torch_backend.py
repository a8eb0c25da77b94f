# pyright: basic
"""Computes steps with torch, in float32."""

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from trioengine_kernels.native.sampler import SampledTokens, SamplingArrays
from trioengine_kernels.paged_attention import plan_attention

from trioengine.config.resolve import ResolvedConfig
from trioengine.models.loader import Checkpoint, NewTensors, ReportFraction
from trioengine.models.lora import LoRA
from trioengine.models.torch_ops import DecoderInput, TorchLoRAs, TorchModel, TorchOps, load_torch_model, tensors_in
from trioengine.worker.backend import StepBatch, kv_cache_groups
from trioengine.worker.kv_cache import TorchKVCache
from trioengine.worker.model_memory import ModelMemory
from trioengine.worker.pooling import Labels, labels_of
from trioengine.worker.profile import Profile
from trioengine.worker.sampler import sample_rows
from trioengine.worker.torch_profile import TorchProfile


def load_torch_backend(
    checkpoint: Checkpoint, config: ResolvedConfig, report: ReportFraction | None = None
) -> "TorchBackend":
    """Read a model and make its cache. Sets the number of torch's threads, which the whole process shares.

    Raises:
        CheckpointError: as `load_model` says.
        MemoryError: weights or cache do not fit.
    """
    torch.set_num_threads(config.cpu_threads)
    version = checkpoint.version
    return TorchBackend(
        load_torch_model(checkpoint, report, config.max_model_len),
        reload=lambda tensors: load_torch_model(version.open().with_tensors(tensors), max_length=config.max_model_len),
        num_blocks=config.num_kv_blocks,
        block_size=config.block_size,
    )


@attrs.define(eq=False)
class _Ready:
    """A model, and its slots for adapters, once there are any."""

    model: TorchModel
    slots: TorchLoRAs | None = None


class TorchBackend(ModelMemory[TorchModel, _Ready, TorchKVCache]):
    """A model of tensors and its KV cache."""

    def __init__(
        self,
        model: TorchModel,
        *,
        reload: Callable[[NewTensors], TorchModel],
        num_blocks: Sequence[int],
        block_size: int,
    ) -> None:
        """`reload` is as `WeightsMemory` has it; `num_blocks` is for each of its KV groups."""
        self.vocab_size = model.config.vocab_size
        self.block_size = block_size
        self.kv_cache_groups = kv_cache_groups(model.config, num_blocks)
        self._config = model.config
        self._loras: dict[int, LoRA] = {}
        self._logits = torch.empty(0, self.vocab_size)
        self._hidden: torch.Tensor | None = None
        super().__init__(model, reload)

    def _make_ready(self, model: TorchModel) -> _Ready:
        return _Ready(model)

    def start_profile(self) -> Profile:
        """As `Profilable.start_profile`."""
        return TorchProfile()

    def _weights_changed(self) -> None:
        self._logits = torch.empty(0, self.vocab_size)
        if self._ready is not None and self._loras:
            self._ready.slots = TorchLoRAs(self._ready.model)
            for slot, lora in self._loras.items():
                self._ready.slots.load(slot, lora)

    def _make_caches(self) -> Sequence[TorchKVCache]:
        return [
            TorchKVCache(
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
        return None if self._ready is None else labels_of(self._ready.model)

    def weight_arrays(self) -> Iterator[memoryview]:
        """As `ComputedModel.weight_arrays`."""
        tensors = iter(()) if self._ready is None else tensors_in(self._ready.model.decoder.weights)
        return (tensor.detach().reshape(-1).numpy().data for tensor in tensors)

    def load_lora(self, slot: int, lora: LoRA) -> None:
        """As `Backend.load_lora`."""
        self._loras[slot] = lora
        self._weights_changed()

    @torch.inference_mode()
    def compute(self, batch: StepBatch) -> None:
        """As `Backend.compute`."""
        assert self._ready is not None, "asleep"
        kv_cache = [cache.layers for cache in self._kv_caches]
        ops = TorchOps(self._input(batch), kv_cache, self._ready.slots)
        self._logits = self._ready.model.decoder.forward(ops)
        self._hidden = ops.hidden_states

    def copy_logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """As `Backend.copy_logits`."""
        return self._logits[list(rows)].numpy()

    def hidden_states(self) -> NDArray[np.float32]:
        """As `Backend.hidden_states`."""
        assert self._hidden is not None, "no step was computed"
        # The last norm has it in its weights.
        return (self._hidden / self._config.logit_multiplier).numpy()

    @torch.inference_mode()
    def sample(self, arrays: SamplingArrays) -> SampledTokens:
        """As `Backend.sample`."""
        return sample_rows(self._logits, arrays)

    def _input(self, batch: StepBatch) -> DecoderInput:
        return DecoderInput(
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
            lora_slots=None if batch.lora_slots is None else torch.from_numpy(batch.lora_slots),
            hidden_rows=torch.from_numpy(batch.hidden_rows).long(),
        )
