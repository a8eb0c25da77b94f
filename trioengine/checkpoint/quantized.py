"""Reads the matrices of folders whose weights were quantized before they were saved, as whole numbers and scales.

Formats: GPTQ (AutoGPTQ's and GPTQModel's layout, versions 1 and 2), AWQ (AutoAWQ's "gemm" layout), compressed-tensors
(pack-quantized, int-quantized, naive-quantized and float-quantized) and fp8 with scales for tensors or blocks. How each
packs is told beside its reader. Whatever is not known to be read right is refused, with what can be done instead.

A file is untrusted input: dtypes, shapes, group indices and scales are checked. This module does not know models, nor
in which form a backend wants the numbers.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.safetensors import TensorDType, TensorView
from trioengine.checkpoint.small_files import read_json_object
from trioengine.errors import CheckpointError

Floats: TypeAlias = NDArray[np.float32]
Codes: TypeAlias = NDArray[np.uint8]
RowRange: TypeAlias = slice
"""From a row to another, both multiples of 16 or the last."""

ALTERNATIVES = (
    "Take the model's original weights (the quantization option, int8 or int4, quantizes them when they are loaded), a"
    " GGUF file of it, or weights quantized with GPTQ, AWQ or compressed-tensors in 4 or 8 bits."
)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Row, of eight, of each four bits of a word, lowest bits first."""
_IGNORED_SUFFIXES = (".input_scale", ".input_zero_point", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
"""Scales of activations and of the KV cache, which this engine quantizes by rules of its own or not at all."""


class QuantizationMethod(enum.StrEnum):
    """Who packed the weights. Values are those of `quant_method` in `quantization_config`."""

    GPTQ = "gptq"
    AWQ = "awq"
    COMPRESSED_TENSORS = "compressed-tensors"
    FP8 = "fp8"


@attrs.frozen
class WeightFormat:
    """What `quantization_config` says, as far as the tensors do not say it themselves."""

    method: QuantizationMethod
    bits: int
    """0: they differ between matrices, whose shapes tell."""
    group_size: int | None = None
    """Of GPTQ and AWQ: columns that share a scale. None is all."""
    zero_offset: int = 0
    """GPTQ's first version stores each zero point less 1."""
    block_size: tuple[int, int] = (128, 128)
    """Of floats: rows and columns that share a scale, where scales are neither for rows nor for all."""

    @property
    def description(self) -> str:
        """For people: method and bits."""
        name = {QuantizationMethod.COMPRESSED_TENSORS: "compressed-tensors"}.get(self.method, self.method.upper())
        return name if self.method is QuantizationMethod.FP8 or not self.bits else f"{name}, {self.bits} bits"


@attrs.frozen(eq=False)
class QuantizedMatrix:
    """Whole numbers of 4 or 8 bits, which stand for `scale * (code - zero)` with the scale and zero of their group."""

    name: str
    num_rows: int
    num_columns: int
    bits: int
    num_groups: int
    column_groups: NDArray[np.int64]
    """[num_columns]: which group each column belongs to."""
    has_groups_in_order: bool
    """Whether groups are runs of columns; else columns were sorted by importance when they were quantized."""
    read_codes: Callable[[RowRange], Codes] = attrs.field(repr=False)
    read_scales: Callable[[RowRange], Floats] = attrs.field(repr=False)
    read_zeros: Callable[[RowRange], NDArray[np.int32]] = attrs.field(repr=False)

    def codes(self, first: int = 0, end: int | None = None) -> Codes:
        """Of rows `first` to `end - 1`, [rows, columns]. Both are multiples of 16, or the last row's end."""
        return self.read_codes(slice(first, self._end(end)))

    def scales(self, first: int = 0, end: int | None = None) -> Floats:
        """Of the same rows, [rows, groups].

        Raises:
            CheckpointError: one is infinite or not a number.
        """
        scales = self.read_scales(slice(first, self._end(end)))
        if not np.isfinite(scales).all():
            raise CheckpointError(f"The scales of {self.name!r} are damaged: one is infinite or not a number.")
        return scales

    def zeros(self, first: int = 0, end: int | None = None) -> NDArray[np.int32]:
        """Of the same rows, [rows, groups]."""
        return self.read_zeros(slice(first, self._end(end)))

    def floats(self, first: int = 0, end: int | None = None) -> Floats:
        """Of the same rows, as new writable float32 numbers, [rows, columns].

        Raises:
            CheckpointError: as `scales` says.
        """
        values = self.codes(first, end).astype(np.float32)
        values -= self.zeros(first, end).astype(np.float32)[:, self.column_groups]
        with np.errstate(over="ignore"):
            values *= self.scales(first, end)[:, self.column_groups]
        return values

    def _end(self, end: int | None) -> int:
        return self.num_rows if end is None else min(end, self.num_rows)


@attrs.frozen(eq=False)
class ScaledMatrix:
    """Floats of 8 bits, each times the scale of its block of rows and columns."""

    name: str
    num_rows: int
    num_columns: int
    bytes: Codes = attrs.field(repr=False)
    """[num_rows, num_columns]. May be a read-only view of the mapped file."""
    table: Floats = attrs.field(repr=False)
    """[256]: the float of each byte."""
    scales: Floats = attrs.field(repr=False)
    """[blocks of rows, blocks of columns], finite."""
    block_rows: int
    block_columns: int

    def floats(self, first: int = 0, end: int | None = None) -> Floats:
        """Rows `first` to `end - 1` as new writable float32 numbers, [rows, columns]."""
        values = self.table[self.bytes[first:end]]
        rows = np.arange(first, first + len(values)) // self.block_rows
        columns = np.arange(self.num_columns) // self.block_columns
        with np.errstate(over="ignore", invalid="ignore"):
            values *= self.scales[rows[:, None], columns]
        return values


PackedMatrix: TypeAlias = QuantizedMatrix | ScaledMatrix


@attrs.frozen(eq=False)
class PackedTensors:
    """A folder's tensors, those that make up a packed matrix taken together."""

    matrices: Mapping[str, PackedMatrix]
    """By the name of the matrix that was packed, as "model.layers.0.self_attn.q_proj.weight"."""
    others: Mapping[str, TensorView]
    """What is not packed."""
    optional: frozenset[str]
    """Those of `others` that make no difference."""


def read_weight_format(folder: Path) -> WeightFormat | None:
    """What `quantization_config` in `config.json` says; None where there is none.

    Raises:
        CheckpointError: a method, a version or a number of bits that cannot be read; the message says what can be done.
    """
    path = folder / "config.json"
    facts = read_json_object(path)
    value = facts.get("quantization_config") or facts.get("compression_config")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: quantization_config is not an object.", path=str(path))
    config = _Config(cast(Mapping[str, object], value), path)
    name = config.text("quant_method").lower()
    match name:
        case QuantizationMethod.GPTQ:
            return _gptq_format(config)
        case QuantizationMethod.AWQ:
            return _awq_format(config)
        case QuantizationMethod.COMPRESSED_TENSORS:
            return _compressed_tensors_format(config)
        case QuantizationMethod.FP8:
            return WeightFormat(QuantizationMethod.FP8, 8, block_size=config.block_size("weight_block_size"))
        case _:
            raise config.refused(f"Weights quantized with {name[:100] or 'an unnamed method'!r} cannot be read")


def open_packed(folder: Path, weight_format: WeightFormat, tensors: Mapping[str, TensorView]) -> PackedTensors:
    """Find the packed matrices among a folder's tensors. None of their numbers is read but group indices and shapes.

    Raises:
        CheckpointError: a part of a packed matrix is missing, or has a wrong dtype or shape; the message names it.
    """
    open_matrix, marks = _READERS[weight_format.method]
    rest = dict(tensors)
    matrices: dict[str, PackedMatrix] = {}
    for name in tensors:
        mark = next((mark for mark in marks if name.endswith(mark)), None)
        if mark is None or name not in rest:
            # Not packed, or the other mark of a module that has two.
            continue
        base = name.removesuffix(mark)
        parts = _Parts(folder, base, rest)
        matrix = open_matrix(weight_format, parts)
        if matrix.name in matrices or matrix.name in rest:
            raise parts.error("its tensor 'weight' is there twice, packed and as it is")
        matrices[matrix.name] = matrix
    optional = {name for name in rest if name.endswith(_IGNORED_SUFFIXES)}
    if weight_format.method is QuantizationMethod.GPTQ:
        # Some writers gave every packed matrix a bias of zeros.
        biases = (f"{name.removesuffix('.weight')}.bias" for name in matrices)
        optional |= {name for name in biases if name in rest and not rest[name].data.any()}
    return PackedTensors(matrices, rest, frozenset(optional))


def check_not_packed(folder: Path, tensors: Mapping[str, TensorView]) -> None:
    """For folders without `quantization_config`.

    Raises:
        CheckpointError: there are packed matrices all the same.
    """
    name = next((name for name in tensors if name.endswith((".qweight", ".weight_packed"))), None)
    if name is not None:
        raise CheckpointError(
            f"{folder}: the tensor {name!r} is packed, but config.json has no quantization_config that says how. Fetch"
            " the model's own config.json.",
            path=str(folder),
        )


class _Config:
    """Typed look-ups in `quantization_config`. None counts as missing."""

    def __init__(self, values: Mapping[str, object], path: Path) -> None:
        self._values = values
        self._path = path

    def refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {why}. {ALTERNATIVES}", path=str(self._path))

    def get(self, key: str) -> object:
        return self._values.get(key)

    def text(self, key: str, default: str = "") -> str:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.refused(f"quantization_config.{key} is not a string")
        return value

    def bits(self, *allowed: int) -> int:
        value = self._values.get("bits", self._values.get("w_bit"))
        if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
            numbers = " or ".join(map(str, allowed))
            raise self.refused(f"quantization_config.bits must be {numbers}, not {repr(value)[:50]}")
        return value

    def group_size(self) -> int | None:
        value = self._values.get("group_size", self._values.get("q_group_size", -1))
        if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or 0 < value < 1 << 24):
            raise self.refused(f"quantization_config.group_size must be -1 or above 0, not {repr(value)[:50]}")
        return None if value == -1 else value

    def block_size(self, key: str) -> tuple[int, int]:
        match self._values.get(key):
            case None:
                return 128, 128
            case [int(rows), int(columns)] if 0 < rows < 1 << 24 and 0 < columns < 1 << 24:
                return rows, columns
            case _:
                raise self.refused(f"quantization_config.{key} is not two sizes")

    def objects(self, key: str) -> "Sequence[_Config]":
        """The values of an object of objects."""
        value = self._values.get(key)
        inner = list(cast(Mapping[str, object], value).values()) if isinstance(value, dict) else []
        if not inner or not all(isinstance(item, dict) for item in inner):
            raise self.refused(f"quantization_config.{key} is not an object of objects")
        return [_Config(cast(Mapping[str, object], item), self._path) for item in inner]

    def inner(self, key: str) -> "_Config":
        value = self._values.get(key)
        if not isinstance(value, dict):
            raise self.refused(f"quantization_config has no object {key!r}")
        return _Config(cast(Mapping[str, object], value), self._path)


