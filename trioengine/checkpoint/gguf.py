"""Reads GGUF (versions 2 and 3, little-endian): metadata decoded, tensor data as views of the mapped file.

A model file is untrusted input. Every count, length, offset, type and alignment is checked against the size of the
file before it is used, so a broken file is a `CheckpointError` that names the place, never a crash, a hang or an
allocation larger than a small multiple of the file. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

This module does not know what keys or tensors mean, and does not dequantize.
"""

import math
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1 << 16
MAX_ARRAY_ELEMENTS = 1 << 22
"""In all arrays of one file together. The largest vocabularies in use have 300,000 tokens and as many merges."""
DEFAULT_ALIGNMENT_BYTES = 32
MAX_ALIGNMENT_BYTES = 1 << 20

GGUFScalar: TypeAlias = bool | int | float | str
GGUFValue: TypeAlias = GGUFScalar | tuple[str, ...] | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...]
Place: TypeAlias = str


class GGMLType(IntEnum):
    """How a tensor's numbers are stored. Values are those of the file format."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39

    @property
    def block_size(self) -> int:
        """Numbers per block."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return _BLOCKS[self][1]


_BLOCKS: Mapping[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 40),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.MXFP4: (32, 17),
}

_SCALAR_FORMATS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TYPE_STRING = 8
_TYPE_ARRAY = 9
_MIN_ENTRY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_U64 = struct.Struct("<Q")


@attrs.frozen
class GGUFTensor:
    """One tensor, still in the form it has in the file."""

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    """In numpy's order: the last dimension is contiguous (the file lists them the other way round)."""
    data: NDArray[np.uint8] = attrs.field(repr=False, eq=False)
    """[num_bytes], a read-only view of the mapped file, which lives as long as any view of it."""


