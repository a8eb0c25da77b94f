import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trioengine.checkpoint.gguf import GGMLType, GGUFFile, open_gguf
from trioengine.errors import CheckpointError


def string(text: bytes | str) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, value_type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def build(
    entries: list[bytes] = [],  # noqa: B006
    tensors: list[bytes] = [],  # noqa: B006
    data: bytes = b"",
    *,
    version: int = 3,
    num_entries: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """A file by hand, wrong wherever a test wants it to be."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def write_valid(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "日本", "", "😀"])
    writer.add_array("some.integers", [1, -2, 3])
    writer.add_array("some.floats", [0.5, 1.5])
    writer.add_array("some.flags", [True, False])
    writer.add_float32("some.float", 0.25)
    writer.add_uint64("some.large", 2**63)
    writer.add_int8("some.small", -7)
    writer.add_bool("some.flag", True)
    writer.add_tensor("weights", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("halves", np.ones((2, 2, 2), np.float16))
    rows = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    quantized = gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_part_of_a_split_model_says_what_to_do(path: Path) -> None:
    path.write_bytes(build([entry("split.count", 2, struct.pack("<H", 3))]))
    with pytest.raises(CheckpointError, match=r"one of 3 files.*llama-gguf-split --merge"):
        open_gguf(path)
    path.write_bytes(build([entry("split.count", 2, struct.pack("<H", 1))]))
    assert open_gguf(path).metadata["split.count"] == 1


def test_reads_what_the_gguf_package_wrote(path: Path) -> None:
    write_valid(path)
    file = open_gguf(path)
    assert dict(file.metadata) == {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": ("a", "日本", "", "😀"),
        "some.integers": (1, -2, 3),
        "some.floats": (0.5, 1.5),
        "some.flags": (True, False),
        "some.float": 0.25,
        "some.large": 2**63,
        "some.small": -7,
        "some.flag": True,
    }
    assert file.metadata["some.flag"] is True
    assert {name: (t.ggml_type, t.shape) for name, t in file.tensors.items()} == {
        "weights": (GGMLType.F32, (3, 4)),
        "halves": (GGMLType.F16, (2, 2, 2)),
        "packed": (GGMLType.Q8_0, (2, 64)),
    }
    weights = file.tensors["weights"].data
    assert weights.view(np.float32).tolist() == list(range(12))
    assert not weights.flags.writeable
    expected = {t.name: bytes(t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}
    assert {name: t.data.tobytes() for name, t in file.tensors.items()} == expected


def test_the_data_outlives_the_file_object(path: Path) -> None:
    write_valid(path)
    data = open_gguf(path).tensors["weights"].data
    path.unlink()
    assert data.view(np.float32).sum() == 66


def test_a_chosen_alignment_is_kept(path: Path) -> None:
    alignment = entry("general.alignment", 4, struct.pack("<I", 64))
    head = b"GGUF" + struct.pack("<IQQ", 2, 1, 1) + alignment + tensor("x", [1], offset=64)
    path.write_bytes(head + bytes(-len(head) % 64) + bytes(64) + struct.pack("<f", 1.5))
    assert open_gguf(path).tensors["x"].data.view(np.float32).tolist() == [1.5]


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    sizes = {kind.name: kind for kind in gguf.GGMLQuantizationType}
    for kind in GGMLType:
        theirs = sizes[kind.name]
        assert int(theirs) == kind
        assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block_size, kind.block_bytes)


U8 = 0
STRING = 8
ARRAY = 9
BROKEN = {
    "empty": (b"", "does not start"),
    "another format": (b"PK\3\4" + bytes(100), "does not start"),
    "only the magic": (b"GGUF", "ends inside the version"),
    "version 1": (build(version=1), "version 1"),
    "version 4": (build(version=4), "version 4"),
    "big-endian": (build(version=3 << 24), "big-endian"),
    "too many entries": (build(num_entries=2**60), "cannot fit"),
    "too many tensors": (build(num_tensors=2**64 - 1), "cannot fit"),
    "a key twice": (build([entry("k", U8, b"\1"), entry("k", U8, b"\1")]), "appears twice"),
    "a key that is no text": (build([entry(b"\xff", U8, b"\1")]), "not UTF-8"),
    "a key without end": (build([struct.pack("<Q", 2**63) + b"k" * 20]), "too long"),
    "a value that is no text": (build([entry("k", STRING, string(b"\xc3"))]), "not UTF-8"),
    "a text without end": (build([entry("k", STRING, struct.pack("<Q", 10**6))]), "ends inside"),
    "an unknown type": (build([entry("k", 13, bytes(16))]), "unknown type 13"),
    "arrays in arrays": (build([entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64))]), "array of arrays"),
    "an array of nothing known": (build([entry("k", ARRAY, struct.pack("<IQ", 99, 1))]), "unknown type 99"),
    "a long array": (build([entry("k", ARRAY, struct.pack("<IQ", U8, 2**62))]), "cannot fit"),
    "a long array of text": (build([entry("k", ARRAY, struct.pack("<IQ", STRING, 2**61))]), "cannot fit"),
    "a text in an array without end": (
        build([entry("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2**64 - 1))]),
        "ends inside",
    ),
    "a text in an array that is no text": (
        build([entry("k", ARRAY, struct.pack("<IQ", STRING, 2) + string("a") + string(b"\x80"))]),
        "element 1 .* not UTF-8",
    ),
    "an alignment of 0": (build([entry("general.alignment", 4, bytes(4))]), "alignment is 0"),
    "an alignment of 24": (build([entry("general.alignment", 4, struct.pack("<I", 24))]), "alignment is 24"),
    "an alignment that is text": (build([entry("general.alignment", STRING, string("x"))]), "not an integer"),
    "a huge alignment": (build([entry("general.alignment", 10, struct.pack("<Q", 2**63))]), "no usable power"),
    "a tensor twice": (build([], [tensor("x", [1]), tensor("x", [1], offset=32)], bytes(64)), "appears twice"),
    "tensors that overlap": (build([], [tensor("x", [9]), tensor("y", [1], offset=32)], bytes(64)), "overlap"),
    "tensors at one place": (build([], [tensor("x", [1]), tensor("y", [1])], bytes(64)), "overlap"),
    "an unaligned tensor": (build([], [tensor("x", [1], offset=4)], bytes(64)), "not aligned"),
    "a tensor past the end": (build([], [tensor("x", [1], offset=64)], bytes(64)), "ends inside tensor"),
    "a tensor far past the end": (build([], [tensor("x", [1], offset=2**63)], bytes(64)), "ends inside tensor"),
    "half a tensor": (build([], [tensor("x", [8])], bytes(31)), "partial download"),
    "a tensor larger than the file": (build([], [tensor("x", [2**40])], bytes(64)), "larger than the file"),
    "dimensions that overflow": (build([], [tensor("x", [2**63, 2**63, 2, 2])], bytes(64)), "larger than the file"),
    "a dimension of 0": (build([], [tensor("x", [0])], bytes(64)), "dimensions"),
    "five dimensions": (build([], [tensor("x", [1] * 5)], bytes(64)), "5 dimensions"),
    "four billion dimensions": (build([], [tensor("x", [1], num_dims=2**32 - 1)], bytes(64)), "4294967295 dimensions"),
    "an unknown tensor type": (build([], [tensor("x", [1], kind=4)], bytes(64)), "unknown type 4"),
    "a broken row": (build([], [tensor("x", [31], kind=8)], bytes(64)), "dimensions"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error_with_its_place(path: Path, name: str) -> None:
    content, words = BROKEN[name]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_gguf(path)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)


def test_too_many_elements_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may not make us build lists that are many times its size."""
    monkeypatch.setattr("trioengine.checkpoint.gguf.MAX_ARRAY_ELEMENTS", 10)
    numbers = struct.pack("<IQ", U8, 6) + bytes(6)
    path.write_bytes(build([entry("a", ARRAY, numbers)]))
    assert open_gguf(path).metadata["a"] == (0,) * 6
    path.write_bytes(build([entry("a", ARRAY, numbers), entry("b", ARRAY, numbers)]))
    with pytest.raises(CheckpointError, match="over 10 elements"):
        open_gguf(path)


def test_what_is_no_file_is_an_error(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe.gguf"
    os.mkfifo(fifo)
    for path in (tmp_path / "nothing.gguf", tmp_path, fifo):
        with pytest.raises(CheckpointError) as caught:
            open_gguf(path)
        assert caught.value.path == str(path)


def open_or_none(path: Path) -> GGUFFile | None:
    """The file, or None for the one kind of error that is allowed."""
    try:
        return open_gguf(path)
    except CheckpointError as error:
        return None if error.path == str(path) else pytest.fail(f"the error names {error.path}")


@pytest.fixture(scope="module")
def valid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "valid.gguf"
    write_valid(path)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_an_error_or_harmless(valid_file: Path, data: st.DataObject) -> None:
    """Flipped bytes, cuts and inserted numbers: a `CheckpointError`, or a file whose every view is inside it."""
    content = bytearray(valid_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "number", "insert"])):
            case "flip":
                content[at] = data.draw(st.integers(0, 255))
            case "cut":
                del content[max(at, 1) :]
            case "number":
                number = data.draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
                content[at : at + 8] = struct.pack("<Q", number)
            case _:
                content[at:at] = data.draw(st.binary(max_size=9))
    path = valid_file.parent / "damaged.gguf"
    path.write_bytes(content)
    if (file := open_or_none(path)) is not None:
        for found in file.tensors.values():
            assert found.data.size * found.ggml_type.block_size == np.prod(found.shape) * found.ggml_type.block_bytes
            assert found.data.tobytes() in bytes(content)


@given(st.binary(max_size=200))
def test_any_bytes_after_the_magic_are_an_error_or_harmless(valid_file: Path, tail: bytes) -> None:
    path = valid_file.parent / "noise.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + tail)
    file = open_or_none(path)
    assert file is None or len(file.tensors) <= len(tail)
