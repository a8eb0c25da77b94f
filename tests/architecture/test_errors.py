"""Every error says whose fault it is, has a code and a status of its own, and crosses a process border unchanged."""

import copy
import inspect
import pickle

import attrs
import pytest

from trioengine import errors
from trioengine.errors import TrioEngineError
from trioengine.types.codec import decode, encode, error_from_data, error_to_data
from trioengine.types.messages import EngineDead

CLASSES = [
    member
    for member in vars(errors).values()
    if inspect.isclass(member) and issubclass(member, TrioEngineError) and member.__module__ == errors.__name__
]
RAISED = [error_class for error_class in CLASSES if error_class is not TrioEngineError]

SAMPLES = {str: "some text", "str | None": "more text", int: 3, float: 2.5}


def sample(error_class: type[TrioEngineError]) -> TrioEngineError:
    fields = [field for field in attrs.fields(error_class) if field.init]
    return error_class(
        **{field.name: SAMPLES[field.type if field.type in SAMPLES else str(field.type)] for field in fields}
    )


def contents(error: TrioEngineError) -> dict[str, object]:
    return {field.name: getattr(error, field.name) for field in attrs.fields(type(error))}


@pytest.mark.parametrize("error_class", CLASSES)
def test_an_error_has_code_status_type_and_words(error_class: type[TrioEngineError]) -> None:
    assert "code" in vars(error_class), "its own, not its base's"
    assert error_class.code.replace("_", "").isalnum()
    assert error_class.code == error_class.code.lower()
    assert 400 <= error_class.status < 600
    assert error_class.error_type
    assert error_class.__doc__
    assert not error_class.__doc__.startswith(f"{error_class.__name__}("), "not attrs' generated one"


def test_no_two_errors_share_a_code() -> None:
    codes = [error_class.code for error_class in CLASSES]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("error_class", RAISED)
def test_an_error_arrives_in_another_process_as_it_was(error_class: type[TrioEngineError]) -> None:
    error = sample(error_class)
    message = decode(encode(EngineDead(error_to_data(error))))
    assert isinstance(message, EngineDead)
    arrived = error_from_data(message.error)
    assert type(arrived) is error_class
    assert contents(arrived) == contents(error)
    assert str(arrived) == str(error)


@pytest.mark.parametrize("error_class", RAISED)
def test_an_error_can_be_copied_and_pickled(error_class: type[TrioEngineError]) -> None:
    error = sample(error_class)
    for twin in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is error_class
        assert contents(twin) == contents(error)
