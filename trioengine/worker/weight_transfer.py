"""New weights on their way into a model that computes: checked and kept as they come, then applied all at once.

It knows names, shapes and types; a backend makes a model of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.dequantize import dequantize
from trioengine.checkpoint.gguf import GGMLType, GGUFTensor
from trioengine.checkpoint.quantize import can_quantize, quantize
from trioengine.checkpoint.safetensors import read_safetensors_file
from trioengine.errors import RequestError, UnavailableError
from trioengine.models.loader import NewTensors
from trioengine.models.source import TensorLayout
from trioengine.types.messages import WeightTensor

_TYPES: Mapping[str, GGMLType] = {
    "float32": GGMLType.F32,
    "float16": GGMLType.F16,
    "bfloat16": GGMLType.BF16,
    "F32": GGMLType.F32,
    "F16": GGMLType.F16,
    "BF16": GGMLType.BF16,
}
"""By the names of messages and of safetensors."""


class ReplaceableWeights(Protocol):
    """A model whose weights can be replaced while it computes."""

    def prepare_weights(self, tensors: NewTensors) -> Callable[[], None]:
        """Make the model with these tensors in place of the checkpoint's. What is computed meanwhile does not change.

        Called in a thread of its own. Calling what it returns, between two steps, makes the model that one.

        Raises:
            CheckpointError: the files are gone, or not what they were.
            MemoryError: there is no memory for two of them.
        """
        ...


@attrs.define(eq=False)
class WeightTransfer:
    """The new weights of one model.

    All tensors that ever came are kept as the checkpoint would have them, since a model is made of the checkpoint and
    of them: after a later update of others, and after a sleep that gave the weights back.
    """

    layouts: Mapping[str, TensorLayout]
    """Of the checkpoint's tensors."""
    model: ReplaceableWeights
    ignored: frozenset[str] = frozenset()
    """Further names that trainers send: of a head that is tied to the embedding, and is not in the files."""
    _current: dict[str, GGUFTensor] = attrs.field(factory=dict[str, GGUFTensor], init=False)
    _staged: dict[str, GGUFTensor] = attrs.field(factory=dict[str, GGUFTensor], init=False)
    _switch: Callable[[], None] | None = attrs.field(default=None, init=False)

    def discard(self) -> None:
        """Forget what is not applied."""
        self._staged, self._switch = {}, None

    def add(self, tensors: Sequence[WeightTensor]) -> None:
        """Keep tensors for the next model; one that came before under the same name is replaced.

        Raises:
            RequestError: names the tensor that is wrong; none of these is kept then.
        """
        self._staged |= {
            tensor.name: self._taken(
                tensor.name, tensor.dtype, tuple(tensor.shape), np.frombuffer(tensor.data, np.uint8)
            )
            for tensor in tensors
            if tensor.name not in self.ignored
        }

    def add_file(self, path: str) -> None:
        """As `add`, of all tensors of a safetensors file. They are copied: the file may change afterwards.

        Raises:
            RequestError: as `add` says.
            CheckpointError: it cannot be read.
        """
        self._staged |= {
            tensor.name: self._taken(tensor.name, tensor.dtype.value, tensor.shape, tensor.data)
            for tensor in list(read_safetensors_file(Path(path)))
            if tensor.name not in self.ignored
        }

    def prepare(self) -> None:
        """Make the next model.

        Raises:
            CheckpointError: as `ReplaceableWeights.prepare_weights`.
            UnavailableError: there is not enough memory.
        """
        try:
            self._switch = self.model.prepare_weights({**self._current, **self._staged})
        except MemoryError as error:
            raise UnavailableError(
                "There is not enough memory for the new weights beside the old ones. Nothing has changed."
            ) from error

    def apply(self) -> None:
        """Compute with the model that was prepared. No step runs."""
        assert self._switch is not None, "nothing is prepared"
        self._switch()
        self._current |= self._staged
        self.discard()

    def _taken(self, name: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> GGUFTensor:
        """A tensor in the checkpoint's own type, with its own memory."""
        layout, given = self.layouts.get(name), _TYPES.get(dtype)
        if layout is None:
            raise _error(name, "The checkpoint that was loaded has none of this name")
        if given is None:
            raise _error(name, f"Its dtype is {dtype[:50]!r}; float32, float16 and bfloat16 can be had")
        if shape != layout.shape:
            raise _error(name, f"Its shape is {list(shape)}, and the checkpoint's is {list(layout.shape)}")
        if len(data) != math.prod(shape) * given.block_bytes:
            raise _error(
                name, f"It has {len(data)} bytes; its shape and dtype need {math.prod(shape) * given.block_bytes}"
            )
        if layout.kind is None:
            raise _error(name, "It is quantized in the checkpoint, in a format that new weights cannot be brought into")
        if not can_quantize(layout.kind):
            raise _error(name, f"It is {layout.kind.name} in the checkpoint, which new weights cannot be brought into")
        if given is layout.kind:
            return GGUFTensor(name, given, shape, data.copy())
        values = dequantize(GGUFTensor(name, given, shape, data))
        return GGUFTensor(name, layout.kind, shape, quantize(values, layout.kind))


def _error(name: str, why: str) -> RequestError:
    return RequestError(f"The tensor {name[:200]!r} cannot be taken. {why}.", param="tensors")
