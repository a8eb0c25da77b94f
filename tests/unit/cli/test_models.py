"""`trioengine models`: what a person and a program read, and what is asked before anything is removed."""

import io
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from trioengine.checkpoint.locate import DEFAULT_MODEL, packaged_path  # noqa: E402
from trioengine.cli import main as cli  # noqa: E402
from trioengine.testing.tiny_model import folder_tensors, tiny_model, write_folder, write_gguf  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TRIOENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def default_model(cache: Path) -> Path:
    path = packaged_path(DEFAULT_MODEL, cache)
    path.parent.mkdir(parents=True)
    write_gguf(path, tiny_model())
    return path


def test_without_an_action_models_are_listed(default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["models"], ["models", "list"]):
        assert cli.main(words) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(DEFAULT_MODEL.name)
        assert "package index" in line
        assert str(default_model) in line


def test_a_model_that_is_not_here_is_listed_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    assert "not fetched yet" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["models", "--json"], ["models", "list", "--json"], ["models", "--json", "list"]])
def test_a_list_for_programs(default_model: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(words) == 0
    (listing,) = json.loads(capsys.readouterr().out)
    assert listing == {
        "name": DEFAULT_MODEL.name,
        "source": "package index",
        "path": str(default_model),
        "num_bytes": default_model.stat().st_size,
        "is_fetched_here": True,
    }


def test_a_model_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    assert cli.main(["models", "show", str(tmp_path / "tiny.gguf")]) == 0
    shown = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    shown = {label: value.strip() for label, value in shown.items()}
    assert shown["architecture"] == "llama"
    assert shown["weights"] == "F32"
    assert shown["context"] == "512"
    assert shown["chat template"] == "no"
    assert shown["path"] == str(tmp_path / "tiny.gguf")
    assert shown["can run"] == "yes"
    assert int(shown["parameters"].replace(",", "")) > 10000


def test_a_model_that_cannot_run_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model()
    write_folder(tmp_path, model, folder_tensors(model))
    (tmp_path / "tokenizer.json").write_text("{}")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}}
    path.write_text(json.dumps(config))
    assert cli.main(["models", "show", "--json", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "'bitsandbytes' cannot be read" in shown["problem"]
    assert shown["source"] == "file"
    assert cli.main(["models", "show", str(tmp_path)]) == 0
    assert "no: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["BertModel", "OPTForCausalLM"])
def test_models_that_our_decoder_does_not_compute_can_run_too(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An encoder, and one that transformers' code computes."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    if name == "BertModel":
        model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=16))
    else:
        config = transformers.OPTConfig(**sizes, ffn_dim=16, word_embed_proj_dim=16)
        model = transformers.OPTForCausalLM(config)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert cli.main(["models", "show", "--json", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["architecture"], shown["problem"]) == (name, None)


def answer(monkeypatch: pytest.MonkeyPatch, text: str, *, is_terminal: bool = True) -> None:
    stream = io.StringIO(text)
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdin", stream)


@pytest.mark.parametrize(
    ("text", "is_removed"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_a_person_is_asked_before_a_model_is_removed(
    default_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    is_removed: bool,
) -> None:
    answer(monkeypatch, text)
    assert cli.main(["models", "remove", DEFAULT_MODEL.name]) == (0 if is_removed else 1)
    assert default_model.exists() is not is_removed
    assert f"Remove {DEFAULT_MODEL.name}" in capsys.readouterr().out


def test_nobody_to_ask_means_no(
    default_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "y\n", is_terminal=False)
    assert cli.main(["models", "remove", DEFAULT_MODEL.name]) == 1
    assert "--yes" in capsys.readouterr().err
    assert default_model.exists()
    assert cli.main(["models", "remove", "--yes", DEFAULT_MODEL.name]) == 0
    assert not default_model.exists()


def test_a_file_of_ones_own_is_never_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model())
    assert cli.main(["models", "remove", "--yes", str(path)]) == 1
    assert "was not fetched by trioengine" in capsys.readouterr().err
    assert path.exists()
