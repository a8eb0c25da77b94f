# pyright: basic
"""Brings weights to a device: floats in its number type, quantized ones as the planes that its products read.

The numbers of a file travel as they are, rows after rows, and are rearranged on the device. Matrices that are one below
the other become one, in the form that holds all of them: INT8_AFFINE holds what INT4 and INT8 do, floats hold anything.
"""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from trioengine_kernels.quantized_linear import GROUP_SIZE, QuantizedWeight, WeightKind

from trioengine.checkpoint.gguf import GGMLType
from trioengine.checkpoint.quantized import QuantizedMatrix, ScaledMatrix
from trioengine.config.engine import Quantization
from trioengine.models.device_ops import DeviceMatrix
from trioengine.models.device_planes import Planes, kind_of_blocks, packed_nibbles, planes_of_blocks, quantized
from trioengine.models.loader import what_floats_become
from trioengine.models.packed_groups import PackedForm, group_fields, packed_form
from trioengine.models.source import Floats, MatrixPart, StoredMatrix

_PIECE_VALUES = 1 << 22
"""Numbers of a matrix that are on their way at a time: 16 MiB of floats."""
_PIECE_ROWS = 16
"""Rows of a piece are a multiple, as `QuantizedMatrix.codes` needs."""
_PLAIN: Mapping[GGMLType, torch.dtype] = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}
"""Types whose bytes torch reads."""
_CODE_TYPES: Mapping[WeightKind, torch.dtype] = {
    WeightKind.INT4: torch.uint8,
    WeightKind.INT8: torch.int8,
    WeightKind.INT8_AFFINE: torch.int8,
    WeightKind.FP8: torch.float8_e4m3fn,
}
_HOST_TYPES: Mapping[np.dtype, torch.dtype] = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.float32): torch.float32,
}


@attrs.frozen
class _Form:
    """What a matrix becomes, where it does not become floats."""

    kind: WeightKind
    group_size: int = GROUP_SIZE


@attrs.frozen(eq=False)
class _Part:
    """A part, and what it would become alone."""

    matrix: MatrixPart
    form: _Form | None
    """None is floats."""
    keeps_codes: bool = False
    """Whether codes are those of the file; else they are what its numbers are rounded to."""


