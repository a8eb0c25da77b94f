# pyright: basic
"""Compiles the C sources of the native backend into one shared object.

Standard library only: the build of a wheel loads this file by itself.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "src"
OBJECT_NAME = "libtrioengine_native.so"
"""Of the shared object that wheels carry, beside this file."""
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


class NativeUnavailableError(Exception):
    """There is no native backend on this machine. The message says why."""


class Compiler(NamedTuple):
    """A C compiler that takes the options of cc."""

    command: tuple[str, ...]
    identity: str
    """Changes when the compiler does."""


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


def build_key(compiler: Compiler) -> str:
    """Changes when the sources, the compiler, its options or the kind of machine do."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.rglob("*.[ch]")):
        digest.update(source.relative_to(SOURCES).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(repr((compiler, FLAGS, _variants(), platform.machine(), sys.platform)).encode())
    return digest.hexdigest()[:16]
