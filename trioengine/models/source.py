"""The tensors of a checkpoint by their names, whichever format it has: shapes are checked before anything is read.

This module does not know what the tensors are for.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.dequantize import dequantize
from trioengine.checkpoint.gguf import GGMLType, GGUFFile, GGUFTensor
from trioengine.checkpoint.quantized import PackedMatrix, check_not_packed, open_packed, read_weight_format
from trioengine.checkpoint.safetensors import TensorDType, TensorView, open_safetensors
from trioengine.errors import CheckpointError
from trioengine.models.config import LONG_ROPE_FACTORS, ROPE_FACTORS, ModelConfig
from trioengine.models.names import ROOTS, Names, folder_names, gguf_names

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]


@attrs.frozen(eq=False)
class StoredMatrix:
    """A matrix as its file has it: each row is a run of whole blocks of numbers."""

    name: str
    """The tensor's name in its file."""
    kind: GGMLType
    rows: Bytes
    """[num_rows, bytes of a row]. May be a read-only view of the mapped file."""
    num_columns: int

    def floats(self, first: int = 0, end: int | None = None) -> Floats:
        """Rows `first` to `end - 1` as new writable float32 numbers, [rows, columns].

        Raises:
            CheckpointError: as `dequantize` says.
        """
        rows = self.rows[first:end]
        return dequantize(GGUFTensor(self.name, self.kind, (len(rows), self.num_columns), rows.reshape(-1)))

    @property
    def num_rows(self) -> int:
        """Outputs."""
        return len(self.rows)


_ROWS_AT_A_TIME = 1024

MatrixPart: TypeAlias = StoredMatrix | PackedMatrix
"""A matrix of a checkpoint. All kinds have `name`, `num_rows`, `num_columns` and `floats(first, end)`."""


@attrs.frozen
class TensorLayout:
    """What a tensor is in its file."""

    shape: tuple[int, ...]
    kind: GGMLType | None
    """None where it cannot be replaced by floats: it is packed, or of no type that is read."""


