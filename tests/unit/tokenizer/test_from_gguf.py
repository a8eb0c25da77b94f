import io
import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from trioengine.checkpoint.locate import ModelKind, ModelLocation
from trioengine.errors import CheckpointError
from trioengine.tokenizer.detokenizer import IncrementalDetokenizer
from trioengine.tokenizer.sentencepiece import TokenType, parse_sentencepiece
from trioengine.tokenizer.token_bytes import byte_stand_ins
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer

STAND_INS = {byte: chr(character) for character, byte in byte_stand_ins().items()}
MERGES = ["Ġ h", "h i", "1 2", "12 3", "Ġh i", "Ġ 1", "Ċ Ċ", "' S"]
BYTE_LEVEL = [*STAND_INS.values(), *(merge.replace(" ", "") for merge in MERGES), "<|end|>", "<tool>"]
BYTE_LEVEL_TYPES = [TokenType.NORMAL] * (len(BYTE_LEVEL) - 2) + [TokenType.CONTROL, TokenType.USER_DEFINED]


def write_gguf(path: Path, **fields: Any) -> ModelLocation:
    """A GGUF file with only these `tokenizer.` entries; None leaves one out."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        name = f"tokenizer.{key.replace('__', '.')}"
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelLocation(ModelKind.GGUF, path, "test")


def byte_level(path: Path, pre: str | None = "gpt-2", **fields: Any) -> Tokenizer:
    entries: dict[str, Any] = {
        "ggml__model": "gpt2",
        "ggml__pre": pre,
        "ggml__tokens": BYTE_LEVEL,
        "ggml__token_type": [int(kind) for kind in BYTE_LEVEL_TYPES],
        "ggml__merges": MERGES,
    }
    return load_tokenizer(write_gguf(path, **(entries | fields)))


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode("latin-1") for token_id in tokenizer.encode(text)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


# Excerpts of published tokenizers; `make.py` beside them says how they were made.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3": {"ggml__model": "gpt2", "ggml__pre": "qwen2"},
    "gptoss": {"ggml__model": "gpt2", "ggml__pre": "gpt-4o"},
    "deepseek_v3": {"ggml__model": "gpt2", "ggml__pre": "deepseek-v3"},
    "mistral_v3": {"ggml__model": "llama"},
    "minilm": {"ggml__model": "bert", "ggml__cls_token_id": 2, "ggml__seperator_token_id": 3},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_pieces_equal_the_published_tokenizers(path: Path, fixtures_folder: Path, name: str) -> None:
    """Emoji, CJK, combining marks, byte fallback, white space, digits, control tokens that users type."""
    excerpt = json.loads((fixtures_folder / "tokenizers" / f"{name}.json").read_text())
    lists = {f"ggml__{key}": excerpt[key] for key in ("tokens", "scores", "merges") if key in excerpt}
    fields = {**lists, **PUBLISHED[name], "ggml__token_type": excerpt["types"]}
    tokenizer = load_tokenizer(write_gguf(path, **fields))
    is_sentencepiece = name == "mistral_v3"
    for row in excerpt["rows"]:
        # To SentencePiece control tokens in a text are text; the others take them for control tokens.
        ids = tokenizer.encode(row["text"], allow_special=not is_sentencepiece, add_special_tokens=not is_sentencepiece)
        assert [tokenizer.id_to_token(token_id) for token_id in ids] == row["pieces"], row["text"]
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        assert detokenizer.feed_many(ids) + detokenizer.flush() == whole
        assert whole == tokenizer._backend.decode(ids, skip_special_tokens=False)
        plain = tokenizer.encode(row["text"], add_special_tokens=False)
        unknown = tokenizer.token_to_id("[UNK]")
        assert {token for token in plain if tokenizer.is_special(token)} <= {unknown}
        if name != "minilm" and name != "qwen3":
            # SentencePiece has one character for a space and its own mark of one.
            text = row["text"].replace("▁", " ") if is_sentencepiece else row["text"]
            assert tokenizer.decode(plain) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        # Digits part from words and, by model, from each other; an 'S in capitals.
        ("gpt-2", [" hi", "123", " ", "\n\n", " ", " 1", "'", "S"]),
        ("smollm", [" hi", "1", "2", "3", " ", "\n\n", " ", " ", "1", "'", "S"]),
        ("llama-bpe", [" hi", "123", " ", "\n\n", " ", " ", "1", "'S"]),
        ("qwen2", [" hi", "1", "2", "3", " ", "\n\n", " ", " ", "1", "'S"]),
        ("refact", [" hi", "1", "2", "3", " ", "\n\n", " ", " ", "1", "'", "S"]),
        ("dbrx", [" hi", "123", " ", "\n\n", " ", " ", "1", "'S"]),
        ("tekken", [" hi", "1", "2", "3", " ", "\n\n", " ", " ", "1", "'S"]),
    ],
)
def test_each_kind_cuts_words_its_own_way(path: Path, pre: str, expected: list[str]) -> None:
    assert words(byte_level(path, pre), " hi123 \n\n  1'S") == expected


def test_qwen2_composes_characters(path: Path) -> None:
    tokenizer = byte_level(path, "qwen2")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


@pytest.mark.parametrize("pre", ["made-up", None])
def test_an_unknown_way_to_cut_words_is_refused(path: Path, pre: str | None) -> None:
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.ggml\.pre.*supported are .*gpt-2, .*llama-bpe, .*qwen2"
    ) as caught:
        byte_level(path, pre)
    assert caught.value.path == str(path)


def test_special_and_user_defined_tokens(path: Path) -> None:
    """Control tokens are plain in text; user-defined ones are vocabulary like any other and always count."""
    tokenizer = byte_level(path)
    end, tool = BYTE_LEVEL.index("<|end|>"), BYTE_LEVEL.index("<tool>")
    assert tokenizer.special_token_ids == {end}
    assert tokenizer.encode("<tool>") == [tool]
    assert end not in tokenizer.encode("<|end|>")
    assert tokenizer.encode("<|end|><tool>", allow_special=True) == [end, tool]
    assert tokenizer.encode_rendered(f"<|end|>{tokenizer.protect('<|end|><tool>')}")[0] == end
    assert tokenizer.encode_rendered(f"<|end|>{tokenizer.protect('<|end|><tool>')}").count(end) == 1


def test_end_tokens_and_templates_are_found(path: Path) -> None:
    tokenizer = byte_level(
        path, ggml__eos_token_id=3, ggml__eot_token_id=4, chat_template="a", chat_template__tool_use="b"
    )
    assert tokenizer.eos_token_ids == (3, 4, BYTE_LEVEL.index("<|end|>"))
    assert tokenizer.facts.chat_templates == {"default": "a", "tool_use": "b"}


def test_bos_is_put_in_front_when_the_file_says_so(path: Path) -> None:
    end = BYTE_LEVEL.index("<|end|>")
    tokenizer = byte_level(path, ggml__bos_token_id=end, ggml__add_bos_token=True)
    hi = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [end, *hi]
    assert tokenizer.encode("hi", allow_special=True) == [end, *hi]


def test_bos_is_put_in_front_by_default_for_llama_3_only(path: Path) -> None:
    end = BYTE_LEVEL.index("<|end|>")
    assert byte_level(path, "llama-bpe", ggml__bos_token_id=end).encode("") == [end]
    assert byte_level(path, "llama-bpe", ggml__bos_token_id=end, ggml__add_bos_token=False).encode("") == []
    assert byte_level(path, "qwen2", ggml__bos_token_id=end).encode("") == []


@pytest.mark.parametrize(
    "fields",
    [
        {"ggml__model": "bert"},
        {"ggml__model": None},
        {"ggml__tokens": None},
        {"ggml__tokens": [1, 2]},
        {"ggml__token_type": [1]},
        {"ggml__merges": None},
        {"ggml__merges": ["not there"]},
        {"ggml__merges": ["", "x"]},
        {"ggml__eos_token_id": 100000},
        {"ggml__bos_token_id": "x"},
        {"ggml__model": "llama"},
    ],
)
def test_what_does_not_fit_together_is_refused(path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        byte_level(path, **fields)
    assert caught.value.path == str(path)


SCORES = {
    "▁": -1.0,
    "h": -2.0,
    "e": -3.0,
    "he": -4.0,
    "l": -5.0,
    "ll": -6.0,
    "hell": -7.0,
    "▁he": -4.5,
    "lo": -6.5,
    "o": -8.0,
}
SPECIALS = ["<unk>", "<s>", "</s>", "<", "/", "s", ">", "</", "s>"]


def sentencepiece(path: Path, **fields: Any) -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SPECIALS, *SCORES, *byte_tokens]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.NORMAL] * (
        len(SPECIALS) + len(SCORES) - 3
    )
    types += [TokenType.BYTE] * 256
    entries: dict[str, Any] = {
        "ggml__model": "llama",
        "ggml__tokens": tokens,
        "ggml__token_type": [int(kind) for kind in types],
        "ggml__scores": [0.0] * len(SPECIALS) + list(SCORES.values()) + [0.0] * 256,
        "ggml__bos_token_id": 1,
        "ggml__eos_token_id": 2,
    }
    return load_tokenizer(write_gguf(path, **(entries | fields)))


def join_by_score(text: str) -> list[str]:
    """SentencePiece's own rule: join the neighbours whose union scores best, the leftmost of equals."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(SCORES[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in SCORES]
        if not unions:
            return parts
        index = -max(unions)[1]
        parts[index : index + 2] = ["".join(parts[index : index + 2])]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece(tmp_path_factory.mktemp("llama") / "model.gguf")


