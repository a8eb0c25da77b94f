# pyright: basic
"""Builds, caches and loads the shared object behind the native backend, and owns its threads.

A shared object beside this file (wheels carry one) wins. Else the sources are compiled once into the given folder,
with the system's compiler or with `ziglang` from PyPI. One object holds a variant of the kernels for each kind of
processor, chosen at run time. This module does not know models or operations.
"""

import contextlib
import ctypes
import enum
import functools
import hashlib
import importlib.util
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "libtrioengine_native.so"
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    # Where multiplications and additions are fused is written in the source: results must not depend on the optimizer.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    # No vector crosses a border between files.
    "-Wno-psabi",
)
X86_VARIANTS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avxvnni": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
    "vnni": (
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mavx512f",
        "-mavx512vl",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vnni",
        "-mprefer-vector-width=256",
    ),
}
ARM_VARIANTS = {"portable": (), "dotprod": ("-mcpu=generic+dotprod",)}
OTHER_VARIANTS = {"portable": ()}
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


class NativeUnavailableError(Exception):
    """There is no native backend on this machine. The message says why."""


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


@attrs.frozen
class Compiler:
    """A C compiler that takes the options of cc."""

    command: tuple[str, ...]
    identity: str
    """Changes when the compiler does."""


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
    path = cache_dir / f"libtrioengine_native-{_build_key(compiler)}.so"
    if not path.exists():
        try:
            build(path, compiler)
        except OSError as error:
            raise NativeUnavailableError(f"The native backend cannot be built: {error}.") from error
    return path


def find_compiler() -> Compiler:
    """Return the system's C compiler, else the one of the `ziglang` package.

    Raises:
        NativeUnavailableError: there is neither.
    """
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            real = Path(path).resolve()
            stat = real.stat()
            return Compiler((path,), f"{real} {stat.st_size} {stat.st_mtime_ns}")
    if importlib.util.find_spec("ziglang") is not None:
        zig_version = importlib.util.find_spec("ziglang").origin or ""  # type: ignore[union-attr]
        return Compiler((sys.executable, "-m", "ziglang", "cc"), zig_version)
    raise NativeUnavailableError("There is no C compiler (cc, gcc, clang or the Python package ziglang).")


def build(path: Path, compiler: Compiler, extra_flags: Sequence[str] = ()) -> None:
    """Compile the sources into a shared object at `path`.

    The object appears whole or not at all, so several processes may build the same one at once.

    Raises:
        NativeUnavailableError: the compiler fails; the message holds the end of what it wrote.
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as folder:
        objects: list[str] = []
        jobs: list[tuple[list[str], subprocess.Popen[bytes]]] = []
        for source, variant, flags in _units(compiler):
            objects.append(f"{folder}/{source.stem}-{variant}.o")
            command = [*compiler.command, *FLAGS, *flags, *extra_flags, "-c", str(source), "-o", objects[-1]]
            jobs.append((command, _start(command)))
        for command, process in jobs:
            _finish(command, process)
        built = f"{folder}/built.so"
        command = [*compiler.command, "-shared", "-pthread", *extra_flags, *objects, "-lm", "-o", built]
        _finish(command, _start(command))
        os.replace(built, path)


def _units(compiler: Compiler) -> list[tuple[Path, str, Sequence[str]]]:
    """What is compiled: source, variant ("" for what all variants share), flags."""
    variants = {name: flags for name, flags in _variants().items() if not flags or _are_known(compiler, flags)}
    units: list[tuple[Path, str, Sequence[str]]] = []
    for source in sorted(SOURCES.glob("variants/*.c")):
        for name, flags in variants.items():
            units.append((source, name, (*flags, f"-I{SOURCES}", f"-DTE_VARIANT={name}")))
    defines = [f"-DTE_HAVE_{name.upper()}" for name in variants]
    units += [(source, "", (f"-I{SOURCES}", *defines)) for source in sorted(SOURCES.glob("*.c"))]
    return units


def _are_known(compiler: Compiler, flags: Sequence[str]) -> bool:
    process = _start([*compiler.command, *flags, "-E", "-x", "c", os.devnull, "-o", os.devnull])
    process.communicate()
    return process.returncode == 0


def _variants() -> dict[str, tuple[str, ...]]:
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return X86_VARIANTS
    return ARM_VARIANTS if machine in ("aarch64", "arm64") else OTHER_VARIANTS


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _finish(command: Sequence[str], process: "subprocess.Popen[bytes]") -> None:
    output, _ = process.communicate()
    if process.returncode:
        tail = output.decode(errors="replace")[-2000:]
        raise NativeUnavailableError(f"The C compiler {command[0]} failed: {tail}")


def _build_key(compiler: Compiler) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.rglob("*.[ch]")):
        digest.update(source.relative_to(SOURCES).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(repr((compiler, FLAGS, _variants(), platform.machine(), sys.platform)).encode())
    return digest.hexdigest()[:16]


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
