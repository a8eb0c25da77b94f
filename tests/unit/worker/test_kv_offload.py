"""What an offload store returns is what was written last, bit by bit, or nothing."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trioengine.errors import ConfigError
from trioengine.worker.kv_offload import DiskOffloadStore, MemoryOffloadStore, OffloadStore

NUM_SLOTS = 5
SLOT_BYTES = [6000, 64]


@pytest.fixture
def disk_store(tmp_path: Path) -> Iterator[DiskOffloadStore]:
    store = DiskOffloadStore(NUM_SLOTS, SLOT_BYTES, tmp_path / "new" / "folder")
    yield store
    store.close()


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, disk_store: DiskOffloadStore) -> OffloadStore:
    return disk_store if request.param == "disk" else MemoryOffloadStore(NUM_SLOTS, SLOT_BYTES)


def block(group: int, number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SLOT_BYTES[group], np.uint8)


def open_files(folder: Path) -> list[int]:
    """The descriptors of this process's files in a folder, also of those that have no name any more."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # Of the listing itself.
            continue
        if target.startswith(f"{folder}/"):
            found.append(int(name))
    return sorted(found)


PLACES = st.tuples(st.integers(0, 1), st.integers(0, NUM_SLOTS - 1))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writes=st.lists(st.tuples(PLACES, st.integers(0, 1000)), max_size=20))
def test_each_slot_holds_what_was_written_last(store: OffloadStore, writes) -> None:
    store.clear()
    expected = {}
    for (group, slot), number in writes:
        store.write(group, slot, block(group, number))
        expected[group, slot] = block(group, number)
    assert store.num_slots == NUM_SLOTS
    for group in range(2):
        for slot in range(NUM_SLOTS):
            found = store.read(group, slot)
            if (group, slot) in expected:
                assert np.array_equal(found, expected[group, slot])
            else:
                assert found is None


def test_nothing_is_left_after_clear_and_close(store: OffloadStore) -> None:
    store.write(0, 1, block(0, 1))
    store.clear()
    assert store.read(0, 1) is None
    store.write(0, 1, block(0, 2))
    assert np.array_equal(store.read(0, 1), block(0, 2))
    store.close()
    store.close()


def test_files_have_no_names_and_are_closed(tmp_path: Path, disk_store: DiskOffloadStore) -> None:
    """Whatever ends the process, nothing of its users' text stays on the disk."""
    disk_store.write(0, 0, block(0, 1))
    folder = tmp_path / "new" / "folder"
    assert list(folder.iterdir()) == []
    assert len(open_files(folder)) == 2
    assert folder.stat().st_mode & 0o777 == 0o700
    disk_store.close()
    assert open_files(folder) == []


def test_room_is_taken_by_what_is_written_only(tmp_path: Path) -> None:
    """And given back when it is cleared."""
    store = DiskOffloadStore(1000, [1 << 20], tmp_path)
    (descriptor,) = open_files(tmp_path)
    store.write(0, 999, np.ones(1 << 20, np.uint8))
    assert os.fstat(descriptor).st_size == 1000 << 20
    assert os.fstat(descriptor).st_blocks * 512 < 3 << 20
    store.clear()
    assert os.fstat(descriptor).st_blocks == 0
    store.close()


def test_a_damaged_block_is_not_read(tmp_path: Path, disk_store: DiskOffloadStore) -> None:
    for slot in range(3):
        disk_store.write(0, slot, block(0, slot))
    descriptor = open_files(tmp_path)[0]
    place = SLOT_BYTES[0] + 1234
    (byte,) = os.pread(descriptor, 1, place)
    os.pwrite(descriptor, bytes([byte ^ 1]), place)
    assert disk_store.read(0, 1) is None
    assert np.array_equal(disk_store.read(0, 0), block(0, 0))
    os.ftruncate(descriptor, 2 * SLOT_BYTES[0] + 10)
    assert disk_store.read(0, 2) is None
    disk_store.write(0, 1, block(0, 7))
    assert np.array_equal(disk_store.read(0, 1), block(0, 7))


def test_what_a_full_disk_does_not_take_is_not_read(
    disk_store: DiskOffloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the slot held before either."""
    disk_store.write(0, 0, block(0, 1))
    disk_store.write(0, 1, block(0, 1))

    def no_space(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)
    disk_store.write(0, 0, block(0, 2))
    monkeypatch.setattr(os, "pwrite", lambda *arguments: 100)
    disk_store.write(0, 1, block(0, 2))
    assert disk_store.read(0, 0) is None
    assert disk_store.read(0, 1) is None


def test_a_disk_that_cannot_be_read_loses_blocks(disk_store: DiskOffloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_store.write(0, 0, block(0, 1))

    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    assert disk_store.read(0, 0) is None
    monkeypatch.undo()
    monkeypatch.setattr(os, "ftruncate", broken)
    disk_store.clear()
    assert disk_store.read(0, 0) is None


def test_a_folder_that_cannot_be_used_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file") as caught:
        DiskOffloadStore(NUM_SLOTS, SLOT_BYTES, tmp_path / "file")
    assert caught.value.option == "kv_offload_path"
    assert open_files(tmp_path) == []