@attrs.frozen
class GGUFFile:
    """What `open_gguf` found. Nothing needs closing: the mapping goes with the last view of it."""

    path: Path
    metadata: Mapping[str, GGUFValue] = attrs.field(repr=False)
    tensors: Mapping[str, GGUFTensor] = attrs.field(repr=False)
    """By name, in the order of the file."""


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the metadata of a GGUF file and map its tensors.

    Reading takes about 0.1 s for a vocabulary of 50,000 tokens, whatever the size of the tensors.

    Raises:
        CheckpointError: the file is missing, is no GGUF file, or is damaged; the message names the place.
    """
    path = Path(path)
    view = map_file(path)
    if view.size < 4 or bytes(view[:4]) != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it does not start with 'GGUF'.", path=str(path))
    reader = _Reader(path, view)
    (version,) = reader.scalars("I", "the version")
    if version not in VERSIONS:
        # A big-endian file shows its version in the upper bytes.
        kind = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
        raise reader.broken(f"it is {kind}; versions 2 and 3, little-endian, can be read")
    num_tensors, num_entries = reader.scalars("QQ", "the counts")
    reader.check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors")
    reader.check_count(num_entries, _MIN_ENTRY_BYTES, "metadata entries")

    metadata: dict[str, GGUFValue] = {}
    for _ in range(num_entries):
        key = reader.string("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise reader.broken(f"the metadata key {key!r} appears twice")
        metadata[key] = reader.value(key)
    num_files = metadata.get("split.count", 1)
    if isinstance(num_files, int) and num_files > 1:
        raise CheckpointError(
            f"{path} is one of {num_files} files that a model was split into. Put them together with llama.cpp's"
            " `llama-gguf-split --merge`, and give the file that it writes.",
            path=str(path),
        )

    infos = [reader.tensor_info() for _ in range(num_tensors)]
    tensors = _locate_tensors(reader, infos, _alignment_bytes(reader, metadata))
    return GGUFFile(path, MappingProxyType(metadata), MappingProxyType(tensors))


def map_file(path: Path) -> NDArray[np.uint8]:
    """Map a regular file read-only: [num_bytes], uint8. An empty file gives an empty array.

    A file that is cut short while it is mapped ends the process at the next access (SIGBUS); nothing can prevent that.

    Raises:
        CheckpointError: there is no such file, it is not a regular file, or it cannot be read.
    """
    try:
        # Opening a named pipe would block for a writer, so the kind is asked first and again on what was opened.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path} is not a regular file.", path=str(path))
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return np.empty(0, np.uint8)
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", path=str(path)) from error
    return np.frombuffer(mapping, np.uint8)


@attrs.frozen
class _TensorInfo:
    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _Reader:
    """A position in the file. Every read checks what is left first."""

    def __init__(self, path: Path, view: NDArray[np.uint8]) -> None:
        self.path = path
        self.view = view
        self.buffer = view.data
        self.size = view.size
        self.position = len(MAGIC)
        self.num_elements = 0

    def broken(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged near byte {self.position}: {why}.", path=str(self.path))

    def take(self, num_bytes: int, what: str) -> int:
        """Advance over num_bytes and return where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.broken(f"the file ends inside {what}")
        self.position = start + num_bytes
        return start

    def scalars(self, formats: str, what: str) -> tuple[int, ...]:
        layout = struct.Struct("<" + formats)
        return layout.unpack_from(self.buffer, self.take(layout.size, what))

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        if count * min_bytes > self.size - self.position:
            raise self.broken(f"{count} {what} cannot fit in the file")

    def string(self, what: str, max_bytes: int | None = None) -> str:
        (length,) = self.scalars("Q", what)
        if max_bytes is not None and length > max_bytes:
            raise self.broken(f"{what} of {length} bytes is too long")
        start = self.take(length, what)
        try:
            return str(self.buffer[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} is not UTF-8") from error

    def value(self, key: str) -> GGUFValue:
        what = f"the value of {key!r}"
        (value_type,) = self.scalars("I", what)
        if value_type == _TYPE_STRING:
            return self.string(what)
        if value_type == _TYPE_ARRAY:
            return self.array(what)
        if (code := _SCALAR_FORMATS.get(value_type)) is None:
            raise self.broken(f"{what} has the unknown type {value_type}")
        return self.scalars("B", what)[0] != 0 if code == "?" else self.scalars(code, what)[0]

    def array(self, what: str) -> GGUFValue:
        element_type, count = self.scalars("IQ", what)
        code = _SCALAR_FORMATS.get(element_type)
        if code is None and element_type != _TYPE_STRING:
            kind = "arrays" if element_type == _TYPE_ARRAY else f"the unknown type {element_type}"
            raise self.broken(f"{what} is an array of {kind}")
        element_bytes = 8 if code is None else struct.calcsize("<" + code)
        self.check_count(count, element_bytes, f"elements of {what}")
        self.num_elements += count
        if self.num_elements > MAX_ARRAY_ELEMENTS:
            raise self.broken(f"{what} brings its arrays over {MAX_ARRAY_ELEMENTS} elements")
        if code is None:
            return self.strings(count, what)
        start = self.take(count * element_bytes, what)
        numbers = np.frombuffer(self.buffer, "<u1" if code == "?" else "<" + code, count, start)
        return tuple((numbers != 0).tolist() if code == "?" else numbers.tolist())

    def strings(self, count: int, what: str) -> tuple[str, ...]:
        """As `string`, count times; spelled out because vocabularies have 100,000 of them."""
        buffer, size, position = self.buffer, self.size, self.position
        unpack = _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack(buffer, position)
                position += 8
                if length > size - position:
                    self.position = position
                    raise self.broken(f"the file ends inside {what}")
                end = position + length
                strings.append(str(buffer[position:end], "utf-8"))
                position = end
        except struct.error as error:
            self.position = position
            raise self.broken(f"the file ends inside {what}") from error
        except UnicodeDecodeError as error:
            self.position = position
            raise self.broken(f"element {len(strings)} of {what} is not UTF-8") from error
        self.position = position
        return tuple(strings)

    def tensor_info(self) -> _TensorInfo:
        name = self.string("a tensor name", MAX_NAME_BYTES)
        what = f"the description of tensor {name!r}"
        (num_dimensions,) = self.scalars("I", what)
        if num_dimensions > MAX_DIMENSIONS:
            raise self.broken(f"tensor {name!r} has {num_dimensions} dimensions")
        dimensions = self.scalars("Q" * num_dimensions, what)
        type_number, offset = self.scalars("IQ", what)
        try:
            ggml_type = GGMLType(type_number)
        except ValueError as error:
            raise self.broken(f"tensor {name!r} has the unknown type {type_number}") from error
        num_values = math.prod(dimensions)
        row = dimensions[0] if dimensions else 1
        if num_values == 0 or row % ggml_type.block_size:
            raise self.broken(f"tensor {name!r} of type {ggml_type.name} has the dimensions {dimensions}")
        num_bytes = num_values // ggml_type.block_size * ggml_type.block_bytes
        if num_bytes > self.size:
            raise self.broken(f"tensor {name!r} with the dimensions {dimensions} is larger than the file")
        return _TensorInfo(name, ggml_type, tuple(reversed(dimensions)), offset, num_bytes)


def _alignment_bytes(reader: _Reader, metadata: Mapping[str, GGUFValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or isinstance(alignment, bool):
        raise reader.broken("general.alignment is not an integer")
    if not 0 < alignment <= MAX_ALIGNMENT_BYTES or alignment & (alignment - 1):
        raise reader.broken(f"general.alignment is {alignment}, which is no usable power of two")
    return alignment


def _locate_tensors(reader: _Reader, infos: list[_TensorInfo], alignment: int) -> dict[str, GGUFTensor]:
    data_start = (reader.position + alignment - 1) // alignment * alignment
    tensors: dict[str, GGUFTensor] = {}
    for info in infos:
        start = data_start + info.offset
        if info.offset % alignment:
            raise reader.broken(f"tensor {info.name!r} starts at {info.offset}, which is not aligned to {alignment}")
        if start + info.num_bytes > reader.size:
            raise reader.broken(f"the file ends inside tensor {info.name!r} (is it a partial download?)")
        if info.name in tensors:
            raise reader.broken(f"the tensor {info.name!r} appears twice")
        data = reader.view[start : start + info.num_bytes]
        tensors[info.name] = GGUFTensor(info.name, info.ggml_type, info.shape, data)

    previous: _TensorInfo | None = None
    for info in sorted(infos, key=lambda info: info.offset):
        if previous is not None and previous.offset + previous.num_bytes > info.offset:
            raise reader.broken(f"the tensors {previous.name!r} and {info.name!r} overlap")
        previous = info
    return tensors
