"""What a person types at a terminal becomes `SamplingParams`, or an error before anything is started."""

import argparse

import pytest

from trioengine.cli import generate
from trioengine.cli.options import engine_config_from
from trioengine.cli.parser import CommandParser
from trioengine.cli.sampling import add_sampling_options, add_structure_options, sampling_from
from trioengine.errors import RequestError
from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.structured import StructuredOutputsParams


def parse(*words: str) -> SamplingParams:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    add_structure_options(parser)
    return sampling_from(parser.parse_args(words))


def test_nothing_given_is_every_default_but_the_length() -> None:
    assert parse() == SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA)


def test_what_is_given_arrives() -> None:
    sampling = parse("--temperature", "0.5", "--stop", "a", "--stop", "b", "--max-tokens", "3")
    assert (sampling.temperature, sampling.stop, sampling.max_tokens) == (0.5, ("a", "b"), 3)


def test_a_seed_is_the_engines_and_the_requests() -> None:
    parser = CommandParser()
    generate.add_arguments(parser)
    arguments = parser.parse(["a prompt", "--seed", "7"])
    assert sampling_from(arguments).seed == engine_config_from(arguments).seed == 7


def test_the_form_of_the_answer_may_be_given() -> None:
    assert parse("--json-schema", '{"type": "object"}').structured_outputs == StructuredOutputsParams(
        json='{"type": "object"}'
    )
    assert parse("--grammar", 'start: "a"').structured_outputs == StructuredOutputsParams(grammar='start: "a"')


def test_one_form_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--json-schema", "{}", "--grammar", "x")
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--temperature", "-1"), ("--json-schema", "{")])
def test_what_cannot_work_is_refused(words: tuple[str, str]) -> None:
    with pytest.raises(RequestError):
        parse(*words)
