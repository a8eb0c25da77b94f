# pyright: basic
"""Computes an encoder's steps with torch, in float32."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from trioengine.models.encoder_config import EncoderConfig
from trioengine.models.encoder_loader import ClassificationHead, EncoderCheckpoint, load_encoder
from trioengine.models.encoder_torch import TorchEncoder, TorchEncoderOps
from trioengine.models.loader import ReportFraction
from trioengine.models.torch_ops import TorchWeights
from trioengine.worker.encoder_executor import EncoderBatch


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
    return TorchEncoderBackend(model, reload=lambda: load_encoder(version.open(), TorchWeights()))


class TorchEncoderBackend:
    """An encoder of tensors."""

    def __init__(self, model: TorchEncoder, *, reload: Callable[[], TorchEncoder]) -> None:
        """`reload` reads the same model again."""
        self.config: EncoderConfig = model.config
        self.head: ClassificationHead | None = model.head
        self._model: TorchEncoder | None = model
        self._reload = reload

    def drop_weights(self) -> None:
        """As `EncoderBackend.drop_weights`."""
        self._model = None

    def load_weights(self) -> None:
        """As `EncoderBackend.load_weights`."""
        self._model = self._model or self._reload()

    @torch.inference_mode()
    def compute(self, batch: EncoderBatch) -> NDArray[np.float32]:
        """As `EncoderBackend.compute`."""
        assert self._model is not None, "asleep"
        ops = TorchEncoderOps(
            token_ids=torch.from_numpy(batch.token_ids).long(),
            positions=torch.from_numpy(batch.positions).long(),
            lengths=np.diff(batch.query_start).tolist(),
            rows=torch.from_numpy(batch.rows).long(),
        )
        return self._model.encoder.forward(ops).numpy()
