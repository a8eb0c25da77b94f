"""Responses and events come out the same however their bytes are cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioengine.cli.bench.http_response import EventSplitter, ResponseParser


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges) if start < end]


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x;note=1\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\nX-Trailer: 1\r\n\r\n"


PLACES = st.lists(st.integers(0, 10_000), max_size=8)


@settings(max_examples=60)
@given(parts=st.lists(st.binary(max_size=40), max_size=5), places=PLACES)
def test_a_chunked_body_is_whole_however_it_is_cut(parts: list[bytes], places: list[int]) -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(parts)
    parser = ResponseParser()
    assert b"".join(parser.feed(piece) for piece in cut(data, places)) == b"".join(parts)
    assert parser.is_complete
    assert parser.status == 200
    assert not parser.closes_connection


@settings(max_examples=30)
@given(body=st.binary(max_size=80), places=PLACES)
def test_a_body_of_known_length_is_whole_however_it_is_cut(body: bytes, places: list[int]) -> None:
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    parser = ResponseParser()
    assert b"".join(parser.feed(piece) for piece in cut(head % len(body) + body, places)) == body
    assert parser.is_complete
    assert parser.status == 404
    assert parser.closes_connection


def test_a_body_without_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert not parser.is_complete
    assert parser.feed(b"") == b""
    assert parser.is_complete


@pytest.mark.parametrize(
    "data", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab"]
)
def test_a_response_that_ends_too_early_is_an_error(data: bytes) -> None:
    parser = ResponseParser()
    if data:
        parser.feed(data)
    with pytest.raises(ValueError, match="closed"):
        parser.feed(b"")


def test_what_is_no_http_is_an_error() -> None:
    with pytest.raises(ValueError, match="not an HTTP"):
        ResponseParser().feed(b"SSH-2.0-OpenSSH\r\n\r\n")


@settings(max_examples=60)
@given(places=PLACES, end=st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_whole_however_they_are_cut(places: list[int], end: bytes) -> None:
    lines = [
        b'data: {"a": 1}',
        b"",
        b": ping",
        b"",
        b"event: x",
        b"data:two",
        b"data: lines",
        b"",
        b"data: [DONE]",
        b"",
    ]
    splitter = EventSplitter()
    events = [event for piece in cut(end.join([*lines, b""]), places) for event in splitter.feed(piece)]
    assert events == [b'{"a": 1}', b"two\nlines", b"[DONE]"]
