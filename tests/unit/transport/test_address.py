"""Endpoints: a private directory where one is possible, else TCP with keys; nothing is left behind."""

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import pytest

from trioengine.transport import address
from trioengine.transport.address import MAX_DIRECTORY_BYTES, CurveKeys, Endpoint, create_endpoint


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A short directory of our own (pytest's are long)."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def test_the_first_usable_base_directory_is_taken(short_path: Path) -> None:
    run, tmp = short_path / "run", short_path / "tmp"
    run.mkdir()
    tmp.mkdir()
    environ = {"XDG_RUNTIME_DIR": str(run), "TMPDIR": str(tmp)}
    bases: list[Path] = []
    for _ in range(3):
        with create_endpoint(environ) as endpoint:
            assert endpoint.directory is not None
            assert endpoint.address == f"ipc://{endpoint.directory}/zmq"
            assert endpoint.curve is None
            bases.append(Path(endpoint.directory).parent)
        environ.pop(next(iter(environ), ""), None)
    assert bases == [run, tmp, Path("/tmp")]


def test_the_directory_is_private(short_path: Path) -> None:
    previous_mask = os.umask(0)
    try:
        with create_endpoint({"TMPDIR": str(short_path)}) as endpoint:
            assert endpoint.directory is not None
            assert stat.S_IMODE(os.stat(endpoint.directory).st_mode) == 0o700
    finally:
        os.umask(previous_mask)


@pytest.mark.parametrize("bad", ["missing", "file", "relative", "empty", "long", "not UTF-8", "null byte"])
def test_a_base_directory_that_cannot_be_used_is_passed_over(short_path: Path, bad: str) -> None:
    usable = short_path / "tmp"
    usable.mkdir()
    match bad:
        case "missing":
            base = str(short_path / "missing")
        case "file":
            base = "/dev/null"
        case "relative":
            base = "."
        case "empty":
            base = ""
        case "long":
            long = short_path / ("x" * 70)
            long.mkdir()
            base = str(long)
        case "not UTF-8":
            base = os.fsdecode(os.fsencode(short_path / "latin") + b"\xe9")
            Path(base).mkdir()
        case _:
            base = "/tmp/\0"
    with create_endpoint({"XDG_RUNTIME_DIR": base, "TMPDIR": str(usable)}) as endpoint:
        assert endpoint.directory is not None
        assert Path(endpoint.directory).parent == usable
        assert len(endpoint.directory.encode()) <= MAX_DIRECTORY_BYTES
    if bad in ("long", "not UTF-8"):
        assert list(Path(base).iterdir()) == []  # what was tried there is gone


def test_without_any_directory_it_is_loopback_tcp_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable(environ: Mapping[str, str]) -> Iterator[str]:
        return iter(["/dev/null/a", "/nowhere"])

    monkeypatch.setattr(address, "_base_directories", unusable)
    with create_endpoint({}) as endpoint:
        assert endpoint.address == "tcp://127.0.0.1:*"
        assert endpoint.directory is None
        assert endpoint.curve is not None
        assert endpoint.curve.secret_key is not None


def test_a_core_gets_the_public_key_only_and_no_key_is_ever_printed() -> None:
    endpoint = Endpoint("tcp://127.0.0.1:1", curve=CurveKeys("the public key", "the secret key"))
    copy = endpoint.for_core()
    assert copy == Endpoint("tcp://127.0.0.1:1", curve=CurveKeys("the public key", None))
    assert "key" not in repr(endpoint).replace("CurveKeys", "")
    as_data = attrs.asdict(copy)
    assert as_data == {
        "address": "tcp://127.0.0.1:1",
        "directory": None,
        "curve": {"public_key": "the public key", "secret_key": None},
    }


def test_the_survivor_removes_the_directory_and_twice_does_no_harm(short_path: Path) -> None:
    endpoint = create_endpoint({"TMPDIR": str(short_path)})
    survivor = Endpoint(**attrs.asdict(endpoint.for_core()))
    assert endpoint.directory is not None
    (Path(endpoint.directory) / "zmq").touch()
    survivor.remove()
    assert not Path(endpoint.directory).exists()
    endpoint.remove()
    survivor.remove()


def test_only_the_socket_is_deleted(short_path: Path) -> None:
    """An endpoint that came as data must not become a way to delete a tree."""
    precious = short_path / "directory" / "precious"
    precious.mkdir(parents=True)
    Endpoint("ipc://x", directory=str(short_path / "directory")).remove()
    assert precious.exists()
