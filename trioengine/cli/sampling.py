"""How `generate` and `chat` let a person choose `SamplingParams`."""

import argparse
from typing import Any, cast

from trioengine.types.params import RequestOutputKind, SamplingParams
from trioengine.types.structured import StructuredOutputsParams


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser the sampling options that people use at a terminal. `--seed` is the engine's."""
    group = parser.add_argument_group("sampling")

    def add(flag: str, kind: type[int] | type[float] | type[str], metavar: str, help_text: str) -> None:
        group.add_argument(flag, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=help_text)

    add("--max-tokens", int, "N", "the most tokens to generate; unset is what the context leaves")
    add("--temperature", float, "X", "0 takes the most likely token; larger is more random")
    add("--top-p", float, "X", "only the most likely tokens whose probabilities sum to this")
    add("--top-k", int, "N", "only this many most likely tokens")
    add("--min-p", float, "X", "only tokens at least this fraction as likely as the most likely one")
    add("--repetition-penalty", float, "X", "above 1, tokens that were there become less likely")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS, help="end before this text; repeatable"
    )


def add_structure_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser the forms that an answer may be given at a terminal."""
    group = parser.add_argument_group("structure").add_mutually_exclusive_group()

    def add(flag: str, metavar: str, help_text: str) -> None:
        group.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help=help_text)

    add("--json-schema", "JSON", "the answer is JSON of this schema")
    add("--grammar", "TEXT", "the answer is of this grammar, in Lark's or in EBNF (GBNF) notation")


def sampling_from(arguments: argparse.Namespace) -> SamplingParams:
    """The parameters that were given, for a stream of deltas.

    Raises:
        RequestError: a value is out of its range.
    """
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
    given = {name: value for name, value in vars(arguments).items() if name in names}
    values = cast("dict[str, Any]", {"max_tokens": None, **given, "output_kind": RequestOutputKind.DELTA})
    schema, grammar = getattr(arguments, "json_schema", None), getattr(arguments, "grammar", None)
    if schema is not None or grammar is not None:
        values["structured_outputs"] = StructuredOutputsParams(json=schema, grammar=grammar)
    params = SamplingParams(**values)
    params.validate()
    return params
