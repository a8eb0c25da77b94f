"""Errors on the wire: OpenAI's shape, short, and nothing of the engine's inside."""

import json

import pytest

from trioengine import errors
from trioengine.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineGenerateError,
    PromptTooLongError,
    RequestError,
    TrioEngineError,
    UnavailableError,
)
from trioengine.openai.errors import error_body, error_reply, status_reply

# All that take a message; a prompt that is too long makes its own.
ERROR_CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, TrioEngineError) and value is not PromptTooLongError
]


@pytest.mark.parametrize("error_class", ERROR_CLASSES)
def test_every_error_has_the_four_fields_and_its_status(error_class: type[TrioEngineError]) -> None:
    """On every route, whatever was raised."""
    reply = error_reply(error_class("What happened."))
    error = json.loads(reply.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert reply.status == error_class.status
    assert error["code"] == error_class.code
    assert error["message"]


def test_a_request_error_tells_what_is_wrong_and_where() -> None:
    """So that it can be repaired."""
    error = json.loads(error_body(RequestError("n must be 1.", param="n")))["error"]
    assert error == {"message": "n must be 1.", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}


def test_a_prompt_that_is_too_long_tells_both_numbers() -> None:
    """Case 41."""
    body = error_body(PromptTooLongError(num_prompt_tokens=5000, max_model_len=2048))
    error = json.loads(body)["error"]
    assert error["code"] == "context_length_exceeded"
    assert "5000" in error["message"]
    assert "2048" in error["message"]


@pytest.mark.parametrize("character", ["x", "\0", "😀", '"', "\ud800"])
def test_a_body_is_under_16_kb_whatever_came_in(character: str) -> None:
    """Case 21: also where every character is escaped."""
    body = error_body(RequestError(character * 1_000_000, param=character * 1_000_000))
    assert len(body) < 16 * 1024
    assert json.loads(body)["error"]["message"].endswith("...")


@pytest.mark.parametrize(
    "error",
    [
        EngineDeadError("died: secret", cause="Traceback: secret"),
        EngineGenerateError("RuntimeError: secret"),
        errors.CheckpointError("secret", path="/secret"),
        ValueError("secret"),
    ],
)
def test_what_went_wrong_inside_stays_inside(error: Exception) -> None:
    """It is for logs."""
    assert b"secret" not in error_body(error)


def test_a_foreign_exception_is_an_internal_error() -> None:
    """Status 500, with an error object."""
    reply = error_reply(ValueError("x"))
    assert reply.status == 500
    assert json.loads(reply.body)["error"]["code"] == "internal_error"


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (2.1, "3")])
def test_an_engine_that_is_full_tells_when_to_come_back(retry_after_s: float, header: str) -> None:
    """In whole seconds, at least one."""
    reply = error_reply(UnavailableError("Full.", retry_after_s=retry_after_s))
    assert reply.status == 503
    assert reply.headers == {"Retry-After": header}


def test_a_server_that_stops_tells_when_to_come_back() -> None:
    """Nothing is wrong with the request, and clients that repeat it know when."""
    reply = error_reply(EngineClosedError("secret"))
    assert (reply.status, reply.headers) == (503, {"Retry-After": "5"})
    assert error_reply(EngineDeadError("dead", cause="x")).headers == {}


@pytest.mark.parametrize(("status", "error_type"), [(408, "invalid_request_error"), (501, "internal_error")])
def test_other_statuses_say_whose_fault_they_are(status: int, error_type: str) -> None:
    """Those of HTTP itself."""
    reply = status_reply(status, "Request Timeout.")
    assert reply.status == status
    assert json.loads(reply.body)["error"]["type"] == error_type
