# pyright: basic
"""Keeps packed weights in files, so that a second start reads what the first one worked out.

Only matrices that take much longer to pack than to read are kept: floats that are quantized when they are loaded,
packed formats of safetensors, GGUF types that the kernels do not know. The others are rearranged about as fast as they
could be read, and take no place on the disk.

One file holds the matrices of one checkpoint in the order in which the loader asks for them. Its name is made of all
that they depend on: files (path, size, time of change, inode), what floats become, and the code that packs. They are
read into memory of huge pages and not mapped, since decoding from small pages is a tenth slower. Every matrix has a
checksum, which costs a third of a second per gigabyte: nobody fetches a cache anew when its bits rot, and nothing has
to wait until a new file is safely on the disk. A file that is damaged is dropped, and made anew at the next start; one
that cannot be written costs a line in the log and nothing else.
"""

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import attrs
import numpy as np
from numpy.typing import NDArray
from trioengine_kernels.native.compiler import SOURCES
from trioengine_kernels.native.library import Library
from trioengine_kernels.native.tiles import TileKind, WeightTiles

from trioengine.models.loader import CheckpointVersion
from trioengine.models.source import Floats, MatrixPart

logger = logging.getLogger(__name__)

MAX_BYTES = 32 << 30
"""Of all files together. Those that were not used for longest make room."""
MIN_BYTES = 16 << 20
"""Of a file: less is packed in no time."""
MIN_FREE_SHARE = 0.1
"""Of the disk: a file that would leave less free is not written."""
_SUFFIX = ".pack"
_TEMPORARY_PREFIX = ".writing-"
_STALE_AFTER_S = 24 * 3600.0
"""What a writer that died has left behind is removed after a day."""
_MAGIC = b"TEPACK01"
_ALIGNMENT = 64


class TilesMaker(Protocol):
    """Packs weights."""

    def is_costly(self, parts: Sequence[MatrixPart], *, min_bits: int = 4) -> bool:
        """Whether `matrix` takes much longer than to read the tiles that it makes."""
        ...

    def matrix(self, parts: Sequence[MatrixPart], *, min_bits: int = 4) -> Sequence[WeightTiles]:
        """As `WeightMaker.matrix`."""
        ...

    def vector(self, values: Floats) -> Floats:
        """As `WeightMaker.vector`."""
        ...


@attrs.frozen
class _Entry:
    """A piece of a matrix in the file."""

    matrix: int
    """Which of the matrices that were asked for it belongs to."""
    kind: int
    rows: int
    columns: int
    offset: int
    num_bytes: int
    checksum: int


@contextlib.contextmanager
def cached_weights(
    weights: TilesMaker, library: Library, folder: Path, version: CheckpointVersion, variant: str
) -> Iterator["CachedWeights"]:
    """Makes tiles like `weights`, out of a file where an earlier start has left one.

    Args:
        weights: packs what is not there.
        library: gives memory.
        folder: where the files are. Made where it is missing.
        version: the checkpoint.
        variant: tells other tiles of the same checkpoint apart.
    """
    path = folder / f"{_key(version, variant)}{_SUFFIX}"
    reader = _open_reader(path)
    writer = None if reader is not None else _Writer(path)
    cached = CachedWeights(weights, library, reader, writer)
    try:
        yield cached
        if writer is not None:
            writer.finish()
    finally:
        if reader is not None:
            reader.file.close()
        if writer is not None:
            writer.close()


class CachedWeights:
    """A `TilesMaker` with a memory."""

    def __init__(
        self, weights: TilesMaker, library: Library, reader: "_Reader | None", writer: "_Writer | None"
    ) -> None:
        self._weights = weights
        self._library = library
        self._reader = reader
        self._writer = writer
        self._num_matrices = 0

    def matrix(self, parts: Sequence[MatrixPart], *, min_bits: int = 4) -> Sequence[WeightTiles]:
        """As `TilesMaker.matrix`."""
        if not self._weights.is_costly(parts, min_bits=min_bits):
            return self._weights.matrix(parts, min_bits=min_bits)
        number, self._num_matrices = self._num_matrices, self._num_matrices + 1
        if self._reader is not None:
            matrix = self._reader.read(self._library, number, parts)
            if matrix is not None:
                return matrix
            self._reader.drop()
            self._reader = None
        matrix = self._weights.matrix(parts, min_bits=min_bits)
        if self._writer is not None:
            self._writer.write(number, matrix)
        return matrix

    def vector(self, values: Floats) -> Floats:
        """As `TilesMaker.vector`."""
        return self._weights.vector(values)


@attrs.frozen(eq=False)
class _Reader:
    """A file that was opened and whose table is whole."""

    path: Path
    file: io.FileIO
    entries: Sequence[_Entry]

    def read(self, library: Library, number: int, parts: Sequence[MatrixPart]) -> Sequence[WeightTiles] | None:
        """A matrix; None where it is not there or damaged."""
        entries = [entry for entry in self.entries if entry.matrix == number]
        num_rows = sum(part.num_rows for part in parts)
        if sum(entry.rows for entry in entries) != num_rows:
            return None
        matrix: list[WeightTiles] = []
        for entry in entries:
            if entry.columns != parts[0].num_columns:
                return None
            data = library.allocate(entry.num_bytes)[: entry.num_bytes]
            if not _read_into(self.file, entry.offset, data) or zlib.crc32(data.data) != entry.checksum:
                return None
            matrix.append(WeightTiles(data, TileKind(entry.kind), entry.rows, entry.columns))
        return matrix

    def drop(self) -> None:
        """The file is not what it says."""
        logger.warning("%s is damaged and is made anew at the next start.", self.path)
        with contextlib.suppress(OSError):
            self.path.unlink()


