"""Only marked methods can be called, with the arguments that they take."""

import pytest

from trioengine.errors import RequestError
from trioengine.worker.remote import call_remotely, collective_rpc


class Worker:
    def __init__(self) -> None:
        self.marked_later = collective_rpc(lambda: 1)

    @collective_rpc
    def add(self, a: int, b: int = 2) -> dict[str, int]:
        return {"sum": a + b}

    @collective_rpc
    def fail(self) -> None:
        raise RequestError("It is so.")

    def close(self) -> None:
        raise AssertionError


class Special(Worker):
    def add(self, a: int, b: int = 2) -> dict[str, int]:
        raise AssertionError


def test_a_marked_method_takes_and_returns_json() -> None:
    assert call_remotely(Worker(), "add", '{"a": 1}') == '{"sum": 3}'
    assert call_remotely(Worker(), "add", '{"a": 1, "b": 5}') == '{"sum": 6}'


@pytest.mark.parametrize("method", ["close", "__init__", "__class__", "marked_later", "nonsense", "", "add.__func__"])
def test_others_are_refused(method: str) -> None:
    """The error says which there are."""
    with pytest.raises(RequestError, match="add, fail") as caught:
        call_remotely(Worker(), method, "{}")
    assert caught.value.param == "method"


def test_an_override_must_be_marked_itself() -> None:
    with pytest.raises(RequestError, match="There are: fail"):
        call_remotely(Special(), "add", '{"a": 1}')


@pytest.mark.parametrize("arguments", ["", "[]", "{", "null", '{"b": 1}', '{"a": 1, "c": 2}', "[" * 100_000])
def test_arguments_must_fit(arguments: str) -> None:
    with pytest.raises(RequestError) as caught:
        call_remotely(Worker(), "add", arguments)
    assert caught.value.param == "arguments"


def test_what_a_method_raises_is_raised() -> None:
    with pytest.raises(RequestError, match="It is so"):
        call_remotely(Worker(), "fail", "{}")
