"""Messages cross unchanged, nothing is coerced, and whatever else arrives is a `CodecError`."""

import contextlib
import copy
import pickle
from typing import Any

import attrs
import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trioengine import errors
from trioengine.errors import CodecError, EngineGenerateError, PromptTooLongError, TrioEngineError
from trioengine.types.codec import (
    MESSAGES,
    decode,
    decode_reply,
    encode,
    encode_reply,
    error_from_data,
    error_to_data,
    make_strict_converter,
    pack,
    reply_type,
    unpack,
)
from trioengine.types.messages import (
    CALLS,
    AbortRequests,
    Call,
    CallRequest,
    CheckIntegrity,
    CoreLoad,
    EncodeCoreRequest,
    EngineCoreRequest,
    EngineDead,
    ErrorData,
    Finished,
    GetLoad,
    ModelFacts,
    Ready,
    Reply,
    SchedulerStats,
    Starting,
    StartWave,
    StepOutput,
    Stop,
    pack_int32,
    unpack_int32,
)
from trioengine.types.output import FinishReason
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.pooling import PoolingFacts, PoolingParams, PoolingTask, PoolingType
from trioengine.types.request import KVHints

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
COLUMNS = st.lists(INT32, max_size=5).map(pack_int32)
TEXTS = st.text(max_size=8)
ERRORS = st.builds(
    ErrorData,
    name=TEXTS,
    fields=st.dictionaries(TEXTS, st.none() | TEXTS | INT64 | FLOATS, max_size=3),
)
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=FLOATS,
    logit_bias=st.none() | st.dictionaries(INT32, FLOATS, max_size=3),
    seed=st.none() | INT64 | st.integers(0, 2**64 - 1),
    max_tokens=st.none() | INT32,
    stop=st.lists(TEXTS, max_size=3),
    stop_token_ids=st.lists(INT32, max_size=3),
    ignore_eos=st.booleans(),
    output_kind=st.sampled_from(RequestOutputKind),
)
FINISHED = st.builds(
    Finished,
    slot=INT32,
    reason=st.sampled_from(FinishReason),
    stop_token_id=st.none() | INT32,
    error=st.none() | ERRORS,
)
POOLINGS = st.builds(
    PoolingParams,
    task=st.sampled_from(PoolingTask),
    pooling_type=st.none() | st.sampled_from(PoolingType),
    dimensions=st.none() | INT32,
    normalize=st.none() | st.booleans(),
    use_activation=st.none() | st.booleans(),
)
POOLING_FACTS = st.builds(
    PoolingFacts,
    st.lists(st.sampled_from(PoolingTask), max_size=2).map(tuple),
    st.sampled_from(PoolingType),
    st.booleans(),
    INT32,
    st.lists(TEXTS, max_size=3).map(tuple),
)
FACTS = st.builds(
    ModelFacts,
    INT32,
    INT32,
    st.lists(INT32, max_size=3).map(tuple),
    can_generate=st.booleans(),
    pooling=st.none() | POOLING_FACTS,
)
STRATEGIES = {
    EngineCoreRequest: st.builds(
        EngineCoreRequest,
        slot=INT32,
        request_id=TEXTS,
        prompt_token_ids=COLUMNS,
        sampling=SAMPLINGS,
        seed=st.integers(0, 2**64 - 1),
        eos_token_ids=st.lists(INT32, max_size=3).map(tuple),
        queue_timeout_s=st.none() | FLOATS,
        kv_hints=st.none() | st.builds(KVHints, st.booleans(), st.booleans()),
    ),
    EncodeCoreRequest: st.builds(
        EncodeCoreRequest,
        INT32,
        TEXTS,
        st.binary(max_size=9),
        POOLINGS,
        st.none() | INT32,
        INT32,
        st.none() | TEXTS,
        st.none() | TEXTS,
    ),
    AbortRequests: st.builds(AbortRequests, st.lists(INT32, max_size=5).map(tuple)),
    CallRequest: st.builds(CallRequest, INT64, st.sampled_from([GetLoad(), CheckIntegrity()])),
    Stop: st.just(Stop()),
    StartWave: st.just(StartWave()),
    Starting: st.builds(Starting, TEXTS, FLOATS),
    Ready: st.builds(Ready, FACTS, INT32, INT32, st.dictionaries(TEXTS, TEXTS, max_size=3)),
    StepOutput: st.builds(
        StepOutput,
        INT64,
        INT64,
        FLOATS,
        COLUMNS,
        COLUMNS,
        COLUMNS,
        st.lists(FINISHED, max_size=3).map(tuple),
        scheduled=COLUMNS,
        preempted=COLUMNS,
        stats=st.none() | st.builds(SchedulerStats, *[INT64] * 2, FLOATS, *[INT64] * 6),
        weight_version=st.none() | TEXTS,
    ),
    Reply: st.builds(Reply, INT64, st.binary(max_size=9), st.none() | ERRORS),
    EngineDead: st.builds(EngineDead, ERRORS),
}


