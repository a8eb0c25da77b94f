import json
from pathlib import Path

import gguf
import pytest

from trioengine.checkpoint.generation import GenerationDefaults, read_generation_defaults
from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.errors import CheckpointError


def read(folder: Path, content: object) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return read_generation_defaults(ModelLocation(ModelKind.FOLDER, folder, "test"))


def test_recommended_values_of_a_folder(tmp_path: Path) -> None:
    content = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    assert read(tmp_path, content) == GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95)
    content = {"min_p": 0, "repetition_penalty": 1.05, "max_new_tokens": 2048, "temperature": None}
    assert read(tmp_path, content) == GenerationDefaults(min_p=0.0, repetition_penalty=1.05, max_tokens=2048)


def test_a_folder_without_the_file_recommends_nothing(tmp_path: Path) -> None:
    assert read_generation_defaults(ModelLocation(ModelKind.FOLDER, tmp_path, "test")) == GenerationDefaults()


def test_recommended_values_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_generation_defaults(ModelLocation(ModelKind.GGUF, path, "test"))
    assert found == GenerationDefaults(temperature=0.5, top_k=20)


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": -1},
        {"temperature": "0.5"},
        {"temperature": 10**400},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"top_k": True},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
        [],
    ],
)
def test_values_that_sampling_cannot_have_are_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read(tmp_path, content)
