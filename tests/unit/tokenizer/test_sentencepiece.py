"""SentencePiece models against the sentencepiece package itself, which trains them here."""

import functools
import io
import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from trioengine.errors import CheckpointError
from trioengine.tokenizer.detokenizer import IncrementalDetokenizer
from trioengine.tokenizer.parts import TokenizerFacts
from trioengine.tokenizer.sentencepiece import Algorithm, SentencePieceModel, build_sentencepiece, parse_sentencepiece
from trioengine.tokenizer.tokenizer import Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "An engine of tokens: 12 of 345 were 6789, said the user <user@example.org>.",
    "日本語のテキスト と 中文字符 und Größe, naïve café, Ελληνικά, Привет!",
    "def function(x):  return x + 1  # the  comment \t tabs",
]


def train(algorithm: str, **options: object) -> bytes:
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3),
        model_writer=written,
        model_type=algorithm,
        vocab_size=420 if options.get("byte_fallback") else 160,
        hard_vocab_limit=False,
        character_coverage=0.99,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return written.getvalue()


def build(data: bytes) -> Tokenizer:
    return Tokenizer(build_sentencepiece(parse_sentencepiece(data)), TokenizerFacts())


@functools.cache
def both(data: bytes) -> tuple[SentencePieceProcessor, Tokenizer]:
    return SentencePieceProcessor(model_proto=data), build(data)


def check_equal(data: bytes, texts: Iterable[str]) -> None:
    oracle, tokenizer = both(data)
    for text in texts:
        expected, found = oracle.encode(text), tokenizer.encode(text)
        if oracle.encode(text, out_type=str) != [tokenizer.id_to_token(token_id) for token_id in found]:
            # Unigram may find two ways of the same score; the library adds in more digits.
            scores = [sum(map(oracle.get_score, ids)) for ids in (expected, found)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4), text
            assert oracle.decode(expected) == oracle.decode(found), text


@pytest.fixture(scope="module")
def texts(fixtures_folder: Path) -> list[str]:
    """Without "<0x41>", which Unigram takes for the byte."""
    rows = json.loads((fixtures_folder / "tokenizers" / "mistral_v3.json").read_text())["rows"]
    return [row["text"] for row in rows if "<0x" not in row["text"]] + SENTENCES


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("algorithm", ["bpe", "unigram", "char"])
def test_pieces_equal_sentencepieces(texts: list[str], algorithm: str, byte_fallback: bool) -> None:
    """As in Llama, Mistral and Gemma: text is taken as it is. Control tokens that users type are text (case 27)."""
    for adds_prefix in (True, False):
        data = train(
            algorithm,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            byte_fallback=byte_fallback,
            add_dummy_prefix=adds_prefix,
        )
        check_equal(data, texts)


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc_cf"])
@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_normalization_equals_sentencepieces(texts: list[str], algorithm: str, rule: str) -> None:
    """Of characters and of spaces. The library normalizes a base with its combining marks otherwise."""
    simple = [text for text in texts if "\r\n" not in text and not any(map(unicodedata.combining, text))]
    assert len(simple) > 40
    check_equal(train(algorithm, normalization_rule_name=rule, byte_fallback=True), simple)


LLAMA_LIKE = train("bpe", normalization_rule_name="identity", remove_extra_whitespaces=False, byte_fallback=True)


@given(st.text(st.sampled_from("the dog12 <s>/▁\n日é\u0301😀\x00"), max_size=20))
def test_any_text_equals_sentencepieces(text: str) -> None:
    check_equal(LLAMA_LIKE, [text])


@given(st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=20))
def test_any_text_comes_back(text: str) -> None:
    _, tokenizer = both(LLAMA_LIKE)
    ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.feed_many(ids) + detokenizer.flush() == tokenizer.decode(ids) == text


def test_user_defined_pieces_are_never_cut() -> None:
    data = train("bpe", user_defined_symbols=["<sep>", "<tool>"], add_dummy_prefix=False)
    check_equal(data, ["the dog<sep>the dog", "a<tool>b"])
    tokenizer = build(data)
    assert "<sep>" in [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode("the<sep>dog")]
    assert tokenizer.token_bytes(tokenizer.token_to_id("<sep>") or 0) == b"<sep>"


def test_bytes_of_tokens() -> None:
    tokenizer = build(LLAMA_LIKE)
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("the 😀"))) == " the 😀".encode()
    assert tokenizer.token_bytes(tokenizer.token_to_id("<0xE2>") or 0) == b"\xe2"


def test_facts_of_the_file() -> None:
    model = parse_sentencepiece(train("unigram", pad_id=3, bos_id=-1))
    assert (model.algorithm, model.bos_id, model.eos_id, model.pad_id) == (Algorithm.UNIGRAM, -1, 2, 3)
    assert (model.add_dummy_prefix, model.remove_extra_whitespaces) == (True, True)
    oracle = SentencePieceProcessor(model_proto=LLAMA_LIKE)
    model = parse_sentencepiece(LLAMA_LIKE)
    assert list(model.pieces) == [oracle.id_to_piece(index) for index in range(oracle.get_piece_size())]
    assert list(model.scores) == [oracle.get_score(index) for index in range(oracle.get_piece_size())]
    assert (model.bos_id, model.eos_id, model.pad_id) == (oracle.bos_id(), oracle.eos_id(), oracle.pad_id())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no pieces"),
        (b"not a model at all", "SentencePiece"),
        (b"\x0a\xff\xff\xff\xff\x0f", "damaged"),
        (b"\xff" * 30, "damaged"),
        (b"\x0a\x03\x0a\x01a" * 2, "twice"),
        (b"\x0a\x03\x0a\x01\xff", "damaged"),
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x03", "model type 3"),
        (b"\x0a\x03\x0a\x01a\x12\x03\xc0\x01\x01", "spaces behind words"),
    ],
)
def test_what_is_no_model_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_sentencepiece(data)


@given(st.integers(0, len(LLAMA_LIKE)), st.binary(max_size=8))
def test_a_damaged_file_is_a_clear_error_or_another_model(position: int, patch: bytes) -> None:
    for damaged in (LLAMA_LIKE[:position], LLAMA_LIKE[:position] + patch + LLAMA_LIKE[position + len(patch) :]):
        try:
            tokenizer = Tokenizer(build_sentencepiece(parse_sentencepiece(damaged)), TokenizerFacts())
        except CheckpointError:
            continue
        assert tokenizer.vocab_size > 0


def test_a_vocabulary_that_could_be_joined_in_too_many_ways_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = tuple("a" * length for length in range(1, 100))
    model = SentencePieceModel(pieces, (0.0,) * 99, (1,) * 99, Algorithm.BPE)
    assert build_sentencepiece(model).get_vocab_size() == 99
    monkeypatch.setattr("trioengine.tokenizer.sentencepiece.MAX_MERGES", 1000)
    with pytest.raises(CheckpointError, match="more than 1000 ways"):
        build_sentencepiece(model)
    monkeypatch.setattr("trioengine.tokenizer.sentencepiece.MAX_CUTS", 1000)
    with pytest.raises(CheckpointError, match="more than 1000 characters"):
        build_sentencepiece(model)


def test_unigram_needs_a_piece_for_what_it_does_not_know() -> None:
    model = SentencePieceModel(("a", "b"), (0.0, 0.0), (1, 1), Algorithm.UNIGRAM)
    with pytest.raises(CheckpointError, match="unknown"):
        build_sentencepiece(model)
    assert build_sentencepiece(attrs.evolve(model, types=(2, 1))).get_vocab_size() == 2
