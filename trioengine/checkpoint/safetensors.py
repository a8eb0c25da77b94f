"""Reads safetensors files, single or sharded, as views of the mapped files.

A model file is untrusted input: every length and offset is checked against the size of the file before it is used,
and an index can only name files of its own folder. The format: https://huggingface.co/docs/safetensors

This module does not know what the tensors mean and converts no numbers.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import cast

import attrs
import numpy as np
from numpy.typing import NDArray

from trioengine.checkpoint.gguf import map_file
from trioengine.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The limit that the format's own implementation has."""


class TensorDType(StrEnum):
    """How a tensor's numbers are stored. Values are the names in the file format."""

    BOOL = "BOOL"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    I64 = "I64"
    U64 = "U64"
    F64 = "F64"
    C64 = "C64"

    @property
    def num_bytes(self) -> int:
        """Bytes per number."""
        return _DTYPE_BYTES[self]


_DTYPE_BYTES: Mapping[TensorDType, int] = {
    **dict.fromkeys(
        (
            TensorDType.BOOL,
            TensorDType.U8,
            TensorDType.I8,
            TensorDType.F8_E5M2,
            TensorDType.F8_E4M3,
            TensorDType.F8_E8M0,
        ),
        1,
    ),
    **dict.fromkeys((TensorDType.I16, TensorDType.U16, TensorDType.F16, TensorDType.BF16), 2),
    **dict.fromkeys((TensorDType.I32, TensorDType.U32, TensorDType.F32), 4),
    **dict.fromkeys((TensorDType.I64, TensorDType.U64, TensorDType.F64, TensorDType.C64), 8),
}


@attrs.frozen
class TensorView:
    """One tensor as it lies in its file."""

    name: str
    dtype: TensorDType
    shape: tuple[int, ...]
    data: NDArray[np.uint8] = attrs.field(repr=False, eq=False)
    """[num_bytes], a read-only view of the mapped file, which lives as long as any view of it."""


def open_safetensors(folder: str | os.PathLike[str]) -> Mapping[str, TensorView]:
    """Map every tensor of a model folder, by name.

    Reads the files that `model.safetensors.index.json` lists where there is one, else `model.safetensors`, else every
    `*.safetensors` in the folder. An index whose files are gone counts for nothing beside a `model.safetensors`: it is
    what transformers leaves where it saves in one file what were several.

    Raises:
        CheckpointError: no such file, a shard is missing, a tensor is missing, appears twice, or a file is damaged.
    """
    folder = Path(folder)
    index_path = folder / INDEX_NAME
    if index_path.exists():
        names_by_file = _read_index(index_path)
        if all((folder / name).exists() for name in names_by_file) or not (folder / SINGLE_NAME).exists():
            return _open_indexed(folder, names_by_file)
    paths = [folder / SINGLE_NAME] if (folder / SINGLE_NAME).exists() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} has no *.safetensors file.", path=str(folder))
    tensors: dict[str, TensorView] = {}
    for path in paths:
        for tensor in read_safetensors_file(path):
            if tensor.name in tensors:
                raise _broken(path, f"the tensor {tensor.name!r} is in another file of the folder too")
            tensors[tensor.name] = tensor
    return MappingProxyType(tensors)


def _read_index(index_path: Path) -> Mapping[str, set[str]]:
    """The names of the tensors in each file."""
    index = _parse_object(index_path, bytes(map_file(index_path)))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise _broken(index_path, "it has no object 'weight_map'")
    names_by_file: dict[str, set[str]] = {}
    for name, file_name in cast(dict[str, object], weight_map).items():
        if not isinstance(file_name, str) or not file_name or file_name in (".", "..") or set(file_name) & set("/\\\0"):
            raise _broken(index_path, f"the tensor {name!r} is not in a file of this folder")
        names_by_file.setdefault(file_name, set()).add(name)
    return names_by_file


def _open_indexed(folder: Path, names_by_file: Mapping[str, set[str]]) -> Mapping[str, TensorView]:
    tensors: dict[str, TensorView] = {}
    for file_name, names in names_by_file.items():
        path = folder / file_name
        if not path.exists():
            raise CheckpointError(f"{path} is missing; {INDEX_NAME} lists it. Fetch it.", path=str(path))
        # A file may hold tensors that the index leaves out, or places in another file: the index decides.
        found = {tensor.name: tensor for tensor in read_safetensors_file(path) if tensor.name in names}
        if missing := names - found.keys():
            raise _broken(path, f"the tensor {min(missing)!r} is not in it, against {INDEX_NAME}")
        tensors.update(found)
    return MappingProxyType(tensors)


def read_safetensors_file(path: Path) -> Iterator[TensorView]:
    """Map the tensors of one file. What is wrong with the file may show only at the end.

    Raises:
        CheckpointError: the file cannot be read, or is damaged.
    """
    view = map_file(path)
    if view.size < 8:
        raise _broken(path, "it is shorter than 8 bytes")
    header_bytes = int.from_bytes(bytes(view[:8]), "little")
    if header_bytes > min(MAX_HEADER_BYTES, view.size - 8):
        raise _broken(path, f"its header of {header_bytes} bytes does not fit (is it a partial download?)")
    header = _parse_object(path, bytes(view[8 : 8 + header_bytes]))
    data = view[8 + header_bytes :]
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _parse_entry(path, name, entry)
        if not begin <= end <= data.size:
            raise _broken(path, f"the tensor {name!r} lies at {begin}..{end} of {data.size} bytes")
        if math.prod(shape) * dtype.num_bytes != end - begin:
            raise _broken(path, f"the tensor {name!r} of shape {list(shape)} has {end - begin} bytes")
        spans.append((begin, end))
        yield TensorView(name, dtype, shape, data[begin:end])
    spans.sort()
    for (_, end), (begin, _) in itertools.pairwise(spans):
        if begin < end:
            raise _broken(path, f"two tensors overlap at byte {begin} of the data")


def _parse_entry(path: Path, name: str, entry: object) -> tuple[TensorDType, tuple[int, ...], int, int]:
    if not isinstance(entry, dict):
        raise _broken(path, f"the entry of tensor {name!r} is not an object")
    fields = cast(dict[str, object], entry)
    try:
        dtype = TensorDType(cast(str, fields.get("dtype")))
    except ValueError as error:
        raise _broken(path, f"the tensor {name!r} has the unknown dtype {fields.get('dtype')!r}") from error
    shape = _natural_numbers(fields.get("shape"))
    offsets = _natural_numbers(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise _broken(path, f"the tensor {name!r} has no usable shape and data_offsets")
    return dtype, shape, offsets[0], offsets[1]


def _natural_numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    items = cast(list[object], value)
    numbers = tuple(
        item for item in items if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63
    )
    return numbers if len(numbers) == len(items) <= 64 else None


def _parse_object(path: Path, text: bytes) -> dict[str, object]:
    def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        parsed = dict(pairs)
        if len(parsed) != len(pairs):
            raise _broken(path, "its JSON has a key twice")
        return parsed

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its JSON cannot be read ({type(error).__name__})") from error
    if not isinstance(parsed, dict):
        raise _broken(path, "its JSON is not an object")
    return cast(dict[str, object], parsed)


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}.", path=str(path))