@given(st.text("helo ", min_size=1, max_size=12))
def test_sentencepiece_joins_by_score(llama: Tokenizer, text: str) -> None:
    ids = llama.encode(text)
    assert ids[0] == 1
    assert [llama.id_to_token(token_id) for token_id in ids[1:]] == join_by_score(text)
    assert llama.decode(ids) == text


def test_sentencepiece_spells_what_it_lacks_in_bytes(llama: Tokenizer) -> None:
    assert llama.decode(llama.encode("日😀\n")) == "日😀\n"


def test_sentencepiece_never_joins_a_control_token_from_text(llama: Tokenizer) -> None:
    assert llama.encode("</s>", add_special_tokens=False)[-2:] != [2]
    assert 2 not in llama.encode("</s>")
    assert llama.decode(llama.encode("</s>")) == "</s>"
    rendered = llama.encode_rendered(f"<s>he{llama.protect('</s>')}</s>")
    assert (rendered[0], rendered[-1], rendered.count(2)) == (1, 2, 1)


def test_sentencepiece_without_the_leading_space(path: Path) -> None:
    tokenizer = sentencepiece(path, ggml__add_space_prefix=False, ggml__add_bos_token=False)
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("hell")] == ["hell"]
    assert tokenizer.decode(tokenizer.encode(" he")) == " he"


