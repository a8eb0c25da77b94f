"""`parse_object`: a JSON object with real text and finite numbers, or a `RequestError`."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import RequestError
from trioengine.openai.json_body import field_path, parse_object

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=4), st.booleans())
def test_every_usable_object_is_parsed(value: dict[str, object], ensure_ascii: bool) -> None:
    """However its characters are written, as escapes or as themselves."""
    assert parse_object(json.dumps(value, ensure_ascii=ensure_ascii).encode()) == value


@given(st.binary(max_size=30))
def test_any_bytes_are_an_object_or_a_request_error(body: bytes) -> None:
    """Nothing else escapes, whatever a stranger sends."""
    try:
        parsed = parse_object(body)
    except RequestError as error:
        parsed = {"message": error.message}
    assert len(str(parsed)) < 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" \n",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": ' + b"[" * 200_000,
        b'{"a": ' * 100_000,
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_bodies_that_are_no_usable_object_are_refused(body: bytes) -> None:
    """Case 42: also those that would be a RecursionError or a ValueError inside the decoder."""
    with pytest.raises(RequestError):
        parse_object(body)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (rb'{"a": "\ud800"}', "a"),
        (rb'{"a": "\uDFFF x"}', "a"),
        (rb'{"a": "\u0000"}', "a"),
        (rb'{"messages": [{}, {"content": "x\u0000y"}]}', "messages[1].content"),
        (rb'{"a": {"\ud800": 1}}', "a"),
    ],
)
def test_strings_that_are_no_text_are_refused_with_their_path(body: bytes, path: str) -> None:
    """Case 42: half a surrogate pair cannot be encoded again, and null characters end strings elsewhere."""
    with pytest.raises(RequestError) as caught:
        parse_object(body)
    assert caught.value.param == path
    caught.value.message.encode()


def test_escapes_that_only_look_suspect_are_fine() -> None:
    """A whole surrogate pair is a character, and an escaped backslash begins no escape."""
    assert parse_object(rb'{"a": "\ud83d\ude00", "b": "\\u0000 \\ud800"}') == {"a": "😀", "b": r"\u0000 \ud800"}


def test_the_same_key_twice_means_the_last() -> None:
    """As every JSON decoder that clients know has it."""
    assert parse_object(b'{"a": 1, "a": 2}') == {"a": 2}


def test_numbers_keep_their_kind() -> None:
    """An integer is no float, so that `1.0` can be refused where an integer belongs."""
    parsed = parse_object(b'{"a": 1, "b": 1.0}')
    assert type(parsed["a"]) is int
    assert type(parsed["b"]) is float


def test_paths_are_written_as_openai_writes_them() -> None:
    """And a key of any length makes no long path."""
    assert field_path(field_path(field_path("", "messages"), 0), "content") == "messages[0].content"
    assert len(field_path("", "x" * 10_000)) < 100


@pytest.mark.parametrize(
    ("number", "problem"),
    [("NaN", "NaN is not a JSON number"), ("1e400", "too large"), ("1" * 5000, "too many digits")],
    ids=["nan", "large", "digits"],
)
def test_a_number_that_cannot_be_used_is_called_that(number: str, problem: str) -> None:
    """In words for a client, not for Python's programmers."""
    with pytest.raises(RequestError, match=problem) as caught:
        parse_object(b'{"a": %s}' % number.encode())
    assert "sys." not in caught.value.message
