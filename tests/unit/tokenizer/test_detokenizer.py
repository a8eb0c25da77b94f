import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from trioengine.tokenizer.detokenizer import IncrementalDetokenizer
from trioengine.tokenizer.parts import TokenizerFacts
from trioengine.tokenizer.tokenizer import Tokenizer

PIECES = ["<unk>", "<s>", "</s>", "▁", "▁leading", "lead", "▁▁", "a", "é", "語", "e\u0301"]


def make_sentencepiece(*, with_strip: bool = True) -> Tokenizer:
    """A Llama-like vocabulary: pieces, then every byte."""
    tokens = PIECES + [f"<0x{byte:02X}>" for byte in range(256)]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if with_strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, TokenizerFacts(bos_token_id=1, eos_token_ids=(2,)))


def byte_id(byte: int) -> int:
    return len(PIECES) + byte


SENTENCEPIECE = make_sentencepiece()


def pieces(
    tokenizer: Tokenizer, token_ids: list[int], prompt_ids: list[int] | None = None, skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids or [], skip_special_tokens=skip)
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.fixture(scope="session")
def odd_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are not whole characters, and the special ones: what random ids rarely hit."""
    texts = tokenizer.token_texts(False)
    return [token_id for token_id, text in enumerate(texts) if text is None] + sorted(tokenizer.special_token_ids)


@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_equal_the_full_decode(
    tokenizer: Tokenizer, odd_ids: list[int], data: st.DataObject, skip: bool
) -> None:
    any_id = st.integers(0, tokenizer.vocab_size + 10) | st.sampled_from(odd_ids)
    ids = data.draw(st.lists(any_id, max_size=30))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, ids, skip=skip)) == whole
    known = [token_id for token_id in ids if token_id < tokenizer.vocab_size]
    assert whole == tokenizer._backend.decode(known, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, len(PIECES) + 255), max_size=20), skip=st.booleans())
def test_joined_deltas_equal_the_full_decode_of_sentencepiece(ids: list[int], skip: bool) -> None:
    assert "".join(pieces(SENTENCEPIECE, ids, skip=skip)) == SENTENCEPIECE.decode(ids, skip_special_tokens=skip)


@given(st.text(st.characters(codec="utf-8"), max_size=10))
def test_any_character_over_byte_tokens_comes_whole(text: str) -> None:
    """Case 26 (mlx-lm 1754): emoji, CJK and combining sequences; every delta is a whole character or nothing."""
    ids = [byte_id(byte) for byte in ("x" + text).encode()]
    parts = pieces(SENTENCEPIECE, ids)
    assert "".join(parts) == "x" + text
    assert max(map(len, parts)) == 1


def test_leading_spaces_equal_the_full_decode() -> None:
    """Case 26 (mlx-lm 1754): '▁', '▁leading'."""
    ids = [PIECES.index("▁"), PIECES.index("▁leading")]
    assert pieces(SENTENCEPIECE, ids) == ["", " leading", ""]
    assert SENTENCEPIECE.decode(ids) == SENTENCEPIECE._backend.decode(ids) == " leading"


def test_a_leading_space_after_a_prompt_is_kept() -> None:
    """It belongs to what the answer adds to the prompt's text; after a prompt of control tokens there is no text."""
    word, begin = PIECES.index("▁leading"), PIECES.index("<s>")
    assert pieces(SENTENCEPIECE, [word], [PIECES.index("a")]) == [" leading", ""]
    assert pieces(SENTENCEPIECE, [word], [begin]) == ["leading", ""]
    assert pieces(make_sentencepiece(with_strip=False), [word], []) == [" leading", ""]


def test_a_character_is_held_until_it_is_whole() -> None:
    ids = [byte_id(byte) for byte in "a😀b".encode()]
    assert pieces(SENTENCEPIECE, ids) == ["a", "", "", "", "😀", "b", ""]


def test_an_invalid_byte_becomes_a_replacement_and_the_text_goes_on() -> None:
    ids = [byte_id(0xFF), byte_id(0xE6), PIECES.index("a"), byte_id(0x97)]
    assert pieces(SENTENCEPIECE, ids) == ["\ufffd", "", "\ufffda", "\ufffd", ""]


def test_an_incomplete_character_at_the_end_is_flushed() -> None:
    assert pieces(SENTENCEPIECE, [byte_id(0xE6), byte_id(0x97)]) == ["", "", "\ufffd"]


def test_a_special_token_that_is_skipped_does_not_part_a_character() -> None:
    """As in the full decode, where it is taken out first."""
    ids = [byte_id(0xE6), PIECES.index("</s>"), byte_id(0x97), byte_id(0xA5)]
    assert pieces(SENTENCEPIECE, ids) == ["", "", "", "日", ""]
    assert "".join(pieces(SENTENCEPIECE, ids, skip=False)) == "\ufffd</s>\ufffd\ufffd"


def test_a_prompt_that_ends_inside_a_character_leaks_nothing() -> None:
    """Case 25 (vllm 48853): the first delta is that character only."""
    prompt = [PIECES.index("a"), *(byte_id(byte) for byte in "日".encode()[:2])]
    assert pieces(SENTENCEPIECE, [byte_id("日".encode()[2])], prompt) == ["日", ""]
    prompt = [byte_id(byte) for byte in "\ufffd".encode()[:2]]
    assert pieces(SENTENCEPIECE, [byte_id("\ufffd".encode()[2])], prompt) == ["\ufffd", ""]


def test_an_incomplete_character_of_the_prompt_is_forgotten_when_nothing_completes_it() -> None:
    prompt = [byte_id(byte) for byte in "日".encode()[:2]]
    assert pieces(SENTENCEPIECE, [PIECES.index("a")], prompt) == ["a", ""]
    assert pieces(SENTENCEPIECE, [], prompt) == [""]
    assert pieces(SENTENCEPIECE, [PIECES.index("</s>")], prompt) == ["", ""]
    assert pieces(SENTENCEPIECE, [byte_id(0xE6), byte_id(0x97), byte_id(0xA5)], prompt) == ["", "", "日", ""]


def test_a_character_begun_in_the_prompt_and_broken_in_the_answer_is_shown_once() -> None:
    """Bytes of the answer went into it, so they are not lost silently."""
    prompt = [byte_id(byte) for byte in "😀".encode()[:2]]
    assert pieces(SENTENCEPIECE, [byte_id("😀".encode()[2]), PIECES.index("a")], prompt) == ["", "\ufffda", ""]


@given(text=st.text("aé日😀", min_size=1, max_size=6), cut=st.integers(0, 24))
def test_prompt_and_answer_join_to_the_whole(text: str, cut: int) -> None:
    """Wherever valid UTF-8 is cut, the answer shows what the prompt's whole characters leave."""
    data = text.encode()
    cut = min(cut, len(data))
    ids = [byte_id(byte) for byte in data]
    whole_characters = data[:cut].decode(errors="ignore")
    shown = "".join(pieces(SENTENCEPIECE, ids[cut:], ids[:cut]))
    assert shown == (text[len(whole_characters) :] if cut < len(data) else "")


def test_many_tokens_at_once_give_the_same(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日本語 😀 text")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.feed_many(ids) + detokenizer.flush() == "日本語 😀 text"


def test_special_tokens_are_shown_when_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", allow_special=True)
    assert pieces(tokenizer, ids) == ["", "hi", "", ""]
    assert pieces(tokenizer, ids, skip=False) == ["<|im_start|>", "hi", "<|im_end|>", ""]