def unigram_model(**options: Any) -> bytes:
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the dog and the fox", "one of these, fine"] * 5),
        model_writer=written,
        model_type="unigram",
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return written.getvalue()


def test_unigram_equals_sentencepiece(path: Path) -> None:
    data = unigram_model()
    oracle, model = SentencePieceProcessor(model_proto=data), parse_sentencepiece(data)
    tokenizer = load_tokenizer(
        write_gguf(
            path,
            ggml__model="t5",
            ggml__tokens=list(model.pieces),
            ggml__token_type=list(model.types),
            ggml__scores=list(model.scores),
            ggml__precompiled_charsmap=list(model.precompiled_charsmap),
            ggml__eos_token_id=2,
        )
    )
    for text in ("the dog", "  the   ｆｏｘ ", "</s> fine", "", "日"):
        assert tokenizer.encode(text) == [*oracle.encode(text), 2]
        ids = tokenizer.encode(text, allow_special=True, add_special_tokens=False)
        assert (2 in ids) == ("</s>" in text)
    assert tokenizer.decode(tokenizer.encode("the dog")) == "the dog"


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "▁cat", "s", "▁."]


def wordpiece(path: Path, words: list[str], **fields: Any) -> Tokenizer:
    entries: dict[str, Any] = {
        "ggml__model": "bert",
        "ggml__tokens": words,
        "ggml__token_type": [3 if word.startswith("[") else 1 for word in words],
    }
    return load_tokenizer(write_gguf(path, **(entries | fields)))


def test_wordpiece_in_small_letters_and_in_both(path: Path) -> None:
    """No key says which; a vocabulary of small letters tells."""
    small = wordpiece(path, WORDS)
    assert small.encode("The cats.") == [2, 4, 5, 6, 7, 3]
    assert small.encode("thes dogs", add_special_tokens=False) == [4, 6, 1]
    assert small.decode([2, 4, 5, 6, 7, 3]) == "the cats."
    assert [small.token_bytes(token_id) for token_id in (5, 6)] == [b" cat", b"s"]
    both = wordpiece(path, [*WORDS, "▁The"])
    assert both.encode("The CATS", add_special_tokens=False) == [8, 1]


def test_wordpiece_without_a_token_for_the_unknown_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no token '\[UNK\]'"):
        wordpiece(path, WORDS[4:])


def test_eos_is_put_behind_when_the_file_says_so(path: Path) -> None:
    end = BYTE_LEVEL.index("<|end|>")
    tokenizer = byte_level(path, ggml__eos_token_id=end, ggml__add_eos_token=True)
    assert tokenizer.encode("hi") == [*tokenizer.encode("hi", add_special_tokens=False), end]


@pytest.mark.parametrize("charsmap", [["a"], [300], "x"])
def test_a_damaged_charsmap_is_refused(path: Path, charsmap: Any) -> None:
    with pytest.raises(CheckpointError, match="precompiled_charsmap"):
        sentencepiece(path, ggml__model="t5", ggml__precompiled_charsmap=charsmap)
    with pytest.raises(CheckpointError, match="do not fit together"):
        sentencepiece(path, ggml__model="t5", ggml__precompiled_charsmap=[1, 2, 3])
