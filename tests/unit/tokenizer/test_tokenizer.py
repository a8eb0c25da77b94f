import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import RequestError
from trioengine.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def published(fixtures_folder: Path) -> dict[str, Any]:
    """Ids that other programs made; the file says how."""
    return json.loads((fixtures_folder / "smollm2_tokenizer.json").read_text())


def test_ids_equal_the_published_tokenizers(tokenizer: Tokenizer, published: dict[str, Any]) -> None:
    """Emoji, CJK, combining marks, white space, digits, control characters, special tokens."""
    for row in published["rows"]:
        assert tokenizer.encode(row["text"], allow_special=True) == row["ids"], row["text"]
        assert tokenizer.encode(row["text"]) == row["plain_ids"], row["text"]


def test_decoding_equals_the_published_tokenizers(tokenizer: Tokenizer, published: dict[str, Any]) -> None:
    for row in published["rows"]:
        assert tokenizer.decode(row["ids"], skip_special_tokens=False) == row["text_back"]


def test_special_tokens_in_text_are_text(tokenizer: Tokenizer) -> None:
    """Case 27 (transformers 29279), at the tokenizer."""
    text = "<|im_end|><|im_start|>system"
    ids = tokenizer.encode(text)
    assert tokenizer.special_token_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, allow_special=True)[:2] == [2, 1]


def test_facts_of_the_default_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.eos_token_ids[0] == tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(19556)
    assert tokenizer.token_bytes(19556) == b"Hello"
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


def test_the_models_own_bytes_of_a_split_character(tokenizer: Tokenizer) -> None:
    """Logprobs report a token's own bytes, which need not be characters."""
    ids = tokenizer.encode("語😀")
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == "語😀".encode()
    assert any(tokenizer.token_texts(False)[token_id] is None for token_id in ids)


@pytest.mark.parametrize("text", ["\ud800", "before \udfff after", "😀\ud83d"])
def test_lone_surrogates_are_the_requests_fault(tokenizer: Tokenizer, text: str) -> None:
    """Case 42 (OpenViking 4238)."""
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode(text, allow_special=True)


def test_a_null_byte_is_a_character_like_any_other(tokenizer: Tokenizer) -> None:
    """Case 42, at the tokenizer; whether a request may hold one is the API's business."""
    assert tokenizer.decode(tokenizer.encode("a\0b")) == "a\0b"


def test_ids_without_a_token_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([19556, 10**6, -1, 19556]) == "HelloHello"


@given(st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_categories=["Cc", "Cs"]), max_size=40))
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    """Of planes 0 to 3: this vocabulary lacks some bytes, and the published tokenizer loses them too."""
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_two_threads_may_encode_at_once(tokenizer: Tokenizer) -> None:
    """Whether special tokens count is no state that one thread could change under another."""
    text = "a<|im_end|>b" * 50
    plain, special = tokenizer.encode(text), tokenizer.encode(text, allow_special=True)
    results: dict[bool, list[list[int]]] = {True: [], False: []}

    def encode_often(allow_special: bool) -> None:
        for _ in range(100):
            results[allow_special].append(tokenizer.encode(text, allow_special=allow_special))

    threads = [threading.Thread(target=encode_often, args=(allow,)) for allow in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {True: [special] * 100, False: [plain] * 100}


def test_a_long_text_has_the_same_ids(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts go another way through the library."""
    text = "It's 日本 12 😀.\n <|im_end|> " * 20
    expected = tokenizer.encode(text), tokenizer.encode(text, allow_special=True)
    monkeypatch.setattr("trioengine.tokenizer.tokenizer.LONG_TEXT_CHARS", 10)
    assert (tokenizer.encode(text), tokenizer.encode(text, allow_special=True)) == expected
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode(text + "\ud800")
