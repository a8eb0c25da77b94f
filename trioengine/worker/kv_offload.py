"""Where the content of KV cache blocks is kept after they were given to others: memory, or files.

Content that was kept comes back bit by bit, or not at all. This module does not know what is in a block, nor which is
worth keeping.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trioengine.errors import ConfigError

Bytes = NDArray[np.uint8]


class OffloadStore(Protocol):
    """Slots of one size for each KV group: 0 to `num_slots - 1`."""

    @property
    def num_slots(self) -> int:
        """Of each group."""
        ...

    def write(self, group: int, slot: int, data: Bytes) -> None:
        """Keep data, [bytes of the group's block], in the place of what the slot held. What cannot be kept is lost."""
        ...

    def read(self, group: int, slot: int) -> Bytes | None:
        """What was written to the slot last, read-only until the next call; None when it is not there any more."""
        ...

    def clear(self) -> None:
        """Lose everything, and give the room back."""
        ...

    def close(self) -> None:
        """Lose everything. Idempotent; nothing else may be called afterwards."""
        ...


class MemoryOffloadStore:
    """Slots in this machine's memory. Those that are never used take none."""

    def __init__(self, num_slots: int, slot_bytes: Sequence[int]) -> None:
        """`slot_bytes`: for each group.

        Raises:
            MemoryError: so much address space is not to be had.
        """
        self.num_slots = num_slots
        self._slot_bytes = tuple(slot_bytes)
        self._slots: list[Bytes] = []
        self._is_written: NDArray[np.bool_] = np.empty(0, np.bool_)
        self.clear()

    def write(self, group: int, slot: int, data: Bytes) -> None:
        """As `OffloadStore.write`."""
        self._slots[group][slot] = data
        self._is_written[group, slot] = True

    def read(self, group: int, slot: int) -> Bytes | None:
        """As `OffloadStore.read`."""
        return self._slots[group][slot] if self._is_written[group, slot] else None

    def clear(self) -> None:
        """As `OffloadStore.clear`."""
        self._slots = [np.zeros((self.num_slots, size), np.uint8) for size in self._slot_bytes]
        self._is_written = np.zeros((len(self._slot_bytes), self.num_slots), np.bool_)

    def close(self) -> None:
        """As `OffloadStore.close`."""
        self._slots = []


class DiskOffloadStore:
    """Slots in one file for each group, in a folder.

    The files have no name, so only this process reads them, and nothing is left of them when it ends. A checksum of
    each slot is in memory: what the disk has lost or changed is not read.
    """

    def __init__(self, num_slots: int, slot_bytes: Sequence[int], folder: Path) -> None:
        """`slot_bytes`: for each group. The folder is made where it is missing.

        Raises:
            ConfigError: files cannot be written there.
        """
        self.num_slots = num_slots
        self._slot_bytes = tuple(slot_bytes)
        self._digests: dict[tuple[int, int], bytes] = {}
        self._buffers: Sequence[Bytes] = [np.empty(size, np.uint8) for size in slot_bytes]
        self._files: list[int] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for _ in slot_bytes:
                self._files.append(_nameless_file(folder))
            self._empty_files()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"kv_offload_path: files cannot be written in {folder}: {error}.", option="kv_offload_path"
            ) from error

    def write(self, group: int, slot: int, data: Bytes) -> None:
        """As `OffloadStore.write`."""
        self._digests.pop((group, slot), None)
        try:
            num_written = os.pwrite(self._files[group], data.data, slot * self._slot_bytes[group])
        except OSError:
            return  # The disk is full or broken: the content is computed again when it is needed.
        if num_written == len(data):
            self._digests[group, slot] = _digest(data)

    def read(self, group: int, slot: int) -> Bytes | None:
        """As `OffloadStore.read`."""
        digest, buffer = self._digests.get((group, slot)), self._buffers[group]
        if digest is None:
            return None
        try:
            num_read = os.preadv(self._files[group], [buffer.data], slot * self._slot_bytes[group])
        except OSError:
            return None
        return buffer if num_read == len(buffer) and _digest(buffer) == digest else None

    def clear(self) -> None:
        """As `OffloadStore.clear`."""
        self._digests.clear()
        with contextlib.suppress(OSError):  # A broken disk: nothing is read from it any more.
            self._empty_files()

    def close(self) -> None:
        """As `OffloadStore.close`."""
        while self._files:
            os.close(self._files.pop())
        self._digests.clear()

    def _empty_files(self) -> None:
        for file, size in zip(self._files, self._slot_bytes, strict=True):
            # Without its end a file takes no room; then all of it is there, and what is never written takes none.
            os.ftruncate(file, 0)
            os.ftruncate(file, self.num_slots * size)


def _nameless_file(folder: Path) -> int:
    descriptor, path = tempfile.mkstemp(prefix=".trioengine-kv-", dir=folder)
    os.unlink(path)
    return descriptor


def _digest(data: Bytes) -> bytes:
    return hashlib.blake2b(data.data, digest_size=16).digest()
