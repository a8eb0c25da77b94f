"""Operations that all executors have: new weights, profiles, collective RPC."""

import abc
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import attrs

from trioengine.errors import RequestError
from trioengine.types.messages import UpdateWeights
from trioengine.worker import remote
from trioengine.worker.profile import Profilable, Profiler
from trioengine.worker.remote import call_remotely
from trioengine.worker.weight_transfer import WeightTransfer

R = TypeVar("R")


@attrs.frozen
class ModelInfo:
    """What is told of a model by `get_model_info`."""

    architecture: str
    num_parameters: int
    """Of its matrices."""
    num_layers: int
    hidden_size: int | None
    """None where transformers' code computes."""
    vocab_size: int
    backend: str
    """"cuda", "native", "torch" or "transformers"."""


class ComputedModel(Profilable, Protocol):
    """A backend."""

    def weight_arrays(self) -> Iterable[memoryview]:
        """All weights as they are computed with, always in the same order. None while they are asleep."""
        ...


class SharedOperations(abc.ABC):
    """A part of an `Executor`."""

    weights: WeightTransfer | None
    """Takes new weights; None refuses them."""
    _profiler: Profiler
    _model_info: ModelInfo | None

    @property
    @abc.abstractmethod
    def _computed(self) -> ComputedModel:
        """The backend."""

    @abc.abstractmethod
    def _between_steps(self, function: Callable[[], R]) -> R:
        """Call a function when the steps that were submitted are computed, in the thread that computes them."""

    def update_weights(self, update: UpdateWeights) -> None:
        """As `Executor.update_weights`."""
        weights = self._replaceable()
        if update.path is None:
            weights.add(update.tensors)
        else:
            weights.add_file(update.path)

    def discard_weights(self) -> None:
        """As `Executor.discard_weights`."""
        self._replaceable().discard()

    def prepare_weights(self) -> None:
        """As `Executor.prepare_weights`."""
        self._replaceable().prepare()

    def apply_weights(self) -> None:
        """As `Executor.apply_weights`."""
        self._between_steps(self._replaceable().apply)

    def start_profile(self, prefix: str | None) -> None:
        """As `Executor.start_profile`."""
        self._between_steps(lambda: self._profiler.start(self._computed, prefix))

    def stop_profile(self) -> str:
        """As `Executor.stop_profile`."""
        return self._between_steps(lambda: self._profiler.stop(self._computed))

    def collective_rpc(self, method: str, arguments: str) -> Sequence[str]:
        """As `Executor.collective_rpc`: of the one worker."""
        return (self._between_steps(lambda: call_remotely(self, method, arguments)),)

    @remote.collective_rpc
    def get_model_info(self) -> dict[str, object]:
        """What the model is: the fields of `ModelInfo`."""
        return {} if self._model_info is None else attrs.asdict(self._model_info)

    @remote.collective_rpc
    def num_parameters(self) -> int:
        """Numbers in the matrices of the model."""
        return 0 if self._model_info is None else self._model_info.num_parameters

    @remote.collective_rpc
    def check_weights(self) -> str | None:
        """A checksum of the weights as they are computed with: equal where they are equal, on the same backend and
        processor. None while they are asleep. Takes about as long as reading them once; steps wait.
        """
        checksum, is_empty = 0, True
        for array in self._computed.weight_arrays():
            checksum, is_empty = zlib.crc32(array, checksum), False
        return None if is_empty else f"{checksum:08x}"

    def _replaceable(self) -> WeightTransfer:
        if self.weights is None:
            raise RequestError("The weights of this model cannot be replaced.")
        return self.weights
