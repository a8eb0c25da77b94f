"""Messages to bytes and back: cattrs over msgpack, strict about types.

cattrs coerces by default (`bool("false")` is True, `tuple("abc")` has three items), so scalars, lists and mappings
have hooks that accept their own kind only, and NaN and infinity are refused. `make_strict_converter` serves the wire
and the bodies of HTTP requests alike.
"""

import enum
import math
import traceback
from collections.abc import Callable
from types import NoneType
from typing import Any, TypeAlias, TypeVar, cast, get_args, get_origin

import attrs
import msgpack
from cattrs import Converter
from cattrs.cols import (
    homogenous_tuple_structure_factory,
    is_mapping,
    is_sequence,
    list_structure_factory,
    mapping_structure_factory,  # pyright: ignore[reportUnknownVariableType]
)
from cattrs.dispatch import StructureHook

from trioengine import errors
from trioengine.errors import CodecError, EngineGenerateError, RequestError, TrioEngineError
from trioengine.types.messages import (
    CALLS,
    AbortRequests,
    Call,
    CallRequest,
    EncodeCoreRequest,
    EngineCoreRequest,
    EngineDead,
    ErrorData,
    FromCore,
    Ready,
    Reply,
    Starting,
    StartWave,
    StepOutput,
    Stop,
    ToCore,
)

R = TypeVar("R")
HookFactory: TypeAlias = Callable[[Any, Converter], StructureHook]

MESSAGES: tuple[type[ToCore | FromCore], ...] = (
    EngineCoreRequest,
    AbortRequests,
    CallRequest,
    Stop,
    Starting,
    Ready,
    StepOutput,
    Reply,
    EngineDead,
    EncodeCoreRequest,
    StartWave,
)
"""Every message. The place in this tuple is its tag on the wire."""

_TAGS = {message_class: tag for tag, message_class in enumerate(MESSAGES)}
_CALL_TAGS: dict[type, int] = {call_class: tag for tag, call_class in enumerate(CALLS)}


def make_strict_converter(*, forbid_extra_keys: bool, detailed_validation: bool = True) -> Converter:
    """A converter that never coerces: a value of the wrong type is an error at its path."""
    converter = Converter(forbid_extra_keys=forbid_extra_keys, detailed_validation=detailed_validation)
    converter.register_structure_hook(bool, _structure_bool)
    converter.register_structure_hook(int, _structure_int)
    converter.register_structure_hook(float, _structure_float)
    converter.register_structure_hook(str, _structure_str)
    converter.register_structure_hook(bytes, _structure_bytes)
    # By class, as the hooks of str and int are, which would take their enums too: cattrs asks these first of all.
    for enum_class in (enum.Enum, enum.StrEnum, enum.IntEnum):
        converter.register_structure_hook(enum_class, _structure_enum)
    converter.register_structure_hook_factory(is_sequence, _strict(list_structure_factory, list))
    # The newest hook that applies wins: tuples are sequences too.
    converter.register_structure_hook_factory(_is_homogenous_tuple, _strict(homogenous_tuple_structure_factory, list))
    converter.register_structure_hook_factory(is_mapping, _strict(_mapping_hook, dict))
    # Without this an empty list is an object whose fields all have defaults.
    converter.register_structure_hook_factory(attrs.has, _strict(_object_hook, dict))
    return converter


def encode(message: ToCore | FromCore) -> bytes:
    """The bytes of a message."""
    return pack([_TAGS[type(message)], _wire.unstructure(message)])


def decode(data: bytes | memoryview) -> ToCore | FromCore:
    """The message in these bytes.

    Raises:
        CodecError: they are not one.
    """
    try:
        tag, fields = unpack(data)
        return _wire.structure(fields, MESSAGES[_tag(tag)])
    except Exception as error:  # A border: whatever a stranger sends becomes one kind of error.
        raise _codec_error("Not a message of this protocol", error) from error


def check_call(call: Call[object]) -> None:
    """Return when a core can read this operation, for otherwise nobody would reply.

    Raises:
        RequestError: it is none, or a field is of the wrong type.
    """
    if type(call) not in _CALL_TAGS:
        raise RequestError(f"{str(call)[:100]!r} is no operation: give an object of a `Call`'s class.")
    for field in attrs.fields(type(call)):
        try:
            _wire.structure(_wire.unstructure(getattr(call, field.name)), field.type)
        except Exception as error:  # A border, as in `decode`.
            raise RequestError(
                f"{field.name} is not what {type(call).__name__} takes: {error}"[:500], param=field.name
            ) from None


def encode_reply(call_class: type[Call[R]], value: R) -> bytes:
    """The bytes of an operation's reply."""
    return pack(_wire.unstructure(value, reply_type(call_class)))


def decode_reply(call_class: type[Call[R]], data: bytes) -> R:
    """The reply in these bytes.

    Raises:
        CodecError: they are not one of this operation's type.
    """
    try:
        return _wire.structure(unpack(data), reply_type(call_class))
    except Exception as error:  # A border, as in `decode`.
        raise _codec_error(f"Not a reply to {call_class.__name__}", error) from error