def _gptq_format(config: _Config) -> WeightFormat:
    version = config.text("checkpoint_format", "gptq").lower()
    if version not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise config.refused(f"GPTQ weights in the layout {version[:100]!r} cannot be read, only gptq and gptq_v2")
    overrides = config.get("dynamic")
    if isinstance(overrides, dict) and any(
        not str(key).startswith("-") for key in cast(dict[object, object], overrides)
    ):
        raise config.refused("GPTQ weights whose bits or groups differ between matrices (dynamic) cannot be read")
    offset = 1 if version == "gptq" else 0
    return WeightFormat(QuantizationMethod.GPTQ, config.bits(4, 8), config.group_size(), offset)


def _awq_format(config: _Config) -> WeightFormat:
    version = config.text("version", "gemm").lower()
    if version != "gemm":
        raise config.refused(f"AWQ weights in the layout {version[:100]!r} cannot be read, only gemm")
    return WeightFormat(QuantizationMethod.AWQ, config.bits(4), config.group_size())


def _compressed_tensors_format(config: _Config) -> WeightFormat:
    allowed = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision")
    groups = config.objects("config_groups")
    for layout in (config.text("format", "pack-quantized"), *(group.text("format", allowed[0]) for group in groups)):
        if layout not in allowed:
            raise config.refused(f"compressed-tensors in the format {layout[:100]!r} cannot be read")
    if config.get("transform_config"):
        raise config.refused("compressed-tensors with transform_config (rotated weights) cannot be read")
    sparsity = config.get("sparsity_config")
    if sparsity and (
        not isinstance(sparsity, dict) or config.inner("sparsity_config").text("format", "dense") != "dense"
    ):
        raise config.refused("compressed-tensors with sparse weights cannot be read")
    all_bits: set[object] = set()
    for weights in (group.inner("weights") for group in groups):
        kind, bits = weights.text("type", "int"), weights.get("num_bits")
        all_bits.add(bits)
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise config.refused(
                f"compressed-tensors of the type {kind[:50]} with {repr(bits)[:50]} bits cannot be read"
            )
    bits = cast(int, all_bits.pop()) if len(all_bits) == 1 else 0
    blocks = {group.inner("weights").block_size("block_structure") for group in groups}
    if len(blocks) > 1:
        raise config.refused("compressed-tensors with blocks of several sizes cannot be read")
    return WeightFormat(QuantizationMethod.COMPRESSED_TENSORS, bits, block_size=blocks.pop())


