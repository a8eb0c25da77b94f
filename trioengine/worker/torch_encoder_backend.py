# pyright: basic
"""Computes an encoder's steps with torch, in float32."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from trioengine.models.encoder_config import EncoderConfig
from trioengine.models.encoder_loader import EncoderCheckpoint, load_encoder
from trioengine.models.encoder_torch import TorchEncoder, TorchEncoderOps
from trioengine.models.head import ClassificationHead
from trioengine.models.loader import NewTensors, ReportFraction
from trioengine.models.torch_ops import TorchWeights, tensors_in
from trioengine.worker.encoder_executor import EncoderBatch
from trioengine.worker.model_memory import WeightsMemory
from trioengine.worker.profile import Profile
from trioengine.worker.torch_profile import TorchProfile


def load_torch_encoder_backend(
    checkpoint: EncoderCheckpoint, cpu_threads: int, report: ReportFraction | None = None
) -> "TorchEncoderBackend":
    """Read an encoder. Sets the number of torch's threads, which the whole process shares.

    Raises:
        CheckpointError: as `load_encoder` says.
        MemoryError: the weights do not fit.
    """
    torch.set_num_threads(cpu_threads)
    version = checkpoint.version
    model = load_encoder(checkpoint, TorchWeights(), report)
    return TorchEncoderBackend(
        model, reload=lambda tensors: load_encoder(version.open().with_tensors(tensors), TorchWeights())
    )


class TorchEncoderBackend(WeightsMemory[TorchEncoder, TorchEncoder]):
    """An encoder of tensors."""

    def __init__(self, model: TorchEncoder, *, reload: Callable[[NewTensors], TorchEncoder]) -> None:
        """`reload` is as `WeightsMemory` has it."""
        self.config: EncoderConfig = model.config
        self.head: ClassificationHead | None = None
        super().__init__(model, reload)

    def _make_ready(self, model: TorchEncoder) -> TorchEncoder:
        return model

    def start_profile(self) -> Profile:
        """As `Profilable.start_profile`."""
        return TorchProfile()

    def _weights_changed(self) -> None:
        if self._ready is not None:
            self.head = self._ready.head

    def weight_arrays(self) -> Iterator[memoryview]:
        """As `ComputedModel.weight_arrays`."""
        tensors = iter(()) if self._ready is None else tensors_in(self._ready.encoder.weights)
        return (tensor.detach().reshape(-1).numpy().data for tensor in tensors)

    @torch.inference_mode()
    def compute(self, batch: EncoderBatch) -> NDArray[np.float32]:
        """As `EncoderBackend.compute`."""
        assert self._ready is not None, "asleep"
        ops = TorchEncoderOps(
            token_ids=torch.from_numpy(batch.token_ids).long(),
            positions=torch.from_numpy(batch.positions).long(),
            lengths=np.diff(batch.query_start).tolist(),
            rows=torch.from_numpy(batch.rows).long(),
        )
        return self._ready.encoder.forward(ops).numpy()
