"""What all backends share: weights that can go, come back and be replaced, and a KV cache that can go and come back."""

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from trioengine.models.loader import NewTensors
from trioengine.worker.profile import Profile, TimedProfile

ModelT = TypeVar("ModelT")
ReadyT = TypeVar("ReadyT")


class Cache(Protocol):
    """The KV cache of one group of layers."""

    def block(self, block_id: int) -> NDArray[np.generic]:
        """A writable view of what a block holds."""
        ...


CacheT = TypeVar("CacheT", bound=Cache)


class WeightsMemory(abc.ABC, Generic[ModelT, ReadyT]):
    """A model that can be read again. `ReadyT` is what computes with it, and all that holds its weights."""

    def __init__(self, model: ModelT, reload: Callable[[NewTensors], ModelT]) -> None:
        """`reload` reads the same model again, with these tensors in place of those of their names."""
        self._reload = reload
        self._tensors: NewTensors = {}
        self._ready: ReadyT | None = self._make_ready(model)
        self._weights_changed()

    @abc.abstractmethod
    def _make_ready(self, model: ModelT) -> ReadyT:
        """Make of a model what computes with it. Another thread may compute with another meanwhile."""

    @abc.abstractmethod
    def _weights_changed(self) -> None:
        """`_ready` is another, or None. No step runs."""

    @abc.abstractmethod
    def weight_arrays(self) -> Iterable[memoryview]:
        """As `ComputedModel.weight_arrays`."""

    def start_profile(self) -> Profile:
        """As `Profilable.start_profile`."""
        return TimedProfile()

    def end_profile(self) -> None:
        """As `Profilable.end_profile`."""

    def drop_weights(self) -> None:
        """As `Memory.drop_weights`."""
        self._ready = None
        self._weights_changed()

    def load_weights(self) -> None:
        """As `Memory.load_weights`: the checkpoint's, and what has come since."""
        if self._ready is None:
            self._ready = self._make_ready(self._reload(self._tensors))
            self._weights_changed()

    def prepare_weights(self, tensors: NewTensors) -> Callable[[], None]:
        """As `ReplaceableWeights.prepare_weights`."""
        ready = self._make_ready(self._reload(tensors))

        def switch() -> None:
            self._ready, self._tensors = ready, tensors
            self._weights_changed()

        return switch


class ModelMemory(WeightsMemory[ModelT, ReadyT], Generic[ModelT, ReadyT, CacheT]):
    """A model and its KV cache: `backend.Memory`."""

    def __init__(self, model: ModelT, reload: Callable[[NewTensors], ModelT]) -> None:
        """As `WeightsMemory`."""
        super().__init__(model, reload)
        self._kv_caches: Sequence[CacheT] = ()
        self.make_kv_cache()

    @abc.abstractmethod
    def _make_caches(self) -> Sequence[CacheT]:
        """An empty cache for each KV group."""

    def drop_kv_cache(self) -> None:
        """As `Memory.drop_kv_cache`."""
        self._kv_caches = ()

    def make_kv_cache(self) -> None:
        """As `Memory.make_kv_cache`."""
        self._kv_caches = self._kv_caches or self._make_caches()

    def kv_block(self, group: int, block_id: int) -> NDArray[np.generic]:
        """As `Backend.kv_block`."""
        return self._kv_caches[group].block(block_id)

    def write_kv_block(self, group: int, block_id: int, data: NDArray[np.uint8] | None) -> None:
        """As `Backend.write_kv_block`."""
        block = self.kv_block(group, block_id)
        block[...] = 0 if data is None else data.view(block.dtype).reshape(block.shape)
