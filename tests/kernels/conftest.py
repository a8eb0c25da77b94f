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


@pytest.fixture(scope="module", autouse=True)
def fast_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Triton's interpreter is fast in the tests of its kernels."""
    if not request.module.__name__.rpartition(".")[2].startswith("test_triton"):
        yield
        return
    pytest.importorskip("triton")
    from trioengine.testing.interpreter import fast_interpreter

    with fast_interpreter():
        yield
