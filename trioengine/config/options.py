"""How a section of the configuration describes its fields: help text, checks, and the list a command line is made from.

A section is a frozen attrs class whose fields carry `documented("...")` as metadata and a validator of this module, so
that name, type, default, meaning and limits of an option have one home. Knows no section and no command line.
"""

import enum
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import attrs

from trioengine.errors import ConfigError

OptionValue: TypeAlias = str | int | float | bool | None

Section = TypeVar("Section", bound=attrs.AttrsInstance)
Member = TypeVar("Member", bound=enum.StrEnum)
Validator: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]

_HELP = "help"


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


def documented(help_text: str) -> Mapping[str, str]:
    """The metadata of a field that has this meaning."""
    return {_HELP: help_text}


def options_of(section: type[attrs.AttrsInstance]) -> Iterator[Option]:
    """The options of a section, in its fields' order."""
    hints = typing.get_type_hints(section)
    for field in attrs.fields(section):
        kind = _kind(hints[field.name])
        choices = [str(member.value) for member in kind] if issubclass(kind, enum.StrEnum) else []
        yield Option(
            name=field.name,
            kind=str if choices else kind,
            default=field.default,
            help=field.metadata.get(_HELP, ""),
            choices=choices,
        )


def to_dict(section: attrs.AttrsInstance) -> dict[str, OptionValue]:
    """A section as plain data, for another process."""
    values = {field.name: getattr(section, field.name) for field in attrs.fields(type(section))}
    return {name: value.value if isinstance(value, enum.StrEnum) else value for name, value in values.items()}


def from_dict(section: type[Section], values: Mapping[str, object]) -> Section:
    """The section that `to_dict` was given; fields left out have their defaults.

    Raises:
        ConfigError: a name is unknown, or a value cannot work. `option` is its name.
    """
    known = {option.name for option in options_of(section)}
    for name in values:
        if name not in known:
            raise ConfigError(f"There is no option {name!r}.", option=name)
    return section(**cast("dict[str, Any]", dict(values)))


def integer(minimum: int, maximum: int | None = None) -> Validator:
    """A validator: an integer in this range."""
    return _check(int, minimum, maximum)


def number(minimum: float) -> Validator:
    """A validator: a finite number, at least this."""
    return _check(float, minimum, None)


def text() -> Validator:
    """A validator: a string that is not empty."""

    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        if not isinstance(value, str) or not value or "\0" in value:
            raise ConfigError(f"{field.name} must be a text, not {value!r}.", option=field.name)

    return check


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
        if value == math.inf:
            raise ConfigError(f"{field.name} must be finite.", option=field.name)

    return check


def _kind(hint: Any) -> type[Any]:
    """`int` of `int | None`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
    if hint not in (str, int, float, bool) and not issubclass(hint, enum.StrEnum):
        raise TypeError(f"{hint} is no type of an option")
    return hint