class Source:
    """The tensors of one checkpoint by their names, and which of them were read."""

    def __init__(
        self,
        path: Path,
        names: Names,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], GGUFTensor],
        *,
        packed: Mapping[str, PackedMatrix] | None = None,
        optional: Collection[str] = (),
    ) -> None:
        """`shapes` and `read` are of tensors that are no packed matrices; those that are optional need not be read."""
        self.path = path
        self.names = names
        self._packed = packed or {}
        packed_shapes = {name: (matrix.num_rows, matrix.num_columns) for name, matrix in self._packed.items()}
        self._shapes = {**shapes, **packed_shapes}
        self._read = read
        self._optional = optional
        self._unread = set(self._shapes).difference(optional)

    def layouts(self) -> Mapping[str, TensorLayout]:
        """All tensors. Reads none."""
        return {name: TensorLayout(shape, self._kind(name)) for name, shape in self._shapes.items()}

    def _kind(self, name: str) -> GGMLType | None:
        if name in self._packed:
            return None
        try:
            return self._read(name).ggml_type
        except CheckpointError:
            return None

    def with_tensors(self, tensors: Mapping[str, GGUFTensor]) -> "Source":
        """The same with these in the place of those of their names, none of which is packed. Nothing is read yet."""
        shapes = {name: shape for name, shape in self._shapes.items() if name not in self._packed}
        return Source(
            self.path,
            self.names,
            shapes,
            lambda name: tensors[name] if name in tensors else self._read(name),
            packed=self._packed,
            optional=self._optional,
        )

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def differ(self, name: str, other: str) -> bool:
        """Whether there are two such tensors of one shape, none of them packed, with different numbers.

        Raises:
            CheckpointError: one has no floats.
        """
        shape = self._shapes.get(name)
        if (
            shape is None
            or len(shape) != 2
            or shape != self._shapes.get(other)
            or not self._packed.keys().isdisjoint((name, other))
        ):
            return False
        tensors = self._read(name), self._read(other)
        one, two = (
            StoredMatrix(each.name, each.ggml_type, each.data.reshape(shape[0], -1), shape[1]) for each in tensors
        )
        for first in range(0, shape[0], _ROWS_AT_A_TIME):
            rows = slice(first, first + _ROWS_AT_A_TIME)
            if one.kind is two.kind:
                is_same = np.array_equal(one.rows[rows], two.rows[rows])
            else:
                is_same = np.array_equal(one.floats(rows.start, rows.stop), two.floats(rows.start, rows.stop))
            if not is_same:
                return True
        return False

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Return when there is such a tensor. CheckpointError: it is missing, or has another shape."""
        if name not in self._shapes:
            raise self.error(f"the tensor {name!r} is missing")
        if self._shapes[name] != shape:
            raise self.error(
                f"the tensor {name!r} has the shape {list(self._shapes[name])}, "
                f"but the configuration needs {list(shape)}"
            )

    def matrix(self, name: str, shape: tuple[int, int]) -> MatrixPart:
        """A matrix, [rows, columns]. CheckpointError: as `check_shape` says."""
        if (packed := self._packed.get(name)) is not None:
            self.check_shape(name, shape)
            self._unread.discard(name)
            return packed
        tensor = self._tensor(name, shape)
        num_rows, num_columns = shape
        return StoredMatrix(name, tensor.ggml_type, tensor.data.reshape(num_rows, -1), num_columns)

    def stacked_matrices(self, name: str, shape: tuple[int, int, int]) -> Sequence[MatrixPart]:
        """Matrices of one tensor, [count, rows, columns]. CheckpointError: as `check_shape` says."""
        tensor = self._tensor(name, shape)
        count, num_rows, num_columns = shape
        return [
            StoredMatrix(name, tensor.ggml_type, rows, num_columns) for rows in tensor.data.reshape(count, num_rows, -1)
        ]

    def vector(self, name: str, size: int) -> Floats:
        """Numbers as float32. CheckpointError: as `check_shape` says, or it is packed."""
        if name in self._packed:
            raise self.error(f"the tensor {name!r} is a packed matrix, but the configuration needs a vector")
        return dequantize(self._tensor(name, (size,)))

    def norm(self, name: str, size: int) -> Floats:
        """The weights of a norm, with what the format leaves out added. CheckpointError: as `vector` says."""
        values = self.vector(name, size)
        with np.errstate(invalid="ignore"):  # A damaged file's numbers are its own.
            values += np.float32(self.names.norm_offset)
        return values

    def ignore(self, name: str) -> None:
        """Count a tensor as read: it changes nothing."""
        self._unread.discard(name)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        self.check_shape(name, shape)
        self._unread.discard(name)
        return self._read(name)

    def check_all_read(self) -> None:
        """A tensor that nobody reads is part of a model that this code would compute wrongly."""
        unread = sorted(name for name in self._unread if not name.endswith(".rotary_emb.inv_freq"))
        if unread:
            shown = ", ".join(repr(name[:100]) for name in unread[:3])
            raise self.error(f"{len(unread)} tensors are not known for this architecture, such as {shown}")

    def error(self, why: str) -> CheckpointError:
        """An error that names the checkpoint."""
        return CheckpointError(f"{self.path}: {why}.", path=str(self.path))


def gguf_source(file: GGUFFile, config: ModelConfig) -> Source:
    """The tensors of a GGUF file."""
    tensors = file.tensors
    return Source(
        file.path,
        gguf_names(config.architecture),
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda name: tensors[name],
        # They are facts of the configuration.
        optional=(ROPE_FACTORS, *LONG_ROPE_FACTORS),
    )


def folder_source(folder: Path, config: ModelConfig) -> Source:
    """The tensors of a folder with safetensors. CheckpointError: a file of it is damaged or of an unknown format."""
    tensors = open_safetensors(folder)
    packed, optional = None, set[str]()
    if (weight_format := read_weight_format(folder)) is not None:
        found = open_packed(folder, weight_format, tensors)
        tensors, packed, optional = found.others, found.matrices, {*found.optional}
    else:
        check_not_packed(folder, tensors)
    root = next((root for root in ROOTS if f"{root}embed_tokens.weight" in tensors), ROOTS[0])
    if root != ROOTS[0]:
        optional.update(name for name in tensors if not name.startswith(root))  # What sees.
    return Source(
        folder,
        folder_names(config.architecture, root),
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda name: as_ggml(folder, tensors[name]),
        packed=packed,
        optional=optional,
    )


_GGML_TYPES: Mapping[TensorDType, GGMLType] = {
    TensorDType.F32: GGMLType.F32,
    TensorDType.F16: GGMLType.F16,
    TensorDType.BF16: GGMLType.BF16,
}
"""The types that both formats store in the same way."""


def ggml_type_of(tensor: TensorView) -> GGMLType | None:
    """The type of a tensor of floats; None of others."""
    return _GGML_TYPES.get(tensor.dtype)


def as_ggml(folder: Path, tensor: TensorView) -> GGUFTensor:
    """The same tensor. CheckpointError: it has no floats."""
    kind = ggml_type_of(tensor)
    if kind is None:
        raise CheckpointError(
            f"{folder}: the tensor {tensor.name!r} has the type {tensor.dtype}; F32, F16 and BF16 can be read.",
            path=str(folder),
        )
    return GGUFTensor(tensor.name, kind, tensor.shape, tensor.data)
