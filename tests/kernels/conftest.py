"""Fixtures of the native backend's tests: the library, built once, and the kernels that this processor runs."""

import platform
from collections.abc import Iterator

import pytest
from trioengine_kernels.native.library import Isa, Library, NativeUnavailableError, ThreadPool, load_library

from trioengine.config.env import cache_dir


@pytest.fixture(scope="session")
def library() -> Library:
    try:
        return load_library(cache_dir() / "native")
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def pool(library: Library) -> ThreadPool:
    """Two threads, however many processors there are."""
    return ThreadPool(library, 2)


X86 = [Isa.AVX2, Isa.AVX_VNNI, Isa.VNNI]
OF_THIS_MACHINE = [
    isa for isa in Isa if isa is Isa.PORTABLE or (isa in X86) == (platform.machine() in ("x86_64", "AMD64"))
]
"""Kernels that are compiled for this kind of machine; its processor may still lack some."""


@pytest.fixture(params=OF_THIS_MACHINE, ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest, library: Library) -> Iterator[Isa]:
    """Kernels in use during a test."""
    before = library.isa
    try:
        library.set_isa(request.param)
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    yield request.param
    library.set_isa(before)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` makes is full of NaN, or of -1, so that whoever reads what nobody wrote is found out."""
    torch = pytest.importorskip("torch")
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def poisoned(*args, make=make, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

        monkeypatch.setattr(torch, name, poisoned)


@pytest.fixture(scope="module")
def fast_interpreter() -> Iterator[None]:
    """Triton's interpreter a few times faster: it replaces Triton's functions once for a launch, not once more for each
    function that a kernel calls, and does not look whether integers overflow."""
    pytest.importorskip("triton")
    from types import SimpleNamespace

    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    of_launch: list[object] = []

    class Scope:
        """Of a launch, or of a function that it calls, whose scope nobody restores."""

        def __init__(self) -> None:
            if not of_launch:
                of_launch.append(replace(SimpleNamespace(__globals__={"tl": tl, "core": tl.core})))

        def restore(self) -> None:
            of_launch.pop().restore()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", lambda _: Scope())
        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
        yield
    assert not of_launch