class _Parts:
    """The tensors of one module, taken out of the folder's as they are asked for."""

    def __init__(self, folder: Path, base: str, tensors: dict[str, TensorView]) -> None:
        self.base = base
        self._folder = folder
        self._tensors = tensors

    def error(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: the packed matrix {self.base!r} cannot be read: {why}.", path=str(self._folder)
        )

    def take(self, suffix: str, *dtypes: TensorDType) -> TensorView:
        tensor = self.take_optional(suffix, *dtypes)
        if tensor is None:
            raise self.error(f"it has no tensor {suffix!r}")
        return tensor

    def take_optional(self, suffix: str, *dtypes: TensorDType) -> TensorView | None:
        tensor = self._tensors.pop(f"{self.base}.{suffix}", None)
        if tensor is not None and tensor.dtype not in dtypes:
            names = " or ".join(dtypes)
            raise self.error(f"its tensor {suffix!r} has the type {tensor.dtype}, not {names}")
        return tensor

    def has(self, suffix: str) -> bool:
        return f"{self.base}.{suffix}" in self._tensors

    def matrix(self, suffix: str, *dtypes: TensorDType, shape: tuple[int, int] | None = None) -> NDArray[np.generic]:
        """A matrix's numbers, as they are stored."""
        tensor = self.take(suffix, *dtypes)
        if shape is not None and tensor.shape != shape:
            raise self.error(f"its tensor {suffix!r} has the shape {list(tensor.shape)}, not {list(shape)}")
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise self.error(f"its tensor {suffix!r} has the shape {list(tensor.shape)}, which is no matrix's")
        return tensor.data.view(_NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape)

    def words(self, suffix: str, shape: tuple[int, int] | None = None) -> NDArray[np.uint32]:
        return cast(NDArray[np.uint32], self.matrix(suffix, TensorDType.I32, TensorDType.U32, shape=shape))

    def scales(self, suffix: str) -> TensorView:
        return self.take(suffix, *_FLOAT_TYPES)


