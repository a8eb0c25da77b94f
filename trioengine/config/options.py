"""How a section of the configuration describes its fields: help text, checks, and the list a command line is made from.

A section is a frozen attrs class whose fields carry `documented("...")` as metadata and a validator of this module, so
that name, type, default, meaning and limits of an option have one home. Knows no section and no command line.
"""

import enum
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import attrs

from trioengine.errors import ConfigError

OptionValue: TypeAlias = str | int | float | bool | tuple[str, ...] | tuple[int, ...] | None

Section = TypeVar("Section", bound=attrs.AttrsInstance)
Member = TypeVar("Member", bound=enum.StrEnum)
Validator: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]

_HELP = "help"
_MAX_INTEGER = 2**63 - 1
"""Of the messages between processes, and of native code."""
_LIST_KINDS: Mapping[object, type[str] | type[int]] = {tuple[str, ...]: str, tuple[int, ...]: int}


@attrs.frozen
class Option:
    """One field of a section, as a command line or a manual shows it."""

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    default: OptionValue
    """None where the value is derived from model and machine, or there is none."""
    help: str
    choices: Sequence[str] = ()
    """The only values; none where any of the kind may do."""
    is_section: bool = False
    """Whether it is a section of its own, written as a JSON object."""
    is_list: bool = False
    """Whether it may be given several times."""


def documented(help_text: str) -> Mapping[str, str]:
    """The metadata of a field that has this meaning."""
    return {_HELP: help_text}


def options_of(section: type[attrs.AttrsInstance]) -> Iterator[Option]:
    """The options of a section, in its fields' order."""
    hints = typing.get_type_hints(section)
    for field in attrs.fields(section):
        list_kind = _LIST_KINDS.get(hints[field.name])
        kind = list_kind or _kind(hints[field.name])
        choices = [str(member.value) for member in kind] if issubclass(kind, enum.StrEnum) else []
        is_section = attrs.has(kind)
        yield Option(
            name=field.name,
            kind=str if choices or is_section else kind,
            default=field.default,
            help=field.metadata.get(_HELP, ""),
            choices=choices,
            is_section=is_section,
            is_list=list_kind is not None,
        )


def from_dict(section: type[Section], values: Mapping[str, object]) -> Section:
    """The section with these values; fields left out have their defaults.

    Raises:
        ConfigError: a name is unknown or missing, or a value cannot work. `option` is its name.
    """
    fields = {field.name: field for field in attrs.fields(section)}
    for name in values:
        if name not in fields:
            raise ConfigError(f"There is no option {name!r}.", option=name)
    for name, field in fields.items():
        if field.default is attrs.NOTHING and name not in values:
            raise ConfigError(f"{name} is required.", option=name)
    return section(**cast("dict[str, Any]", dict(values)))


def integer(minimum: int, maximum: int | None = None) -> Validator:
    """A validator: an integer in this range, of 64 bits at most."""
    return _check(int, minimum, maximum)


def integers(minimum: int, maximum: int | None = None) -> Validator:
    """A validator: a tuple of integers in this range. For a field whose converter is `to_integers()`."""
    check_one = integer(minimum, maximum)

    def check(config: object, field: "attrs.Attribute[Any]", value: object) -> None:
        for member in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
            check_one(config, field, member)

    return check