def _open_reader(path: Path) -> _Reader | None:
    try:
        file = io.FileIO(path)
    except OSError:
        return None
    try:
        entries = _read_table(file)
        # Who was used last is what the times say: many systems do not note reads.
        os.utime(path)
        return _Reader(path, file, entries)
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s is damaged (%s) and is made anew.", path, error)
        file.close()
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _read_table(file: io.FileIO) -> Sequence[_Entry]:
    """The table is at the end, behind its own length and checksum, which are at the beginning.

    Raises:
        OSError, TypeError, ValueError: it is not whole.
    """
    size = os.fstat(file.fileno()).st_size
    header = file.read(_ALIGNMENT) or b""
    offset, num_bytes, checksum = (int.from_bytes(header[first : first + 8], "little") for first in (8, 16, 24))
    if header[:8] != _MAGIC or offset + num_bytes != size:
        raise ValueError("it does not have the length that it should have")
    file.seek(offset)
    table = file.read(num_bytes) or b""
    if zlib.crc32(table) != checksum:
        raise ValueError("its table has a wrong checksum")
    entries = [_Entry(*fields) for fields in cast(list[list[int]], json.loads(table))]
    if any(entry.offset + entry.num_bytes > offset for entry in entries):
        raise ValueError("its table is wrong")
    return entries


def _read_into(file: io.FileIO, offset: int, data: NDArray[np.uint8]) -> bool:
    """Fill `data` from there on. Returns whether the file has that much. One read has at most 2 GB."""
    file.seek(offset)
    first = 0
    while first < len(data):
        count = file.readinto(data[first:].data)
        if not count:
            return False
        first += count
    return True


class _Writer:
    """Writes a file that appears under its name when it is whole. What fails is logged and given up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: list[_Entry] = []
        self._file: BinaryIO | None = None
        self._temporary = ""
        self._is_given_up = False

    def write(self, number: int, matrix: Sequence[WeightTiles]) -> None:
        """Add a matrix."""
        if self._is_given_up:
            return
        try:
            file = self._file = self._file or self._create()
            for part in matrix:
                offset, num_bytes = file.tell(), len(part.data)
                _check_free_space(self._path.parent, num_bytes)
                file.write(part.data.data)
                file.write(bytes(-num_bytes % _ALIGNMENT))
                place = (offset, num_bytes, zlib.crc32(part.data.data))
                self._entries.append(_Entry(number, int(part.kind), part.rows, part.columns, *place))
        except OSError as error:
            self._give_up(error)

    def finish(self) -> None:
        """All matrices are there."""
        if self._file is None or self._is_given_up:
            return
        try:
            table = json.dumps([attrs.astuple(entry) for entry in self._entries]).encode()
            offset = self._file.tell()
            if offset < MIN_BYTES:
                return
            self._file.write(table)
            self._file.seek(0)
            self._file.write(_MAGIC)
            for number in (offset, len(table), zlib.crc32(table)):
                self._file.write(number.to_bytes(8, "little"))
            self._file.flush()
            _make_room(self._path.parent, MAX_BYTES - offset)
            os.replace(self._temporary, self._path)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Leave nothing behind that is not whole."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)

    def _create(self) -> BinaryIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, self._temporary = tempfile.mkstemp(prefix=_TEMPORARY_PREFIX, dir=self._path.parent)
        file = os.fdopen(descriptor, "wb")
        file.write(bytes(_ALIGNMENT))
        return file

    def _give_up(self, error: OSError) -> None:
        self._is_given_up = True
        logger.info("Packed weights are not kept for the next start: %s", error)


def _check_free_space(folder: Path, num_bytes: int) -> None:
    """Raises OSError where the disk is nearly full."""
    usage = shutil.disk_usage(folder)
    if usage.free - num_bytes < MIN_FREE_SHARE * usage.total:
        raise OSError(f"the disk of {folder} has less than {MIN_FREE_SHARE:.0%} free")


def _make_room(folder: Path, max_bytes: int) -> None:
    """Remove what was not used for longest, until all files together have at most so many bytes."""
    files = [(path, path.stat()) for path in folder.glob(f"*{_SUFFIX}")]
    total = sum(stat.st_size for _, stat in files)
    for path, stat in sorted(files, key=lambda file: file[1].st_mtime_ns):
        if total <= max_bytes:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size
    for path in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
            path.unlink(missing_ok=True)


def _key(version: CheckpointVersion, variant: str) -> str:
    path = version.location.path
    folder = path if path.is_dir() else path.parent
    files = [(attrs.astuple(file), os.stat(folder / file.name).st_ino) for file in version.files]
    return hashlib.sha256(repr((str(path), files, variant, _code_digest())).encode()).hexdigest()[:32]


@functools.cache
def _code_digest() -> str:
    """Of all code that packed weights depend on: nobody has to remember to count a version up."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    python = (*here.rglob("*.py"), *(here.parent / "checkpoint").glob("*.py"), SOURCES.parent / "tiles.py")
    for path in sorted((*SOURCES.glob("*.[ch]"), *python)):
        digest.update(path.read_bytes())
    return digest.hexdigest()
