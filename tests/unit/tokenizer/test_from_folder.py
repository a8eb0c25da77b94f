import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.errors import CheckpointError, RequestError
from trioengine.tokenizer.chat_template import render_chat
from trioengine.tokenizer.token_bytes import byte_stand_ins
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer

VOCABULARY = {token: index for index, token in enumerate(["<s>", "</s>", *map(chr, byte_stand_ins())])}


def make_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(VOCABULARY, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|extra|>"])
    backend.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    return backend


def load(folder: Path, backend: tokenizers.Tokenizer | None = None, **files: Any) -> Tokenizer:
    """Write the folder's files (JSON by name, text as it is) and load its tokenizer."""
    (folder / "tokenizer.json").write_text((backend or make_backend()).to_str())
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return load_tokenizer(ModelLocation(ModelKind.FOLDER, folder, "test"))


def test_special_tokens_are_found_in_either_form(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<|extra|>", "unk_token": None}
    tokenizer = load(tmp_path, tokenizer_config__json=config)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, len(VOCABULARY))
    assert tokenizer.special_token_ids == {0, 1, len(VOCABULARY)}


def test_every_end_token_of_every_file_ends_an_answer(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        tokenizer_config__json={"eos_token": "</s>"},
        generation_config__json={"eos_token_id": [7, 1]},
        config__json={"eos_token_id": 9, "bos_token_id": 0},
    )
    assert tokenizer.eos_token_ids == (1, 7, 9)
    assert tokenizer.bos_token_id == 0


def test_tokens_beside_the_vocabulary_keep_their_ids(tmp_path: Path) -> None:
    """The guarded tokenizer numbers added tokens otherwise; the ids that come out are the model's."""
    tokenizer = load(tmp_path)
    extra, think = len(VOCABULARY), len(VOCABULARY) + 1
    assert tokenizer.encode("<think>") == [think]
    assert tokenizer.encode("<|extra|><think>", allow_special=True) == [extra, think]
    plain = tokenizer.encode("<|extra|>")
    assert extra not in plain
    rendered = tokenizer.encode_rendered("<s><|extra|><think>" + tokenizer.protect("<|extra|>") + "<|extra|>")
    assert rendered == [0, extra, think, *plain, extra]


def test_bos_is_added_when_the_configuration_overrules(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "add_bos_token": True}
    assert load(tmp_path, tokenizer_config__json=config).encode("") == [0]
    with_bos = make_backend()
    with_bos.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    assert load(tmp_path, with_bos, tokenizer_config__json=config).encode("") == [0]
    assert load(tmp_path, with_bos, tokenizer_config__json={"bos_token": "<s>"}).encode("") == [0]
    assert load(tmp_path, with_bos, tokenizer_config__json=config | {"add_bos_token": False}).encode("") == []


def test_settings_for_training_batches_are_dropped(tmp_path: Path) -> None:
    """They would cut or pad prompts silently."""
    backend = make_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    assert len(load(tmp_path, backend).encode("hello")) == 5


def test_chat_templates_come_as_text_as_a_list_or_as_a_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    tokenizer = load(tmp_path, tokenizer_config__json={"chat_template": "text"})
    assert render_chat(tokenizer, messages).prompt_text == "text"
    named = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = load(tmp_path, tokenizer_config__json={"chat_template": named})
    assert render_chat(tokenizer, messages).prompt_text == "listed"
    tokenizer = load(tmp_path, chat_template__jinja="from the file")
    assert render_chat(tokenizer, messages).prompt_text == "from the file"
    assert tokenizer.facts.chat_templates["tool_use"] == "tools"


def test_a_normalizer_cannot_turn_user_text_into_a_control_token(tmp_path: Path) -> None:
    """A token that is matched after lower-casing would be found in <THINK> too."""
    backend = make_backend()
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([tokenizers.AddedToken("<stop>", special=True, normalized=True)])
    tokenizer = load(tmp_path, backend)
    stop = tokenizer.token_to_id("<stop>")
    assert stop in tokenizer.encode("<STOP>", allow_special=True)
    assert stop not in tokenizer.encode("<STOP>")
    assert tokenizer.encode_rendered("<stop>" + tokenizer.protect("<STOP>")).count(stop) == 1


def test_a_control_token_that_merges_can_make_is_never_made_from_text(tmp_path: Path) -> None:
    """No such vocabulary is known; where one comes, users get an error and no control token."""
    backend = tokenizers.Tokenizer(models.BPE({"<": 0, "s": 1, "<s": 2}, [("<", "s")]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s"])
    tokenizer = load(tmp_path, backend)
    assert tokenizer.encode("<s", allow_special=True) == [2]
    assert tokenizer.encode("s<") == [1, 0]
    with pytest.raises(RequestError, match="control token '<s'"):
        tokenizer.encode("<s")
    assert tokenizer.encode_rendered("<s") == [2]
    with pytest.raises(RequestError, match="control token '<s'"):
        tokenizer.encode_rendered("<s" + tokenizer.protect("<s"))


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(ModelLocation(ModelKind.FOLDER, tmp_path, "test"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config__json", "{"),
        ("tokenizer_config__json", "[]"),
        ("tokenizer_config__json", "[" * 100_000),
        ("generation_config__json", '{"eos_token_id": '),
        ("tokenizer_config__json", {"chat_template": [{"name": 1}]}),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: Any) -> None:
    with pytest.raises(CheckpointError, match=name.replace("__", ".")) as caught:
        load(tmp_path, **{name: content})
    assert caught.value.path == str(tmp_path / name.replace("__", "."))


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(ModelLocation(ModelKind.FOLDER, tmp_path, "test"))


def test_a_crash_inside_the_library_is_an_error(tmp_path: Path) -> None:
    """A merge longer than every token makes the library panic, which Python sees as no `Exception`."""
    parsed = json.loads(make_backend().to_str())
    parsed["model"]["vocab"] = {"aa": 0, "b": 1}
    parsed["model"]["merges"] = [["aa", "b"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(ModelLocation(ModelKind.FOLDER, tmp_path, "test"))


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    backend = make_backend()
    backend.decoder = decoders.CTC()
    with pytest.raises(CheckpointError, match="CTC"):
        load(tmp_path, backend)
