import functools
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
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


def test_a_chat_template_gets_the_tokens_that_the_tokenizer_names(tmp_path: Path) -> None:
    """Qwen 2.5 has no BOS, though its config.json has an id for one; others name more than the usual four."""
    names = ["bos_token", "eos_token", "sep_token", "image_token"]
    config: dict[str, Any] = {"chat_template": "|".join(f"{{{{ {name} }}}}" for name in names), "eos_token": "</s>"}
    ids = {"bos_token_id": 0, "eos_token_id": 1}

    def rendered(**changes: Any) -> str:
        tokenizer = load(tmp_path, tokenizer_config__json=config | changes, config__json=ids)
        return render_chat(tokenizer, [{"role": "user", "content": ""}]).prompt_text

    assert rendered() == "|</s>||"
    assert rendered(bos_token=None, sep_token="<|extra|>") == "|</s>|<|extra|>|"
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        assert rendered(**{key: {"image_token": "<|extra|>"}}) == "|</s>||<|extra|>"
    del config["eos_token"]
    assert rendered() == "<s>|</s>||"


@pytest.mark.parametrize("has_own", [False, True])
def test_texts_are_lowered_where_sentence_transformers_does(has_own: bool, tmp_path: Path) -> None:
    backend = make_backend()
    if has_own:
        backend.normalizer = normalizers.Replace("b", "x")
    tokenizer = load(tmp_path, backend, sentence_bert_config__json={"do_lower_case": True})
    assert tokenizer.decode(tokenizer.encode("ÄB<S>c")) == ("äx<s>c" if has_own else "äb<s>c")
    assert tokenizer.encode("<s>B", allow_special=True)[0] == 0
    tokenizer = load(tmp_path, backend, sentence_bert_config__json={"do_lower_case": False})
    assert tokenizer.decode(tokenizer.encode("AC")) == "AC"


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


def test_more_places_of_chat_templates(tmp_path: Path) -> None:
    """Later ones overrule: tokenizer_config.json, chat_template.json, chat_template.jinja, a folder of named ones."""
    listed = [{"name": "default", "template": "listed"}, {"name": "rag", "template": "documents"}]
    load(tmp_path, tokenizer_config__json={"chat_template": listed})
    assert load(tmp_path, chat_template__json={"chat_template": "json"}).facts.chat_templates == {
        "default": "json",
        "rag": "documents",
    }
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("tools")
    (folder / "rag.jinja").write_text("other documents")
    tokenizer = load(tmp_path, chat_template__jinja="jinja")
    expected = {"default": "jinja", "rag": "other documents", "tool_use": "tools"}
    assert tokenizer.facts.chat_templates == expected
    messages = [{"role": "user", "content": "x"}]
    assert render_chat(tokenizer, messages, template_kwargs={"tools": [{}]}).prompt_text == "tools"


def test_tokens_beside_tokenizer_json_are_added(tmp_path: Path) -> None:
    size = make_backend().get_vocab_size()
    special = {"content": "<|call|>", "special": True, "normalized": False}
    tokenizer = load(
        tmp_path,
        added_tokens__json={"<tool>": size},
        tokenizer_config__json={"added_tokens_decoder": {str(size + 1): special}, "eos_token": "<|call|>"},
        special_tokens_map__json={"bos_token": "<s>", "eos_token": "</s>"},
    )
    assert tokenizer.encode("<tool>") == [size]
    assert tokenizer.encode("<|call|>", allow_special=True) == [size + 1]
    assert size + 1 not in tokenizer.encode("<|call|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, size + 1)


def test_an_added_token_without_a_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'<tool>' should have the id 999"):
        load(tmp_path, added_tokens__json={"<tool>": 999})


def test_what_tokenizer_json_knows_overrules_lists_of_added_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, added_tokens__json={"<think>": 999})
    assert tokenizer.encode("<think>") == [len(VOCABULARY) + 1]