def test_every_message_has_a_strategy() -> None:
    assert set(STRATEGIES) == set(MESSAGES)


@given(st.one_of(*STRATEGIES.values()))
@settings(max_examples=300, deadline=None)
def test_messages_cross_unchanged(message: Any) -> None:
    decoded = decode(encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@given(st.lists(INT32))
def test_columns_hold_int32(values: list[int]) -> None:
    assert unpack_int32(pack_int32(values)).tolist() == values


# Strangers


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
@example(b"")
@example(b"\x02\x01")
@example(msgpack.packb(b"\x03\x00"))
@example(msgpack.packb({3: {}, 4: 1}))
@example(b"\x91" * 5000 + b"\xc0")
@example(b"\xdf\xff\xff\xff\xff")
def test_bytes_that_are_no_message_are_a_codec_error(data: bytes) -> None:
    try:
        message = decode(data)
    except CodecError as error:
        length = len(error.message)
    else:
        length = 0
        assert decode(encode(message)) == message
    assert length < 600


PLAIN = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats() | TEXTS | st.binary(max_size=5),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(TEXTS, children, max_size=4),
    max_leaves=8,
)


@given(st.integers(-2, len(MESSAGES) + 1), PLAIN)
@settings(max_examples=200, deadline=None)
def test_plain_data_that_is_no_message_is_a_codec_error(tag: int, fields: object) -> None:
    try:
        message = decode(pack([tag, fields]))
    except CodecError:
        return
    assert decode(encode(message)) == message


