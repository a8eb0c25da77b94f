# pyright: basic
"""Computes steps with torch, in float32."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from trioengine_kernels.native.sampler import SampledTokens, SamplingArrays
from trioengine_kernels.paged_attention import plan_attention

from trioengine.config.resolve import ResolvedConfig
from trioengine.models.loader import Checkpoint, ReportFraction
from trioengine.models.lora import LoRA
from trioengine.models.torch_ops import DecoderInput, TorchLoRAs, TorchModel, TorchOps, load_torch_model
from trioengine.worker.backend import StepBatch, kv_cache_groups
from trioengine.worker.kv_cache import TorchKVCache
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
    version = checkpoint.version
    return TorchBackend(
        load_torch_model(checkpoint, report, config.max_model_len),
        reload=lambda: load_torch_model(version.open(), max_length=config.max_model_len),
        num_blocks=config.num_kv_blocks,
        block_size=config.block_size,
    )


class TorchBackend:
    """A model of tensors and its KV cache."""

    def __init__(
        self,
        model: TorchModel,
        *,
        reload: Callable[[], TorchModel],
        num_blocks: Sequence[int],
        block_size: int,
    ) -> None:
        """`reload` reads the same model again; `num_blocks` is for each of its KV groups."""
        self.vocab_size = model.config.vocab_size
        self.block_size = block_size
        self.kv_cache_groups = kv_cache_groups(model.config, num_blocks)
        self._config = model.config
        self._model: TorchModel | None = model
        self._reload = reload
        self._loras: dict[int, LoRA] = {}
        self._slots: TorchLoRAs | None = None
        self._fill_slots()
        self._logits = torch.empty(0, self.vocab_size)
        self._hidden: torch.Tensor | None = None
        self._kv_caches: Sequence[TorchKVCache] = ()
        self.make_kv_cache()

    def drop_weights(self) -> None:
        """As `Memory.drop_weights`."""
        self._model = self._slots = None
        self._logits = torch.empty(0, self.vocab_size)

    def load_weights(self) -> None:
        """As `Memory.load_weights`."""
        if self._model is None:
            self._model = self._reload()
            self._fill_slots()

    def drop_kv_cache(self) -> None:
        """As `Memory.drop_kv_cache`."""
        self._kv_caches = ()

    def make_kv_cache(self) -> None:
        """As `Memory.make_kv_cache`."""
        self._kv_caches = self._kv_caches or [
            TorchKVCache(
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
        self._loras[slot] = lora
        self._fill_slots()

    def _fill_slots(self) -> None:
        self._slots = None
        if self._model is not None and self._loras:
            self._slots = TorchLoRAs(self._model)
            for slot, lora in self._loras.items():
                self._slots.load(slot, lora)

    @torch.inference_mode()
    def compute(self, batch: StepBatch) -> None:
        """As `Backend.compute`."""
        assert self._model is not None, "asleep"
        kv_cache = [cache.layers for cache in self._kv_caches]
        ops = TorchOps(self._input(batch), kv_cache, self._slots)
        self._logits = self._model.decoder.forward(ops)
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
