"""Command lines: errors of one line that say what was perhaps meant, and words in the forms that vLLM has."""

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

_FURTHER_VALUES = {"--served-model-name": "--model-alias"}
"""An option of one value -> the one that takes what vLLM has behind that."""


class CommandParser(argparse.ArgumentParser):
    """argparse's, with `parse` in place of `parse_args`.

    Underscores in names of options are hyphens. An option that may be given several times may have several values, too,
    where that does not make one of MODEL.
    """

    def __init__(self, **options: Any) -> None:
        """Without abbreviations, whose meaning another option could change."""
        super().__init__(allow_abbrev=False, **options)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments. A wrong command line ends the process with status 2."""
        words = list(_with_hyphens(words))
        found, unknown = self.parse_known_args(words)
        if unknown or _has_two_models(found):
            had_model = _has_model(found)
            found, unknown = self.parse_known_args(list(_one_by_one(words, self._lists())))
            if had_model and not _has_model(found):
                self.error("MODEL must stand before an option with several values")
        if unknown:
            self.error(self._describe(next((word for word in unknown if word.startswith("-")), unknown[0]), found))
        return found

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 and one line on standard error."""
        self.exit(2, f"{self.prog}: error: {message}. All options: {self.prog} --help\n")

    def _lists(self) -> Mapping[str, str]:
        """The options that may have several values, and the option that each further value is one of."""
        several = argparse._AppendAction  # pyright: ignore[reportPrivateUsage]
        known = self._option_string_actions
        lists = {flag: flag for flag, action in known.items() if isinstance(action, several)}
        return lists | {flag: further for flag, further in _FURTHER_VALUES.items() if further in known}

    def _describe(self, word: str, found: argparse.Namespace) -> str:
        if not word.startswith("-"):
            return f"unrecognized argument {word!r}"
        flag = word.partition("=")[0]
        near = difflib.get_close_matches(flag, self._flags(found), 1)
        return f"unrecognized option {flag}" + (f" (did you mean {near[0]}?)" if near else "")

    def _flags(self, found: argparse.Namespace) -> Sequence[str]:
        """Of this parser, and of the one of the action that was chosen."""
        flags = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
                chosen: object = cast(Any, action).choices.get(getattr(found, action.dest))
                flags += chosen._flags(found) if isinstance(chosen, CommandParser) else []
        return flags


def _with_hyphens(words: Sequence[str]) -> Iterator[str]:
    is_option = True
    for word in words:
        is_option = is_option and word != "--"
        name, equals, value = word.partition("=")
        # What has a space is no option for argparse.
        is_name = is_option and name.startswith("--") and " " not in name
        yield name.replace("_", "-") + equals + value if is_name else word


def _one_by_one(words: Sequence[str], lists: Mapping[str, str]) -> Iterator[str]:
    """`--api-key a b` as `--api-key a --api-key b`."""
    further, has_value = None, False
    for word in words:
        if word.startswith("-"):
            flag, equals, _ = word.partition("=")
            further, has_value = lists.get(flag), bool(equals)
        elif further is not None:
            if has_value:
                yield further
            has_value = True
        yield word


def _has_model(found: argparse.Namespace) -> bool:
    return "model" in found or getattr(found, "model_argument", None) is not None


def _has_two_models(found: argparse.Namespace) -> bool:
    return "model" in found and getattr(found, "model_argument", None) is not None