def test_a_character_that_fills_up_batches_stays_a_character(tmp_path: Path) -> None:
    """Models name "!" as their padding token; it may be typed, and is shown."""
    backend = make_backend()
    backend.add_special_tokens(["!"])
    tokenizer = load(tmp_path, backend, tokenizer_config__json={"pad_token": "!"})
    ids = tokenizer.encode("hi!")
    assert ids[-1] == tokenizer.pad_token_id == VOCABULARY["!"]
    assert tokenizer.decode(ids) == "hi!"


def test_eos_is_put_behind_when_the_configuration_says_so(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True}
    assert load(tmp_path, tokenizer_config__json=config).encode("") == [1]
    assert load(tmp_path, tokenizer_config__json=config | {"add_bos_token": True}).encode("") == [0, 1]


def excerpt(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "tokenizers" / f"{name}.json").read_text())


def load_files(folder: Path, **files: Any) -> Tokenizer:
    """As `load`, without a tokenizer.json."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return load_tokenizer(ModelLocation(ModelKind.FOLDER, folder, "test"))


def check_rows(tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        ids = tokenizer.encode(row["text"], allow_special=True)
        assert [tokenizer.id_to_token(token_id) for token_id in ids] == row["pieces"], row["text"]


def test_a_folder_with_vocab_txt_equals_the_published_tokenizer(tmp_path: Path, fixtures_folder: Path) -> None:
    published = excerpt(fixtures_folder, "minilm")
    words = [
        token if token.startswith("[") and len(token) > 1 else token[1:] if token.startswith("▁") else f"##{token}"
        for token in published["tokens"]
    ]
    tokenizer = load_files(tmp_path, vocab__txt="\n".join(words) + "\n", tokenizer_config__json={"do_lower_case": True})
    check_rows(tokenizer, published["rows"])
    assert tokenizer.decode(tokenizer.encode("Hello, world")) == "hello, world"
    cased = load_files(tmp_path, tokenizer_config__json={"do_lower_case": False, "tokenizer_class": "BertTokenizer"})
    unknown = cased.token_to_id("[UNK]")
    assert cased.encode("HELLO", add_special_tokens=False) == [unknown]


def test_a_folder_with_vocab_json_and_merges_equals_the_published_tokenizer(
    tmp_path: Path, fixtures_folder: Path
) -> None:
    published = excerpt(fixtures_folder, "qwen3")
    num_words = published["types"].count(1)
    ids = {token: index for index, token in enumerate(published["tokens"])}
    tokenizer = load_files(
        tmp_path,
        vocab__json={token: index for token, index in ids.items() if index < num_words},
        merges__txt="#version: 0.2\n" + "\n".join(published["merges"]) + "\n",
        added_tokens__json={token: index for token, index in ids.items() if index >= num_words},
        tokenizer_config__json={
            "tokenizer_class": "Qwen2TokenizerFast",
            "eos_token": "<|im_end|>",
            "additional_special_tokens": ["<|im_start|>", "<|endoftext|>"],
        },
    )
    check_rows(tokenizer, published["rows"])
    assert tokenizer.special_token_ids == set(range(num_words, len(ids)))
    assert tokenizer.eos_token_id == ids["<|im_end|>"]


def train_sentencepiece(folder: Path, **options: Any) -> SentencePieceProcessor:
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the dog and the fox", "one of these"] * 5),
        model_writer=written,
        model_type="bpe",
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    return SentencePieceProcessor(model_proto=written.getvalue())


def test_a_folder_with_tokenizer_model(tmp_path: Path) -> None:
    oracle = train_sentencepiece(tmp_path)
    tokenizer = load_files(tmp_path, tokenizer_config__json={"tokenizer_class": "LlamaTokenizer"})
    text = "the dog </s> 日"
    assert tokenizer.encode(text) == [1, *oracle.encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    chat = tokenizer.encode("<s>dog</s>", allow_special=True, add_special_tokens=False)
    assert [tokenizer.id_to_token(token_id) for token_id in chat] == [
        "<s>",
        *oracle.encode("dog", out_type=str),
        "</s>",
    ]
    tokenizer = load_files(tmp_path, tokenizer_config__json={"add_bos_token": False, "legacy": False})
    assert tokenizer.encode(text) == oracle.encode(text)
    chat = tokenizer.encode("<s>dog", allow_special=True)
    assert not (tokenizer.id_to_token(chat[1]) or "").startswith("▁")


def test_a_damaged_tokenizer_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match="SentencePiece") as caught:
        load_files(tmp_path)
    assert caught.value.path == str(tmp_path / "tokenizer.model")


def test_unigram_reads_control_tokens_in_text_as_text(tmp_path: Path) -> None:
    """Its vocabulary has them among the words that text is cut into (case 27)."""
    words = [("<unk>", 0.0), ("</s>", 0.0), *((character, -5.0) for character in "</s>▁ab")]
    backend = tokenizers.Tokenizer(models.Unigram(words, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = load(tmp_path, backend)
    assert tokenizer.encode("</s>", allow_special=True) == [1]
    assert [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode("a</s>")] == list("▁a</s>")
    rendered = tokenizer.encode_rendered(f"{tokenizer.protect('</s>')}</s>")
    assert rendered.count(1) == 1
    assert 0 in tokenizer.encode("?")


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


def test_a_file_that_is_none_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named pipe would block for ever."""
    load(tmp_path)
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(CheckpointError, match="no regular file"):
        load(tmp_path)
    monkeypatch.setattr("trioengine.tokenizer.from_folder.MAX_VOCABULARY_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is larger than 100 bytes"):
        load(tmp_path)


