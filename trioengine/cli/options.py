"""Command line options made from the configuration's sections, and back."""

import argparse
import re
from fractions import Fraction
from typing import TypeVar

import attrs

from trioengine.config import EngineConfig
from trioengine.config.options import Option, from_dict, options_of
from trioengine.errors import ConfigError

_WITH_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgtKMGT])")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
METAVARS = {str: "TEXT", int: "N", float: "X"}

Section = TypeVar("Section", bound=attrs.AttrsInstance)


def add_section(parser: argparse.ArgumentParser, section: type[attrs.AttrsInstance], title: str) -> None:
    """Give the parser one option for each field of a section: `max_model_len` becomes `--max-model-len`."""
    group = parser.add_argument_group(title)
    for option in options_of(section):
        _add_option(group, option)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser MODEL, which is also `--model`, and the engine's other options."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    add_section(parser, EngineConfig, "engine")


def section_from(arguments: argparse.Namespace, section: type[Section]) -> Section:
    """The section with the options that were given; the others have their defaults.

    Raises:
        ConfigError: a value cannot work.
    """
    given = vars(arguments)
    return from_dict(
        section, {option.name: given[option.name] for option in options_of(section) if option.name in given}
    )


def engine_config_from(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's configuration, after `add_engine_options`.

    Raises:
        ConfigError: a value cannot work, or MODEL is given twice.
    """
    config, model = section_from(arguments, EngineConfig), arguments.model_argument
    if None not in (model, config.model) and model != config.model:
        raise ConfigError(f"MODEL is given twice: {model!r}, and {config.model!r} by --model.", option="model")
    return config if model is None else attrs.evolve(config, model=model)


def flag_of(name: str) -> str:
    """How a field is spelled on a command line."""
    return "--" + name.replace("_", "-")


def integer(text: str) -> int:
    """For argparse: an integer, also as vLLM has it: 8k is 8000, 8K is 8 * 1024, 1.5k is 1500."""
    try:
        if (written := _WITH_UNIT.fullmatch(text)) is None:
            return int(text)
        number = Fraction(written[1]) * _UNITS[written[2]]
        if number.denominator == 1:
            return int(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text[:50]!r} is no integer, such as 8192, 8k (8000) or 8K (8192)")


def integer_or_auto(text: str) -> int | None:
    """For argparse: as `integer`, or the word "auto", which leaves the value open."""
    return None if text == "auto" else integer(text)


def positive_int(text: str) -> int:
    """For argparse: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _add_option(group: "argparse._ArgumentGroup", option: Option) -> None:  # pyright: ignore[reportPrivateUsage]
    # Left out, an option leaves no trace, so that defaults stay where the section has them.
    flag, nothing = flag_of(option.name), argparse.SUPPRESS
    if option.kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=nothing, help=_help(option))
    else:
        metavar = "JSON" if option.is_section else "|".join(option.choices) or METAVARS[option.kind]
        choices = option.choices or None
        # A list of numbers is one argument after another, as in vLLM.
        is_run = option.is_list and option.kind is int
        kind = option.kind
        if kind is int:
            kind = integer_or_auto if option.default is None else integer
        group.add_argument(
            flag,
            action="extend" if is_run else "append" if option.is_list else "store",
            nargs="+" if is_run else None,
            type=kind,
            metavar=metavar,
            choices=choices,
            default=nothing,
            help=_help(option),
        )


def _help(option: Option) -> str:
    text = option.help.replace("%", "%%")
    if option.is_list and option.kind is str:
        text += " May be given several times."
    if option.default is None or option.default is False or option.default == ():
        return text
    if isinstance(option.default, tuple):
        return f"{text} Default: {' '.join(map(str, option.default))}."
    return f"{text} Default: {'on' if option.default is True else option.default}."
