"""Conversion by a process of its own; a small stand-in takes the place of transformers, which takes seconds to load."""

import importlib.metadata
import json
import subprocess
import threading
from pathlib import Path

import pytest

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.errors import CheckpointError
from trioengine.tokenizer.convert import CONVERTED_FOLDER, convert_tokenizer
from trioengine.tokenizer.token_bytes import byte_stand_ins
from trioengine.tokenizer.tokenizer import load_tokenizer

STAND_IN = """
import json, pathlib, threading
import tokenizers

class _Backend:
    def __init__(self, text):
        self.text = text
    def to_str(self):
        return self.text

class AutoTokenizer:
    def __init__(self, folder):
        self.is_fast = not (folder / "slow.json").exists()
        words = json.loads((folder / "words.json").read_text())
        backend = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, []))
        backend.decoder = tokenizers.decoders.ByteLevel()
        self.backend_tokenizer = _Backend(backend.to_str())
    @staticmethod
    def from_pretrained(folder, *, local_files_only, trust_remote_code):
        assert local_files_only and not trust_remote_code
        folder = pathlib.Path(folder)
        if (folder / "endless.json").exists():
            threading.Event().wait()
        return AutoTokenizer(folder)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose tokenizer only transformers could build."""
    modules = tmp_path / "modules"
    (modules / "transformers").mkdir(parents=True)
    (modules / "transformers" / "__init__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("TRIOENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.0 of {name}")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "words.json").write_text('["a", "b"]')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "OddTokenizer", "eos_token": "b"}')
    return folder


def test_a_tokenizer_that_only_transformers_can_build(folder: Path) -> None:
    tokenizer = load_tokenizer(ModelLocation(ModelKind.FOLDER, folder, "test"))
    assert tokenizer.encode("ab") == [0, 1]
    assert tokenizer.eos_token_id == 1


def test_it_is_converted_once_for_each_content(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = convert_tokenizer(folder, tmp_path)
    assert path.parent == tmp_path / CONVERTED_FOLDER
    (folder / "model.safetensors").write_bytes(b"weights take no part")
    with monkeypatch.context() as context:
        context.setattr(subprocess, "run", None)
        assert convert_tokenizer(folder, tmp_path) == path
    (folder / "words.json").write_text('["a", "b", "c"]')
    other = convert_tokenizer(folder, tmp_path)
    assert other != path
    assert len(json.loads(other.read_text())["model"]["vocab"]) == 3
    assert sorted(path.parent.iterdir()) == sorted([path, other])


def test_several_at_once_are_safe(folder: Path, tmp_path: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(convert_tokenizer(folder, tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert list((tmp_path / CONVERTED_FOLDER).iterdir()) == [paths[0]]


def test_the_reason_of_a_failure_is_told(folder: Path, tmp_path: Path) -> None:
    (folder / "words.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"could not build .*JSONDecodeError"):
        convert_tokenizer(folder, tmp_path)
    (folder / "words.json").write_text("[]")
    (folder / "slow.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no form that the tokenizers library knows"):
        convert_tokenizer(folder, tmp_path)
    assert list((tmp_path / CONVERTED_FOLDER).iterdir()) == []


def test_a_conversion_without_end_is_ended(folder: Path, tmp_path: Path) -> None:
    (folder / "endless.json").write_text("{}")
    with pytest.raises(CheckpointError, match="took over"):
        convert_tokenizer(folder, tmp_path, timeout_s=0.5)


def test_without_transformers_the_error_says_what_to_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(CheckpointError, match="pip install transformers"):
        convert_tokenizer(folder, tmp_path)


def test_a_cache_that_cannot_be_written_and_too_large_files_are_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="TRIOENGINE_CACHE"):
        convert_tokenizer(folder, tmp_path / "file")
    monkeypatch.setattr("trioengine.tokenizer.convert.MAX_SOURCE_BYTES", 5)
    with pytest.raises(CheckpointError, match="over the limits"):
        convert_tokenizer(folder, tmp_path)


@pytest.mark.slow
def test_transformers_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RoBERTa's ids are those of its files, with its own tokens around a text."""
    monkeypatch.setenv("TRIOENGINE_CACHE", str(tmp_path / "cache"))
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *map(chr, byte_stand_ins()), "Ġa"]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({word: token_id for token_id, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\nĠ a\n")
    (folder / "config.json").write_text('{"model_type": "roberta"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    tokenizer = load_tokenizer(ModelLocation(ModelKind.FOLDER, folder, "test"))
    pieces = [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode("b a <s>")]
    assert pieces == ["<s>", "b", "Ġa", "Ġ", "<", "s", ">", "</s>"]
