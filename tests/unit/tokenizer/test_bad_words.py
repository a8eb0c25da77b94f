"""An answer whose tokens are never the forbidden ones does not have the words, whatever tokens it is made of."""

import random
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.tokenizer.bad_words import BadWords, BadWordsRules, TokenIndex
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.params import SamplingParams

# Of few characters, so that words overlap with themselves, with each other and with the tokens' ends.
WORDS = ["a", "b", "aa", "ab", "ba", "aba", "abab", "bb", "aab", "€a", " b", "€€"]
TOKENIZER = FakeTokenizer(WORDS[2:])
INDEX = TokenIndex(TOKENIZER.token_byte_table(skip_special_tokens=True))
texts = st.text("ab€ ", max_size=6)
few_tokens = st.sampled_from([*b"ab", *"€".encode(), 32, *range(256, 256 + len(WORDS[2:]) + 1)])


def bad_words(*words: str) -> BadWords:
    return BadWords(words, INDEX)


def spelled(token_ids: list[int]) -> bytes:
    return b"".join(INDEX.token_bytes[token_id] for token_id in token_ids)


@given(
    words=st.lists(texts.filter(bool), min_size=1, max_size=3),
    prompt=st.lists(few_tokens, max_size=3),
    answer=st.lists(few_tokens, max_size=12),
)
def test_a_token_is_forbidden_exactly_where_it_would_complete_a_word(
    words: list[str], prompt: list[int], answer: list[int]
) -> None:
    """Of the answer alone."""
    rules = bad_words(*words)
    token_ids = list(prompt)
    for token_id in answer:
        forbidden = rules.forbidden_token_ids(token_ids, len(prompt), len(token_ids)).tolist()
        would_complete = any(word.encode() in spelled([*token_ids[len(prompt) :], token_id]) for word in words)
        assert (token_id in forbidden) == would_complete
        assert forbidden == sorted(set(forbidden))
        if not would_complete:
            token_ids.append(token_id)


@given(words=st.lists(texts.filter(bool), min_size=1, max_size=3), answer=st.lists(few_tokens, max_size=12))
def test_a_word_that_is_there_already_is_no_fault(words: list[str], answer: list[int]) -> None:
    """The next one is still prevented, also where it overlaps with the first."""
    rules = bad_words(*words)
    forbidden = rules.forbidden_token_ids(answer, 0, len(answer)).tolist()
    so_far = spelled(answer)
    for token_id in range(TOKENIZER.vocab_size):
        whole = so_far + INDEX.token_bytes[token_id]
        completed = any(whole.find(word.encode(), max(0, len(so_far) - len(word.encode()) + 1)) >= 0 for word in words)
        assert (token_id in forbidden) == completed


@given(part=st.text("ab€", min_size=1, max_size=4).map(str.encode))
def test_tokens_are_found_by_their_bytes(part: bytes) -> None:
    table = list(enumerate(INDEX.token_bytes))
    assert sorted(INDEX.starting_with(part)) == [token_id for token_id, data in table if data.startswith(part)]
    assert INDEX.containing(part) == [token_id for token_id, data in table if part in data]


def test_a_control_token_inside_a_word_does_not_hide_it() -> None:
    """It is not shown, so the reader would see the word."""
    assert ord("b") in bad_words("ab").forbidden_token_ids([ord("a"), TOKENIZER.end_token_id], 0, 2)


def test_ids_without_a_token_show_nothing() -> None:
    """A model may have more rows than its tokenizer has tokens."""
    assert ord("b") in bad_words("ab").forbidden_token_ids([ord("a"), TOKENIZER.vocab_size + 5], 0, 2)


def test_control_tokens_count_as_they_are_shown() -> None:
    """Their text is a part of the answer only when it is asked for; the vocabulary is read when a word is."""
    read: list[bool] = []

    def token_byte_table(skip_special_tokens: bool) -> Sequence[bytes]:
        read.append(skip_special_tokens)
        return TOKENIZER.token_byte_table(skip_special_tokens)

    rules = BadWordsRules(token_byte_table, TOKENIZER.vocab_size)
    assert rules.of(SamplingParams()) is None
    assert not read
    for skip, is_forbidden in ((True, False), (False, True)):
        for _ in range(2):
            found = rules.of(SamplingParams(bad_words=("|end|",), skip_special_tokens=skip))
            assert found is not None
            assert (TOKENIZER.end_token_id in found.forbidden_token_ids([], 0, 0)) is is_forbidden
    assert read == [True, False]


def test_tokens_that_the_model_has_no_row_for_are_not_forbidden() -> None:
    """They cannot be sampled."""
    found = BadWordsRules(TOKENIZER.token_byte_table, 257).of(SamplingParams(bad_words=("aa",)))
    assert found is not None
    assert found.forbidden_token_ids([ord("a")], 0, 1).tolist() == [ord("a"), 256]


@pytest.mark.parametrize("word", ["the", " is", "government", "naïve", "日本", "e"])
def test_streams_of_the_default_models_tokens_do_not_have_the_word(tokenizer: Tokenizer, word: str) -> None:
    """Streams that try to spell it at every place, each time in other tokens."""
    index = TokenIndex(tokenizer.token_byte_table(skip_special_tokens=True))
    rules = BadWords([word], index)
    data, drawn = word.encode(), random.Random(word)

    @cache
    def spelling(rest: bytes, piece: bytes) -> list[int]:
        """The tokens that go on with this piece; the word's first may begin before it, its last go on behind it."""
        if rest == piece:
            return index.starting_with(piece) if rest != data else index.containing(piece)
        is_first = rest == data
        table = enumerate(index.token_bytes)
        return [token_id for token_id, own in table if own == piece or (is_first and own.endswith(piece))]

    answer = list[int]()
    num_refused, rest = 0, data
    for _ in range(500):
        piece = rest[: drawn.randint(1, len(rest))]
        pool = spelling(rest, piece)
        token_id = drawn.choice(pool) if pool else drawn.randrange(tokenizer.vocab_size)
        if token_id in rules.forbidden_token_ids(answer, 0, len(answer)):
            num_refused += 1
            assert word in tokenizer.decode([*answer, token_id])
            rest = data
            continue
        answer.append(token_id)
        rest = rest[len(piece) :] if pool else data
        rest = rest or data
    assert word not in tokenizer.decode(answer)
    assert num_refused > 10
