import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from trioengine.checkpoint.safetensors import TensorDType, open_safetensors
from trioengine.errors import CheckpointError

NAME = "model.safetensors"
INDEX = "model.safetensors.index.json"


def build(header: Any, data: bytes = b"", header_bytes: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), begin: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_safetensors_package_wrote(tmp_path: Path) -> None:
    arrays = {
        "weights": np.arange(6, dtype=np.float32).reshape(2, 3),
        "halves": np.ones((2, 2), np.float16),
        "scalar": np.array(7, np.int64),
        "nothing": np.zeros((0, 4), np.uint8),
    }
    save_file(arrays, tmp_path / NAME, metadata={"format": "pt"})
    tensors = open_safetensors(tmp_path)
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {
        "weights": (TensorDType.F32, (2, 3)),
        "halves": (TensorDType.F16, (2, 2)),
        "scalar": (TensorDType.I64, ()),
        "nothing": (TensorDType.U8, (0, 4)),
    }
    for name, array in arrays.items():
        assert tensors[name].data.tobytes() == array.tobytes()
    assert not tensors["weights"].data.flags.writeable


def test_the_index_says_which_shards_are_read(tmp_path: Path) -> None:
    save_file({"a": np.ones(1, np.float32), "stale": np.ones(1, np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(2, np.float32)}, tmp_path / "two.safetensors")
    save_file({"c": np.zeros(2, np.float32)}, tmp_path / "unlisted.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert sorted(open_safetensors(tmp_path)) == ["a", "b"]


def test_an_index_whose_files_are_gone_counts_for_nothing_beside_a_single_file(tmp_path: Path) -> None:
    """transformers leaves it where a model that was sharded is saved in one file."""
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors is missing"):
        open_safetensors(tmp_path)
    save_file({"a": np.full(1, 7, np.float32), "b": np.zeros(2, np.float32)}, tmp_path / NAME)
    assert open_safetensors(tmp_path)["a"].data.view(np.float32).tolist() == [7]
    save_file({"b": np.zeros(2, np.float32)}, tmp_path / "two.safetensors")
    assert open_safetensors(tmp_path)["a"].data.view(np.float32).tolist() == [1]


def test_without_an_index_every_file_is_read(tmp_path: Path) -> None:
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(2, np.float32)}, tmp_path / "two.safetensors")
    assert sorted(open_safetensors(tmp_path)) == ["a", "b"]
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="'a' is in another file"):
        open_safetensors(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "missing.safetensors"}}, "missing.safetensors is missing"),
        ({"weight_map": {"zz": "one.safetensors"}}, "'zz' is not in it"),
        ({"weight_map": {"a": "../one.safetensors"}}, "not in a file of this folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "not in a file of this folder"),
        ({"weight_map": {"a": ".."}}, "not in a file of this folder"),
        ({"weight_map": {"a": "a\0b"}}, "not in a file of this folder"),
        ({"weight_map": {"a": 1}}, "not in a file of this folder"),
        ({"weight_map": [1]}, "no object 'weight_map'"),
        ({}, "no object 'weight_map'"),
        ([], "not an object"),
    ],
)
def test_a_broken_index_is_an_error(tmp_path: Path, index: Any, words: str) -> None:
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        open_safetensors(tmp_path)


BROKEN = {
    "empty": (b"", "shorter than 8 bytes"),
    "a header past the end": (build({}, header_bytes=100), "does not fit"),
    "a huge header": (build({}, header_bytes=2**64 - 1), "does not fit"),
    "no JSON": (build(b"{"), "JSON cannot be read"),
    "not UTF-8": (build(b'{"\xff": 1}'), "JSON cannot be read"),
    "deep JSON": (build(b"[" * 100_000), "JSON cannot be read"),
    "a long number": (build(b'{"x": ' + b"1" * 10_000 + b"}"), "JSON cannot be read"),
    "a list": (build([]), "not an object"),
    "a name twice": (build(b'{"x": {}, "x": {}}'), "a key twice"),
    "an entry that is no object": (build({"x": 1}), "not an object"),
    "an unknown dtype": (build({"x": entry("F7")}, bytes(4)), "unknown dtype 'F7'"),
    "a dtype that is no text": (build({"x": entry([])}, bytes(4)), "unknown dtype"),
    "a negative dimension": (build({"x": entry(shape=[-1])}, bytes(4)), "no usable shape"),
    "a dimension that is a flag": (build({"x": entry(shape=[True])}, bytes(4)), "no usable shape"),
    "no shape": (build({"x": entry(shape=None)}, bytes(4)), "no usable shape"),
    "three offsets": (build({"x": entry() | {"data_offsets": [0, 4, 8]}}, bytes(8)), "no usable shape"),
    "offsets past the end": (build({"x": entry(end=8, shape=[2])}, bytes(4)), "lies at 0..8 of 4"),
    "offsets backwards": (build({"x": entry(begin=4, end=0)}, bytes(4)), "lies at 4..0"),
    "a shape that is too large": (build({"x": entry(shape=[2**40, 2**40])}, bytes(4)), "has 4 bytes"),
    "a shape that is too small": (build({"x": entry(end=8)}, bytes(8)), "has 8 bytes"),
    "tensors that overlap": (
        build({"x": entry(shape=[2], end=8), "y": entry(begin=4, end=8)}, bytes(8)),
        "overlap at byte 4",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    content, words = BROKEN[name]
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_safetensors(tmp_path)
    assert caught.value.path == str(tmp_path / NAME)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("safetensors")


@given(data=st.data())
def test_damage_is_an_error_or_harmless(folder: Path, data: st.DataObject) -> None:
    whole = {"a": np.arange(4, dtype=np.float32), "b": np.ones((2, 3), np.float16)}
    save_file(whole, folder / NAME)
    content = bytearray((folder / NAME).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[at] = data.draw(st.integers(0, 255))
        else:
            content[at:] = content[at : at + data.draw(st.integers(0, 40))] + b" "
    (folder / NAME).write_bytes(content)
    try:
        tensors = open_safetensors(folder)
    except CheckpointError as error:
        assert error.path == str(folder / NAME)  # noqa: PT017 (either outcome is right)
    else:
        assert all(t.data.size == int(np.prod(t.shape)) * t.dtype.num_bytes for t in tensors.values())