@given(st.one_of(*STRATEGIES.values()), st.data())
@settings(max_examples=200, deadline=None)
def test_a_message_with_one_damaged_byte_is_a_message_or_a_codec_error(message: Any, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        assert type(decode(bytes(damaged))) in MESSAGES


@pytest.mark.parametrize("tag", [-1, -9, max(len(MESSAGES), len(CALLS)), True, 0.0, "3", None])
def test_tags_are_small_integers_and_nothing_else(tag: object) -> None:
    """A negative one is no place from the end of the list."""
    with pytest.raises(CodecError):
        decode(pack([tag, {}]))
    with pytest.raises(CodecError):
        decode(pack([2, {"call_id": 0, "call": [tag, {}]}]))


def test_errors_that_cannot_be_shown_are_codec_errors() -> None:
    """msgpack's has what it unpacked, too deep for repr; cattrs' joins the names of fields, which are no texts here."""
    with pytest.raises(CodecError, match="extra data"):
        decode(b"\x91" * 1000 + b"\xc0" * 2)
    with pytest.raises(CodecError, match="ForbiddenExtraKeysError"):
        decode(pack([MESSAGES.index(Stop), {1: 1, "more": 1}]))


def test_unknown_and_missing_fields_are_refused() -> None:
    with pytest.raises(CodecError):
        decode(pack([MESSAGES.index(Stop), {"more": 1}]))
    with pytest.raises(CodecError):
        decode(pack([MESSAGES.index(Starting), {"stage": "x"}]))
    with pytest.raises(CodecError):
        decode(pack([MESSAGES.index(CallRequest), {"call_id": 0, "call": [0, {"more": 1}]}]))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(number: float) -> None:
    with pytest.raises(CodecError):
        decode(pack([MESSAGES.index(Starting), {"stage": "x", "fraction": number}]))


def test_invalid_utf8_is_refused() -> None:
    data = encode(Starting("\u20ac", 0.0)).replace("\u20ac".encode(), b"\xff\xfe\xfd")
    with pytest.raises(CodecError):
        decode(data)


# Strictness


@attrs.frozen
class Everything:
    """One field of each kind."""

    flag: bool = True
    number: int = 1
    ratio: float = 0.5
    text: str = "x"
    data: bytes = b"x"
    items: list[int] = attrs.field(factory=list)
    several: tuple[str, ...] = ()
    mapping: dict[str, int] = attrs.field(factory=dict)
    reason: FinishReason = FinishReason.STOP
    kind: RequestOutputKind = RequestOutputKind.DELTA
    optional: int | None = None


ACCEPTED: dict[str, list[object]] = {
    "flag": [True, False],
    "number": [0, -5, 2**70],
    "ratio": [0.5, 1, -3],
    "text": ["", "true"],
    "data": [b""],
    "items": [[], [1, 2]],
    "several": [[], ["a"]],
    "mapping": [{}, {"a": 1}],
    "reason": ["stop"],
    "kind": [0, 2],
    "optional": [None, 4],
}
CANDIDATES: list[object] = [
    *(None, True, False, 0, 1, 7, -5, 2**70, 0.0, 1.0, 0.5, -3, "", "1", "true", "stop", "x", b"", b"x"),
    *([], [1, 2], ["a"], [True], [1.0], ["1"], [None], [b"a"], {}, {"a": 1}, {"a": "1"}, {"a": True}, {1: 1}),
    *(float("nan"), float("inf"), (1, 2), ("a",), {1, 2}),
]


@pytest.mark.parametrize("name", ACCEPTED)
def test_nothing_is_coerced(name: str) -> None:
    """Each field takes its own kind only; an integer is a number, and that is all."""
    converter = make_strict_converter(forbid_extra_keys=True)
    is_like = {
        "flag": lambda value: type(value) is bool,
        "number": lambda value: type(value) is int,
        "ratio": lambda value: type(value) in (int, float) and abs(value) < 1e300,
        "text": lambda value: type(value) is str,
        "data": lambda value: type(value) is bytes,
        "items": lambda value: type(value) is list and all(type(item) is int for item in value),
        "several": lambda value: type(value) is list and all(type(item) is str for item in value),
        "mapping": lambda value: (
            type(value) is dict and all(type(key) is str and type(item) is int for key, item in value.items())
        ),
        "reason": lambda value: value == "stop",
        "kind": lambda value: type(value) is not bool and value in (0, 1, 2),
        "optional": lambda value: value is None or type(value) is int,
    }[name]
    for value in [*ACCEPTED[name], *CANDIDATES]:
        if is_like(value):
            structured = getattr(converter.structure({name: value}, Everything), name)
            assert structured == (tuple(value) if name == "several" else value)  # type: ignore[arg-type]
        else:
            with pytest.raises(Exception, match="Everything"):
                converter.structure({name: value}, Everything)


def test_a_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(Exception, match="Everything"):
        make_strict_converter(forbid_extra_keys=True).structure({"ratio": 10**400}, Everything)


@pytest.mark.parametrize("value", [[], "text", "flag", 5, None, [["flag", True]], ("flag",)])
@pytest.mark.parametrize("forbid_extra_keys", [True, False])
def test_an_object_is_an_object(value: object, forbid_extra_keys: bool) -> None:
    """Also one all of whose fields have defaults, and whatever is done with unknown keys."""
    converter = make_strict_converter(forbid_extra_keys=forbid_extra_keys)
    with pytest.raises(TypeError, match="expected an object"):
        converter.structure(value, Everything)


def test_errors_tell_the_path() -> None:
    with pytest.raises(Exception, match="Everything") as caught:
        make_strict_converter(forbid_extra_keys=True).structure({"items": [1, "2"]}, Everything)
    assert isinstance(caught.value, ExceptionGroup)


# Replies


@pytest.mark.parametrize("data", [b"", b"\xc1", pack(None), pack({}), pack({"running": "1"}), pack([1, 2, 3, 4])])
def test_a_reply_of_another_type_is_a_codec_error(data: bytes) -> None:
    with pytest.raises(CodecError, match="GetLoad"):
        decode_reply(GetLoad, data)


def test_a_reply_of_none_is_none_and_nothing_else() -> None:
    assert decode_reply(CheckIntegrity, encode_reply(CheckIntegrity, None)) is None
    with pytest.raises(CodecError, match="CheckIntegrity"):
        decode_reply(CheckIntegrity, pack(0))


def test_the_reply_type_of_what_is_no_operation_is_an_error_of_the_program() -> None:
    with pytest.raises(TypeError, match="Call"):
        reply_type(CoreLoad)  # type: ignore[arg-type]
    assert issubclass(GetLoad, Call)


# Errors as data


def every_error_class() -> list[type[TrioEngineError]]:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    return [error for error in classes if issubclass(error, TrioEngineError) and error is not TrioEngineError]


def make_error(error_class: type[TrioEngineError]) -> TrioEngineError:
    """One with a value of its own in each field."""
    samples: dict[object, object] = {str: "text", float: 2.5, int: 7}
    names = {field.name: field.type for field in attrs.fields(error_class) if field.init}
    values = {
        name: next(value for kind, value in samples.items() if kind is type_ or kind in getattr(type_, "__args__", ()))
        for name, type_ in names.items()
    }
    return error_class(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("error_class", every_error_class())
def test_every_error_crosses_as_itself(error_class: type[TrioEngineError]) -> None:
    """Through the wire, pickle and copy: same class, same fields, same words."""
    error = make_error(error_class)
    message = decode(encode(EngineDead(error_to_data(error))))
    assert isinstance(message, EngineDead)
    for copied in (
        error_from_data(message.error),
        pickle.loads(pickle.dumps(error)),
        copy.copy(error),
        copy.deepcopy(error),
        attrs.evolve(error),
    ):
        assert type(copied) is error_class
        assert attrs.asdict(copied) == attrs.asdict(error)
        assert str(copied) == str(error)


def test_a_strangers_error_arrives_as_a_generate_error_that_names_it() -> None:
    arrived = error_from_data(error_to_data(KeyError("slot")))
    assert type(arrived) is EngineGenerateError
    assert str(arrived) == "KeyError: 'slot'"


@pytest.mark.parametrize(
    "data",
    [
        ErrorData("NoSuchError", {"message": "x"}),
        ErrorData("ClassVar", {}),
        ErrorData("_rebuild", {}),
        ErrorData("RequestError", {"unknown": 1}),
        ErrorData("RequestError", {}),
    ],
)
def test_error_data_that_fits_no_class_is_a_generate_error(data: ErrorData) -> None:
    assert type(error_from_data(data)) is EngineGenerateError


def test_errors_with_texts_that_utf8_cannot_write_still_arrive() -> None:
    """A file's name may hold bytes that are no UTF-8; the engine must still say what is wrong with the file."""
    error = errors.CheckpointError("bad: \udcff", path="/models/\udcff")
    message = decode(encode(EngineDead(error_to_data(error))))
    assert isinstance(message, EngineDead)
    assert message.error.fields["path"] == "/models/?"
    arrived = error_from_data(error_to_data(ValueError("\ud800")))
    assert str(arrived) == "ValueError: ?"


def test_a_prompt_that_is_too_long_keeps_both_numbers() -> None:
    arrived = error_from_data(error_to_data(PromptTooLongError(num_prompt_tokens=10, max_model_len=8)))
    assert isinstance(arrived, PromptTooLongError)
    assert (arrived.num_prompt_tokens, arrived.max_model_len) == (10, 8)
    assert "10" in str(arrived)
    assert "8" in str(arrived)


def test_keys_of_a_mapping_may_be_integers() -> None:
    assert unpack(pack({1: 2})) == {1: 2}
