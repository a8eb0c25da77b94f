"""Packed weights in files: the same tiles at the second start, without reading the first files; damage is noticed."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trioengine_kernels.native.library import ThreadPool  # noqa: E402
from trioengine_kernels.native.tiles import WeightTiles  # noqa: E402

from trioengine.checkpoint.locate import ModelLocation  # noqa: E402
from trioengine.config.engine import Quantization  # noqa: E402
from trioengine.models import pack_cache  # noqa: E402
from trioengine.models.loader import open_checkpoint  # noqa: E402
from trioengine.models.native_ops import NativeModel, NativeWeights, load_native_model  # noqa: E402
from trioengine.testing.native import native_library  # noqa: E402
from trioengine.testing.tiny_model import folder_tensors, tiny_model, write_folder  # noqa: E402


@pytest.fixture
def location(tmp_path: Path) -> ModelLocation:
    (tmp_path / "model").mkdir()
    model = tiny_model()
    return write_folder(tmp_path / "model", model, folder_tensors(model))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pack_cache, "MIN_BYTES", 0)
    return tmp_path / "cache" / "packed"


def load(
    location: ModelLocation, cache: Path | None, quantization: Quantization | None = Quantization.INT8
) -> NativeModel:
    library = native_library()
    checkpoint = open_checkpoint(location)
    return load_native_model(checkpoint, library, ThreadPool(library, 1), quantization, cache_folder=cache)


def all_tiles(model: NativeModel) -> list[WeightTiles]:
    """Of all matrices."""
    found: list[WeightTiles] = []

    def collect(value: Any) -> None:
        if isinstance(value, WeightTiles):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)
        elif attrs.has(type(value)):
            collect([getattr(value, field.name) for field in attrs.fields(type(value))])

    collect(model.decoder.weights)
    return found


def assert_same(found: NativeModel, expected: NativeModel) -> None:
    pairs = list(zip(all_tiles(found), all_tiles(expected), strict=True))
    assert len(pairs) > 8
    for tiles, expected_tiles in pairs:
        assert (tiles.kind, tiles.rows, tiles.columns) == (
            expected_tiles.kind,
            expected_tiles.rows,
            expected_tiles.columns,
        )
        assert np.array_equal(tiles.data, expected_tiles.data)
        assert tiles.data.ctypes.data % 64 == 0


def packed_files(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.exists() else []


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many matrices were packed since this was last asked."""
    count = 0
    matrix = NativeWeights.matrix

    def counting(self: NativeWeights, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return matrix(self, *arguments, **options)

    monkeypatch.setattr(NativeWeights, "matrix", counting)

    def since() -> int:
        nonlocal count
        found, count = count, 0
        return found

    return since


def test_the_second_start_packs_nothing(location: ModelLocation, cache: Path, packed: Callable[[], int]) -> None:
    first = load(location, cache)
    assert packed() > 8
    (path,) = packed_files(cache)
    assert path.suffix == ".pack"
    second = load(location, cache)
    assert packed() == 0
    assert_same(second, first)
    assert_same(second, load(location, None))
    assert packed_files(cache) == [path]


def test_progress_rises_to_one_both_times(location: ModelLocation, cache: Path) -> None:
    library = native_library()
    for _ in range(2):
        fractions: list[float] = []
        load_native_model(
            open_checkpoint(location),
            library,
            ThreadPool(library, 1),
            Quantization.INT8,
            report=fractions.append,
            cache_folder=cache,
        )
        assert fractions == sorted(fractions)
        assert len(set(fractions)) > 2
        assert fractions[-1] == 1.0


def test_what_is_quickly_packed_takes_no_place(location: ModelLocation, cache: Path) -> None:
    load(location, cache, None)
    assert packed_files(cache) == []


def test_each_kind_of_tiles_has_its_own_file(location: ModelLocation, cache: Path) -> None:
    load(location, cache)
    int4 = load(location, cache, Quantization.INT4)
    assert len(packed_files(cache)) == 2
    assert_same(load(location, cache, Quantization.INT4), int4)


def test_a_checkpoint_that_changed_is_packed_anew(
    location: ModelLocation, cache: Path, packed: Callable[[], int]
) -> None:
    load(location, cache)
    packed()
    model = tiny_model(seed=7)
    write_folder(location.path, model, folder_tensors(model))
    os.utime(location.path / "model.safetensors", ns=(0, 12345))
    changed = load(location, cache)
    assert packed() > 8
    assert_same(changed, load(location, None))


def test_code_that_changed_packs_anew(
    location: ModelLocation, cache: Path, packed: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(location, cache)
    packed()
    monkeypatch.setattr(pack_cache, "_code_digest", lambda: "of other code")
    load(location, cache)
    assert packed() > 8


def damage_data(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)


def damage_table(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-700])


def leave_matrices_out(path: Path) -> None:
    """A valid file of another loader."""
    content = path.read_bytes()
    offset = int.from_bytes(content[8:16], "little")
    table = json.dumps(json.loads(content[offset:])[:3]).encode()
    header = content[:16] + len(table).to_bytes(8, "little") + pack_cache.zlib.crc32(table).to_bytes(8, "little")
    path.write_bytes(header + content[len(header) : offset] + table)


DAMAGES = {
    "a bit of the data": damage_data,
    "a bit of the table": damage_table,
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "another file": lambda path: path.write_bytes(b"x" * 9000),
    "matrices left out": leave_matrices_out,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_noticed_and_made_anew(
    location: ModelLocation, cache: Path, name: str, caplog: pytest.LogCaptureFixture, packed: Callable[[], int]
) -> None:
    expected = load(location, cache)
    (path,) = packed_files(cache)
    whole = path.read_bytes()
    DAMAGES[name](path)
    packed()
    with caplog.at_level(logging.WARNING):
        assert_same(load(location, cache), expected)
    assert "damaged" in caplog.text
    assert packed() > 0
    load(location, cache)
    load(location, cache)
    assert path.read_bytes() == whole
    packed()
    assert_same(load(location, cache), expected)
    assert packed() == 0


def test_a_cache_that_cannot_be_written_costs_nothing_but_a_line(
    location: ModelLocation, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("not a folder")
    with caplog.at_level(logging.INFO):
        assert_same(load(location, cache), load(location, None))
    assert "not kept for the next start" in caplog.text


def test_a_full_disk_leaves_nothing_behind(
    location: ModelLocation, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_cache, "MIN_FREE_SHARE", 1.0)
    with caplog.at_level(logging.INFO):
        load(location, cache)
    assert "free" in caplog.text
    assert packed_files(cache) == []


def test_a_load_that_fails_leaves_nothing_behind(location: ModelLocation, cache: Path) -> None:
    def fail(fraction: float) -> None:
        if fraction > 0.5:
            raise KeyboardInterrupt

    library = native_library()
    with pytest.raises(KeyboardInterrupt):
        load_native_model(
            open_checkpoint(location),
            library,
            ThreadPool(library, 1),
            Quantization.INT8,
            report=fail,
            cache_folder=cache,
        )
    assert packed_files(cache) == []


def test_what_was_not_used_for_longest_makes_room(
    location: ModelLocation, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(location, cache, Quantization.INT8)
    (int8,) = packed_files(cache)
    load(location, cache, Quantization.INT4)
    (int4,) = (path for path in packed_files(cache) if path != int8)
    os.utime(int8, ns=(0, 10**9))
    os.utime(int4, ns=(0, 2 * 10**9))
    left_over = cache / ".writing-left-over"
    left_over.write_bytes(b"x")
    os.utime(left_over, ns=(0, 0))
    # The older one is used again, so the other one goes when a third comes.
    load(location, cache, Quantization.INT8)
    monkeypatch.setattr(pack_cache, "MAX_BYTES", int8.stat().st_size + int4.stat().st_size + 1000)
    os.utime(location.path / "config.json", ns=(0, 77))
    load(location, cache, Quantization.INT4)
    assert int8 in packed_files(cache)
    assert int4 not in packed_files(cache)
    assert len(packed_files(cache)) == 2


def test_small_files_are_not_kept(location: ModelLocation, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_cache, "MIN_BYTES", 1 << 20)
    load(location, cache)
    assert packed_files(cache) == []