def _codec_error(what: str, error: Exception) -> CodecError:
    # Neither repr nor str is safe: msgpack's errors hold what was unpacked, perhaps nested too deeply to be shown, and
    # cattrs' fail for keys that are no texts.
    return CodecError(f"{what}: {traceback.format_exception_only(error)[0].strip()}"[:500])


def reply_type(call_class: type[Call[R]]) -> type[R]:
    """`R` of an operation that derives from `Call[R]`."""
    for base in getattr(call_class, "__orig_bases__", ()):
        if get_origin(base) is Call:
            return get_args(base)[0]
    raise TypeError(f"{call_class.__name__} does not derive from Call[...]")


def pack(value: object) -> bytes:
    """Plain data as msgpack."""
    return _msgpack.packb(value)


def unpack(data: bytes | memoryview) -> Any:
    """The plain data in these bytes. Raises whatever msgpack raises when they are none."""
    # What is made from it is structured strictly, so integers as keys are harmless.
    return _msgpack.unpackb(data, strict_map_key=False)


def error_to_data(error: Exception) -> ErrorData:
    """An exception as data. One that is not TrioEngine's becomes an `EngineGenerateError` that names it."""
    if not isinstance(error, TrioEngineError):
        return ErrorData(EngineGenerateError.__name__, {"message": _sendable(f"{type(error).__name__}: {error}")})
    names = [field.name for field in attrs.fields(type(error)) if field.init]
    return ErrorData(name=type(error).__name__, fields={name: _sendable(getattr(error, name)) for name in names})


def error_from_data(data: ErrorData) -> TrioEngineError:
    """The exception that `error_to_data` was given, to be raised."""
    named: object = getattr(errors, data.name, None)
    is_ours = isinstance(named, type) and issubclass(named, TrioEngineError)
    error_class = cast(Any, named if is_ours else EngineGenerateError)
    try:
        return error_class(**data.fields)
    except TypeError:
        return EngineGenerateError(f"{data.name}: {data.fields}")


def _sendable(value: object) -> Any:
    """A field of an error as the wire takes it: an error must arrive whatever a file's name or a library put into it.

    Texts lose lone surrogates, which stand for bytes in names of files; other objects become their text.
    """
    if value is None or (isinstance(value, (int, float)) and math.isfinite(value)):
        return value
    return str(value).encode("utf-8", "replace").decode()


_msgpack = cast(Any, msgpack)  # It has no types.
_mapping_hook = cast("HookFactory", mapping_structure_factory)


def _tag(value: object) -> int:
    tag = _structure_int(value, int)
    if tag < 0:
        raise ValueError("a tag is not negative")
    return tag


def _structure_bool(value: object, _: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("expected true or false")
    return value


def _structure_int(value: object, _: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("expected an integer")
    return value


def _structure_float(value: object, _: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def _structure_str(value: object, _: object) -> str:
    if not isinstance(value, str):
        raise TypeError("expected a string")
    return value


def _structure_bytes(value: object, _: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("expected bytes")
    return value


def _structure_scalar(value: object, _: object) -> str | int | float | None:
    if value is None or isinstance(value, str):
        return value
    return _structure_int(value, int) if isinstance(value, int) else _structure_float(value, float)


def _structure_enum(value: object, enum_class: Any) -> Any:
    members: list[Any] = list(enum_class)
    for member in members:
        if type(value) is not bool and member.value == value:
            return member
    raise ValueError(f"expected one of {', '.join(repr(member.value) for member in members)}")


def _is_homogenous_tuple(type_: Any) -> bool:
    arguments = get_args(type_)
    return get_origin(type_) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis


def _object_hook(type_: Any, converter: Converter) -> StructureHook:
    return converter.gen_structure_attrs_fromdict(type_)


def _strict(factory: HookFactory, kind: type) -> HookFactory:
    """`factory`'s hook behind a check that the value is of this JSON kind."""
    expected = "a list" if kind is list else "an object"

    def strict_factory(type_: Any, converter: Converter) -> StructureHook:
        structure = factory(type_, converter)

        def structure_strictly(value: object, type_: Any) -> Any:
            if not isinstance(value, kind):
                raise TypeError(f"expected {expected}")
            return structure(value, type_)

        return structure_strictly

    return strict_factory


def _unstructure_call(call: Call[object]) -> list[object]:
    return [_CALL_TAGS[type(call)], _wire.unstructure_attrs_asdict(call)]


def _structure_call(value: list[Any], _: object) -> Call[object]:
    tag, fields = value
    call_class: type[Call[object]] = CALLS[_tag(tag)]
    return _wire.structure(fields, call_class)


def _make_wire_converter() -> Converter:
    converter = make_strict_converter(forbid_extra_keys=True, detailed_validation=False)
    converter.register_structure_hook(str | int | float | None, _structure_scalar)
    converter.register_structure_hook(NoneType, lambda value, _: _require_none(value))
    # Exactly the field's annotation: the classes themselves keep cattrs' own hooks.
    converter.register_structure_hook_func(lambda type_: get_origin(type_) is Call, _structure_call)
    converter.register_unstructure_hook_func(lambda type_: get_origin(type_) is Call, _unstructure_call)
    return converter


def _require_none(value: object) -> None:
    if value is not None:
        raise TypeError("expected null")


_wire = _make_wire_converter()
