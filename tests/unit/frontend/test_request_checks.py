"""Every rule of a request is checked before anything is sent, and each violation names its field."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import RequestError
from trioengine.frontend.input_processor import InputProcessor
from trioengine.frontend.request_checks import (
    MAX_REQUEST_ID_CHARS,
    MAX_SESSION_ID_CHARS,
    MAX_TRACE_HEADER_CHARS,
    MAX_TRACE_HEADERS,
    check_request,
)
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.messages import ModelFacts
from trioengine.types.pooling import EncodeRequest
from trioengine.types.request import ChatPrompt, Deadlines, GenerateRequest, KVHints, TextPrompt, TokensPrompt

ACCEPTED: list[tuple[str, list[Any]]] = [
    ("request_id", [None, "", "x", "ä" * MAX_REQUEST_ID_CHARS]),
    ("session_id", [None, "x", "x" * MAX_SESSION_ID_CHARS]),
    ("data_parallel_rank", [None, 0, 7]),
    ("trace_headers", [None, {}, {"traceparent": "00-a-b-01", "tracestate": ""}]),
    ("deadlines", [Deadlines(), Deadlines(total_s=1, queue_s=0.001, first_token_s=1e9, inter_token_s=5)]),
    ("kv_hints", [None, KVHints(), KVHints(read_prefix_cache=False, write_prefix_cache=False)]),
    ("reasoning_parser_kwargs", [None, {}, {"enable_thinking": True}]),
]

REFUSED: list[tuple[str, str, list[Any]]] = [
    ("request_id", "request_id", [5, "\ud800", "x" * (MAX_REQUEST_ID_CHARS + 1)]),
    ("session_id", "session_id", ["", 5, b"x", "\ud800", "x" * (MAX_SESSION_ID_CHARS + 1)]),
    ("data_parallel_rank", "data_parallel_rank", [-1, 1.0, True, "0"]),
    ("trace_headers", "trace_headers", [5, "a", [("a", "b")], {5: "x"}, {"\ud800": "x"}]),
    ("trace_headers", "trace_headers", [{str(number): "x" for number in range(MAX_TRACE_HEADERS + 1)}]),
    ("trace_headers", "trace_headers.a", [{"a": 5}, {"a": None}, {"a": "\ud800"}]),
    ("trace_headers", "trace_headers.a", [{"a": "x" * (MAX_TRACE_HEADER_CHARS + 1)}]),
    ("deadlines", "deadlines", [None, 5.0, {"total_s": 5}]),
    ("kv_hints", "kv_hints", [True, {}, "no"]),
    ("kv_hints", "kv_hints.read_prefix_cache", [KVHints(read_prefix_cache=1)]),  # type: ignore[arg-type]
    ("kv_hints", "kv_hints.write_prefix_cache", [KVHints(write_prefix_cache=None)]),  # type: ignore[arg-type]
    ("reasoning_parser_kwargs", "reasoning_parser_kwargs", [5, "x", {"thinking": True}, {5: True}]),
    ("reasoning_parser_kwargs", "reasoning_parser_kwargs.enable_thinking", [{"enable_thinking": "yes"}]),
    ("reasoning_ended", "reasoning_ended", [1, "yes"]),
    ("sampling", "sampling", [None, {}, "x"]),
    *(
        ("deadlines", f"deadlines.{name}", [Deadlines(**{name: value})])
        for name in ("total_s", "queue_s", "first_token_s", "inter_token_s")
        for value in (0, -1, math.nan, math.inf, "5", True)
    ),
]


@pytest.mark.parametrize(("field", "values"), ACCEPTED)
def test_what_can_work_is_accepted(field: str, values: list[Any]) -> None:
    for value in values:
        request = GenerateRequest("x", **{field: value})
        check_request(request)
        assert getattr(request, field) == value


@pytest.mark.parametrize(("field", "param", "values"), REFUSED)
def test_what_cannot_work_is_refused_by_the_path_of_its_field(field: str, param: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError) as caught:
            check_request(GenerateRequest("x", **{field: value}))
        assert caught.value.param == param
        assert param in caught.value.message
        assert len(caught.value.message) < 500


NO_PROMPTS: list[tuple[Callable[[Any], object], str, list[Any]]] = [
    (GenerateRequest, "prompt", [None, 5, b"ab", {"prompt": "x"}]),
    (EncodeRequest, "prompt", [None, 5, b"ab"]),
    (TextPrompt, "prompt", [None, 5, b"ab"]),
    (TokensPrompt, "prompt", [None, 5, "ab"]),
    (ChatPrompt, "messages", [None, 5, "hello", {"role": "user"}]),
    (ChatPrompt, "messages[1]", [[{"role": "user", "content": "a"}, 5]]),
    (lambda value: ChatPrompt((), chat_template=value), "chat_template", [5, b"x"]),
    (lambda value: EncodeRequest("x", value), "pooling", [None, {"task": "embed"}]),
]


@pytest.mark.parametrize(("make", "param", "values"), NO_PROMPTS)
def test_what_is_no_prompt_is_refused_when_it_is_made(
    make: Callable[[Any], object], param: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(RequestError) as caught:
            make(value)
        assert caught.value.param == param


@pytest.mark.parametrize("field", ["session_id", "data_parallel_rank", "deadlines", "trace_headers"])
def test_requests_for_vectors_have_the_same_rules(field: str) -> None:
    for name, param, values in REFUSED:
        if name == field:
            for value in values:
                with pytest.raises(RequestError) as caught:
                    check_request(EncodeRequest("x", **{field: value}))
                assert caught.value.param == param


@pytest.mark.parametrize(
    ("reasoning_ended", "kwargs", "sent"),
    [
        (None, None, None),
        (None, {}, None),
        (None, {"enable_thinking": False}, True),
        (None, {"enable_thinking": True}, False),
        (True, {"enable_thinking": True}, True),
        (False, {"enable_thinking": False}, False),
    ],
)
def test_the_parsers_arguments_say_whether_there_is_reasoning(
    reasoning_ended: bool | None, kwargs: Any, sent: bool | None
) -> None:
    request = GenerateRequest("x", reasoning_ended=reasoning_ended, reasoning_parser_kwargs=kwargs)
    processor = InputProcessor(FakeTokenizer(), ModelFacts(100, 257, ()))
    assert processor.process(request).reasoning_ended is sent


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.none())
            for name in ("session_id", "data_parallel_rank", "trace_headers", "kv_hints", "priority", "deadlines")
        },
    )
)
def test_whatever_comes_is_accepted_or_a_request_error(fields: dict[str, Any]) -> None:
    refused = None
    try:
        check_request(GenerateRequest("x", **fields))
    except RequestError as error:
        refused = error
    assert refused is None or (refused.param or "").split(".")[0] in fields
