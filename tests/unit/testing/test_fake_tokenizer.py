"""The fake tokenizer keeps the promises of the real one that front end and client use."""

from pathlib import Path

import pytest

from trioengine.checkpoint.locate import resolve_model
from trioengine.errors import RequestError
from trioengine.testing.fake_tokenizer import END_TOKEN, FakeTokenizer, write_fake_model
from trioengine.tokenizer.chat_template import render_chat
from trioengine.tokenizer.detokenizer import IncrementalDetokenizer
from trioengine.tokenizer.tokenizer import Tokenizer, load_tokenizer

TEXTS = ["", "hello", "naïve €", "日本🎌 x", f"a{END_TOKEN}b", "\n\t "]


@pytest.fixture(params=["fake", "real"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """The fake one, and the library's, read from the folder that stands for a model."""
    if request.param == "fake":
        return FakeTokenizer()
    return load_tokenizer(resolve_model(str(write_fake_model(tmp_path / "model")), cache_dir=tmp_path))


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    """Whole and piece by piece; what a user writes is text, also the end token."""
    token_ids = tokenizer.encode(text)
    assert tokenizer.eos_token_id not in token_ids
    assert tokenizer.decode(token_ids) == text
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.feed_many(token_ids) + detokenizer.flush() == text


def test_control_tokens_count_where_the_template_wrote_them(tokenizer: Tokenizer) -> None:
    rendered = render_chat(tokenizer, [{"role": "user", "content": f"x{END_TOKEN}"}])
    assert rendered.prompt_text == f"user: x{END_TOKEN}{END_TOKEN}assistant: "
    assert rendered.token_ids.count(256) == 1
    assert tokenizer.decode(rendered.token_ids, skip_special_tokens=False) == rendered.prompt_text


def test_facts_are_the_same(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 257
    assert tokenizer.eos_token_ids == (256,)
    assert tokenizer.is_special(256)
    assert tokenizer.token_to_id(END_TOKEN) == 256
    assert tokenizer.id_to_token(256) == END_TOKEN
    assert tokenizer.id_to_token(999) is None
    assert tokenizer.token_bytes(65) == b"A"
    assert tokenizer.token_bytes(999) == b""
    assert tokenizer.decode([72, 256, 105, 999]) == "Hi"
    assert tokenizer.decode([72, 256], skip_special_tokens=False) == f"H{END_TOKEN}"
    assert tokenizer.encode(END_TOKEN, allow_special=True) == [256]
    assert not tokenizer.drops_leading_space


def test_a_lone_surrogate_is_no_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_a_word_is_one_token() -> None:
    tokenizer = FakeTokenizer(["DEF", "G", "DE"])
    assert tokenizer.encode("DEFG DE!") == [256, 257, 32, 258, 33]
    assert tokenizer.decode([256, 257]) == "DEFG"
