"""Building, caching and loading the native backend, and its threads."""

import ctypes
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from trioengine_kernels.native import compiler as compiling
from trioengine_kernels.native import library as native
from trioengine_kernels.native.compiler import Compiler, NativeUnavailableError
from trioengine_kernels.native.library import Isa, Library, ThreadPool


@pytest.fixture
def compiler():
    try:
        return compiling.find_compiler()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def tiny_sources(tmp_path, monkeypatch):
    """Sources that compile in a moment."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "tiny.c").write_text('__attribute__((visibility("default"))) int te_isa(void) { return 0; }\n')
    monkeypatch.setattr(compiling, "SOURCES", folder)
    monkeypatch.setattr(native, "PREBUILT", tmp_path / "none.so")
    return folder


def test_what_was_built_once_is_loaded_without_a_compiler(tmp_path, tiny_sources, compiler, monkeypatch):
    first = native.load_library(tmp_path / "cache")
    native._load.cache_clear()
    monkeypatch.setattr(native, "find_compiler", lambda: compiler)
    monkeypatch.setattr(native, "build", lambda *_: pytest.fail("built again"))
    assert native.load_library(tmp_path / "cache").path == first.path
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.path.name]


def test_changed_sources_or_another_compiler_are_built_anew(tmp_path, tiny_sources, compiler):
    names = {compiling.build_key(compiler)}
    (tiny_sources / "tiny.c").write_text("int other;\n")
    names.add(compiling.build_key(compiler))
    names.add(compiling.build_key(Compiler(compiler.command, "another")))
    assert len(names) == 3


def test_a_compiler_that_fails_is_reported_with_its_words(tmp_path, tiny_sources, compiler):
    (tiny_sources / "tiny.c").write_text("#error not today\n")
    with pytest.raises(NativeUnavailableError, match="not today"):
        native.load_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_old_compiler_leaves_out_the_processors_that_it_does_not_know(tmp_path, tiny_sources, compiler):
    old = tmp_path / "old-cc"
    refuse = 'case "$*" in *-mavxvnni*) echo unknown; exit 1;; esac'
    old.write_text(f'#!/bin/sh\n{refuse}\nexec {shlex.join(compiler.command)} "$@"\n')
    old.chmod(0o700)
    (tiny_sources / "tiny.c").write_text("#if defined(TE_HAVE_AVXVNNI)\n#error\n#endif\nint te_tiny;\n")
    compiling.build(tmp_path / "tiny.so", Compiler((str(old),), "old"))
    assert (tmp_path / "tiny.so").exists()


def test_no_compiler_is_reported(tmp_path, tiny_sources, monkeypatch):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NativeUnavailableError, match="no C compiler"):
        native.load_library(tmp_path / "cache")


def test_a_folder_that_cannot_be_written_is_reported(tmp_path, tiny_sources, compiler):
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeUnavailableError, match="cannot be built"):
        native.load_library(tmp_path / "file" / "cache")


def test_a_prebuilt_object_wins(tmp_path, tiny_sources, compiler, monkeypatch):
    prebuilt = tmp_path / "prebuilt.so"
    compiling.build(prebuilt, compiler)
    monkeypatch.setattr(native, "PREBUILT", prebuilt)
    assert native.load_library(tmp_path / "cache").path == prebuilt
    assert not (tmp_path / "cache").exists()


def test_two_processes_that_build_at_once_both_load(tmp_path, tiny_sources, compiler):
    program = (
        "import sys; from pathlib import Path; from trioengine_kernels.native import compiler, library as native;"
        "compiler.SOURCES, native.PREBUILT = Path(sys.argv[1]), Path('/none');"
        "print(native.load_library(Path(sys.argv[2])).path)"
    )
    command = [sys.executable, "-P", "-c", program, str(tiny_sources), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    outputs = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(outputs) == 1
    assert Path(outputs.pop().decode().strip()).exists()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_loading_imports_no_torch(library):
    program = (
        "import sys, trioengine_kernels.native.program, trioengine_kernels.native.tiles; print('torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True).stdout
    assert output.strip() == b"False"


def test_the_fastest_kernels_are_chosen_and_others_can_be(library):
    assert library.isa is library.supported_isas()[-1]
    before = library.isa
    library.set_isa(Isa.PORTABLE)
    assert library.isa is Isa.PORTABLE
    library.set_isa(before)
    foreign = next(isa for isa in Isa if isa not in library.supported_isas())
    with pytest.raises(NativeUnavailableError):
        library.set_isa(foreign)


def test_too_much_memory_is_a_memory_error(library):
    with pytest.raises(MemoryError):
        library.allocate(1 << 60)


def test_memory_is_freed_when_no_piece_is_referenced(library):
    """Also the rest that the next piece would come out of."""

    def mapped_bytes():
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[0]) * os.sysconf("SC_PAGESIZE")

    library.drop_arena()
    before = mapped_bytes()
    pieces = [library.allocate(1 << 20) for _ in range(3)]
    assert mapped_bytes() - before >= 3 << 20
    library.drop_arena()
    assert mapped_bytes() - before >= 3 << 20
    assert all(not piece.any() for piece in pieces)
    pieces.clear()
    assert mapped_bytes() - before < 3 << 20


def test_memory_is_aligned_and_not_shared(library):
    pieces = [library.allocate(size) for size in (1, 63, 64, 65, 3 << 20, 100)]
    for i, piece in enumerate(pieces):
        assert piece.ctypes.data % 64 == 0
        piece[:] = i
    assert all((piece == i).all() for i, piece in enumerate(pieces))


TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)


def run_ops(library: Library, pool: ThreadPool, chunks: list[int]):
    """What the pool called, in order: operation, chunk, thread. Python's lock lets one call at a time record itself."""
    calls = []
    task = TASK(lambda _, op, chunk, thread: calls.append((op, chunk, thread)))
    function = library.function(
        "te_pool_run", None, ctypes.c_void_p, TASK, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
    )
    array = (ctypes.c_int32 * len(chunks))(*chunks)
    function(pool.handle, task, None, len(chunks), ctypes.addressof(array))
    return calls


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_chunk_runs_once_and_operations_follow_each_other(library, num_threads):
    pool = ThreadPool(library, num_threads)
    for _ in range(50):
        chunks = [3, 1, 0, 17, 2]
        calls = run_ops(library, pool, chunks)
        assert [op for op, _, _ in calls] == sorted(op for op, _, _ in calls)
        assert sorted((op, chunk) for op, chunk, _ in calls) == [
            (op, i) for op, n in enumerate(chunks) for i in range(n)
        ]
        assert {thread for _, _, thread in calls} <= set(range(num_threads))
    pool.close()
    pool.close()


def test_more_threads_than_processors_finish(library):
    """Threads that come late, or not at all, find nothing left to do; nobody waits for them."""
    pool = ThreadPool(library, 40)
    for _ in range(20):
        assert len(run_ops(library, pool, [2, 1, 3] * 20)) == 120
    pool.close()


def test_a_run_without_chunks_returns(library, pool):
    assert run_ops(library, pool, []) == []
    assert run_ops(library, pool, [0, 0]) == []


def test_a_closed_pool_is_refused_and_sizes_are_checked(library):
    pool = ThreadPool(library, 2)
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        run_ops(library, pool, [1])
    for size in (0, -1, 5000):
        with pytest.raises(ValueError, match="num_threads"):
            ThreadPool(library, size)


def test_pools_come_and_go_without_leaving_threads(library):
    before = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0
    for _ in range(20):
        pool = ThreadPool(library, 3)
        assert len(run_ops(library, pool, [5, 5])) == 10
        pool.close()
    after = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0
    assert after == before


@pytest.mark.slow
def test_the_sources_compile_without_a_warning(tmp_path, compiler):
    compiling.build(tmp_path / "strict.so", compiler, ["-Werror", "-O1"])
    assert (tmp_path / "strict.so").exists()
