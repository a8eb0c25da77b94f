"""The state tables of docs/stream-protocol.md, and what holds whatever a client sends."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import (
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    PromptTooLongError,
    RequestError,
    UnavailableError,
)
from trioengine.openai.chat_answer import ChatForm
from trioengine.openai.chat_stream import chat_events
from trioengine.openai.sse import ReplyHead
from trioengine.openai.stream_protocol import (
    CONGESTED_BYTES,
    MAX_WAITING_BYTES,
    Action,
    CancelRequest,
    CloseConnection,
    FinishReasons,
    ResumeRequest,
    StartRequest,
    StreamSession,
    event_data,
    parse_message,
)
from trioengine.testing.fake_tokenizer import FakeTokenizer
from trioengine.types.output import CompletionOutput, FinishReason, RequestOutput
from trioengine.types.stream_messages import StreamLimits

HELLO = {"type": "hello", "version": 1}


def create(id_: str = "1", **more: Any) -> dict[str, Any]:
    return {"type": "create", "id": id_, "endpoint": "chat", "body": {}, **more}


def tell(session: StreamSession, *messages: object) -> list[Action]:
    """What the session does about these messages, in order."""
    return [
        action
        for message in messages
        for action in session.receive(parse_message(message if isinstance(message, str) else json.dumps(message)))
    ]


def said(session: StreamSession) -> list[dict[str, Any]]:
    """What it says, as a client reads it."""
    return [json.loads(text) for text in session.take_waiting()]


def opened(**limits: int) -> StreamSession:
    session = StreamSession("a-model", StreamLimits(max_model_len=77, **limits))
    tell(session, HELLO)
    said(session)
    return session


def running(*ids: str, **more: Any) -> StreamSession:
    session = opened()
    for id_ in ids or ("1",):
        tell(session, create(id_, **more))
        session.started(id_, 3)
    said(session)
    return session


def close_code(actions: Sequence[Action]) -> int | None:
    return next((action.code for action in actions if isinstance(action, CloseConnection)), None)


# The connection


def test_a_greeting_is_answered_with_the_limits() -> None:
    session = StreamSession("a-model", StreamLimits(max_open_requests=3, max_message_bytes=9, max_model_len=77))
    assert tell(session, HELLO) == []
    (hello,) = said(session)
    limits = {"max_open_requests": 3, "max_message_bytes": 9, "max_model_len": 77}
    assert hello == {"type": "hello", "version": 1, "model": "a-model", "limits": limits}


@pytest.mark.parametrize(
    "first",
    [{"type": "hello", "version": 2}, create(), {"type": "cancel", "id": "1"}, "no json", "[]", {"type": "hello"}],
)
def test_anything_but_a_greeting_of_this_version_comes_first_closes(first: object) -> None:
    session = StreamSession("a-model")
    assert close_code(tell(session, first)) == 1008
    (error,) = said(session)
    assert (error["type"], error["status"]) == ("error", 400)
    assert "id" not in error
    assert session.is_closed
    assert tell(session, HELLO, create()) == []
    assert said(session) == []


def test_a_second_greeting_closes() -> None:
    assert close_code(tell(opened(), HELLO)) == 1008


def test_a_client_that_says_nothing_is_closed() -> None:
    session = StreamSession("a-model")
    assert close_code(session.time_out()) == 1008
    assert opened().time_out() == ()


def test_a_binary_message_closes_with_1003() -> None:
    assert close_code(opened().receive_bytes()) == 1003


@pytest.mark.parametrize(
    ("message", "id_", "param"),
    [
        ("", None, None),
        ("{", None, None),
        ("[1]", None, None),
        ('{"type": "cancel", "id": "\\ud800"}', None, "id"),
        ('{"type": "create", "id": "9", "body": {"prompt": "\\ud800"}}', "9", "body.prompt"),
        ('{"type": "create", "id": "9", "body": {"prompt": "\\u0000"}}', "9", "body.prompt"),
        ('{"type": "create", "id": "9", "body": {"seed": NaN}}', "9", None),
        ('{"id": 9, "body": NaN}', None, None),
        ("[NaN]", None, None),
        ({"type": "nothing", "id": "9"}, "9", "type"),
        ({"id": "9"}, "9", "type"),
        ({"type": ["create"], "id": "9"}, "9", "type"),
        (create("9", endpoint=3), "9", "endpoint"),
        (create("9", body=[]), "9", "body"),
        (create("9", bodyy={}), "9", "bodyy"),
        (create("9", credits=-1), "9", "credits"),
        (create("9", credits="1"), "9", "credits"),
        (create("9", credits=True), "9", "credits"),
        (create("9", endpoint="images"), "9", "endpoint"),
        ({"type": "create", "id": "9", "endpoint": "chat"}, "9", "body"),
        (create(""), None, "id"),
        (create("a b"), None, "id"),
        (create("é"), None, "id"),
        (create("x" * 129), None, "id"),
        ({"type": "credit", "id": "9", "n": 0}, "9", "n"),
        ({"type": "credit", "id": "9", "n": 1.5}, "9", "n"),
        ({"type": "cancel"}, None, "id"),
        ({"type": "cancel", "id": 9}, None, "id"),
    ],
)
def test_a_message_that_is_none_is_an_error_and_the_connection_goes_on(
    message: object, id_: str | None, param: str | None
) -> None:
    session = running("1")
    assert tell(session, message) == []
    (error,) = said(session)
    assert (error["type"], error["status"], error.get("id")) == ("error", 400, id_)
    assert error["error"]["param"] == param
    assert error["error"]["type"] == "invalid_request_error"
    assert tell(session, create("2")) != []
    assert session.is_live("1")


def test_a_faulty_message_about_a_live_request_does_not_look_like_its_end() -> None:
    session = running("1")
    tell(session, {"type": "credit", "id": "1", "n": 0})
    (error,) = said(session)
    assert "id" not in error


def test_an_id_that_is_live_closes() -> None:
    session = running("1")
    assert close_code(tell(session, create("1"))) == 1008
    assert session.live_ids == ()


def test_an_id_may_be_used_again_after_its_end() -> None:
    for end in (lambda session: session.done("1"), lambda session: session.fail("1", RequestError("no"))):
        session = running("1")
        end(session)
        (action,) = tell(session, create("1"))
        assert isinstance(action, StartRequest)


def test_there_is_a_limit_of_open_requests() -> None:
    session = opened(max_open_requests=2)
    tell(session, create("1"), create("2"))
    assert tell(session, create("3")) == []
    (error,) = said(session)
    assert (error["id"], error["status"], error["error"]["code"]) == ("3", 503, "overloaded")
    assert error["retry_after_s"] > 0
    session.done("1")
    assert len(tell(session, create("3"))) == 1


def test_a_server_that_shuts_down_takes_nothing_and_closes_behind_the_last_request() -> None:
    session = running("1")
    assert session.drain() == ()
    assert tell(session, create("2")) == []
    assert said(session)[0]["status"] == 503
    assert close_code(session.done("1", ["stop"])) == 1001
    assert [message["type"] for message in said(session)] == ["done"]
    assert close_code(opened().drain()) == 1001
    assert close_code(StreamSession("a-model").drain()) == 1001


def test_a_client_that_only_writes_is_closed_before_its_answers_fill_memory() -> None:
    session = opened()
    num_bytes, code = 0, None
    while code is None:
        code = close_code(tell(session, "x" * 10))
        num_bytes += 10
        assert num_bytes < 2 * MAX_WAITING_BYTES
    assert code == 1008
    assert sum(map(len, session.take_waiting())) < MAX_WAITING_BYTES + 1000


# Requests


def test_a_request_from_its_start_to_its_end() -> None:
    session = opened()
    (action,) = tell(session, create("7", credits=2))
    assert isinstance(action, StartRequest)
    assert action.create.credits == 2
    session.started("7", 5, ["something was changed"])
    session.chunk("7", b'{"a":1}')
    assert session.done("7", ["stop"], {"total_tokens": 6}) == ()
    assert said(session) == [
        {"type": "started", "id": "7", "prompt_tokens": 5, "warnings": ["something was changed"]},
        {"type": "chunk", "id": "7", "data": {"a": 1}},
        {"type": "done", "id": "7", "finish": ["stop"], "usage": {"total_tokens": 6}},
    ]
    session.chunk("7", b"{}")
    assert session.done("7") == session.fail("7", RequestError("late")) == ()
    assert said(session) == []


def test_without_credit_a_request_is_not_read() -> None:
    session = running("1", credits=2)
    assert session.may_read("1")
    session.chunk("1", b"{}")
    session.chunk("1", b"{}")
    assert not session.may_read("1")
    assert tell(session, {"type": "credit", "id": "1", "n": 1}) == [ResumeRequest("1")]
    assert session.may_read("1")
    assert tell(session, {"type": "credit", "id": "1", "n": 1}) == []


def test_an_output_of_many_chunks_leaves_a_debt() -> None:
    session = running("1", credits=1)
    for _ in range(3):
        session.chunk("1", b"{}")
    assert tell(session, {"type": "credit", "id": "1", "n": 2}) == []
    assert not session.may_read("1")
    assert tell(session, {"type": "credit", "id": "1", "n": 1}) == [ResumeRequest("1")]


def test_a_request_that_counts_no_credits_is_read_until_too_much_waits() -> None:
    session = running("1", "2")
    data = b'"' + b"x" * 1000 + b'"'
    while session.may_read("1"):
        session.chunk("1", data)
    assert session.is_congested
    assert not session.may_read("2")
    assert CONGESTED_BYTES <= sum(map(len, session.take_waiting())) < CONGESTED_BYTES + 2000
    assert session.may_read("1")
    assert session.may_read("2")


def test_a_cancelled_request_still_tells_what_waits_and_needs_no_credit_for_it() -> None:
    session = running("1", credits=0)
    assert not session.may_read("1")
    assert tell(session, {"type": "cancel", "id": "1"}) == [CancelRequest("1"), ResumeRequest("1")]
    assert session.may_read("1")
    assert tell(session, {"type": "cancel", "id": "1"}, {"type": "credit", "id": "1", "n": 1}) == [ResumeRequest("1")]
    session.chunk("1", b"{}")
    session.done("1", ["abort"])
    assert [message["type"] for message in said(session)] == ["chunk", "done"]


def test_a_request_that_is_cancelled_before_the_engine_has_it_is_over_at_once() -> None:
    session = opened()
    actions = tell(session, create("1"), {"type": "cancel", "id": "1"})
    assert isinstance(actions[0], StartRequest)
    assert actions[1:] == [CancelRequest("1")]
    assert said(session) == [{"type": "done", "id": "1", "finish": ["abort"], "usage": None}]
    assert not session.is_live("1")


def test_credits_and_cancels_of_nobody_are_ignored() -> None:
    session = opened()
    assert tell(session, {"type": "credit", "id": "1", "n": 1}, {"type": "cancel", "id": "1"}) == []
    assert said(session) == []


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptTooLongError(num_prompt_tokens=9, max_model_len=8), 400, "context_length_exceeded"),
        (UnavailableError("full"), 503, "overloaded"),
        (EngineDeadError("secret", cause="traceback"), 503, "engine_dead"),
        (EngineClosedError("secret"), 503, "engine_closed"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
def test_errors_are_those_of_http_and_keep_secrets(error: Exception, status: int, code: str) -> None:
    session = running("1")
    session.fail("1", error)
    (message,) = said(session)
    assert (message["id"], message["status"], message["error"]["code"]) == ("1", status, code)
    assert "native" not in message
    assert "secret" not in json.dumps(message)
    assert "traceback" not in json.dumps(message)


@pytest.mark.parametrize(("endpoint", "name"), [("chat", "timeout"), ("generate", "deadlines.total_s")])
def test_a_deadline_has_the_name_that_the_client_wrote(endpoint: str, name: str) -> None:
    session = running("1", endpoint=endpoint)
    session.fail("1", DeadlineExceededError("It has passed: deadlines.total_s is 2."))
    (message,) = said(session)
    assert message["error"]["message"] == f"It has passed: {name} is 2."


def test_native_endpoints_tell_the_exception_too_but_no_secrets_of_the_engine() -> None:
    session = running("1", "2", endpoint="generate")
    session.fail("1", PromptTooLongError(num_prompt_tokens=9, max_model_len=8))
    session.fail("2", EngineDeadError("secret", cause="traceback"))
    first, second = said(session)
    assert first["native"] == {
        "name": "PromptTooLongError",
        "fields": {"param": "prompt", "num_prompt_tokens": 9, "max_model_len": 8},
    }
    assert second["native"] == {"name": "EngineDeadError", "fields": {}}
    assert "secret" not in json.dumps(second)


# What holds whatever comes

MESSAGES = st.one_of(
    st.just(HELLO),
    st.builds(
        create,
        st.sampled_from("123"),
        credits=st.one_of(st.none(), st.integers(-1, 3)),
        endpoint=st.sampled_from(["chat", "generate", "x"]),
    ),
    st.builds(lambda id_, n: {"type": "credit", "id": id_, "n": n}, st.sampled_from("123"), st.integers(-1, 3)),
    st.builds(lambda id_: {"type": "cancel", "id": id_}, st.sampled_from("1234")),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    ),
)
STEPS = st.lists(
    st.one_of(
        MESSAGES,
        st.sampled_from(["start", "chunk", "done", "fail", "drain"]),
        st.text(max_size=10),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_every_request_has_one_end_whatever_a_client_sends(steps: list[object]) -> None:
    session = opened()
    ends: dict[str, int] = {}
    live: set[str] = set()
    for step in steps:
        before = session.live_ids
        if step in ("start", "chunk", "done", "fail"):
            for id_ in before[:1]:
                match step:
                    case "start":
                        session.started(id_, 1)
                    case "chunk":
                        if session.may_read(id_):
                            session.chunk(id_, b"{}")
                    case "done":
                        session.done(id_)
                    case _:
                        session.fail(id_, RequestError("no"))
            actions: Sequence[Action] = ()
        elif step == "drain":
            actions = session.drain()
        else:
            actions = tell(session, step)
        for action in actions:
            if isinstance(action, StartRequest):
                assert action.create.id not in live
                live.add(action.create.id)
                ends[action.create.id] = 0
        for message in said(session):
            if message["type"] in ("done", "error") and message.get("id") in live:
                ends[message["id"]] += 1
                live.discard(message["id"])
        if session.is_closed:
            assert session.live_ids == ()
            return
        assert live == set(session.live_ids)
        assert all(count == 1 for id_, count in ends.items() if id_ not in live)


# Chunks


def test_the_data_of_chunks_is_that_of_http() -> None:
    events = chat_events(ReplyHead("id", 1, "a-model"), ChatForm(tokenizer=FakeTokenizer()))
    choices = (CompletionOutput(0, "a\n\n", (1,)), CompletionOutput(1, "b", (2,), FinishReason.LENGTH))
    first = events.events(RequestOutput("r", (1,), choices, False, 2))
    last = events.events(RequestOutput("r", (1,), (CompletionOutput(0, "", (), FinishReason.STOP),), True, 2))
    chunks = [*event_data(first), *event_data(last)]
    sent = b"".join(b"data: " + chunk + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    assert sent == first + last
    assert len(chunks) == 3
    assert event_data(b"") == ()
    reasons = FinishReasons()
    for chunk in chunks:
        reasons.read(chunk)
    assert reasons.in_order == ["stop", "length"]