_FLOAT_TYPES = (TensorDType.F16, TensorDType.BF16, TensorDType.F32)
_NUMPY_TYPES: Mapping[TensorDType, str] = {
    TensorDType.I8: "i1",
    TensorDType.I32: "<u4",
    TensorDType.U32: "<u4",
    TensorDType.F16: "<f2",
    TensorDType.BF16: "<u2",
    TensorDType.F32: "<f4",
}


def _as_floats(tensor: TensorView, values: NDArray[np.generic]) -> Floats:
    if tensor.dtype is TensorDType.BF16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _stored(tensor: TensorView, shape: tuple[int, ...]) -> NDArray[np.generic]:
    return tensor.data.view(_NUMPY_TYPES[tensor.dtype]).reshape(shape)


def _split_words(words: NDArray[np.uint32], bits: int) -> Codes:
    """[rows, words] to [rows, words * 32 / bits]: each word's lowest bits first."""
    as_bytes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return as_bytes
    codes = np.empty((*as_bytes.shape, 2), np.uint8)
    np.bitwise_and(as_bytes, 15, out=codes[:, :, 0])
    np.right_shift(as_bytes, 4, out=codes[:, :, 1])
    return codes.reshape(len(words), -1)


def _groups_in_order(parts: _Parts, num_columns: int, num_groups: int, group_size: int | None) -> NDArray[np.int64]:
    size = num_columns if group_size is None else group_size
    if num_groups != -(-num_columns // size):
        raise parts.error(f"it has scales for {num_groups} groups, but {num_columns} columns in groups of {size}")
    return np.arange(num_columns) // size


def _sorted_groups(parts: _Parts, suffix: str, num_columns: int, num_groups: int) -> NDArray[np.int64] | None:
    """What `g_idx` says; None where it is missing."""
    tensor = parts.take_optional(suffix, TensorDType.I32)
    if tensor is None:
        return None
    if tensor.shape != (num_columns,):
        raise parts.error(f"its tensor {suffix!r} has the shape {list(tensor.shape)}, not [{num_columns}]")
    groups = tensor.data.view("<i4").astype(np.int64)
    if groups.min() < 0 or groups.max() >= num_groups:
        raise parts.error(f"its tensor {suffix!r} names groups that are not among its {num_groups}")
    return groups


def _open_gptq(weight_format: WeightFormat, parts: _Parts) -> QuantizedMatrix:
    """`qweight` [columns * bits / 32, rows], words that run down the columns; `scales` [groups, rows]; `qzeros`
    [groups, rows * bits / 32], words that run along the rows; `g_idx` [columns] where columns were sorted.
    """
    bits, offset = weight_format.bits, weight_format.zero_offset
    words = parts.words("qweight")
    num_columns, num_rows = len(words) * 32 // bits, words.shape[1]
    scales = parts.scales("scales")
    if len(scales.shape) != 2 or scales.shape[1] != num_rows:
        raise parts.error(f"its scales have the shape {list(scales.shape)}, but it has {num_rows} rows")
    num_groups = scales.shape[0]
    zero_words = parts.words("qzeros", (num_groups, -(-num_rows * bits // 32)))
    in_order = _groups_in_order(parts, num_columns, num_groups, weight_format.group_size)
    groups = _sorted_groups(parts, "g_idx", num_columns, num_groups)
    stored = _stored(scales, scales.shape)
    return QuantizedMatrix(
        name=f"{parts.base}.weight",
        num_rows=num_rows,
        num_columns=num_columns,
        bits=bits,
        num_groups=num_groups,
        column_groups=in_order if groups is None else groups,
        has_groups_in_order=groups is None or np.array_equal(groups, in_order),
        read_codes=lambda rows: _split_words(words[:, rows].T, bits),
        read_scales=lambda rows: _as_floats(scales, stored[:, rows]).T,
        read_zeros=lambda rows: _split_words(zero_words, bits)[:, rows].T.astype(np.int32) + offset,
    )


def _open_awq(weight_format: WeightFormat, parts: _Parts) -> QuantizedMatrix:
    """`qweight` [columns, rows / 8] and `qzeros` [groups, rows / 8], words of eight rows in AWQ's order; `scales`
    [groups, rows].
    """
    words = parts.words("qweight")
    num_columns, num_rows = len(words), words.shape[1] * 8
    scales = parts.scales("scales")
    if len(scales.shape) != 2 or scales.shape[1] != num_rows:
        raise parts.error(f"its scales have the shape {list(scales.shape)}, but it has {num_rows} rows")
    num_groups = scales.shape[0]
    zero_words = parts.words("qzeros", (num_groups, words.shape[1]))
    stored = _stored(scales, scales.shape)

    def eights(packed: NDArray[np.uint32], rows: RowRange) -> Codes:
        """[rows, length] of [length, all rows / 8]."""
        some = np.ascontiguousarray(packed[:, rows.start // 8 : -(-rows.stop // 8)].T)
        codes = np.empty((len(some), 8, some.shape[1]), np.uint8)
        for place, row in enumerate(_AWQ_ORDER):
            np.bitwise_and(some >> np.uint32(4 * place), 15, out=codes[:, row], casting="unsafe")
        return codes.reshape(-1, some.shape[1])

    return QuantizedMatrix(
        name=f"{parts.base}.weight",
        num_rows=num_rows,
        num_columns=num_columns,
        bits=4,
        num_groups=num_groups,
        column_groups=_groups_in_order(parts, num_columns, num_groups, weight_format.group_size),
        has_groups_in_order=True,
        read_codes=lambda rows: eights(words, rows),
        read_scales=lambda rows: _as_floats(scales, stored[:, rows]).T,
        read_zeros=lambda rows: eights(zero_words, rows).astype(np.int32),
    )


def _open_compressed(weight_format: WeightFormat, parts: _Parts) -> PackedMatrix:
    """`weight_packed` [rows, columns * bits / 32], words that run along the rows, each number plus half its range, and
    `weight_shape`; or `weight`, bytes. `weight_scale` [rows, groups], [rows, 1], [1] or, of floats, for blocks.
    `weight_zero_point` as the scales, or packed down the rows. `weight_g_idx` [columns] where columns were sorted.
    """
    shape = parts.take_optional("weight_shape", TensorDType.I64, TensorDType.I32)
    if shape is None:
        floats = parts.take_optional("weight", TensorDType.I8, *_FLOAT8_TABLES)
        if floats is None:
            raise parts.error("it has neither 'weight_packed' with 'weight_shape' nor 'weight'")
        if floats.dtype is not TensorDType.I8:
            return _open_scaled(weight_format, parts, floats, "weight_scale")
        stored_codes = _bytes_of(parts, floats)
        num_rows, num_columns = stored_codes.shape
        bits = 8

        def codes(rows: RowRange) -> Codes:
            return stored_codes[rows] ^ np.uint8(128)
    else:
        if shape.shape != (2,):
            raise parts.error(f"its tensor 'weight_shape' has the shape {list(shape.shape)}, not [2]")
        num_rows, num_columns = (
            int(size) for size in shape.data.view("<i8" if shape.dtype is TensorDType.I64 else "<i4")
        )
        words = parts.words("weight_packed")
        if num_rows != len(words) or num_columns <= 0:
            raise parts.error(f"its weight_shape is [{num_rows}, {num_columns}], but it has {len(words)} rows")
        fitting = [bits for bits in (4, 8) if -(-num_columns * bits // 32) == words.shape[1]]
        if len(fitting) != 1:
            raise parts.error(f"{words.shape[1]} words do not hold {num_columns} numbers of 4 or 8 bits")
        (bits,) = fitting

        def codes(rows: RowRange) -> Codes:
            return _split_words(words[rows], bits)[:, :num_columns]

    middle = 1 << (bits - 1)
    scales = parts.scales("weight_scale")
    scale_shape = _scale_shape(parts, scales, num_rows)
    num_groups = scale_shape[1]
    stored = np.broadcast_to(_stored(scales, scale_shape), (num_rows, num_groups))
    groups = _sorted_groups(parts, "weight_g_idx", num_columns, num_groups)
    if groups is None and num_columns % num_groups:
        raise parts.error(f"{num_columns} columns cannot be split into {num_groups} groups")
    in_order = np.arange(num_columns) * num_groups // num_columns
    return QuantizedMatrix(
        name=f"{parts.base}.weight",
        num_rows=num_rows,
        num_columns=num_columns,
        bits=bits,
        num_groups=num_groups,
        column_groups=in_order if groups is None else groups,
        has_groups_in_order=groups is None or np.array_equal(groups, in_order),
        read_codes=codes,
        read_scales=lambda rows: _as_floats(scales, stored[rows]),
        read_zeros=_compressed_zeros(parts, (num_rows, num_groups), scale_shape, bits, middle),
    )


def _scale_shape(parts: _Parts, scales: TensorView, num_rows: int) -> tuple[int, int]:
    """[rows, groups] or [1, 1]."""
    match scales.shape:
        case () | (1,) | (1, 1):
            return 1, 1
        case (rows,) if rows == num_rows:
            return rows, 1
        case (rows, groups) if rows == num_rows and groups > 0:
            return rows, groups
        case _:
            raise parts.error(f"its scales have the shape {list(scales.shape)}, but it has {num_rows} rows")


def _compressed_zeros(
    parts: _Parts, shape: tuple[int, int], scale_shape: tuple[int, int], bits: int, middle: int
) -> Callable[[RowRange], NDArray[np.int32]]:
    tensor = parts.take_optional("weight_zero_point", TensorDType.I8, TensorDType.I32)
    if tensor is None:
        return lambda rows: np.full((rows.stop - rows.start, shape[1]), middle, np.int32)
    num_rows, num_groups = shape
    if tensor.dtype is TensorDType.I32:
        packed_shape = (-(-num_rows * bits // 32), num_groups)
        if tensor.shape != packed_shape:
            raise parts.error(f"its zero points have the shape {list(tensor.shape)}, not {list(packed_shape)}")
        words = tensor.data.view("<u4").reshape(packed_shape)
        return lambda rows: _split_words(words.T, bits).T[rows].astype(np.int32)
    if int(np.prod(tensor.shape)) != scale_shape[0] * scale_shape[1]:
        raise parts.error(f"its zero points have the shape {list(tensor.shape)}, and its scales {list(scale_shape)}")
    zeros = np.broadcast_to(tensor.data.view(np.int8).reshape(scale_shape), shape)
    return lambda rows: zeros[rows].astype(np.int32) + middle


def _bytes_of(parts: _Parts, tensor: TensorView) -> Codes:
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise parts.error(f"its weight has the shape {list(tensor.shape)}, which is no matrix's")
    return tensor.data.reshape(tensor.shape)


def _open_fp8(weight_format: WeightFormat, parts: _Parts) -> ScaledMatrix:
    """`weight`, floats of 8 bits, and `weight_scale_inv` for blocks of rows and columns, or `weight_scale`. Both
    multiply.
    """
    weight = parts.take("weight", *_FLOAT8_TABLES)
    return _open_scaled(
        weight_format, parts, weight, "weight_scale_inv" if parts.has("weight_scale_inv") else "weight_scale"
    )


def _open_scaled(weight_format: WeightFormat, parts: _Parts, weight: TensorView, scale_suffix: str) -> ScaledMatrix:
    stored = _bytes_of(parts, weight)
    num_rows, num_columns = stored.shape
    tensor = parts.scales(scale_suffix)
    shape = (*tensor.shape, 1, 1)[:2] if len(tensor.shape) <= 2 else None
    if shape is None or not (0 < shape[0] <= num_rows and 0 < shape[1] <= num_columns):
        raise parts.error(f"its scales have the shape {list(tensor.shape)}, its weight {list(weight.shape)}")
    scales = _as_floats(tensor, _stored(tensor, shape))
    if not np.isfinite(scales).all():
        raise parts.error("one of its scales is infinite or not a number")
    sizes = [
        size if count == 1 else 1 if count == size else block
        for size, count, block in zip(stored.shape, shape, weight_format.block_size, strict=True)
    ]
    if any(-(-size // block) != count for size, block, count in zip(stored.shape, sizes, shape, strict=True)):
        raise parts.error(f"its scales have the shape {list(tensor.shape)}, its weight {list(weight.shape)}")
    return ScaledMatrix(
        name=f"{parts.base}.weight",
        num_rows=num_rows,
        num_columns=num_columns,
        bytes=stored,
        table=_FLOAT8_TABLES[weight.dtype],
        scales=scales,
        block_rows=sizes[0],
        block_columns=sizes[1],
    )


def _float8_table(num_exponent_bits: int, bias: int) -> Floats:
    """All floats of 8 bits without infinities: the largest exponent is ordinary, but with all bits set NaN."""
    codes = np.arange(256, dtype=np.int64)
    num_fraction_bits = 7 - num_exponent_bits
    exponents = codes >> num_fraction_bits & (1 << num_exponent_bits) - 1
    fractions = (codes & (1 << num_fraction_bits) - 1) / 2**num_fraction_bits
    # The smallest exponent has no leading 1.
    values = np.ldexp(fractions + (exponents > 0), np.maximum(exponents, 1) - bias)
    values[codes & 127 == 127] = np.nan
    return (values * np.where(codes & 128, -1, 1)).astype(np.float32)


_FLOAT8_TABLES: Mapping[TensorDType, Floats] = {
    TensorDType.F8_E4M3: _float8_table(4, 7),
    # The upper half of a half.
    TensorDType.F8_E5M2: (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32),
}
_READERS: Mapping[QuantizationMethod, tuple[Callable[[WeightFormat, _Parts], PackedMatrix], Sequence[str]]] = {
    QuantizationMethod.GPTQ: (_open_gptq, (".qweight",)),
    QuantizationMethod.AWQ: (_open_awq, (".qweight",)),
    QuantizationMethod.COMPRESSED_TENSORS: (_open_compressed, (".weight_packed", ".weight_scale")),
    QuantizationMethod.FP8: (_open_fp8, (".weight_scale_inv", ".weight_scale")),
}
"""What opens a matrix, and the ends of the names of tensors that only packed matrices have."""