def test_a_crash_inside_the_library_is_an_error(tmp_path: Path) -> None:
    """A merge longer than every token makes the library panic, which Python sees as no `Exception`."""
    parsed = json.loads(make_backend().to_str())
    parsed["model"]["vocab"] = {"aa": 0, "b": 1}
    parsed["model"]["merges"] = [["aa", "b"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(ModelLocation(ModelKind.FOLDER, tmp_path, "test"))


def test_a_text_that_the_models_pattern_gives_up_on_is_the_requests_fault(tmp_path: Path) -> None:
    """The library panics then, which Python sees as no `Exception`; others go on."""
    backend = make_backend()
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    tokenizer = load(tmp_path, backend)
    with pytest.raises(RequestError, match="cannot read this text"):
        tokenizer.encode("a" * 30 + "b")
    assert len(tokenizer.encode("ab")) == 2


def test_a_text_that_the_vocabulary_cannot_spell_is_the_requests_fault(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.Unigram([("a", -1.0)], None, False))
    backend.decoder = decoders.Metaspace()
    tokenizer = load(tmp_path, backend)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RequestError, match="cannot read this text"):
        tokenizer.encode("b")


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of everything in a JSON value, but a vocabulary's words."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        if key != "vocab":
            yield from places(item, (*path, key))


odd_values = st.sampled_from([None, True, -1, 0, 2**40, 1.5, "", "a", "▁" * 300, "(", [], [[]], {}, {"type": "Strip"}])


@given(st.data())
def test_a_damaged_tokenizer_json_is_a_clear_error_or_another_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    backend = make_backend()
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    parsed = json.loads(backend.to_str())
    path = data.draw(st.sampled_from(sorted(places(parsed), key=str)))
    target = functools.reduce(lambda value, key: value[key], path[:-1], parsed)
    target[path[-1]] = data.draw(odd_values)
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "tokenizer.json").write_text(json.dumps(parsed))
    try:
        tokenizer = load_tokenizer(ModelLocation(ModelKind.FOLDER, folder, "test"))
        ids = tokenizer.encode("hi <s>")
    except (CheckpointError, RequestError):
        return
    assert isinstance(tokenizer.decode(ids), str)


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    backend = make_backend()
    backend.decoder = decoders.CTC()
    with pytest.raises(CheckpointError, match="CTC"):
        load(tmp_path, backend)
