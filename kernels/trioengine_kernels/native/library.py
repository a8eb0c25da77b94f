# pyright: basic
"""Loads the shared object behind the native backend, builds it where nobody has, and owns its threads.

A shared object beside this file (wheels carry one) wins. Else the sources are compiled once into the given folder,
with the system's compiler or with `ziglang` from PyPI. One object holds a variant of the kernels for each kind of
processor, chosen at run time. This module does not know models or operations.
"""

import contextlib
import ctypes
import enum
import functools
import mmap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trioengine_kernels.native.compiler import OBJECT_NAME, NativeUnavailableError, build, build_key, find_compiler

PREBUILT = Path(__file__).parent / OBJECT_NAME
_HUGE_PAGE_BYTES = 2 << 20
_ARENA_BYTES = 32 << 20


class Isa(enum.IntEnum):
    """Kinds of processors that the kernels are compiled for. Values are those of `TeIsa` in src/te.h."""

    PORTABLE = 0
    AVX2 = 1
    """x86 with AVX2, FMA and F16C."""
    AVX_VNNI = 2
    """AVX2 and AVX-VNNI, as processors without AVX-512 have it. Compilers before 2021 do not know it."""
    VNNI = 3
    """AVX2 and AVX-512 VNNI, VL, BW and DQ."""
    DOTPROD = 4
    """ARM with the int8 dot product."""


class Library:
    """The loaded shared object. Functions have their C names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        self._arena: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._lock = threading.Lock()  # Weights may be packed by two threads.

    def function(self, name: str, result: type | None, *arguments: type) -> Callable[..., int]:
        """Return a C function with its types declared.

        Raises:
            AttributeError: the shared object has none of this name.
        """
        function = self._dll[name]
        function.restype = result
        function.argtypes = list(arguments)
        return function

    @property
    def isa(self) -> Isa:
        """The kernels in use; at first, the fastest that this processor runs."""
        return Isa(self.function("te_isa", ctypes.c_int32)())

    def set_isa(self, isa: Isa) -> None:
        """Use other kernels from now on, in the whole process. For tests and benchmarks; no program may be running.

        Raises:
            NativeUnavailableError: this processor does not run them.
        """
        if not self.function("te_set_isa", ctypes.c_int32, ctypes.c_int32)(isa):
            raise NativeUnavailableError(f"This processor does not run the {isa.name} kernels.")

    def supported_isas(self) -> list[Isa]:
        """The kernels that this processor runs, slowest first."""
        is_supported = self.function("te_isa_is_supported", ctypes.c_int32, ctypes.c_int32)
        return [isa for isa in Isa if is_supported(isa)]

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory for weights, uninitialized, 64-byte aligned, never freed while a piece of it is referenced.

        Pieces come out of large areas for which huge pages are asked: reading 100 MB per token through 4 KB pages
        costs a tenth of the bandwidth.

        Raises:
            MemoryError: so much is not to be had.
        """
        num_bytes = -(-num_bytes // 64) * 64
        with self._lock:
            if num_bytes > len(self._arena):
                self._arena = _huge_pages(max(num_bytes, _ARENA_BYTES))
            piece, self._arena = self._arena[:num_bytes], self._arena[num_bytes:]
        return piece

    def drop_arena(self) -> None:
        """Take the next piece out of a new area, so that the old one is freed when nobody references its pieces."""
        with self._lock:
            self._arena = np.empty(0, np.uint8)


class ThreadPool:
    """Threads of the native backend: the caller and `num_threads - 1` others, which sleep while there is no work."""

    def __init__(self, library: Library, num_threads: int) -> None:
        if not 1 <= num_threads <= 1024:
            raise ValueError("num_threads must be from 1 to 1024.")
        self.num_threads = num_threads
        self._destroy = library.function("te_pool_destroy", None, ctypes.c_void_p)
        create = library.function("te_pool_create", ctypes.c_void_p, ctypes.c_int32)
        self._handle: int | None = create(num_threads)
        if not self._handle:
            raise MemoryError("The native backend's threads could not be created.")

    @property
    def handle(self) -> int:
        """The `TePool *`, for calls into the library.

        Raises:
            ValueError: the pool is closed.
        """
        if self._handle is None:
            raise ValueError("The thread pool is closed.")
        return self._handle

    def close(self) -> None:
        """End the threads. Closing twice is fine."""
        if self._handle is not None:
            self._destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()


def load_library(cache_dir: Path) -> Library:
    """Load the native backend; build it first where no earlier call, of any process, has.

    Args:
        cache_dir: the folder that keeps what is built. Made where it is missing.

    Raises:
        NativeUnavailableError: there is no compiler, it fails, or what it made cannot be loaded.
    """
    # One object per process and path: ctypes and its users share declarations.
    return _load(cache_dir)


@functools.cache
def _load(cache_dir: Path) -> Library:
    path = PREBUILT if PREBUILT.exists() else _built(cache_dir)
    try:
        return Library(path)
    except OSError as error:
        raise NativeUnavailableError(f"The native backend {path} cannot be loaded: {error}.") from error


def _built(cache_dir: Path) -> Path:
    compiler = find_compiler()
    path = cache_dir / f"libtrioengine_native-{build_key(compiler)}.so"
    if not path.exists():
        try:
            build(path, compiler)
        except OSError as error:
            raise NativeUnavailableError(f"The native backend cannot be built: {error}.") from error
    return path


def _huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed memory on pages of 2 MB where the system grants them."""
    size = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    # Private: shared memory, which is the default here, gets no huge pages on most systems.
    try:
        memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"There is no memory for {num_bytes} bytes of weights.") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel without them: ordinary pages do.
            memory.madvise(mmap.MADV_HUGEPAGE)
    area = np.frombuffer(memory, np.uint8)
    start = -area.ctypes.data % _HUGE_PAGE_BYTES
    return area[start : start + size]
