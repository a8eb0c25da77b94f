"""Every option is documented once, and the command line has it."""

import argparse

import attrs
import pytest

from trioengine.cli import serve
from trioengine.cli.options import flag_of
from trioengine.config import EngineConfig, ServerConfig
from trioengine.config.options import options_of

SECTIONS = [EngineConfig, ServerConfig]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_says_what_it_means_and_is_checked(section: type[attrs.AttrsInstance]) -> None:
    for option, field in zip(options_of(section), attrs.fields(section), strict=True):
        assert option.help.endswith("."), option.name
        assert "default" not in option.help.lower().replace("default model", ""), f"{option.name}: shown by itself"
        assert field.validator is not None, option.name


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_an_option_of_serve(section: type[attrs.AttrsInstance]) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for option in options_of(section):
        assert flag_of(option.name) in flags


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_are_frozen_and_named_with_units(section: type[attrs.AttrsInstance]) -> None:
    for option in options_of(section):
        if option.kind is float:
            # Seconds, or a share.
            assert option.name.endswith(("_s", "_utilization")), option.name
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(section(), next(options_of(section)).name, None)