def to_integers() -> Callable[[Any], tuple[int, ...]]:
    """A converter: an integer alone, several, or a JSON list of them, as a tuple. Others are left to the validator."""

    def convert(value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                return value
        if isinstance(value, list):
            return tuple(cast("list[object]", value))
        return (value,) if type(value) is int else value

    return convert


def number(minimum: float, maximum: float | None = None) -> Validator:
    """A validator: a finite number in this range."""
    return _check(float, minimum, maximum)


def text(pattern: str | None = None) -> Validator:
    """A validator: a string that is not empty and of this form."""
    form = None if pattern is None else re.compile(pattern)

    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        if not isinstance(value, str) or not value or "\0" in value:
            raise ConfigError(f"{field.name} must be a text, not {value!r}.", option=field.name)
        if form is not None and form.fullmatch(value) is None:
            raise ConfigError(f"{field.name} must be of the form {pattern}, not {value!r}.", option=field.name)

    return check


def texts(pattern: str = ".+") -> Validator:
    """A validator: a tuple of strings, each of this form. For a field whose converter is `to_texts()`."""
    form = re.compile(pattern)

    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        members = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
        for member in members:
            # Not shown: it may be a secret.
            if not isinstance(member, str) or "\0" in member or form.fullmatch(member) is None:
                raise ConfigError(f"A value of {field.name} is not of the form {pattern}.", option=field.name)

    return check


def to_texts() -> Callable[[Any], tuple[str, ...]]:
    """A converter: a text alone, several, or a JSON list of them, as a tuple. Others are left to the validator."""

    def convert(value: Any) -> Any:
        if isinstance(value, str):
            return tuple(_texts_of(value))
        if isinstance(value, (list, tuple)):
            members = cast("Sequence[object]", value)
            return tuple(
                text for member in members for text in (_texts_of(member) if isinstance(member, str) else [member])
            )
        return value

    return convert


def _texts_of(value: str) -> Sequence[str]:
    # A bracket alone may begin an IPv6 address.
    if value.startswith('["') or value == "[]":
        try:
            return json.loads(value)
        except ValueError:
            pass
    return [value]


def member_of(choices: type[enum.StrEnum]) -> Validator:
    """A validator: one of these. For a field whose converter is `to_member_of` the same."""

    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        if not isinstance(value, choices):
            names = ", ".join(choices)
            raise ConfigError(f"{field.name} must be one of {names}, not {value!r}.", option=field.name)

    return check


def to_member_of(choices: type[Member]) -> Callable[[Any], Member]:
    """A converter: the member that a text names. Whatever names none is left to the validator."""

    def convert(value: Any) -> Any:
        return choices(value) if isinstance(value, str) and value in list(choices) else value

    return convert


def section_of(section: type[attrs.AttrsInstance]) -> Validator:
    """A validator: a section. For a field whose converter is `to_section` of the same."""

    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        if not isinstance(value, section):
            raise ConfigError(f"{field.name} must be a JSON object, not {value!r}.", option=field.name)

    return check


def to_section(section: type[Section]) -> Callable[[Any], Section]:
    """A converter: the section that a mapping, or a JSON object's text, describes. Others are left to the validator.

    Raises:
        ConfigError: what `from_dict` raises; or the text is no JSON.
    """

    def convert(value: Any, field: "attrs.Attribute[Any]") -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"{field.name} is no JSON: {error}.", option=field.name) from None
        if not isinstance(value, Mapping):
            return value
        try:
            return from_dict(section, cast("Mapping[str, object]", value))
        except ConfigError as error:
            raise ConfigError(f"{field.name}: {error.message}", option=field.name) from None

    return cast("Callable[[Any], Section]", attrs.Converter(convert, takes_field=True))


def flag() -> Validator:
    """A validator: True or False."""

    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        if not isinstance(value, bool):
            raise ConfigError(f"{field.name} must be true or false, not {value!r}.", option=field.name)

    return check


def _check(kind: type[int] | type[float], minimum: float, maximum: float | None) -> Validator:
    expected = "an integer" if kind is int else "a number"
    limits = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"

    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        is_kind = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        # `not (a <= x)` also refuses NaN.
        if not is_kind or not minimum <= cast(float, value) <= (math.inf if maximum is None else maximum):
            raise ConfigError(f"{field.name} must be {expected}, {limits}, not {value!r}.", option=field.name)
        if kind is int and cast(int, value) > _MAX_INTEGER:
            raise ConfigError(f"{field.name} must be an integer of at most 64 bits.", option=field.name)
        if value == math.inf:
            raise ConfigError(f"{field.name} must be finite.", option=field.name)

    return check


def _kind(hint: Any) -> type[Any]:
    """`int` of `int | None`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
    if hint not in (str, int, float, bool) and not issubclass(hint, enum.StrEnum) and not attrs.has(hint):
        raise TypeError(f"{hint} is no type of an option")
    return hint
