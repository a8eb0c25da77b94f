"""The models on a machine: listed, found, described; only what this engine has fetched is removed."""

import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from trioengine.checkpoint.inventory import (
    ModelSource,
    describe,
    find_model,
    list_models,
    remove_model,
)
from trioengine.checkpoint.locate import DEFAULT_MODEL, ModelKind, ModelLocation, packaged_path, resolve_model
from trioengine.errors import CheckpointError
from trioengine.testing import packed_weights


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's folder, empty, and a hub without a network."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def write_gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tensor("a", np.zeros((4, 32), np.float32))
    packed = gguf.quantize(np.ones((16, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("b", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(
    folder: Path, config: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({} if config is None else config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"x": np.zeros((2, 3), np.float16)} if tensors is None else dict(tensors), folder / "model.safetensors")
    return folder


def write_hub_model(hub: Path, folder_name: str = "models--org--name", revision: str = "0123") -> Path:
    snapshot = write_folder(hub / folder_name / "snapshots" / revision)
    (hub / folder_name / "refs").mkdir(exist_ok=True)
    (hub / folder_name / "refs" / "main").write_text(revision)
    return snapshot


def put_default(cache: Path) -> Path:
    return write_gguf(packaged_path(DEFAULT_MODEL, cache))


def test_the_default_model_is_listed_fetched_or_not(cache: Path) -> None:
    [missing] = list_models(cache)
    assert (missing.name, missing.path, missing.num_bytes) == (DEFAULT_MODEL.name, None, DEFAULT_MODEL.wheel_bytes)
    assert not missing.is_fetched_here
    path = put_default(cache)
    [found] = list_models(cache)
    assert (found.path, found.num_bytes, found.source) == (path, path.stat().st_size, ModelSource.PACKAGE)
    assert found.is_fetched_here


def test_files_and_the_hubs_models_are_listed(cache: Path, hub: Path) -> None:
    other = write_gguf(cache / "models" / "mine" / "other.gguf")
    snapshot = write_hub_model(hub)
    write_hub_model(hub, "models--org--two--dashes")
    (hub / "models--org--no-weights" / "snapshots" / "1").mkdir(parents=True)
    (hub / "datasets--org--name" / "snapshots" / "1").mkdir(parents=True)
    _, *listed = list_models(cache)
    assert [(model.name, model.source) for model in listed] == [
        (str(other), ModelSource.FILE),
        ("org/name", ModelSource.HUB),
        ("org/two--dashes", ModelSource.HUB),
    ]
    assert listed[1].path == snapshot
    assert listed[1].num_bytes == sum(path.stat().st_size for path in snapshot.iterdir())
    assert not any(model.is_fetched_here for model in listed)


def test_of_several_snapshots_the_main_one_counts(cache: Path, hub: Path) -> None:
    write_hub_model(hub, revision="0000")
    newer = write_hub_model(hub, revision="9999")
    assert find_model("org/name", cache)[0].path == newer
    (hub / "models--org--name" / "refs" / "main").write_text("gone")
    assert find_model("org/name", cache)[0].path == newer.with_name("0000")


def test_without_the_hubs_package_there_are_no_hub_models(
    cache: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hub_model(hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    assert len(list_models(cache)) == 1


def test_a_model_is_found_by_whatever_names_it(cache: Path, hub: Path, tmp_path: Path) -> None:
    path = put_default(cache)
    for name in (None, DEFAULT_MODEL.name):
        listing, location = find_model(name, cache)
        assert location == ModelLocation(ModelKind.GGUF, path, DEFAULT_MODEL.name)
        assert listing.is_fetched_here
    assert find_model(str(path), cache)[0] == listing
    folder = write_folder(tmp_path / "my-model")
    listing, location = find_model(str(folder), cache)
    assert (listing.source, location.kind, location.path) == (ModelSource.FILE, ModelKind.FOLDER, folder)
    snapshot = write_hub_model(hub)
    listing, location = find_model("org/name", cache)
    assert (listing.source, location.path, location.served_name) == (ModelSource.HUB, snapshot, "org/name")


@pytest.mark.parametrize("name", [None, DEFAULT_MODEL.name, "org/name", "nonsense", "x" * 5000, "a\0b"])
def test_what_is_not_here_is_an_error_and_is_not_fetched(cache: Path, name: str | None) -> None:
    with pytest.raises(CheckpointError, match=r"not on this machine|cannot be looked up"):
        find_model(name, cache)


def test_a_gguf_file_is_described(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf")
    found = describe(ModelLocation(ModelKind.GGUF, path, "x"))
    assert (found.architecture, found.max_position_embeddings) == ("llama", 512)
    assert (found.num_parameters, found.weights) == (640, "Q8_0, F32")
    assert found.num_bytes == path.stat().st_size


def test_a_folder_is_described(tmp_path: Path) -> None:
    config = {"architectures": ["SomethingNew"], "text_config": {"max_position_embeddings": 99}}
    found = describe(ModelLocation(ModelKind.FOLDER, write_folder(tmp_path / "x", config), "x"))
    assert (found.architecture, found.max_position_embeddings) == ("SomethingNew", 99)
    assert (found.num_parameters, found.weights) == (6, "F16")


def test_packed_weights_count_as_the_numbers_that_they_are(tmp_path: Path) -> None:
    codes = np.zeros((16, 64), np.int64)
    packed = packed_weights.awq(codes, np.ones((16, 2), np.float16), codes[:, :2])
    tensors = {f"a.{name}": np.asarray(values) for name, values in packed.items()} | {"b": np.zeros(5, np.float32)}
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    found = describe(ModelLocation(ModelKind.FOLDER, write_folder(tmp_path / "x", config, tensors), "x"))
    assert (found.num_parameters, found.weights) == (16 * 64 + 5, "AWQ, 4 bits; F32")
    assert (found.architecture, found.max_position_embeddings) == (None, None)


def test_the_fetched_default_model_is_removed_with_its_folder(cache: Path) -> None:
    path = put_default(cache)
    remove_model(find_model(None, cache)[0], cache)
    assert not path.parent.exists()
    put_default(cache)
    (path.parent / "notes.txt").write_text("mine")
    remove_model(find_model(None, cache)[0], cache)
    assert [kept.name for kept in path.parent.iterdir()] == ["notes.txt"]


def test_what_others_have_fetched_stays(cache: Path, hub: Path, tmp_path: Path) -> None:
    other = write_gguf(cache / "models" / "mine" / "other.gguf")
    snapshot = write_hub_model(hub)
    folder = write_folder(tmp_path / "my-model")
    for name, path in ((str(other), other), ("org/name", snapshot), (str(folder), folder)):
        with pytest.raises(CheckpointError, match="was not fetched by trioengine") as caught:
            remove_model(find_model(name, cache)[0], cache)
        assert caught.value.path == str(path)
        assert path.exists()


def fake_download(hub_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        folder_name = f"models--{hub_id.replace('/', '--')}"
        kept = hub_folder / folder_name / "snapshots" / "0123"
        return str(kept if kept.exists() else write_hub_model(hub_folder, folder_name))

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download  # pyright: ignore
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_hub_model_that_was_fetched_here_is_removed(cache: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hub_model(hub, "models--org--theirs")
    fake_download(hub, monkeypatch)
    for name in ("org/theirs", "org/ours", "org/ours"):
        resolve_model(name, cache_dir=cache)
    listings = {listing.name: listing for listing in list_models(cache)}
    assert not listings["org/theirs"].is_fetched_here
    assert listings["org/ours"].is_fetched_here
    remove_model(listings["org/ours"], cache)
    assert [path.name for path in hub.iterdir()] == ["models--org--theirs"]
    # Somebody else fetches it now: it is no longer ours.
    write_hub_model(hub, "models--org--ours")
    assert not find_model("org/ours", cache)[0].is_fetched_here