class DeviceWeightMaker:
    """Makes tensors and planes: a `loader.WeightMaker`.

    On CUDA, its copies and operations are queued on the current stream, and the host runs ahead of them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None) -> None:
        """Args:
        device: where weights go.
        dtype: of those that are not quantized.
        quantization: what matrices of floats become; None keeps them, rounded to `dtype`.
        """
        self._device = device
        self._dtype = dtype
        self._quantization = quantization

    def matrix(self, parts: Sequence[MatrixPart], *, min_bits: int = 4) -> DeviceMatrix:
        """The parts, one below the other.

        Floats are rounded to the device's number type, or quantized where that was asked for and they may be. What its
        file has quantized stays so, as `device_planes` and `packed_groups` tell; FP8 keeps its codes and scales. Types
        that have no planes are rounded to INT8. Matrices whose columns are no multiple of 32 become floats.

        Raises:
            CheckpointError: numbers are damaged.
            torch.OutOfMemoryError: they do not fit.
        """
        quantization = what_floats_become(self._quantization, min_bits)
        floats_become = None if quantization is None else WeightKind(quantization.value)
        described = [_described(part, floats_become) for part in parts]
        form = _common_form([part.form for part in described])
        num_rows, num_columns = sum(part.num_rows for part in parts), parts[0].num_columns
        if form is None:
            matrix = self._empty((num_rows, num_columns), self._dtype)
            for rows, part, first, end in _pieces(described):
                matrix[rows] = self._floats(part.matrix, first, end)
            return matrix
        weight = self._empty_weight(form, num_rows, num_columns)
        for rows, part, first, end in _pieces(described):
            planes = self._planes(part, first, end)
            if form != part.form:
                planes = planes.widened()
            weight.codes[rows] = planes.codes.reshape(end - first, -1)
            weight.scales[rows] = planes.scales.reshape(end - first, -1)
            if weight.minimums is not None:
                assert planes.minimums is not None
                weight.minimums[rows] = planes.minimums.reshape(end - first, -1)
        return weight

    def vector(self, values: Floats) -> Tensor:
        """The same numbers, float32."""
        return self._to_device(values)

    def _empty_weight(self, form: _Form, num_rows: int, num_columns: int) -> QuantizedWeight:
        kind, num_groups = form.kind, -(-num_columns // form.group_size)
        has_minimums = kind in (WeightKind.INT4, WeightKind.INT8_AFFINE)
        return QuantizedWeight(
            kind=kind,
            codes=self._empty((num_rows, num_columns // (2 if kind is WeightKind.INT4 else 1)), _CODE_TYPES[kind]),
            scales=self._empty((num_rows, num_groups), torch.float32 if kind is WeightKind.FP8 else torch.float16),
            minimums=self._empty((num_rows, num_groups), torch.float16) if has_minimums else None,
            num_rows=num_rows,
            num_columns=num_columns,
            group_size=form.group_size,
        )

    def _floats(self, part: MatrixPart, first: int, end: int) -> Tensor:
        """Rows of a part, [rows, columns], float32 or the file's type."""
        if isinstance(part, StoredMatrix) and part.kind in _PLAIN:
            return self._to_device(part.rows[first:end]).view(_PLAIN[part.kind])
        return self._to_device(part.floats(first, end))

    def _planes(self, part: _Part, first: int, end: int) -> Planes:
        """Rows of a part, in its own form."""
        form, matrix = part.form, part.matrix
        assert form is not None
        if not part.keeps_codes:
            return quantized(self._floats(matrix, first, end).float().view(-1, form.group_size), form.kind)
        match matrix:
            case StoredMatrix():
                blocks = self._to_device(matrix.rows[first:end]).view(-1, matrix.kind.block_bytes)
                return planes_of_blocks(matrix.kind, blocks)
            case QuantizedMatrix():
                fields = group_fields(matrix, first, end, PackedForm[form.kind.name])
                codes = self._to_device(fields.codes)
                codes = packed_nibbles(codes) if form.kind is WeightKind.INT4 else (codes ^ 128).view(torch.int8)
                minimums = None if fields.minimums is None else self._to_device(fields.minimums)
                return Planes(codes, self._to_device(fields.scales), minimums)
            case ScaledMatrix():
                return self._scaled_planes(matrix, first, end, form.group_size)

    def _scaled_planes(self, matrix: ScaledMatrix, first: int, end: int, group_size: int) -> Planes:
        codes = self._to_device(matrix.bytes[first:end])
        scales = self._to_device(matrix.scales[np.arange(first, end) // matrix.block_rows])
        # Kernels know no NaN among the codes: one makes its group's scale NaN.
        groups = F.pad(codes & 127, (0, -codes.shape[1] % group_size)).unflatten(1, (-1, group_size))
        scales = scales.masked_fill((groups == 127).any(dim=2), float("nan"))
        return Planes(codes.view(torch.float8_e4m3fn), scales)

    def _empty(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _to_device(self, values: NDArray) -> Tensor:
        """A copy. Torch keeps pinned memory until the copy from it is done, and gives it to the next one then."""
        is_pinned = self._device.type == "cuda"
        host = torch.empty(values.shape, dtype=_HOST_TYPES[values.dtype], pin_memory=is_pinned)
        host.numpy()[...] = values
        return host.to(self._device, non_blocking=True)


def _described(part: MatrixPart, floats_become: WeightKind | None) -> _Part:
    if part.num_columns % GROUP_SIZE:
        return _Part(part, None)
    match part:
        case StoredMatrix() if part.kind.block_size > 1:
            kind = kind_of_blocks(part.kind)
            return _Part(part, _Form(kind or WeightKind.INT8), keeps_codes=kind is not None)
        case QuantizedMatrix():
            match packed_form(part):
                case PackedForm.FLOATS:
                    return _Part(part, None)
                case PackedForm.ROUNDED:
                    return _Part(part, _Form(WeightKind.INT8))
                case form:
                    return _Part(part, _Form(WeightKind[form.name]), keeps_codes=True)
        case ScaledMatrix() if floats_become in (None, WeightKind.FP8) and _is_float8_plane(part):
            return _Part(part, _Form(WeightKind.FP8, min(part.block_columns, part.num_columns)), keeps_codes=True)
        case _ if floats_become is None:
            return _Part(part, None)
        case _:
            return _Part(
                part, _Form(floats_become, part.num_columns if floats_become is WeightKind.FP8 else GROUP_SIZE)
            )


def _common_form(forms: Sequence[_Form | None]) -> _Form | None:
    """The smallest that holds the numbers of all. None is floats."""
    first = forms[0]
    if all(form == first for form in forms):
        return first
    are_whole_numbers = all(form is not None and form.kind is not WeightKind.FP8 for form in forms)
    return _Form(WeightKind.INT8_AFFINE) if are_whole_numbers else None


def _is_float8_plane(part: ScaledMatrix) -> bool:
    """Whether the bytes are float8_e4m3fn, and groups of columns begin where planes can have them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    has_groups = part.block_columns % GROUP_SIZE == 0 or part.block_columns >= part.num_columns
    return has_groups and np.array_equal(part.table, numbers, equal_nan=True)


def _pieces(parts: Sequence[_Part]) -> Iterator[tuple[slice, _Part, int, int]]:
    """Pieces of all parts: their rows among all, the part, and from which row to which one of it they go."""
    place = 0
    for part in parts:
        num_rows, num_columns = part.matrix.num_rows, part.matrix.num_columns
        step = max(_PIECE_ROWS, _PIECE_VALUES // num_columns // _PIECE_ROWS * _PIECE_ROWS)
        for first in range(0, num_rows, step):
            end = min(first + step, num_rows)
            yield slice(place + first, place + end), part, first, end
        place += num_rows
